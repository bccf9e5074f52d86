// A tile of slots: the part of what the rows see that is scored, and selected from, at a time. Slots are entries, or those of
// candidate blocks; scores (T, count) and lists are one tile's, so that scratch does not grow with the context. A tile holds
// whole segments, but for the last one where a single tile is all there is, and a segment whole groups of four blocks.
struct Tile {
    first: u32,    // first slot
    count: u32,    // slots
    segment: u32,  // slots that one workgroup selects from
    whole: u32,    // 1: rows see no more than the first segment, and what is selected from it is final
}

// Entries that the segments of a tile's first `slots` slots list: the best `topk` of each, or all that it has.
fn listed(tile: Tile, topk: u32, slots: u32) -> u32 {
    return slots / tile.segment * min(topk, tile.segment) + min(topk, slots % tile.segment);
}

// Words of a row's listed keys, and of their ids: whole groups of four.
fn list_stride(tile: Tile, topk: u32) -> u32 {
    return (listed(tile, topk, tile.count) + 3u) & 0xfffffffcu;
}
