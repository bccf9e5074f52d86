import { type ChatCompletion, type ChatCompletionChunk, type ChatDelta, type ChatFinish, type ChatRequest, type ChatToolCall, type ChatUsage, type Checked, checked } from "./completion.js";
import { CedraError } from "./errors.js";
import { choose, type Kept, seedFor } from "./kept.js";
import type { Link, ReplyDelta } from "./protocol.js";
import type { Session } from "./session.js";
import { StopMatcher } from "./stop.js";

/** Sessions that wait for their conversations to go on. Each has windows of its own on the device. */
const KEEPS = 2;

/** A piece of a reply, or how it ended. */
type Event = ReplyDelta | { type: "end"; finish: ChatFinish; usage: ChatUsage };

/** Options of a request that are not part of it. */
export interface ChatOptions {
  /** Ends the reply; the request is rejected with `ABORTED`. */
  signal?: AbortSignal;
}

/**
 * Replies to conversations, in the shape of OpenAI's API. Sessions are kept behind it: a request whose messages go on from those of
 * a request before reads only what is new. Requests at the same time have a session each.
 */
export class ChatCompletions {
  readonly #link: Link;
  readonly #open: () => Promise<Session>;
  /** The one used last comes last. */
  readonly #kept: Kept[] = [];

  /** @internal */
  constructor(link: Link, open: () => Promise<Session>) {
    this.#link = link;
    this.#open = open;
  }

  /** Makes a reply, in chunks. Nothing is read before the first is asked for; leaving the loop ends it. */
  create(request: ChatRequest & { stream: true }, options?: ChatOptions): Promise<AsyncGenerator<ChatCompletionChunk, undefined>>;
  /** Makes a reply. */
  create(request: ChatRequest & { stream?: false | null }, options?: ChatOptions): Promise<ChatCompletion>;
  /** Makes a reply, in chunks or as a whole. */
  create(request: ChatRequest, options?: ChatOptions): Promise<ChatCompletion | AsyncGenerator<ChatCompletionChunk, undefined>>;
  async create(request: ChatRequest, { signal }: ChatOptions = {}): Promise<ChatCompletion | AsyncGenerator<ChatCompletionChunk, undefined>> {
    const asked = checked(request);
    const text = await this.#link.call("encodeChat", { conversation: asked.conversation }, signal ? { signal } : {});
    const events = this.#events(asked, text, signal);
    const { model } = asked;
    const head = { id: `chatcmpl-${crypto.randomUUID()}`, created: Math.floor(Date.now() / 1000), model };
    return asked.stream ? chunks(head, asked.includeUsage, events) : whole(head, events);
  }

