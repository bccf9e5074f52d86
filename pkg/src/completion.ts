import { CedraError } from "./errors.js";

// Requests and replies of chats in the shape that OpenAI's API gave them, and the checks of the former.

/** A part of a message's content. */
export interface ChatTextPart {
  /** Text is the one kind there is. */
  type: "text";
  /** The text. */
  text: string;
}

/** A call of a function, as a reply makes it. */
export interface ChatToolCall {
  /** Its name in this conversation; the result refers to it. */
  id: string;
  /** Functions are the one kind there is. */
  type: "function";
  /** What is called. */
  function: {
    /** The function. */
    name: string;
    /** JSON, if the model kept to the form. */
    arguments: string;
  };
}

/** What the model is told beforehand. */
export interface ChatSystemMessage {
  /** Who speaks. */
  role: "system";
  /** What is said. */
  content: string | readonly ChatTextPart[];
}

/** What a person says. */
export interface ChatUserMessage {
  /** Who speaks. */
  role: "user";
  /** What is said. */
  content: string | readonly ChatTextPart[];
}

/** What the model said. */
export interface ChatAssistantMessage {
  /** Who speaks. */
  role: "assistant";
  /** What is said; may be missing beside calls. */
  content?: string | readonly ChatTextPart[] | null;
  /** What was thought before. It is read again in conversations with tools only. */
  reasoning_content?: string | null;
  /** What was called. */
  tool_calls?: readonly ChatToolCall[];
  /** Whether the reply goes on from here; in the last message only. */
  prefix?: boolean;
}

/** What a call came to. */
export interface ChatToolMessage {
  /** Who speaks. */
  role: "tool";
  /** The call. */
  tool_call_id: string;
  /** Its result. */
  content: string | readonly ChatTextPart[];
}

/** A message of a conversation. */
export type ChatMessage = ChatSystemMessage | ChatUserMessage | ChatAssistantMessage | ChatToolMessage;

/** A function that may be called. */
export interface ChatTool {
  /** Functions are the one kind there is. */
  type: "function";
  /** The function. */
  function: {
    /** Its name. */
    name: string;
    /** What it does, for the model. */
    description?: string;
    /** JSON schema of its arguments. */
    parameters?: Record<string, unknown>;
    /** Nothing holds a reply to a schema, so `true` is refused. */
    strict?: false | null;
  };
}

/** A request for a reply. */
export interface ChatRequest {
  /** The conversation so far. */
  messages: readonly ChatMessage[];
  /** Comes back with the reply; an engine has one model. */
  model?: string;
  /** Whether the reply comes in chunks. Default: false. */
  stream?: boolean | null;
  /** What a stream is to tell. */
  stream_options?: {
    /** Whether its last chunk has the usage. */
    include_usage?: boolean;
  } | null;
  /** Divides the logits; 0 takes the most likely token. Default: 1. */
  temperature?: number | null;
  /** Takes the fewest tokens that together are this likely. Default: 1, all. */
  top_p?: number | null;
  /** Tokens of the reply at most. Default: what the context has room for. */
  max_completion_tokens?: number | null;
  /** Older name of `max_completion_tokens`. */
  max_tokens?: number | null;
  /** Up to four texts that end the reply and are not part of it. They are looked for in what is said, not in reasoning and calls. */
  stop?: string | readonly string[] | null;
  /** Draws the same tokens from the same distributions again. Default: another one each time. */
  seed?: number | bigint | null;
  /** Functions that may be called. */
  tools?: readonly ChatTool[] | null;
  /** Whether functions are called: as the model sees fit, never, or for certain. */
  tool_choice?: "auto" | "none" | "required" | null;
  /** Whether the model reasons before it replies. Default: disabled. */
  thinking?: {
    /** Whether it does. */
    type: "enabled" | "disabled";
  } | null;
  /** How thoroughly it is to reason, if it does. */
  reasoning_effort?: "none" | "minimal" | "low" | "medium" | "high" | "xhigh" | "max" | null;
}

/** Why a reply ended: the model or a stop text ended it, it has reached its length, or functions are to be called. */
export type ChatFinish = "stop" | "length" | "tool_calls";

/** What a reply took. */
export interface ChatUsage {
  /** Tokens of the conversation. */
  prompt_tokens: number;
  /** Tokens that were made. */
  completion_tokens: number;
  /** Both. */
  total_tokens: number;
  /** Of the conversation's tokens. */
  prompt_tokens_details: {
    /** Those that were known from before and were not computed again. */
    cached_tokens: number;
  };
}

/** A whole reply. */
export interface ChatCompletion {
  /** A name of its own. */
  id: string;
  /** What this is. */
  object: "chat.completion";
  /** Seconds since 1970. */
  created: number;
  /** As in the request. */
  model: string;
  /** The one reply. */
  choices: [{
    /** Its number. */
    index: 0;
    /** What was said; can be appended to the messages as it is. */
    message: {
      /** Who speaks. */
      role: "assistant";
      /** What is said. */
      content: string;
      /** What was thought before. */
      reasoning_content?: string;
      /** What is called. */
      tool_calls?: ChatToolCall[];
    };
    /** Why it ended. */
    finish_reason: ChatFinish;
  }];
  /** What it took. */
  usage: ChatUsage;
}

