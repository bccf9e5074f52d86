// The state of a step on the device: where it stands and how the next token is drawn. Twin of `kernels::Step`.
// It lives in one buffer, bound as a uniform by the kernels that read it and as storage by the one that advances it.
struct Step {
    position: u32,    // tokens in the cache before this step; row t has position `position + t`
    rows: u32,        // rows in flight; 0 once generation has stopped
    sampled: u32,     // tokens sampled since the last reset
    status: u32,      // 0 running, 1 stopped, 2 a logit was not finite
    seed_lo: u32,     // generator: low and high word of the seed
    seed_hi: u32,
    top_k: u32,       // 0: off
    temperature: f32, // 0: greedy
    top_p: f32,
    stop_count: u32,  // stop ids to compare with
    encoder_floor: u32, // layers of the encoder see no window key below this position
    decoder_floor: u32, // the same for layers of the decoder
    kept: u32,        // tokens whose groups are in the pages already: entries that end below stay as they are
    limit: u32,       // rounds of drafting end when so many tokens are sampled
    round: u32,       // rounds of drafting so far
    p5: u32,
}
