import { Chat } from "./chat.js";
import { CedraError } from "./errors.js";
import { WorkerLink } from "./link.js";
import type { Counters, Fit } from "./info.js";
import type {
  Args,
  EngineState,
  Link,
  LoadProgress,
  RecoveredSession,
  RecoverProgress,
  SelfTestReport,
  SessionEntry,
  StoreRef,
  StoreUsage,
} from "./protocol.js";
import { prefersWorker } from "./runtime.js";
import { Session, tokenIds } from "./session.js";
import { configOf, type ModelSource, resolveSource } from "./source.js";
import { adapterLimits } from "./supported.js";
import type { WasmSource } from "./wasm.js";

/** What a plan is made for. */
export interface PlanOptions {
  /** Tokens that a session is to hold. */
  context: number;
  /** Whether with the draft stages, where the model has some (default). */
  draft?: boolean;
  /** Where the wasm is, when it is not beside the package. */
  wasm?: WasmSource;
  /** Ends it with `ABORTED`. */
  signal?: AbortSignal;
}

/** How a model is loaded. */
export interface LoadOptions {
  /** Tokens that a session can hold; memory is planned for it. Default: what the model was made for. */
  context?: number;
  /** Rows that are computed at a time when a text is read. */
  chunk?: number;
  /** Whether the model's draft stages are loaded, where it has some. Default: yes, but for software devices. */
  draft?: boolean;
  /** Hears how it goes. */
  onProgress?: (progress: LoadProgress) => void;
  /** Ends it with `ABORTED`. */
  signal?: AbortSignal;
  /** Whether the engine has a thread of its own (default, except in Node and Deno), or the worker to use, whose script is `cedra/worker`. */
  worker?: boolean | Worker;
  /** Where the wasm is, when it is not beside the package: its URL, bytes or module. */
  wasm?: WasmSource;
  /** Whether downloaded weights stay in this browser (default). */
  cache?: boolean;
}

/** A model on the device, with its sessions. */
export class Engine {
  readonly #link: Link;
  readonly #config: string;
  readonly #wasm: WasmSource | undefined;
  #state: EngineState;
  /** Chats in the shape of OpenAI's API, with sessions kept behind them. */
  readonly chat: Chat;

  private constructor(link: Link, config: string, wasm: WasmSource | undefined, state: EngineState) {
    this.#link = link;
    this.#config = config;
    this.#wasm = wasm;
    this.#state = state;
    this.chat = new Chat(link, () => this.session());
  }

  /** Loads a model: downloads and verifies what is not cached, and streams it to the device. */
  static async load(source: ModelSource, options: LoadOptions = {}): Promise<Engine> {
    const { signal, onProgress, worker = prefersWorker(), wasm, cache = true, context, chunk, draft } = options;
    const resolved = await resolveSource(source);
    const link = await linkTo(worker);
    try {
      const args = {
        source: resolved,
        cache,
        ...(wasm !== undefined && { wasm: wasm instanceof URL ? wasm.href : wasm }),
        ...(context !== undefined && { context }),
        ...(chunk !== undefined && { chunk }),
        ...(draft !== undefined && { draft }),
      };
      const state = await link.call("load", args, { ...(signal && { signal }), ...(onProgress && { onProgress }) });
      return new Engine(link, state.config, wasm, state);
    } catch (thrown) {
      link.close();
      throw thrown;
    }
  }

  /** Memory that a model needs, and whether the adapter, if there is one, allows it. Downloads no more than its `config.json`. */
  static async plan(source: ModelSource, options: PlanOptions): Promise<Fit> {
    const { context, wasm, signal, draft = true } = options;
    const [config, limits] = [await configOf(source, signal), await adapterLimits()];
    return plan(await linkTo(false), { config, context, draft, ...(limits && { limits }), ...(wasm !== undefined && { wasm }) });
  }

  /** The adapter, what of it is used, the model's sizes and its layers with their roles. */
  get info(): EngineState["info"] {
    return this.#state.info;
  }

  /** Version of the engine. */
  get version(): string {
    return this.#state.version;
  }

  /** Where the weights lie: the caller's files, the browser's storage, or memory for want of it. */
  get weights(): EngineState["weights"] {
    return this.#state.weights;
  }

