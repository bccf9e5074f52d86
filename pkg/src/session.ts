import { CedraError, fromWire } from "./errors.js";
import type { Attention, Ngrams } from "./figures.js";
import type { Draft, DraftCounters, Finish, LayerRows, Link, ReadProgress, SessionState, StoreRef } from "./protocol.js";

/** How a text is read. */
export interface AppendOptions {
  /**
   * Which rows the layers run: `"bounded"` reads with the encoder and gives the decoder the last rows only, `"exact"` whatever the
   * next token depends on, `"full"` everything. `"bounded"` by default.
   */
  prefill?: "bounded" | "exact" | "full";
  /** Whether an empty session takes over a prefix that another session has read already. Default: true. */
  reuse?: boolean;
  /** Whether control tokens in a text are meant as such. Default: false, they stay text. */
  special?: boolean;
  /** Hears how it goes. */
  onProgress?: (progress: ReadProgress) => void;
  /** Ends it with `ABORTED`; what was read until then stays. */
  signal?: AbortSignal;
}

/** How tokens are made. */
export interface GenerateOptions {
  /** Tokens to make at most. */
  maxTokens?: number;
  /** Divides the logits; 0, the default, takes the most likely token. */
  temperature?: number;
  /** Takes the fewest tokens that together are this likely; 1, the default, takes all. */
  topP?: number;
  /** Takes this many of the most likely tokens; 0, the default, takes all. */
  topK?: number;
  /** The same seed draws the same tokens from the same distributions. Default: 0. */
  seed?: number | bigint;
  /**
   * Tokens that the model's draft stages guess for each pass to verify: a number, `"off"`, or `"auto"`, which measures what pays. Greedy
   * text is the same with every choice, and drawn text as likely; with `"auto"` a seed does not fix it. Default: `"auto"` at
   * temperature 0 on a GPU that is no software one, else `"off"`.
   */
  draft?: Draft;
  /** Texts that end the answer. They are not shown, but the session has the tokens that spelled them. */
  stop?: string | readonly string[];
  /** Tokens that end the answer. Default: the model's end token. */
  stopIds?: ArrayLike<number>;
  /** Ends it with `ABORTED`; what was made until then stays. */
  signal?: AbortSignal;
}

/** How a session is saved. */
export interface SaveOptions {
  /** Where to save from now on. Needed for a session that was made without a name. */
  name?: string;
  /** The store to save in from now on. */
  store?: StoreRef;
  /** Whether the window rings are saved too: larger, and nothing is computed again when the session is opened. */
  rings?: "replay" | "saved";
}

/** What a reading did not have to do, and what it did again. */
export interface Appended {
  /** Tokens that were taken over from what other sessions had read. */
  reused: number;
  /** Rows that were computed again because windows are not kept. */
  replayed: number;
}

/** What a save has written. */
export interface Written {
  /** Records. */
  records: number;
  /** Bytes. */
  bytes: number;
  /** Tokens of the text that is saved now. */
  tokens: number;
}

/** A piece of an answer: whole characters, and the tokens that were made for it. */
export interface Piece {
  /** Whole characters. */
  text: string;
  /** The tokens. */
  ids: Uint32Array;
  /** 1 for each of them that had been drafted, else 0. A round's tokens had been, but for its last. */
  drafted: Uint8Array;
  /** Why the answer ended, in its last piece. */
  finish?: Finish;
}

/**
 * An answer while it is made; iterate over it once. Leaving the loop ends it and keeps what was made. Any other call on the session,
 * but `save`, ends an answer that nobody waits for at that moment, and is refused with `SESSION_BUSY` while the next piece is being made.
 */
export class Answer implements AsyncIterableIterator<Piece> {
  readonly #pieces: AsyncGenerator<Piece, undefined>;
  #finish: Finish | undefined;

  /** @internal */
  constructor(pieces: (ended: (finish: Finish | undefined) => void) => AsyncGenerator<Piece, undefined>) {
    this.#pieces = pieces((finish) => (this.#finish = finish));
  }

  /** Why the answer ended; `undefined` until then. */
  get finish(): Finish | undefined {
    return this.#finish;
  }

  /** The rest of the answer as one text. */
  async text(): Promise<string> {
    let text = "";
    for await (const piece of this) text += piece.text;
    return text;
  }

  /** The next piece. */
  next(): Promise<IteratorResult<Piece, undefined>> {
    return this.#pieces.next();
  }

  /** Ends the answer. */
  return(): Promise<IteratorResult<Piece, undefined>> {
    return this.#pieces.return(undefined);
  }

  /** Itself. */
  [Symbol.asyncIterator](): this {
    return this;
  }
}

/** A text on the device: appended to, continued, cut, forked, saved. Calls on it run one after the other. */
export class Session {
  readonly #link: Link;
  readonly #id: number;
  #state: SessionState;
  #closed = false;

  /** @internal */
  constructor(link: Link, state: SessionState) {
    this.#link = link;
    this.#id = state.session;
    this.#state = state;
  }

  /** Tokens of the text. */
  get length(): number {
    return this.#state.length;
  }

  /** Tokens that still fit. */
  get remaining(): number {
    return this.#state.remaining;
  }

  /** Tokens that were taken over from what other sessions had read. */
  get reused(): number {
    return this.#state.reused;
  }

  /** Rows that were computed again because windows are not kept. */
  get replayed(): number {
    return this.#state.replayed;
  }

