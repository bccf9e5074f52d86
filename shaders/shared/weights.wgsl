// Weight packs: one buffer holds several matrices, rows of whole chunks of 32 channels, the last padded with zero bytes.
//
//   format            16-byte quads a chunk   scales (UE8M0 bytes, rows of whole words)
//   0 F32             8                       none
//   1 BF16            4                       none
//   2 F16             4                       none
//   3 FP8 E4M3        2                       one per 32 rows and 32 channels
//   4 FP8 E4M3        2                       one per row and 32 channels
//   5 FP4 E2M1        1                       one per row and 32 channels; low nibble = even channel
//
// The importing kernel declares `weights: array<vec4<u32>>`.
#import float

const F32: u32 = 0u;
const BF16: u32 = 1u;
const F16: u32 = 2u;
const FP8_BLOCK: u32 = 3u;
const FP8_ROW: u32 = 4u;
const FP4: u32 = 5u;

// 16-byte quads of a chunk.
fn chunk_quads(format: u32) -> u32 {
    return array<u32, 6>(8u, 4u, 4u, 2u, 2u, 1u)[format];
}

// Word offsets of the scales of four rows, counted from the matrix's first scale; `chunks` a row.
fn scale_rows(format: u32, rows: vec4<u32>, chunks: u32) -> vec4<u32> {
    return select(rows, rows / vec4<u32>(32u), format == FP8_BLOCK) * ((chunks + 3u) / 4u);
}

// The scale byte of chunk `c` of the scale row at word `at`.
fn scale_byte(at: u32, c: u32) -> u32 {
    let word = at + c / 4u;
    return (weights[word / 4u][word % 4u] >> (8u * (c % 4u))) & 255u;
}