/** What a chunk adds to a reply. */
export interface ChatDelta {
  /** Who speaks, in the first chunk. */
  role?: "assistant";
  /** More of what is said. */
  content?: string;
  /** More of what was thought. */
  reasoning_content?: string;
  /** Calls that begin or go on. */
  tool_calls?: {
    /** The call's number. */
    index: number;
    /** Its name, when it begins. */
    id?: string;
    /** Its kind, when it begins. */
    type?: "function";
    /** What is called. */
    function: {
      /** The function, when the call begins. */
      name?: string;
      /** More of the arguments. */
      arguments: string;
    };
  }[];
}

/** A chunk of a reply. */
export interface ChatCompletionChunk {
  /** The reply's name. */
  id: string;
  /** What this is. */
  object: "chat.completion.chunk";
  /** Seconds since 1970. */
  created: number;
  /** As in the request. */
  model: string;
  /** What it adds; nothing in the chunk with the usage. */
  choices: {
    /** Number of the one reply. */
    index: 0;
    /** What is added. */
    delta: ChatDelta;
    /** Why the reply ended, in its last chunk. */
    finish_reason: ChatFinish | null;
  }[];
  /** What it took, in the last chunk of all, if it was asked for. */
  usage?: ChatUsage | null;
}

/** A request that has been looked at. */
export interface Checked {
  /** What the engine encodes, as JSON. */
  conversation: string;
  model: string;
  stream: boolean;
  includeUsage: boolean;
  temperature: number;
  topP: number;
  maxTokens: number | undefined;
  stop: string[];
  seed: bigint | undefined;
}

const CONVERSATION = ["messages", "tools", "tool_choice", "thinking", "reasoning_effort"] as const;
const FIELDS: readonly string[] = [
  ...CONVERSATION, "model", "stream", "stream_options", "temperature", "top_p", "max_completion_tokens", "max_tokens", "stop", "seed",
];
const MOST_STOPS = 4;

/** Refuses what means nothing. What the messages and tools say is looked at by the engine. */
export function checked(request: ChatRequest): Checked {
  if (typeof request !== "object" || request === null) throw refused("request", request, "an object");
  const fields = request as unknown as Record<string, unknown>;
  const unknown = Object.keys(fields).find((name) => !FIELDS.includes(name) && fields[name] !== undefined);
  if (unknown !== undefined) throw refused(unknown, fields[unknown], `no such field; the fields are ${FIELDS.join(", ")}`);

  const field = <T>(name: string, allowed: string, test: (value: unknown) => value is T): T | undefined => {
    const value = fields[name] ?? undefined;
    if (value === undefined || test(value)) return value;
    throw refused(name, value, allowed);
  };
  const whole = (name: string): number | undefined => field(name, "a whole number, 1 or more", (n): n is number => isWhole(n) && n >= 1);
  const streamOptions = field("stream_options", "an object with include_usage", (value) => typeof value === "object");
  const includeUsage = (streamOptions as { include_usage?: unknown } | undefined)?.include_usage ?? false;
  if (!isBoolean(includeUsage)) throw refused("stream_options.include_usage", includeUsage, "true or false");
  const stream = field("stream", "true or false", isBoolean) ?? false;
  if (streamOptions && !stream) throw refused("stream_options", streamOptions, "nothing, without `stream: true`");
  const stop = field("stop", `a text, or up to ${MOST_STOPS} of them, none of them empty`, isStop) ?? [];
  const seed = field("seed", "a whole number from 0 to 2^64 - 1", isSeed);

  let conversation: string;
  try {
    conversation = JSON.stringify(Object.fromEntries(CONVERSATION.map((name) => [name, fields[name]])));
  } catch (cause) {
    throw new CedraError("ARGUMENT", "the messages or tools cannot be written as JSON", { field: "messages" }, cause);
  }
  return {
    conversation,
    model: field("model", "a string", (value) => typeof value === "string") ?? "cedra",
    stream,
    includeUsage,
    temperature: field("temperature", "a number, 0 or more", (n): n is number => isNumber(n) && n >= 0) ?? 1,
    topP: field("top_p", "more than 0, at most 1", (n): n is number => isNumber(n) && n > 0 && n <= 1) ?? 1,
    maxTokens: whole("max_completion_tokens") ?? whole("max_tokens"),
    stop: typeof stop === "string" ? [stop] : [...stop],
    seed: seed === undefined ? undefined : BigInt(seed),
  };
}

const isBoolean = (value: unknown): value is boolean => typeof value === "boolean";
const isNumber = (value: unknown): value is number => typeof value === "number" && Number.isFinite(value);
const isWhole = (value: unknown): value is number => Number.isSafeInteger(value);
const isStop = (value: unknown): value is string | string[] => {
  const texts: unknown[] = Array.isArray(value) ? value : [value];
  return texts.length <= MOST_STOPS && texts.every((text) => typeof text === "string" && text !== "");
};
const isSeed = (value: unknown): value is number | bigint =>
  typeof value === "bigint" ? value >= 0n && value < 1n << 64n : isWhole(value) && value >= 0;

/** As the engine words it. */
function refused(field: string, found: unknown, allowed: string): CedraError {
  let words: string;
  try {
    words = JSON.stringify(found) ?? String(found);
  } catch {
    words = String(found);
  }
  return new CedraError("ARGUMENT", `\`${field}\`: found ${words}, allowed: ${allowed}`, { field, found: words, allowed });
}
