// A tile of pairs (row of x, expert) and the weights of its expert. The importing kernel declares `tile`, `pairs`, and
// `params.segment`.

// Matrices of one kind, a row of experts: expert e lies e - first_expert strides from the start.
struct ExpertSegment {
    format: u32,
    // Word offsets of the codes and of the scales of the first expert, and from one expert to the next.
    data: u32,
    scales: u32,
    rows: u32,
    data_stride: u32,
    scale_stride: u32,
    first_expert: u32,
    experts: u32,
}

struct ExpertTile {
    expert: u32,
    first: u32,
    pairs: u32,
}

// Pair i of the tile; beyond the last, the last.
fn tile_pair(i: u32) -> u32 {
    return pairs[tile.first + min(i, tile.pairs - 1u)];
}

fn expert_data(s: ExpertSegment) -> u32 {
    return s.data + (tile.expert - s.first_expert) * s.data_stride;
}

fn expert_scales(s: ExpertSegment) -> u32 {
    return s.scales + (tile.expert - s.first_expert) * s.scale_stride;
}
