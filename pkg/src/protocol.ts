import type { WireError } from "./errors.js";
import type { Attention, Ngrams } from "./figures.js";
import type { BufferLimits, Counters, EngineInfo, Exceeded, MemoryPlan } from "./info.js";
import type { WasmSource } from "./wasm.js";

// What a page and the thread of its engine say to each other. Everything here can be cloned.

/** A place where sessions are kept; see `idb` and `memory`. */
export interface StoreRef {
  /** What holds it: the browser's storage, or the engine. */
  readonly kind: "indexedDB" | "memory";
  /** Its name there. */
  readonly name: string;
}

/** A session in a store. */
export interface SessionEntry {
  /** Its name. */
  name: string;
  /** Tokens of its text. */
  tokens: number;
  /** Bytes in the store. */
  bytes: number;
  /** Milliseconds since 1970. */
  savedAt: number;
}

/** What a store holds. */
export interface StoreUsage {
  /** Sessions. */
  sessions: number;
  /** Records; sessions with a beginning in common share theirs. */
  records: number;
  /** Bytes in all. */
  bytes: number;
  /** Bytes that the browser still grants, where it says so. */
  available?: number;
}

/** How a load goes. */
export type LoadProgress = DownloadProgress | VerifyProgress | UploadProgress;

/** Bytes of weights that are here, over the network or from the cache. */
export interface DownloadProgress {
  /** Which part of a load this is. */
  stage: "download";
  /** The file. */
  file: string;
  /** Bytes that are here. */
  loaded: number;
  /** Bytes that there are. */
  total: number;
}

/** Bytes of a file whose hash is compared. */
export interface VerifyProgress {
  /** Which part of a load this is. */
  stage: "verify";
  /** The file. */
  file: string;
  /** Bytes that were looked at. */
  loaded: number;
  /** Bytes that there are. */
  total: number;
}

/** Bytes of weights on the device. */
export interface UploadProgress {
  /** Which part of a load this is. */
  stage: "load";
  /** Bytes that are there. */
  loaded: number;
  /** Bytes that there will be. */
  total: number;
}

/** Tokens that were read, of those to be read. */
export interface ReadProgress {
  /** Tokens that were read. */
  done: number;
  /** Tokens to be read. */
  total: number;
}

/** Rows that a layer has run: as a whole, and only the part that feeds its cache. */
export interface LayerRows {
  /** Rows that it has run as a whole. */
  whole: number;
  /** Rows of which it has run only what feeds its cache. */
  part: number;
}

export interface EngineState {
  /** The model's `config.json`. */
  config: string;
  info: Readonly<EngineInfo>;
  version: string;
  /** Where the weights lie now. */
  weights: "files" | "opfs" | "cache" | "memory";
}

/** Tokens that are guessed for each pass to verify: a number, none, or as many as are measured to pay. */
export type Draft = "auto" | "off" | number;

/** What drafting did in a session since it was chosen. */
export interface DraftCounters {
  /** Rounds, each of which makes a token at least. */
  rounds: number;
  /** Of them, those that drafted. */
  drafted: number;
  /** Tokens that they made. */
  tokens: number;
  /** How long a round took in the mean, of those that were measured; `null` when none was. */
  secondsARound: number | null;
  /** Drafted tokens that were verified, by their place in the block. */
  verified: readonly number[];
  /** Of them, those that were accepted. */
  accepted: readonly number[];
}

export interface SessionState {
  session: number;
  length: number;
  remaining: number;
  reused: number;
  replayed: number;
  layerRows: LayerRows[];
  drafts: DraftCounters;
  persisted: boolean;
  storeError?: WireError;
}

export interface GenerateArgs {
  maxTokens?: number;
  temperature?: number;
  topP?: number;
  topK?: number;
  seed?: bigint | number;
  draft?: Draft;
  stopIds?: Uint32Array;
  stop?: string[];
}

/** Why an answer ended: the model or a stop text ended it, or it has reached its length. */
export type Finish = "stop" | "length";

/** How a recovery goes: the weights go to the new device, then texts are read again. */
export type RecoverProgress = UploadProgress | RereadProgress;

/** Tokens of one session that are read again, of those to be read. */
export interface RereadProgress {
  /** What is going on. */
  stage: "read";
  /** The session's name in its store, if it has one. */
  name?: string;
  /** Tokens that are read. */
  done: number;
  /** Tokens to be read. */
  total: number;
}

/** What has become of a session when its engine got a new device. */
export interface RecoveredSession {
  /** Its name in its store, if it has one. */
  name?: string;
  /** Tokens of the text: all that it had. */
  tokens: number;
  /** How many of them no store had, or only in damaged pages: they were read again. */
  reread: number;
}

