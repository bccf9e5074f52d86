// Takes the token at a place of a drafted block (numerics.md §13), if verifying it makes more tokens a second. One workgroup.
//
// A place's logits are the block's and what the Markov head makes of the token before. Whether its token is to be verified is
// decided before it is known: by the probability that it is accepted, which depends on the tokens before it only, and by what
// rounds were measured to take. The first place that is not taken ends the block, and so does a logit that is not finite.
//
// 2 base        (B, stride)  logits of the block
// 3 markov      (B, stride)  of the Markov head, by place
// 4 raw         (B, h4)      residuals before the last norm
// 5 embeddings  (T, r4)      the Markov head's, of the step's tokens: row i is of the token before place i
// 6 confidence  (h + r)      weights
// 7 step                     has a row more for each token that was taken
// 8 tokens                   ids of the step
// 9 round                    see `shared/round.wgsl`
#import step
#import draw
#import round

struct Params {
    place: u32,
    block: u32,      // B
    vocabulary: u32, // V
    stride: u32,     // words of a row of logits
    hidden: u32,     // h
    rank: u32,       // r
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> base: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> markov: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> raw: array<f32>;
@group(0) @binding(5) var<storage, read> embeddings: array<f32>;
@group(0) @binding(6) var<storage, read> confidence: array<f32>;
@group(0) @binding(7) var<storage, read_write> step: Step;
@group(0) @binding(8) var<storage, read_write> tokens: array<u32>;
@group(0) @binding(9) var<storage, read_write> round: array<u32>;

// Stream of random numbers that drafted tokens are drawn with.
const DRAFTED: u32 = 0x9e3779b9u;

// The step as it was, and whether the place may be taken, for every invocation.
var<workgroup> now: Step;
var<workgroup> open: u32;

fn vocabulary() -> u32 {
    return params.vocabulary;
}

fn logit_quad(quad: u32) -> vec4<u32> {
    let at = params.place * params.stride / 4u + quad;
    return bitcast<vec4<u32>>(base[at] + markov[at]);
}

fn padded(n: u32) -> u32 {
    return (n + 3u) / 4u * 4u;
}

// The probability that the place's token is accepted when those before it are; invocation 0 gets it.
fn acceptance(local: u32) -> f32 {
    var share = 0.0;
    for (var c = local; c < params.hidden; c += THREADS) {
        share = fma(confidence[c], raw[params.place * padded(params.hidden) + c], share);
    }
    for (var c = local; c < params.rank; c += THREADS) {
        share = fma(confidence[params.hidden + c], embeddings[params.place * padded(params.rank) + c], share);
    }
    floats[local] = share;
    for (var half = THREADS / 2u; half > 0u; half >>= 1u) {
        workgroupBarrier();
        if local < half {
            floats[local] += floats[local + half];
        }
    }
    workgroupBarrier();
    return 1.0 / (1.0 + exp(-floats[0]));
}

// Seconds of a round that verifies k tokens, and the share of tokens that are accepted at a place when those before it are.
fn cost(k: u32) -> f32 {
    return bitcast<f32>(round[COSTS + k]);
}

fn accepted(place: u32) -> f32 {
    return bitcast<f32>(round[COSTS + params.block + 1u + place]);
}

// Whether verifying the place's token, or it and more, makes more tokens a second than stopping before it.
fn pays(survival: f32, expected: f32) -> bool {
    var alive = survival;
    var made = expected;
    let rate = (made - alive) / cost(params.place);
    for (var k = params.place + 1u; k <= params.block; k++) {
        if made / cost(k) > rate {
            return true;
        }
        if k < params.block {
            alive *= accepted(k);
            made += alive;
        }
    }
    return false;
}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) local: u32) {
    if local == 0u {
        now = step;
        // All places before it were taken, and the token after them all may be made too.
        open = select(0u, 1u, now.rows == params.place + 1u && now.sampled + params.place + 2u <= now.limit);
    }
    if workgroupUniformLoad(&open) == 0u {
        return;
    }
    let at = workgroupUniformLoad(&now);
    let accepts = acceptance(local);
    if local == 0u {
        let survival = bitcast<f32>(round[SURVIVAL]) * accepts;
        let expected = bitcast<f32>(round[EXPECTED]) + survival;
        var more = params.place < round[VERIFY];
        if round[VERIFY] == ANY {
            more = pays(survival, expected);
        }
        round[SURVIVAL] = bitcast<u32>(survival);
        round[EXPECTED] = bitcast<u32>(expected);
        open = select(0u, 1u, more);
    }
    if workgroupUniformLoad(&open) == 0u {
        return;
    }
    let odds = find_odds(local, at.temperature, at.top_k, at.top_p);
    let best = best_of_row();
    if best == NONE {
        return;
    }
    var token = best;
    if at.temperature != 0.0 {
        token = draw(local, odds, random_number(at.seed_lo, at.seed_hi, DRAFTED, at.sampled + params.place));
    }
    if local == 0u {
        let entry = odds_at(params.block, params.block + 1u + params.place);
        round[entry] = odds.best;
        round[entry + 1u] = bitcast<u32>(odds.largest);
        round[entry + 2u] = bitcast<u32>(odds.sum);
        round[entry + 3u] = odds.cut;
        round[entry + 4u] = odds.last_tie;
        round[entry + MASS] = mass;
        round[entry + TOKEN] = token;
        round[entry + ACCEPTS] = bitcast<u32>(accepts);
        tokens[at.rows] = token;
        step.rows = at.rows + 1u;
    }
}
