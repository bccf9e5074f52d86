import { downloadModel, room } from "./download.js";
import { aborted, asCedraError, CedraError, toWire } from "./errors.js";
import { lockSession } from "./locks.js";
import type {
  Args,
  EngineState,
  Hooks,
  Link,
  LoadProgress,
  Method,
  RecoveredSession,
  Result,
  SelfTestReport,
  SessionState,
  StoreRef,
} from "./protocol.js";
import { bringBack, type Found } from "./recover.js";
import { StopMatcher } from "./stop.js";
import { loadWasm, type WasmEngine, type WasmGeneration, type WasmModule, type WasmReply, type WasmSession, type WasmSource, type WasmStore } from "./wasm.js";

/** A session, and what it needs besides the wasm. */
interface Open {
  id: number;
  wasm: WasmSession;
  /** Where `save` writes. */
  home?: { store: StoreRef; name: string; unlock: () => void };
  /** How often the text was changed otherwise than by tokens that were made. */
  changes: number;
  /** What the store has: the text after so many changes, with so many tokens. */
  kept?: { changes: number; tokens: number };
  /** Why it could not be kept, the last time that was tried. */
  storeError?: CedraError;
  stream?: Stream;
  /** The last of the saves that have not ended. */
  saving?: Promise<void>;
  /** Whether its home has ever had it. */
  saved?: boolean;
  /** How its text was read last. */
  prefill?: string;
}

interface Stream {
  id: number;
  session: Open;
  wasm: WasmGeneration;
  abort: AbortController;
  stop?: StopMatcher;
  /** Whether the next piece is being made. */
  busy: boolean;
}

type Loading = Extract<LoadProgress, { stage: "load" }>;

type Handlers = { [M in Method]: (args: Args<M>, hooks: Hooks<M>) => Promise<Result<M>> };

/**
 * The engine's side of the calls, in the thread that has the wasm. It knows sessions and streams by number, keeps the locks of
 * what it has open, and decides what may run beside what.
 */
export class Host implements Link {
  #engine: WasmEngine | undefined;
  /** Loads the model once more, on another device. */
  #reload: ((hooks: { signal?: AbortSignal; onProgress?: (progress: Loading) => void }) => Promise<WasmEngine>) | undefined;
  /** Calls that have not ended, but for recoveries. */
  readonly #pending = new Set<Promise<unknown>>();
  /** The recovery that is going on, and those that wait for it. */
  #recovery: Promise<unknown> = Promise.resolve();
  readonly #attached = new Map<string, StoreRef>();
  #bos: number | undefined;
  #numbers = 0;
  readonly #sessions = new Map<number, Open>();
  readonly #replies = new Map<number, WasmReply>();
  readonly #streams = new Map<number, Stream>();
  readonly #stores = new Map<string, Promise<WasmStore>>();
  /** Stores in memory are this host's own, so that their names mean nothing elsewhere. */
  readonly #own = crypto.randomUUID();
  #closed = false;

  constructor(readonly wasm: (source?: WasmSource) => Promise<WasmModule> = loadWasm) {}

