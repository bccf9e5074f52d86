// What the page knows of a model: its folder, its config, and how a conversation is spelled in tokens.

import type { Engine } from "cedra";

/** `engine.info`, as far as the page reads it. */
export interface Info {
  adapter: { name: string; software: boolean; description: string };
  model: { window: number; headDim: number; maxContext: number; decoder: number; bos: number; eos: number; fingerprint: { weights: string; config: string } };
  context: number;
  memory: { weights: number; cache: number; total: number };
  layers: { index: number; role: "window" | "full" | "reindex" | "reuse"; ratio: number; part: "encoder" | "decoder"; engram: boolean }[];
}

/** `config.json`, as far as the page reads it. */
export interface Config {
  max_position_embeddings: number;
  head_dim: number;
  index_head_dim: number;
  engram_num_embeddings?: number[];
  engram_layer_ids?: number[];
}

/** Longest context that is asked for: memory for it is planned before anything is read. */
const MOST_CONTEXT = 131_072;

/** The folder of the model: the one beside the page, or the one that the address names. */
export const folder = new URL(new URLSearchParams(location.search).get("model") ?? "./model/", document.baseURI);
if (!folder.pathname.endsWith("/")) folder.pathname += "/";
export const own = folder.href === new URL("./model/", document.baseURI).href;

/** The config, for what the page must know before the engine is there and what the engine does not tell. */
export async function readConfig(kept: Storage): Promise<Config | undefined> {
  const key = `cedra-page/config/${folder.href}`;
  try {
    const response = await fetch(new URL("config.json", folder), { cache: "no-cache" });
    const json = (await response.json()) as { text_config?: Config } & Config;
    const { max_position_embeddings, head_dim, index_head_dim, engram_num_embeddings, engram_layer_ids } = json.text_config ?? json;
    const config = { max_position_embeddings, head_dim, index_head_dim, engram_num_embeddings, engram_layer_ids } as Config;
    kept.setItem(key, JSON.stringify(config));
    return config;
  } catch {
    // Without a network the engine has its own copy of the files; this is the page's.
    return JSON.parse(kept.getItem(key) ?? "null") ?? undefined;
  }
}

export const contextOf = (config: Config): number => Math.min(config.max_position_embeddings, MOST_CONTEXT);

const words = (n: number): number => 4 * Math.ceil(n / 4);

/** Bytes that a token adds to the global cache: an FP4 latent and an FP4 index key an entry, both with their scales, an entry a `ratio` tokens. */
export function cacheBytes(config: Config, info: Info): number {
  const latent = words(config.head_dim / 2) + words(config.head_dim / 16);
  const key = words(config.index_head_dim / 2) + words(config.index_head_dim / 32);
  return info.layers.filter(({ role }) => role === "full").reduce((sum, { ratio }) => sum + (latent + key) / ratio, 0);
}

/** Bytes of all window rings, whatever the length: an FP8 key with its scales a position. */
export const ringBytes = (config: Config, info: Info): number => info.layers.length * info.model.window * (words(config.head_dim) + words(config.head_dim / 32));

/** The same of one uncompressed cache a layer: a BF16 vector of a head's size. */
export const plainBytes = (config: Config, info: Info): number => 2 * config.head_dim * info.layers.length;

/** Tokens that a conversation is made of. */
export interface Controls {
  bos: number;
  eos: number;
  user: number;
  /** What an answer begins with. */
  answer: number[];
}

/** Asks the tokenizer for the control tokens. */
export async function controlsOf(engine: Engine): Promise<Controls> {
  const { bos, eos } = (engine.info as unknown as Info).model;
  const [user, answer] = await Promise.all([engine.encode("<｜User｜>", true), engine.encode("<｜Assistant｜></think>", true)]);
  if (user.length !== 1 || answer.length !== 2) throw new Error("The tokenizer of this model has no tokens for user and assistant, which this page needs.");
  return { bos, eos, user: user[0]!, answer: [...answer] };
}

/** A question and its answer, as positions of a text. */
export interface Turn {
  /** Where the question begins: cutting here takes the turn back. */
  start: number;
  question: Uint32Array;
  answer: Uint32Array;
  /** Where the answer begins and, with the end token, where it is over. */
  answerStart: number;
  end: number;
}

/** The turns of a text behind its document, from its tokens alone. */
export function turnsOf(tokens: Uint32Array, documentEnd: number, { eos, user, answer }: Controls): Turn[] {
  const turns: Turn[] = [];
  const assistant = answer[0]!;
  let at = documentEnd;
  while (at < tokens.length) {
    const start = at;
    if (tokens[at] === user) at += 1;
    const question = at;
    while (at < tokens.length && tokens[at] !== assistant && tokens[at] !== user && tokens[at] !== eos) at += 1;
    const questionEnd = at;
    if (tokens[at] === assistant) at = Math.min(at + answer.length, tokens.length);
    const answerStart = at;
    while (at < tokens.length && tokens[at] !== user && tokens[at] !== eos) at += 1;
    const answerEnd = at;
    if (tokens[at] === eos) at += 1;
    turns.push({ start, question: tokens.slice(question, questionEnd), answer: tokens.slice(answerStart, answerEnd), answerStart, end: at });
  }
  return turns;
}
