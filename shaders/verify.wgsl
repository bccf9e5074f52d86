// Which drafted tokens stand, and the token after them (numerics.md §13).
//
// A drafted token d comes from the distribution q of its place, and the model's row before it has p. It is accepted with
// probability min(1, p(d) / q(d)); what replaces the first that is refused comes from the positive part of p - q, and what follows
// all of them from p. All of it is arithmetic on integers, those that tokens are drawn from anyway. At temperature 0 a token
// stands when it is the model's best.
//
// ROWS: the odds of the model's rows, a workgroup each, and the token that each draws. Grid: (1 + B).
// Otherwise one workgroup: judges the drafted tokens, and moves the step on.
//
// 2 logits    (1 + B, stride)  of the model
// 3 round     see `shared/round.wgsl`
// 4 base      (B, stride)      logits of the block
// 5 markov    (B, stride)      of the Markov head, by place
// 6 tokens    ids of the step; slot 0 receives the token that waits then
// 7 history   (N-1): raw ids before the step, newest first; shifted by the rows that stand
// 8 out       (ring, 4 + 1 + B): tokens made, status, tokens verified, tokens accepted; the tokens made. Slot `round % ring`
// 9 stop ids
// 10 step: advanced
#import step
#import draw
#import round

#ifndef ROWS
// Ids that end the text; the first step.stop_count of them.
struct StopIds {
    ids: array<vec4<u32>, 4>,
}
#endif

struct Params {
    block: u32,      // B
    vocabulary: u32, // V
    stride: u32,     // words of a row of logits
    ring: u32,       // slots of out
    history: u32,    // ids in it
}

@group(0) @binding(0) var<uniform> params: Params;
#ifdef ROWS
@group(0) @binding(1) var<uniform> step: Step;
#endif
@group(0) @binding(2) var<storage, read> logits: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> round: array<u32>;
#ifndef ROWS
@group(0) @binding(4) var<storage, read> base: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> markov: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> tokens: array<u32>;
@group(0) @binding(7) var<storage, read_write> history: array<u32>;
@group(0) @binding(8) var<storage, read_write> out: array<u32>;
@group(0) @binding(9) var<uniform> stop_ids: StopIds;
@group(0) @binding(10) var<storage, read_write> step: Step;
#endif

// The row whose odds are looked for.
var<private> row: u32;

fn vocabulary() -> u32 {
    return params.vocabulary;
}

fn logit_quad(quad: u32) -> vec4<u32> {
    return logits[row * params.stride / 4u + quad];
}

#ifdef ROWS
@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    if group.x >= step.rows {
        return;
    }
    row = group.x;
    let odds = find_odds(local, step.temperature, step.top_k, step.top_p);
    let best = best_of_row();
    var token = best;
    if best != NONE && step.temperature != 0.0 {
        token = draw(local, odds, random_number(step.seed_lo, step.seed_hi, 0u, step.sampled + row));
    }
    if local == 0u {
        let entry = odds_at(params.block, row);
        round[entry] = odds.best;
        round[entry + 1u] = bitcast<u32>(odds.largest);
        round[entry + 2u] = bitcast<u32>(odds.sum);
        round[entry + 3u] = odds.cut;
        round[entry + 4u] = odds.last_tie;
        round[entry + MASS] = mass;
        round[entry + TOKEN] = token;
    }
}
#else
const STOPPED: u32 = 1u;
const NON_FINITE: u32 = 2u;
const FULL_LENGTH: u32 = 3u;
// Stream of random numbers that accept.
const ACCEPTED: u32 = 0x3c6ef372u;

// The step as it was, for every invocation; what became of the drafted tokens.
var<workgroup> now: Step;
var<workgroup> refused: u32;
var<workgroup> rest_found: vec2<u32>;

// What a row's odds leave of an id: `entry` is where they stand in `round`.
fn kept_of(entry: u32, id: u32, bits: u32) -> u32 {
    largest = bitcast<f32>(round[entry + 1u]);
    sum = bitcast<f32>(round[entry + 2u]);
    return contribution(DRAW, id, bits, round[entry + 3u], round[entry + 4u]);
}

fn drafted_quad(place: u32, quad: u32) -> vec4<u32> {
    let at = place * params.stride / 4u + quad;
    return bitcast<vec4<u32>>(base[at] + markov[at]);
}

fn drafted_entry(place: u32) -> u32 {
    return odds_at(params.block, params.block + 1u + place);
}

// floor(a b / 2^32).
fn mulhi(a: u32, b: vec2<u32>) -> vec2<u32> {
    return u64_add(u64_mul_wide(a, b.y), vec2(u64_mul_wide(a, b.x).y, 0u));
}

// Whether the drafted token at a place stands.
fn stands(place: u32, at: Step) -> bool {
    let p = odds_at(params.block, place);
    let q = drafted_entry(place);
    let token = tokens[place + 1u];
    if round[p] == NONE || at.temperature == 0.0 {
        return round[p] == token;
    }
    let p_bits = logits[place * params.stride / 4u + token / 4u][token % 4u];
    let q_bits = drafted_quad(place, token / 4u)[token % 4u];
    let wanted = u64_mul_wide(kept_of(p, token, p_bits), round[q + MASS]);
    let all = u64_mul_wide(kept_of(q, token, q_bits), round[p + MASS]);
    let random = random_number(at.seed_lo, at.seed_hi, ACCEPTED, at.sampled + place);
    return u64_less(mulhi(random, all), wanted);
}

