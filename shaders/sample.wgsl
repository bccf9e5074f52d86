// Ends a step: chooses the next token from a row of logits, as `shared/draw.wgsl` says, and moves the step on. One workgroup.
// A NaN or infinite logit ends the generation without a token.
//
// 0 params
// 2 logits (stride4(V)): bits of f32
// 3 step: advanced
// 4 tokens (T): the ids of the step; slot 0 receives the token
// 5 history (N-1): raw ids before the step, newest first; shifted by the rows of the step
// 6 stop ids (step.stop_count)
// 7 out (ring, 2): token or NONE, and status; slot `sampled % ring`

#import step
#import draw

struct Params {
    // Whether to choose a token, or only to move on (all chunks of a prompt but the last).
    sample: u32,
    // Logits V.
    vocabulary: u32,
    // Slots of out.
    ring: u32,
    // Ids in history.
    history: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> logits: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> step: Step;
@group(0) @binding(4) var<storage, read_write> tokens: array<u32>;
@group(0) @binding(5) var<storage, read_write> history: array<u32>;
@group(0) @binding(6) var<storage, read> stop_ids: array<u32>;
@group(0) @binding(7) var<storage, read_write> out: array<vec2<u32>>;

const STOPPED: u32 = 1u;
const NON_FINITE: u32 = 2u;

// The step as it was, for every invocation.
var<workgroup> now: Step;
fn vocabulary() -> u32 {
    return params.vocabulary;
}

fn logit_quad(quad: u32) -> vec4<u32> {
    return logits[quad];
}

// The next token, or NONE when a logit is not finite.
fn choose(local: u32, at: Step) -> u32 {
    let odds = find_odds(local, at.temperature, at.top_k, at.top_p);
    let best = best_of_row();
    if best == NONE || at.temperature == 0.0 {
        return best;
    }
    return draw(local, odds, random_number(at.seed_lo, at.seed_hi, 0u, at.sampled));
}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) local: u32) {
    if local == 0u {
        now = step;
    }
    let at = workgroupUniformLoad(&now);
    let slot = at.sampled % params.ring;
    if at.rows == 0u {
        if local == 0u && params.sample != 0u {
            out[slot] = vec2(NONE, at.status);
        }
        return;
    }
    var token = NONE;
    if params.sample != 0u {
        token = choose(local, at);
    }
    if local != 0u {
        return;
    }

    // From the oldest on, so that what is shifted has not been overwritten.
    for (var i = params.history; i > 0u; i--) {
        let age = i - 1u;
        if age < at.rows {
            history[age] = tokens[at.rows - 1u - age];
        } else {
            history[age] = history[age - at.rows];
        }
    }
    step.position = at.position + at.rows;
    if params.sample == 0u {
        return;
    }
    var status = 0u;
    if token == NONE {
        status = NON_FINITE;
    } else {
        tokens[0] = token;
        step.sampled = at.sampled + 1u;
        for (var i = 0u; i < at.stop_count; i++) {
            if stop_ids[i] == token {
                status = STOPPED;
            }
        }
    }
    step.status = status;
    step.rows = select(0u, 1u, status == 0u);
    out[slot] = vec2(token, status);
}