  /** Rows that each layer has run. */
  get layerRows(): readonly LayerRows[] {
    return this.#state.layerRows;
  }

  /** What drafting did since it was chosen. */
  get drafts(): DraftCounters {
    return this.#state.drafts;
  }

  /** Whether the store has the session as it is now. */
  get persisted(): boolean {
    return this.#state.persisted;
  }

  /** Why the session goes on in memory only, when its store cannot be opened. */
  get storeError(): CedraError | undefined {
    return this.#state.storeError && fromWire(this.#state.storeError);
  }

  /** The text's tokens. */
  tokens(): Promise<Uint32Array> {
    return this.#link.call("tokens", { session: this.#id });
  }

  /** Reads a text, or tokens. The first text of a session begins with the model's first token. */
  async append(text: string | ArrayLike<number>, options: AppendOptions = {}): Promise<Appended> {
    const { signal, onProgress, special = false, ...how } = options;
    const args = { session: this.#id, text: typeof text === "string" ? text : tokenIds(text), special, ...how };
    const { state, ...done } = await this.#tracked(
      this.#link.call("append", args, { ...(signal && { signal }), ...(onProgress && { onProgress }) }),
    );
    this.#state = state;
    return done;
  }

  /** Continues the text. Nothing is made before the first piece is asked for. */
  generate(options: GenerateOptions = {}): Answer {
    return new Answer((ended) => this.#pieces(options, ended));
  }

  async *#pieces(options: GenerateOptions, ended: (finish: Finish | undefined) => void): AsyncGenerator<Piece, undefined> {
    const { signal, stop = [], stopIds, ...sampling } = options;
    const stops = typeof stop === "string" ? [stop] : [...stop];
    if (stops.includes("")) throw new CedraError("ARGUMENT", "a stop string is empty", { stop: stops });
    const args = { session: this.#id, ...sampling, stop: stops, ...(stopIds && { stopIds: tokenIds(stopIds) }) };
    const hooks = signal ? { signal } : {};
    const { stream, state } = await this.#link.call("generate", args, hooks);
    this.#state = state;
    let open = true;
    try {
      while (open) {
        const { ids, drafted, text, done, finish, state } = await this.#link.call("next", { stream }, hooks);
        this.#state = state;
        open = !done;
        if (done) ended(finish);
        if (text || ids.length > 0 || finish) yield { text, ids, drafted, ...(finish && { finish }) };
      }
    } finally {
      if (open) await this.#left(stream);
    }
    return undefined;
  }

  async #left(stream: number): Promise<void> {
    // The engine may be gone; whoever left the loop has heard of that or does not care.
    this.#state = await this.#link.call("leave", { session: this.#id, stream }).catch(() => this.#state);
  }

  /**
   * Goes back to the first `length` tokens. `"bounded"` computes the windows again from a few tokens, `"exact"` as if the text had
   * never gone further.
   */
  async truncate(length: number, replay?: "bounded" | "exact"): Promise<void> {
    const args = { session: this.#id, length, ...(replay && { replay }) };
    this.#state = await this.#tracked(this.#link.call("truncate", args));
  }

  /** A second session with the same text. It has no name until it is saved with one. */
  async fork(): Promise<Session> {
    const { fork, state } = await this.#link.call("fork", { session: this.#id });
    this.#state = state;
    return new Session(this.#link, fork);
  }

  /**
   * Writes what the store does not have yet, of the text as it is now: `tokens` of it. An answer that is being made goes on
   * meanwhile, and so may everything else. What was saved before stays whole until this has succeeded; a store without room
   * refuses with `QUOTA`, and `storeError` says so from then on.
   */
  async save(options: SaveOptions = {}): Promise<Written> {
    const { state, ...written } = await this.#tracked(this.#link.call("save", { session: this.#id, ...options }));
    this.#state = state;
    return written;
  }

  /**
   * What the last token that was read attended to, while an answer is made or after it; `undefined` before the first answer, and once
   * anything else has run on the engine. It waits for the device.
   */
  attention(): Promise<Attention | undefined> {
    return this.#link.call("attention", { session: this.#id });
  }

  /** The n-grams that end at a position of the text, as the model's Engrams look them up. */
  ngrams(position: number): Promise<Ngrams[]> {
    return this.#link.call("ngrams", { session: this.#id, position });
  }

  /** Gives the device's memory and the name back. What was saved stays. */
  async close(): Promise<void> {
    if (this.#closed) return;
    this.#closed = true;
    await this.#link.call("close", { session: this.#id }).catch((thrown: unknown) => {
      if (!(thrown instanceof CedraError) || thrown.code !== "ENGINE_CLOSED") throw thrown;
    });
  }

  /** A call that changes the text: when it fails half-way, the text is what it left. */
  async #tracked<T>(call: Promise<T>): Promise<T> {
    try {
      return await call;
    } catch (thrown) {
      this.#state = await this.#link.call("state", { session: this.#id }).catch(() => this.#state);
      throw thrown;
    }
  }
}

export function tokenIds(ids: ArrayLike<number>): Uint32Array {
  const bad = Array.prototype.findIndex.call(ids, (id: number) => !Number.isInteger(id) || id < 0 || id > 0xffff_ffff) as number;
  if (bad >= 0) throw new CedraError("TOKEN_ID", `${String(ids[bad])} at ${bad} is no token id`, { id: ids[bad], at: bad });
  return Uint32Array.from(ids);
}
