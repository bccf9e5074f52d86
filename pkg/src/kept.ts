import type { Session } from "./session.js";

/** A session that waits for the conversation to go on. */
export interface Kept {
  readonly session: Session;
  /** Its text. */
  readonly tokens: Uint32Array;
  /** Tokens of the conversation that was read last, without its reply. */
  readonly prompt: number;
  /** The seed that was drawn with last. */
  readonly seed: bigint | undefined;
}

/** Tokens that two texts begin with. */
export function common(a: ArrayLike<number>, b: ArrayLike<number>): number {
  const most = Math.min(a.length, b.length);
  let length = 0;
  while (length < most && a[length] === b[length]) length++;
  return length;
}

/**
 * The session whose conversation this one continues: the one that has most of it. It continues it when it has all that was read
 * before, but for the token that began the reply, which is another one when reasoning is left out of what is shown again. A text
 * that goes elsewhere sooner would cost the other conversation its session, and has its own instead.
 *
 * A session draws on from where it was when its seed is the same, so with the same seed for the same text it does not serve.
 */
export function choose<K extends Omit<Kept, "session">>(kept: readonly K[], text: ArrayLike<number>, seed?: bigint): { chosen: K; shared: number } | undefined {
  let best: { chosen: K; shared: number } | undefined;
  for (const chosen of kept) {
    const shared = common(chosen.tokens, text);
    const continues = shared > 0 && shared >= Math.min(chosen.prompt - 1, chosen.tokens.length);
    const draws = seed !== undefined && seed === chosen.seed;
    if (continues && !draws && shared > (best?.shared ?? 0)) best = { chosen, shared };
  }
  return best;
}

/** The seed to draw with: as long as a conversation grows, another one for each reply, and the same for the same. */
export const seedFor = (seed: bigint, length: number): bigint => BigInt.asUintN(64, seed * 0x9e37_79b9_7f4a_7c15n + BigInt(length));