/** What the self test says of one variant of one kernel. */
export interface KernelReport {
  /** The kernel's name. */
  kernel: string;
  /** Which of its variants. */
  variant: string;
  /** The largest relative error; of kernels that have to be exact, how many values differ. */
  worst: number;
  /** What is allowed of it. */
  allowed: number;
  /** Whether it does what it should. */
  ok: boolean;
  /** The first thing that is wrong. */
  message?: string;
}

/** What the self test says. */
export interface SelfTestReport {
  /** Whether every kernel does on this device what it should. */
  ok: boolean;
  /** How long it took. */
  milliseconds: number;
  /** The adapter, its features and limits. */
  adapter: string;
  /** Every variant that the device runs. */
  kernels: KernelReport[];
}
/** What a piece of a reply adds. */
export type ReplyDelta =
  | { type: "reasoning"; text: string }
  | { type: "content"; text: string }
  | { type: "call"; index: number; name: string }
  | { type: "arguments"; index: number; text: string };

/** Every call: what it takes, what it gives, what it reports on the way. */
export interface Calls {
  load: {
    args: {
      source: { url: string } | { files: Map<string, Blob> };
      context?: number;
      chunk?: number;
      draft?: boolean;
      cache: boolean;
      wasm?: WasmSource;
    };
    result: EngineState;
    progress: LoadProgress;
  };
  recover: { args: object; result: { info: EngineState["info"]; sessions: RecoveredSession[] }; progress: RecoverProgress };
  selfTest: { args: object; result: SelfTestReport; progress: never };
  plan: {
    args: { config: string; context: number; draft: boolean; limits?: BufferLimits; wasm?: WasmSource };
    result: { plan: MemoryPlan; exceeded?: Exceeded };
    progress: never;
  };
  counters: { args: object; result: Counters; progress: never };
  encode: { args: { text: string; special: boolean }; result: Uint32Array; progress: never };
  decode: { args: { ids: Uint32Array }; result: string; progress: never };
  encodeChat: { args: { conversation: string }; result: Uint32Array; progress: never };
  /** Begins to listen to a reply; the result is its number. */
  reply: { args: { conversation: string }; result: number; progress: never };
  hear: { args: { reply: number; ids: Uint32Array; end: boolean }; result: ReplyDelta[]; progress: never };
  open: { args: { name?: string; store?: StoreRef }; result: SessionState; progress: never };
  sessions: { args: { store: StoreRef }; result: SessionEntry[]; progress: never };
  usage: { args: { store: StoreRef }; result: StoreUsage; progress: never };
  attach: { args: { store: StoreRef }; result: undefined; progress: never };
  remove: { args: { store: StoreRef; name: string }; result: boolean; progress: never };
  append: {
    args: { session: number; text: string | Uint32Array; special: boolean; prefill?: string; reuse?: boolean };
    result: { reused: number; replayed: number; state: SessionState };
    progress: ReadProgress;
  };
  generate: { args: { session: number } & GenerateArgs; result: { stream: number; state: SessionState }; progress: never };
  next: {
    args: { stream: number };
    result: { ids: Uint32Array; drafted: Uint8Array; text: string; done: boolean; finish?: Finish; state: SessionState };
    progress: never;
  };
  leave: { args: { session: number; stream: number }; result: SessionState; progress: never };
  state: { args: { session: number }; result: SessionState; progress: never };
  tokens: { args: { session: number }; result: Uint32Array; progress: never };
  truncate: { args: { session: number; length: number; replay?: string }; result: SessionState; progress: never };
  fork: { args: { session: number }; result: { fork: SessionState; state: SessionState }; progress: never };
  save: {
    args: { session: number; name?: string; store?: StoreRef; rings?: string };
    result: { records: number; bytes: number; tokens: number; state: SessionState };
    progress: never;
  };
  close: { args: { session: number }; result: undefined; progress: never };
  attention: { args: { session: number }; result: Attention | undefined; progress: never };
  ngrams: { args: { session: number; position: number }; result: Ngrams[]; progress: never };
}

export type Method = keyof Calls;
export type Args<M extends Method> = Calls[M]["args"];
export type Result<M extends Method> = Calls[M]["result"];
export type ProgressOf<M extends Method> = Calls[M]["progress"];

/** What belongs to one call besides its arguments. */
export interface Hooks<M extends Method> {
  signal?: AbortSignal;
  onProgress?: (progress: ProgressOf<M>) => void;
}

/** The way to an engine, in a worker or in this thread. */
export interface Link {
  call<M extends Method>(method: M, args: Args<M>, hooks?: Hooks<M>): Promise<Result<M>>;
  close(): void;
}

export type ToWorker =
  | { type: "hello"; alive: string }
  | { type: "call"; id: number; method: Method; args: unknown; progress: boolean }
  | { type: "abort"; id: number };

export type FromWorker =
  | { type: "ready" }
  | { type: "done"; id: number; result: unknown }
  | { type: "failed"; id: number; error: WireError }
  | { type: "progress"; id: number; progress: unknown }
  | { type: "crashed"; error: WireError };