  async *#events(asked: Checked, text: Uint32Array, signal: AbortSignal | undefined): AsyncGenerator<Event, undefined> {
    const hooks = signal ? { signal } : {};
    const seed = asked.seed === undefined || asked.temperature === 0 ? undefined : seedFor(asked.seed, text.length);
    const found = choose(this.#kept, text, seed);
    // Whoever comes next finds it gone: it is put back when the reply is over.
    if (found) this.#kept.splice(this.#kept.indexOf(found.chosen), 1);
    const session = found?.chosen.session ?? (await this.#open());
    let reply: number | undefined;
    try {
      const replayed = session.replayed;
      const shared = found?.shared ?? 0;
      if (session.length > shared) await session.truncate(shared);
      const rest = text.subarray(shared);
      const reused = rest.length > 0 ? (await session.append(rest, hooks)).reused : 0;
      // A text's last token waits for the next step, and what windows need is computed again.
      const cached = Math.max(0, (found ? shared - 1 : reused) - (session.replayed - replayed));
      const room = session.remaining;
      if (room === 0) {
        const [needed, allowed] = [text.length + 1, text.length];
        throw new CedraError("CONTEXT", `context overrun: ${needed} tokens needed, ${allowed} allowed`, { needed, allowed });
      }
      reply = await this.#link.call("reply", { conversation: asked.conversation });
      const answer = session.generate({
        maxTokens: Math.min(asked.maxTokens ?? room, room),
        temperature: asked.temperature,
        topP: asked.topP,
        seed: seed ?? randomSeed(),
        ...hooks,
      });
      const stop = new Stops(asked.stop);
      let made = 0;
      for await (const { ids } of answer) {
        made += ids.length;
        yield* stop.push(await this.#link.call("hear", { reply, ids, end: false }));
        if (stop.stopped) break;
      }
      if (!stop.stopped) {
        yield* stop.push(await this.#link.call("hear", { reply, ids: new Uint32Array(), end: true }));
        reply = undefined;
        yield* stop.finish();
      }
      const finish = stop.stopped ? "stop" : stop.calls ? "tool_calls" : (answer.finish ?? "stop");
      yield { type: "end", finish, usage: usage(text.length, made, cached) };
    } finally {
      if (reply !== undefined) void this.#link.call("hear", { reply, ids: new Uint32Array(), end: true }).catch(() => {});
      await this.#keep(session, text.length, seed);
    }
    return undefined;
  }

  /** Keeps a session for what may follow, with the text that it really has, however the reply ended. */
  async #keep(session: Session, prompt: number, seed: bigint | undefined): Promise<void> {
    try {
      this.#kept.push({ session, tokens: await session.tokens(), prompt, seed });
      const oldest = this.#kept.length > KEEPS ? this.#kept.shift() : undefined;
      await oldest?.session.close();
    } catch {
      await session.close().catch(() => {}); // The engine is gone, or the session is.
    }
  }
}

/** Chats with the engine's model. */
export class Chat {
  /** Where replies are made. */
  readonly completions: ChatCompletions;

  /** @internal */
  constructor(link: Link, open: () => Promise<Session>) {
    this.completions = new ChatCompletions(link, open);
  }
}

/** Looks for stop texts in what is said. */
class Stops {
  readonly #matcher: StopMatcher;
  stopped = false;
  /** Whether a call has begun. */
  calls = false;

  constructor(texts: readonly string[]) {
    this.#matcher = new StopMatcher(texts);
  }

  *push(deltas: readonly ReplyDelta[]): Generator<ReplyDelta> {
    for (const delta of deltas) {
      if (delta.type !== "content") {
        // What is said is over.
        if (delta.type === "call") yield* this.finish();
        this.calls ||= delta.type === "call";
        yield delta;
        continue;
      }
      const { text, stopped } = this.#matcher.push(delta.text);
      if (text) yield { type: "content", text };
      if (stopped) {
        this.stopped = true;
        return;
      }
    }
  }

  *finish(): Generator<ReplyDelta> {
    const text = this.#matcher.finish();
    if (text) yield { type: "content", text };
  }
}

/** What replies and chunks begin with. */
interface Head {
  id: string;
  created: number;
  model: string;
}

async function whole(head: Head, events: AsyncGenerator<Event, undefined>): Promise<ChatCompletion> {
  let content = "";
  let reasoning = "";
  const calls: ChatToolCall[] = [];
  let end: Extract<Event, { type: "end" }> | undefined;
  for await (const event of events) {
    if (event.type === "content") content += event.text;
    else if (event.type === "reasoning") reasoning += event.text;
    else if (event.type === "call") calls.push({ id: callId(event.index), type: "function", function: { name: event.name, arguments: "" } });
    else if (event.type === "arguments") calls[event.index]!.function.arguments += event.text;
    else end = event;
  }
  const { finish, usage } = end!;
  const message = {
    role: "assistant" as const,
    content,
    ...(reasoning && { reasoning_content: reasoning }),
    ...(calls.length > 0 && { tool_calls: calls }),
  };
  return { ...head, object: "chat.completion", choices: [{ index: 0, message, finish_reason: finish }], usage };
}

async function* chunks(head: Head, includeUsage: boolean, events: AsyncGenerator<Event, undefined>): AsyncGenerator<ChatCompletionChunk, undefined> {
  const chunk = (delta: ChatDelta, finish_reason: ChatFinish | null = null): ChatCompletionChunk => ({
    ...head,
    object: "chat.completion.chunk",
    choices: [{ index: 0, delta, finish_reason }],
    ...(includeUsage && { usage: null }),
  });
  let begun = false;
  for await (const event of events) {
    if (!begun) yield chunk({ role: "assistant", content: "" });
    begun = true;
    if (event.type === "content") yield chunk({ content: event.text });
    else if (event.type === "reasoning") yield chunk({ reasoning_content: event.text });
    else if (event.type === "call") {
      const { index, name } = event;
      yield chunk({ tool_calls: [{ index, id: callId(index), type: "function", function: { name, arguments: "" } }] });
    } else if (event.type === "arguments") yield chunk({ tool_calls: [{ index: event.index, function: { arguments: event.text } }] });
    else {
      yield chunk({}, event.finish);
      if (includeUsage) yield { ...head, object: "chat.completion.chunk", choices: [], usage: event.usage };
    }
  }
  return undefined;
}

const callId = (index: number): string => `call_${String(index).padStart(2, "0")}_${crypto.randomUUID().replaceAll("-", "")}`;

const randomSeed = (): bigint => crypto.getRandomValues(new BigUint64Array(1))[0]!;

const usage = (prompt: number, made: number, cached: number): ChatUsage => ({
  prompt_tokens: prompt,
  completion_tokens: made,
  total_tokens: prompt + made,
  prompt_tokens_details: { cached_tokens: cached },
});