  async call<M extends Method>(method: M, args: Args<M>, hooks: Hooks<M> = {}): Promise<Result<M>> {
    if (hooks.signal?.aborted) throw aborted(hooks.signal);
    if (this.#closed) throw new CedraError("ENGINE_CLOSED", "the engine is closed");
    const answer = this.#handlers[method](args, hooks);
    if (method !== "recover") this.#pending.add(answer);
    try {
      return await answer;
    } catch (thrown) {
      throw asCedraError(thrown);
    } finally {
      this.#pending.delete(answer);
    }
  }

  close(): void {
    if (this.#closed) return;
    const closing = [...this.#sessions.keys()].map((id) => this.#closeSession(id));
    this.#closed = true;
    // What is being saved is finished first.
    void Promise.all(closing).then(() => this.#engine?.free());
  }

  readonly #handlers: Handlers = {
    load: async ({ source, cache, wasm, ...options }, { signal, onProgress }) => {
      const module = await this.wasm(wasm);
      const { files, kept }: { files: Map<string, Blob>; kept: EngineState["weights"] } =
        "files" in source
          ? { files: source.files, kept: "files" }
          : await downloadModel(source.url, { cache, ...(signal && { signal }), ...(onProgress && { onProgress }) });
      const config = (await files.get("config.json")?.text()) ?? "";
      this.#bos = bosOf(config);
      this.#reload = ({ signal, onProgress }) =>
        module.WasmEngine.load(files, {
          ...options,
          ...(signal && { signal }),
          onProgress: (loaded, total) => onProgress?.({ stage: "load", loaded, total }),
        });
      this.#engine = await this.#reload({ ...(signal && { signal }), ...(onProgress && { onProgress }) });
      return { config, info: this.#engine.info, version: module.version(), weights: kept };
    },

    plan: async ({ config, context, limits, wasm, draft }) => {
      const { WasmEngine } = await this.wasm(wasm);
      const exceeded = limits && WasmEngine.exceeded(config, context, limits, draft);
      return { plan: WasmEngine.plan(config, context, draft), ...(exceeded && { exceeded }) };
    },

    recover: async (_, hooks) => {
      const recovery = this.#recovery.then(() => this.#recover(hooks));
      this.#recovery = recovery.catch(() => {});
      return recovery;
    },

    selfTest: async () => (await this.#device().selfTest()) as SelfTestReport,

    counters: async () => this.#running().counters,

    encode: async ({ text, special }) => this.#running().encode(text, special),

    decode: async ({ ids }) => this.#running().decode(ids),

    encodeChat: async ({ conversation }) => this.#running().encodeChat(conversation),

    reply: async ({ conversation }) => {
      const id = ++this.#numbers;
      this.#replies.set(id, this.#running().reply(conversation));
      return id;
    },

    hear: async ({ reply: id, ids, end }) => {
      const reply = this.#replies.get(id);
      if (!reply) throw new CedraError("ARGUMENT", `reply ${id} is over`, { reply: id });
      const deltas = reply.push(ids);
      if (!end) return deltas;
      this.#replies.delete(id);
      deltas.push(...reply.finish());
      reply.free();
      return deltas;
    },

    open: async ({ name, store }) => {
      const engine = this.#device();
      if (name === undefined || !store) return state(this.#adopt(await engine.session()));
      const unlock = await this.#lock(store, name);
      try {
        const { wasm, saved, storeError } = await this.#find(engine, store, name);
        const session = this.#adopt(wasm);
        Object.assign(session, { home: { store, name, unlock }, saved, ...(storeError && { storeError }) });
        if (saved) session.kept = { changes: session.changes, tokens: wasm.length };
        return state(session);
      } catch (thrown) {
        unlock();
        throw thrown;
      }
    },

    sessions: async ({ store }) => (await this.#store(store)).list(),

    usage: async ({ store }) => {
      const usage = await (await this.#store(store)).usage();
      const available = usage.available ?? (store.kind === "indexedDB" ? await room() : undefined);
      return { ...usage, ...(available === undefined ? {} : { available }) };
    },

    attach: async ({ store }) => {
      await this.#running().attach(await this.#store(store));
      this.#attached.set(`${store.kind}/${store.name}`, store);
      return undefined;
    },

    remove: async ({ store, name }) => {
      const unlock = await this.#lock(store, name);
      try {
        return await this.#running().remove(await this.#store(store), name);
      } finally {
        unlock();
      }
    },

    append: async ({ session: id, text, special, ...options }, { signal, onProgress }) => {
      const session = this.#live(id);
      await this.#takeOver(session);
      const ids = typeof text === "string" ? this.#encode(session, text, special) : text;
      session.changes++;
      if (options.prefill !== undefined) session.prefill = options.prefill;
      const done = await session.wasm.append(ids, {
        ...options,
        ...(signal && { signal }),
        onProgress: (done, total) => onProgress?.({ done, total }),
      });
      return { reused: done.reused, replayed: done.replayed, state: state(session) };
    },

    generate: async ({ session: id, stop, ...options }, { signal }) => {
      const session = this.#live(id);
      await this.#takeOver(session);
      const abort = new AbortController();
      const stream: Stream = { id: ++this.#numbers, session, wasm: undefined as never, abort, busy: true };
      if (stop?.length) stream.stop = new StopMatcher(stop);
      session.stream = stream;
      try {
        stream.wasm = await abortable(stream, signal, () => session.wasm.generate({ ...options, signal: abort.signal }));
      } catch (thrown) {
        this.#forget(stream);
        throw thrown;
      }
      this.#streams.set(stream.id, stream);
      return { stream: stream.id, state: state(session) };
    },

    next: async ({ stream: id }, { signal }) => {
      const stream = this.#streams.get(id);
      if (!stream) throw ended();
      const { session } = stream;
      if (stream.busy) throw busy();
      this.#device();
      const piece = await abortable(stream, signal, () => stream.wasm.next());
      let { text, done, finish } = piece;
      if (stream.stop) {
        const shown = stream.stop.push(text);
        text = shown.text;
        if (shown.stopped && !done) await stream.wasm.return();
        if (shown.stopped) [done, finish] = [true, "stop"];
        else if (done) text += stream.stop.finish();
      }
      if (done) this.#forget(stream);
      if (done && !finish) throw ended();
      return { ids: piece.ids, drafted: piece.drafted, text, done, ...(finish && { finish }), state: state(session) };
    },

    leave: async ({ session, stream: id }) => {
      const stream = this.#streams.get(id);
      if (stream) await this.#leave(stream);
      return state(this.#session(session));
    },

    state: async ({ session }) => state(this.#session(session)),

    tokens: async ({ session }) => this.#session(session).wasm.tokens,

    truncate: async ({ session: id, length, replay }) => {
      const session = this.#live(id);
      await this.#takeOver(session);
      session.changes++;
      await session.wasm.truncate(length, replay);
      return state(session);
    },

    fork: async ({ session: id }) => {
      const session = this.#live(id);
      await this.#takeOver(session);
      const fork = this.#adopt(await session.wasm.fork());
      if (session.prefill !== undefined) fork.prefill = session.prefill;
      return { fork: state(fork), state: state(session) };
    },

    save: ({ session: id, ...to }) => {
      const session = this.#live(id);
      // One after the other, each with the text of its turn; a stream goes on.
      const saving = session.saving ? session.saving.then(() => this.#save(session, to)) : this.#save(session, to);
      const over = saving
        .then(() => {}, () => {})
        .then(() => {
          if (session.saving === over) delete session.saving;
        });
      session.saving = over;
      return saving;
    },

    close: async ({ session }) => {
      await this.#closeSession(session);
      return undefined;
    },

    attention: async ({ session }) => this.#session(session).wasm.attention(),

    ngrams: async ({ session, position }) => this.#session(session).wasm.ngrams(position),
  };

  async #save(session: Open, { name, store, rings }: Omit<Args<"save">, "session">): Promise<Result<"save">> {
    const to = { store: store ?? session.home?.store, name: name ?? session.home?.name };
    if (!to.store || to.name === undefined) {
      throw new CedraError("ARGUMENT", "the session has no name or no store to be saved in", { name: to.name, store: to.store });
    }
    const moves = to.store.kind !== session.home?.store.kind || to.store.name !== session.home.store.name || to.name !== session.home.name;
    const home = moves
      ? { store: to.store, name: to.name, unlock: await this.#lock(to.store, to.name) }
      : session.home!;
    try {
      const place = await this.#store(home.store);
      const { changes } = session;
      const { records, bytes, tokens } = await session.wasm.save(place, home.name, rings);
      if (moves) {
        session.home?.unlock();
        session.home = home;
      }
      session.kept = { changes, tokens };
      session.saved = true;
      delete session.storeError;
      return { records, bytes, tokens, state: state(session) };
    } catch (thrown) {
      if (moves) home.unlock();
      const error = asCedraError(thrown);
      if (unstored(error)) session.storeError = error;
      throw error;
    }
  }

  #lock({ kind, name: store }: StoreRef, name: string): Promise<() => void> {
    return lockSession(kind === "memory" ? `memory/${this.#own}/${store}` : `${kind}/${store}`, name);
  }

  #running(): WasmEngine {
    if (!this.#engine) throw new CedraError("ENGINE_CLOSED", "the engine has not been loaded");
    return this.#engine;
  }

  /** The engine, unless its device is lost or has failed: then everything fails that needs one. */
  #device(): WasmEngine {
    const engine = this.#running();
    engine.check();
    return engine;
  }

  /** A session whose device is there. */
  #live(id: number): Open {
    const session = this.#session(id);
    this.#device();
    return session;
  }

  /** Another engine in place of one whose device is gone. Nothing is replaced before everything is there. */
  async #recover(hooks: Hooks<"recover">): Promise<Result<"recover">> {
    const gone = this.#running();
    if (!this.#reload || isSound(gone)) return { info: gone.info as EngineState["info"], sessions: [] };
    // They fail now, and say what they leave of their texts.
    await Promise.allSettled(this.#pending);
    const engine = await this.#reload(hooks);
    const found = new Map<Open, Found>();
    try {
      // Prefixes in stores save work and are no promise.
      for (const store of this.#attached.values()) await this.#store(store).then((store) => engine.attach(store)).catch(() => {});
      for (const session of this.#sessions.values()) found.set(session, await bringBack(engine, await this.#lost(session), hooks));
      engine.check();
      if (this.#closed) throw new CedraError("ENGINE_CLOSED", "the engine is closed");
    } catch (thrown) {
      for (const { wasm } of found.values()) wasm.close();
      engine.free();
      throw thrown;
    }
    this.#engine = engine;
    const sessions: RecoveredSession[] = [];
    for (const [session, { wasm, persisted, report }] of found) {
      if (!this.#sessions.has(session.id)) {
        wasm.close();
        continue;
      }
      session.stream?.abort.abort();
      if (session.stream) this.#forget(session.stream);
      session.wasm.close();
      session.wasm = wasm;
      session.changes++;
      if (persisted) session.kept = { changes: session.changes, tokens: wasm.length };
      sessions.push(report);
    }
    gone.free();
    return { info: engine.info as EngineState["info"], sessions };
  }

  async #lost({ wasm, home, saved, prefill }: Open): Promise<Parameters<typeof bringBack>[1]> {
    return {
      wasm,
      ...(home && { name: home.name }),
      ...(home && saved && { saved: { store: await this.#store(home.store), name: home.name } }),
      ...(prefill !== undefined && { prefill }),
    };
  }

  #session(id: number): Open {
    const session = this.#sessions.get(id);
    if (!session) throw new CedraError("SESSION_CLOSED", "the session is closed");
    return session;
  }

  #adopt(wasm: WasmSession): Open {
    const session: Open = { id: ++this.#numbers, wasm, changes: 0 };
    this.#sessions.set(session.id, session);
    return session;
  }

  /** The saved session, a new one, or a new one that cannot be saved because there is no storage. */
  async #find(engine: WasmEngine, ref: StoreRef, name: string): Promise<Pick<Open, "wasm" | "storeError"> & { saved: boolean }> {
    try {
      return { wasm: await engine.open(await this.#store(ref), name), saved: true };
    } catch (thrown) {
      const error = asCedraError(thrown);
      if (error.code === "NO_SESSION") return { wasm: await engine.session(), saved: false };
      if (unstored(error)) return { wasm: await engine.session(), saved: false, storeError: error };
      throw error;
    }
  }

  #store({ kind, name }: StoreRef): Promise<WasmStore> {
    const key = `${kind}/${name}`;
    const known = this.#stores.get(key);
    if (known) return known;
    const opened = this.wasm().then(({ WasmStore }) => (kind === "indexedDB" ? WasmStore.indexedDb(name) : WasmStore.memory()));
    this.#stores.set(key, opened);
    // Storage that was denied may be granted later.
    opened.catch(() => this.#stores.delete(key));
    return opened;
  }

  /** A text begins with the model's first token; a continuation does not. */
  #encode(session: Open, text: string, special: boolean): Uint32Array {
    const ids = this.#running().encode(text, special);
    if (this.#bos === undefined || session.wasm.length > 0 || ids[0] === this.#bos) return ids;
    return Uint32Array.of(this.#bos, ...ids);
  }

  /** Ends a stream that nobody waits for, so that a forgotten one blocks nothing. One that makes a piece right now goes on. */
  async #takeOver(session: Open): Promise<void> {
    if (session.stream?.busy) throw busy();
    if (session.stream) await this.#leave(session.stream);
  }

  async #leave(stream: Stream): Promise<void> {
    this.#forget(stream);
    // Without its device it has ended already.
    if (isSound(this.#running())) await stream.wasm.return();
  }

  #forget(stream: Stream): void {
    this.#streams.delete(stream.id);
    if (stream.session.stream === stream) delete stream.session.stream;
  }

  async #closeSession(id: number): Promise<void> {
    const session = this.#sessions.get(id);
    if (!session) return;
    this.#sessions.delete(id);
    if (session.stream) {
      session.stream.abort.abort();
      this.#forget(session.stream);
    }
    // What is being saved, or waits to be, is saved first; and nobody else writes before.
    if (session.saving) await session.saving;
    session.wasm.close();
    session.home?.unlock();
  }
}

/** Works on a stream; `signal` aborts the stream while it does. */
async function abortable<T>(stream: Stream, signal: AbortSignal | undefined, work: () => Promise<T>): Promise<T> {
  stream.busy = true;
  const stop = (): void => stream.abort.abort(signal?.reason);
  signal?.addEventListener("abort", stop);
  try {
    return await work();
  } finally {
    stream.busy = false;
    signal?.removeEventListener("abort", stop);
  }
}

/** Whether the engine's device is there and in order. */
function isSound(engine: WasmEngine): boolean {
  try {
    engine.check();
    return true;
  } catch {
    return false;
  }
}

const ended = (): CedraError => new CedraError("SESSION_BUSY", "another call on the session has ended this answer");
const busy = (): CedraError => new CedraError("SESSION_BUSY", "the session is making an answer");

/** Whether an error says that a store does not take what it is given. */
const unstored = ({ code }: CedraError): boolean => code === "STORE" || code === "QUOTA";

function state(session: Open): SessionState {
  const { length, remaining, reused, replayed, layerRows, drafts } = session.wasm;
  const { id, kept, changes, storeError } = session;
  const persisted = kept?.changes === changes && kept.tokens === length;
  return { session: id, length, remaining, reused, replayed, layerRows, drafts, persisted, ...(storeError && { storeError: toWire(storeError) }) };
}

function bosOf(config: string): number | undefined {
  try {
    const json = JSON.parse(config) as { bos_token_id?: unknown; text_config?: { bos_token_id?: unknown } };
    const bos = json.text_config?.bos_token_id ?? json.bos_token_id;
    return typeof bos === "number" ? bos : undefined;
  } catch {
    return undefined; // The engine says what is wrong with it.
  }
}
