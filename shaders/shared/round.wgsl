// What a round of drafting hands from kernel to kernel, in one buffer of words, for blocks of B tokens:
//
//   0 tokens to verify, whatever they promise, or ANY
//   1 probability that all tokens taken so far are accepted, 2 tokens that the round is expected to make of them (f32)
//   4 seconds of a round that verifies k tokens (B + 1, f32), then the share of tokens that are accepted at a place (B, f32)
//   then, from a multiple of 8 on, the odds of the model's rows (B + 1) and of the drafted ones (B), 8 words each:
//   best, largest, sum, cut, last_tie (see `draw.wgsl`), the mass of what is kept, the token; of a drafted one, the probability that
//   it was thought to be accepted with (f32)
const ANY: u32 = 0xffffffffu;
const VERIFY: u32 = 0u;
const SURVIVAL: u32 = 1u;
const EXPECTED: u32 = 2u;
const COSTS: u32 = 4u;
// Words of a row's odds, and where mass, token and probability stand in them.
const ODDS_WORDS: u32 = 8u;
const MASS: u32 = 5u;
const TOKEN: u32 = 6u;
const ACCEPTS: u32 = 7u;

// Where the odds of a row of the model begin; those of place i of a block are of row B + 1 + i.
fn odds_at(block: u32, row: u32) -> u32 {
    return (COSTS + 2u * block + 8u) / 8u * 8u + row * ODDS_WORDS;
}