// The positive part of p - q at four ids, in units of 1 / (mass of p · mass of q).
fn surplus(place: u32, quad: u32) -> array<vec2<u32>, 4> {
    let p = odds_at(params.block, place);
    let q = drafted_entry(place);
    let p_bits = logits[place * params.stride / 4u + quad];
    let q_bits = drafted_quad(place, quad);
    var parts: array<vec2<u32>, 4>;
    for (var k = 0u; k < 4u; k++) {
        let id = 4u * quad + k;
        let wanted = u64_mul_wide(kept_of(p, id, p_bits[k]), round[q + MASS]);
        let drafted = u64_mul_wide(kept_of(q, id, q_bits[k]), round[p + MASS]);
        if u64_less(drafted, wanted) {
            parts[k] = u64_sub(wanted, drafted);
        }
    }
    return parts;
}

// Sums of the values of invocations 0 ..= local. Leaves the sum of all in the last of `pairs`.
fn scan_u64(local: u32, value: vec2<u32>) -> vec2<u32> {
    var total = value;
    workgroupBarrier();
    pairs[local] = total;
    for (var stride = 1u; stride < THREADS; stride <<= 1u) {
        workgroupBarrier();
        if local >= stride {
            total = u64_add(total, pairs[local - stride]);
        }
        workgroupBarrier();
        pairs[local] = total;
    }
    workgroupBarrier();
    return total;
}

// The first id at which the running sum of the surplus exceeds the share number / 2^32 of its total.
fn draw_surplus(local: u32, place: u32, number: u32) -> u32 {
    var rest = vec2(0u);
    var first = 0u;
    var end = quads();
    loop {
        let each = (end - first + THREADS - 1u) / THREADS;
        let begin = first + local * each;
        let stop = min(begin + each, end);
        var mine = vec2(0u);
        for (var quad = begin; quad < stop; quad++) {
            var parts = surplus(place, quad);
            for (var k = 0u; k < 4u; k++) {
                mine = u64_add(mine, parts[k]);
            }
        }
        let reached = scan_u64(local, mine);
        if first == 0u && end == quads() {
            rest = mulhi(number, pairs[THREADS - 1u]);
        }
        let before = u64_sub(reached, mine);
        if u64_less(rest, reached) && !u64_less(rest, before) {
            found[0] = begin;
            found[1] = stop;
            rest_found = u64_sub(rest, before);
        }
        first = workgroupUniformLoad(&found[0]);
        end = workgroupUniformLoad(&found[1]);
        rest = workgroupUniformLoad(&rest_found);
        if each == 1u {
            break;
        }
    }
    var parts = surplus(place, first);
    var id = first * 4u;
    for (var k = 0u; k < 4u; k++) {
        if u64_less(rest, parts[k]) {
            break;
        }
        rest = u64_sub(rest, parts[k]);
        id++;
    }
    return id;
}

fn is_stop(token: u32, count: u32) -> bool {
    for (var i = 0u; i < count; i++) {
        if stop_ids.ids[i / 4u][i % 4u] == token {
            return true;
        }
    }
    return false;
}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) local: u32) {
    if local == 0u {
        now = step;
        found[0] = 0u;
        refused = 0u;
        temperature = now.temperature;
        if now.rows > 0u {
            while found[0] + 1u < now.rows && stands(found[0], now) {
                found[0]++;
            }
            refused = select(0u, 1u, found[0] + 1u < now.rows);
        }
    }
    let at = workgroupUniformLoad(&now);
    let place = workgroupUniformLoad(&found[0]);
    let is_refused = workgroupUniformLoad(&refused) == 1u;
    temperature = at.temperature;
    let slot = at.round % params.ring * (5u + params.block);
    if at.rows == 0u {
        if local == 0u {
            out[slot] = 0u;
            out[slot + 1u] = at.status;
            step.round = at.round + 1u;
        }
        return;
    }
    // Drawn by all, needed when a token was refused by chance.
    var drawn = NONE;
    if is_refused && at.temperature != 0.0 {
        drawn = draw_surplus(local, place, random_number(at.seed_lo, at.seed_hi, 0u, at.sampled + place));
    }
    if local != 0u {
        return;
    }
    let entry = odds_at(params.block, place);
    var next = round[entry + TOKEN];
    if is_refused && at.temperature != 0.0 && round[entry] != NONE {
        next = drawn;
    }

    // The tokens made, and the rows that stand: those of the token that waited and of all made but the last.
    var status = 0u;
    var made = 0u;
    for (var i = 0u; i <= place && status == 0u; i++) {
        var token = next;
        if i < place {
            token = tokens[i + 1u];
        }
        if token == NONE {
            status = NON_FINITE;
            break;
        }
        out[slot + 4u + made] = token;
        made++;
        if is_stop(token, at.stop_count) {
            status = STOPPED;
        }
    }
    let rows = select(made, made + 1u, status == NON_FINITE);
    if status == 0u && at.sampled + made == at.limit {
        status = FULL_LENGTH;
    }
    // From the oldest on, so that what is shifted has not been overwritten.
    for (var i = params.history; i > 0u; i--) {
        let age = i - 1u;
        if age < rows {
            history[age] = tokens[rows - 1u - age];
        } else {
            history[age] = history[age - rows];
        }
    }
    if made > 0u {
        tokens[0] = out[slot + 3u + made];
    }
    out[slot] = made;
    out[slot + 1u] = status;
    out[slot + 2u] = at.rows - 1u;
    out[slot + 3u] = place;
    step.position = at.position + rows;
    step.sampled = at.sampled + made;
    step.round = at.round + 1u;
    step.status = status;
    step.rows = select(0u, 1u, status == 0u);
}
#endif
