// What a page can draw of a session. Asking for it changes nothing, and ends no answer.

/** Positions from the first up to before the second. */
export type PositionRange = readonly [number, number];

/** What a layer attended to. */
export interface LayerAttention {
  /** Positions whose window keys were seen. */
  window: PositionRange;
  /** Tokens an entry: entry e stands for the positions from e · ratio to before (e + 1) · ratio. 0 for layers with a window only. */
  ratio: number;
  /** Entries of the global cache that were selected, ascending. */
  entries: Uint32Array;
  /** Positions that could be selected; missing where all could. */
  candidates?: PositionRange[];
}

/** What the last token that was read attended to. */
export interface Attention {
  /** Where it stands in the text. */
  position: number;
  /** Every layer, in order. */
  layers: LayerAttention[];
}

/** The n-grams that end at a token, as one Engram looks them up. */
export interface Ngrams {
  /** The layer that opens with the Engram. */
  layer: number;
  /** By order, from 2 on: rows of the layer's table, one a hash head. */
  rows: number[][];
}
