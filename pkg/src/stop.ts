/**
 * Finds stop strings in a text that comes in pieces. What may be the beginning of one is held back until it is clear, so
 * nothing of a stop string ever shows, and nothing else gets lost.
 */
export class StopMatcher {
  #held = "";

  constructor(readonly stops: readonly string[]) {}

  /** What may be shown after one more piece, and whether a stop string was found behind it. */
  push(piece: string): { text: string; stopped: boolean } {
    const all = this.#held + piece;
    const first = Math.min(...this.stops.map((stop) => all.indexOf(stop)).filter((at) => at >= 0));
    if (first < Infinity) {
      this.#held = "";
      return { text: all.slice(0, first), stopped: true };
    }
    const keep = Math.max(0, ...this.stops.map((stop) => overlap(all, stop)));
    this.#held = all.slice(all.length - keep);
    return { text: all.slice(0, all.length - keep), stopped: false };
  }

  /** What was held back, once no more comes. */
  finish(): string {
    const rest = this.#held;
    this.#held = "";
    return rest;
  }
}

/** Length of the longest end of `text` that `stop` begins with. */
function overlap(text: string, stop: string): number {
  for (let length = Math.min(text.length, stop.length - 1); length > 0; length--) {
    if (text.endsWith(stop.slice(0, length))) return length;
  }
  return 0;
}