  /** Memory that this model would need for another length of context, and whether the device allows it. */
  plan(context: number, { draft = true }: { draft?: boolean } = {}): Promise<Fit> {
    const { limits } = this.info;
    return plan(this.#link, { config: this.#config, context, draft, limits, ...(this.#wasm !== undefined && { wasm: this.#wasm }) });
  }

  /**
   * Gets a new device when the one there was is lost (`DEVICE_LOST`) or has failed (`DEVICE`), loads the weights from where they
   * lie, and brings every session back with its whole text: from its store as far as that has it, the rest is read again. The
   * engine and its sessions stay the same objects. It says what became of each session, in the order in which they were opened;
   * nothing, when the device is in order. Where it fails everything is as it was before, and it may be tried again.
   */
  async recover(options: { signal?: AbortSignal; onProgress?: (progress: RecoverProgress) => void } = {}): Promise<RecoveredSession[]> {
    const { info, sessions } = await this.#link.call("recover", {}, options);
    this.#state = { ...this.#state, info };
    return sessions;
  }

  /**
   * Runs every kernel on this device and compares it with what it should do: drivers have bugs. It takes a second or two on a GPU,
   * and leaves the sessions alone.
   */
  selfTest(): Promise<SelfTestReport> {
    return this.#link.call("selfTest", {});
  }

  /** What the device has done so far. */
  counters(): Promise<Counters> {
    return this.#link.call("counters", {});
  }

  /** A text's tokens. Control tokens in it stay text, unless `special` is true. */
  encode(text: string, special = false): Promise<Uint32Array> {
    return this.#link.call("encode", { text, special });
  }

  /** A text of tokens, control tokens included. */
  decode(ids: ArrayLike<number>): Promise<string> {
    return this.#link.call("decode", { ids: tokenIds(ids) });
  }

  /**
   * An empty session; with a name and a store the saved session of that name, or a new one that `save` writes there. Nobody else
   * can open it until it is closed: `SESSION_BUSY`. Without storage it goes on in memory, and `storeError` says why.
   */
  async session(name?: string, options: { store?: StoreRef } = {}): Promise<Session> {
    const { store } = options;
    if ((name === undefined) !== (store === undefined)) {
      throw new CedraError("ARGUMENT", "a name needs a store, and a store a name", { name, store });
    }
    return new Session(this.#link, await this.#link.call("open", { ...(name !== undefined && { name }), ...(store && { store }) }));
  }

  /** The sessions of a store. */
  sessions(store: StoreRef): Promise<SessionEntry[]> {
    return this.#link.call("sessions", { store });
  }

  /** What a store holds. */
  usage(store: StoreRef): Promise<StoreUsage> {
    return this.#link.call("usage", { store });
  }

  /** Lets new sessions take over prefixes of those in a store. */
  attach(store: StoreRef): Promise<void> {
    return this.#link.call("attach", { store });
  }

  /** Forgets a saved session. Whether there was one. */
  delete(name: string, options: { store: StoreRef }): Promise<boolean> {
    return this.#link.call("remove", { name, store: options.store });
  }

  /** Gives everything back. Calls that wait are rejected with `ENGINE_CLOSED`. */
  close(): void {
    this.#link.close();
  }
}

/** Sessions in an IndexedDB database of this name. */
export const idb = (name: string): StoreRef => ({ kind: "indexedDB", name });

/** Sessions in the engine's memory, as long as it lives. The same name is the same store. */
export const memory = (name = "default"): StoreRef => ({ kind: "memory", name });

async function plan(link: Link, args: Args<"plan">): Promise<Fit> {
  const { plan, exceeded } = await link.call("plan", args);
  return { ...plan, fits: args.limits && !exceeded, ...(exceeded && { exceeded }) };
}

async function linkTo(worker: boolean | Worker): Promise<Link> {
  if (worker === false) return new (await import("./host.js")).Host();
  if (worker !== true) return new WorkerLink(worker);
  try {
    return new WorkerLink(new Worker(new URL("./worker.js", import.meta.url), { type: "module", name: "cedra" }));
  } catch (cause) {
    throw new CedraError("WORKER", "no worker could be started; `worker: false` goes without", {}, cause);
  }
}
