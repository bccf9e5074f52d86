import { CedraError } from "./errors.js";
import type { Attention, Ngrams } from "./figures.js";
import type { BufferLimits, Counters, EngineInfo, Exceeded, MemoryPlan } from "./info.js";
import type { Draft, DraftCounters, ReplyDelta } from "./protocol.js";
import { localFile, prepareScope, readLocal } from "./runtime.js";
import { askForSubgroups } from "./subgroups.js";

// What the wasm module exports. Its own declarations know less: there, options and results are `any`.

export interface WasmModule {
  default(options?: { module_or_path: WasmSource }): Promise<unknown>;
  version(): string;
  WasmEngine: {
    load(
      files: Map<string, Blob>,
      options: { context?: number; chunk?: number; onProgress?: (loaded: number, total: number) => void; signal?: AbortSignal },
    ): Promise<WasmEngine>;
    plan(configJson: string, context: number, draft: boolean): MemoryPlan;
    exceeded(configJson: string, context: number, limits: BufferLimits, draft: boolean): Exceeded | undefined;
  };
  WasmStore: { indexedDb(name: string): Promise<WasmStore>; memory(): WasmStore };
}

export interface WasmEngine {
  readonly info: EngineInfo;
  readonly counters: Counters;
  encode(text: string, special: boolean): Uint32Array;
  decode(ids: Uint32Array): string;
  session(): Promise<WasmSession>;
  /** Throws when the device is lost or has failed. */
  check(): void;
  selfTest(): Promise<object>;
  encodeChat(conversation: string): Uint32Array;
  reply(conversation: string): WasmReply;
  open(store: WasmStore, name: string): Promise<WasmSession>;
  attach(store: WasmStore): Promise<void>;
  remove(store: WasmStore, name: string): Promise<boolean>;
  free(): void;
}

export interface WasmReply {
  push(ids: Uint32Array): ReplyDelta[];
  finish(): ReplyDelta[];
  free(): void;
}

export interface WasmStore {
  list(): Promise<{ name: string; tokens: number; bytes: number; savedAt: number }[]>;
  usage(): Promise<{ sessions: number; records: number; bytes: number; available?: number }>;
}

export interface WasmSession {
  readonly length: number;
  readonly remaining: number;
  readonly reused: number;
  readonly replayed: number;
  readonly tokens: Uint32Array;
  readonly layerRows: { whole: number; part: number }[];
  readonly drafts: DraftCounters;
  append(
    ids: Uint32Array,
    options: { prefill?: string; reuse?: boolean; onProgress?: (done: number, total: number) => void; signal?: AbortSignal },
  ): Promise<{ reused: number; replayed: number }>;
  generate(options: {
    maxTokens?: number;
    temperature?: number;
    topP?: number;
    topK?: number;
    seed?: bigint | number;
    draft?: Draft;
    stopIds?: Uint32Array;
    signal?: AbortSignal;
  }): Promise<WasmGeneration>;
  truncate(length: number, replay?: string): Promise<void>;
  fork(): Promise<WasmSession>;
  save(store: WasmStore, name: string, rings?: string): Promise<{ records: number; bytes: number; tokens: number }>;
  attention(): Promise<Attention | undefined>;
  ngrams(position: number): Promise<Ngrams[]>;
  close(): void;
}

export interface WasmGeneration {
  next(): Promise<{ ids: Uint32Array; drafted: Uint8Array; text: string; done: boolean; finish?: "stop" | "length" }>;
  return(): Promise<void>;
}

/** Where the wasm comes from when it is not to be found beside the package. */
export type WasmSource = string | URL | BufferSource | WebAssembly.Module;

let loading: Promise<WasmModule> | undefined;

/** The wasm module, loaded once a thread. A failed load is tried again by the next call. */
export function loadWasm(source?: WasmSource): Promise<WasmModule> {
  loading ??= load(source).catch((cause: unknown) => {
    loading = undefined;
    throw new CedraError("WORKER", "the wasm module could not be loaded", {}, cause);
  });
  return loading;
}

/** The name apart from the place: bundlers take the two together for one more asset. */
const here = import.meta.url;
const beside = (): URL => new URL("../wasm/cedra_bg.wasm", here);

async function load(source?: WasmSource): Promise<WasmModule> {
  prepareScope();
  askForSubgroups();
  const module = (await import("../wasm/cedra.js")) as unknown as WasmModule;
  // Without a source the glue looks beside itself, with `fetch`, which does not read files everywhere.
  const place = source ?? (here.startsWith("file:") ? beside() : undefined);
  const file = typeof place === "string" || place instanceof URL ? localFile(place) : undefined;
  const from = file ? await readLocal(file) : source;
  await module.default(from === undefined ? undefined : { module_or_path: from });
  return module;
}
