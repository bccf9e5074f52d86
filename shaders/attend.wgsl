// Attention of the rows in flight (numerics.md §4): per head one softmax over the window keys, the selected entries of the
// global cache (GLOBAL) and the sink, which only adds to the denominator; a key is its own value. Queries are rotated on
// the way in, outputs rotated back on the way out.
//
// One workgroup takes one row and HEADS of its heads. Keys are walked in tiles of 32, packed as they lie in the caches:
// window keys in ascending position, then selected entries in ascending order. For the scores eight invocations share a
// key; for the values an invocation owns a pair of channels. So tiles and sums depend on nothing but the row, and a head's
// result is the same bits for every HEADS. Grid: (rows, ceil(H / HEADS)).
//
// A row sees the W positions up to its own, but none below the floor that the step has for the layer's half of the model. In
// a drafted block (numerics.md §13) every row sees the W positions before the step, and all rows of the step.
//
// 2 up         (T, up_stride)    raw queries (H, D) at query_at
// 3 ring       (slots, row words) packed FP8 window keys, slot position % slots: positions before the step, or a single row's
//              own, unless it is a block
// 4 chunk      (T, row words)    packed FP8 window keys of the step, by row, when it has several or is a block
// 5 constants  frequencies (d_r / 2) | sink logits (H)
// 6 attended   (T, out_stride)   group g of H / G heads starts at g * group_stride
// 7 latents    (T, topk, row words)  packed NVFP4 latents of the selected entries
// 8 selection  (T, 1 + topk)     count, ascending entries
#import step
#import rope
#import float

struct Params {
    heads: u32,         // H
    window: u32,        // W
    slots: u32,         // of the ring
    block: u32,         // 1: the rows are a drafted block
    scale: f32,         // D^-0.5
    up_stride: u32,
    query_at: u32,
    group_heads: u32,   // H / G
    group_stride: u32,
    out_stride: u32,
    topk: u32,
    decoder: u32,       // 1: step.decoder_floor holds; 0: step.encoder_floor
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<storage, read> up: array<f32>;
@group(0) @binding(3) var<storage, read> ring: array<u32>;
@group(0) @binding(4) var<storage, read> chunk: array<u32>;
@group(0) @binding(5) var<storage, read> constants: array<f32>;
@group(0) @binding(6) var<storage, read_write> attended: array<f32>;
#ifdef GLOBAL
@group(0) @binding(7) var<storage, read> latents: array<u32>;
@group(0) @binding(8) var<storage, read> selection: array<u32>;
#endif

const LANES: u32 = 256u;
const TILE: u32 = 32u;   // keys a tile
const SLICES: u32 = 8u;  // invocations that share a key's score
// Bit of a key's place that says that it lies in the chunk.
const IN_CHUNK: u32 = 0x80000000u;

override D: u32;
override PAIRS: u32;    // D / 2, at most 256
override QUADS: u32;    // quads of channels of a query, padded to whole words of codes: 2 * ceil(D / 8)
override ROTATED: u32;  // d_r / 2

var<workgroup> turns: array<vec2<f32>, ROTATED>;
// Rotated queries, zero beyond channel D.
var<workgroup> query: array<vec4<f32>, HEADS * QUADS>;
// (head, invocation): shares of the scores. Then (head, key): scores, and weights exp(score - highest), zero beyond the
// tile's last key.
var<workgroup> shares: array<f32, HEADS * LANES>;
var<workgroup> scores: array<f32, HEADS * TILE>;
var<workgroup> weights: array<f32, HEADS * TILE>;
// First word of each key of the tile.
var<workgroup> places: array<u32, TILE>;
// Highest logit of each head so far, before and after the tile, in turn; and what the tile scales the sums by.
var<workgroup> highest: array<f32, 2u * HEADS>;
var<workgroup> rescale: array<f32, HEADS>;
var<workgroup> denominators: array<f32, HEADS>;

// This invocation's share of the scores of its key, a head each.
var<private> score: array<f32, HEADS>;
// Its pair of output channels, for heads slot, slot + SLOTS, ...
var<private> output: array<vec2<f32>, HEADS>;
// Invocation h: sum of head h's weights.
var<private> denominator: f32;
var<private> tiles: u32;

fn ring_words() -> u32 {
    return (D + 3u) / 4u + (D + 127u) / 128u;
}

// Four channels of a key (before its scale) with the queries.
fn add_scores(quad: u32, key: vec4<f32>, sums: ptr<function, array<f32, HEADS>>) {
    for (var h = 0u; h < HEADS; h++) {
        let q = query[h * QUADS + quad];
        (*sums)[h] = fma(q.w, key.w, fma(q.z, key.z, fma(q.y, key.y, fma(q.x, key.x, (*sums)[h]))));
    }
}

fn add_scaled(sums: ptr<function, array<f32, HEADS>>, scale: f32) {
    for (var h = 0u; h < HEADS; h++) {
        score[h] = fma((*sums)[h], scale, score[h]);
    }
}

// Where the window key of a position starts.
fn window_place(position: u32) -> u32 {
    if (position < step.position || (step.rows == 1u && params.block == 0u)) {
        return position % params.slots * ring_words();
    }
    return ((position - step.position) * ring_words()) | IN_CHUNK;
}

fn window_word(place: u32, i: u32) -> u32 {
    if (place >= IN_CHUNK) {
        return chunk[(place ^ IN_CHUNK) + i];
    }
    return ring[place + i];
}

fn score_window_key(slice: u32, place: u32) {
    let codes = (D + 3u) / 4u;
    for (var w = slice; w < codes; w += SLICES) {
        let scales = window_word(place, codes + w / 32u);
        var sums = array<f32, HEADS>();
        add_scores(w, e4m3x4(window_word(place, w)), &sums);
        add_scaled(&sums, ue8m0((scales >> (w / 8u % 4u * 8u)) & 255u));
    }
}

// A pair of channels of key k of the tile; zero beyond the last key.
fn window_value(k: u32, keys: u32, pair: u32) -> vec2<f32> {
    if (k >= keys) {
        return vec2<f32>(0.0);
    }
    let place = places[k];
    let codes = window_word(place, pair / 2u);
    let scales = window_word(place, (D + 3u) / 4u + pair / 64u);
    return e4m3x4(codes >> (pair % 2u * 16u)).xy * ue8m0((scales >> (pair / 16u % 4u * 8u)) & 255u);
}

#ifdef GLOBAL
fn latent_words() -> u32 {
    return (D + 7u) / 8u + (D + 63u) / 64u;
}

fn score_entry(slice: u32, place: u32) {
    let codes = (D + 7u) / 8u;
    for (var w = slice; w < codes; w += SLICES) {
        let word = latents[place + w];
        let scales = latents[place + codes + w / 8u];
        var sums = array<f32, HEADS>();
        add_scores(2u * w, e2m1x4(word), &sums);
        add_scores(2u * w + 1u, e2m1x4(word >> 16u), &sums);
        add_scaled(&sums, e4m3x4(scales >> (w / 2u % 4u * 8u)).x);
    }
}

fn entry_value(k: u32, keys: u32, pair: u32) -> vec2<f32> {
    if (k >= keys) {
        return vec2<f32>(0.0);
    }
    let place = places[k];
    let codes = latents[place + pair / 4u];
    let scales = latents[place + (D + 7u) / 8u + pair / 32u];
    return e2m1x4(codes >> (pair % 4u * 8u)).xy * e4m3x4(scales >> (pair / 8u % 4u * 8u)).x;
}
#endif

// Weights of keys k .. k + 3 for a head of the group.
fn weights_of(head: u32, k: u32) -> vec4<f32> {
    let at = head * TILE + k;
    return vec4<f32>(weights[at], weights[at + 1u], weights[at + 2u], weights[at + 3u]);
}

// From the shares of the scores to the tile's weights. To be called by the whole workgroup, before it walks the values.
fn weigh_tile(lane: u32, keys: u32, place: u32) {
    for (var h = 0u; h < HEADS; h++) {
        shares[h * LANES + lane] = score[h];
    }
    workgroupBarrier();
    if (lane % SLICES == 0u) {
        places[lane / SLICES] = place;
    }
    let head = lane / TILE;
    let key = lane % TILE;
    if (head < HEADS) {
        let p = head * LANES + key * SLICES;
        let sum = ((shares[p] + shares[p + 1u]) + (shares[p + 2u] + shares[p + 3u]))
            + ((shares[p + 4u] + shares[p + 5u]) + (shares[p + 6u] + shares[p + 7u]));
        scores[lane] = sum * params.scale;
    }
    workgroupBarrier();
    let before = tiles % 2u * HEADS;
    let after = HEADS - before;
    if (head < HEADS) {
        var largest = highest[before + head];
        for (var k = 0u; k < keys; k++) {
            largest = max(largest, scores[head * TILE + k]);
        }
        weights[lane] = select(0.0, exp(scores[lane] - largest), key < keys);
        if (key == 0u) {
            highest[after + head] = largest;
            rescale[head] = exp(highest[before + head] - largest);
        }
    }
    tiles += 1u;
    workgroupBarrier();
    if (lane < HEADS) {
        var sum = vec4<f32>(0.0);
        for (var k = 0u; k < TILE; k += 4u) {
            sum += weights_of(lane, k);
        }
        denominator = fma(denominator, rescale[lane], (sum.x + sum.y) + (sum.z + sum.w));
    }
}

// Heads that are walked at once when D is small: invocations / pairs.
fn slots() -> u32 {
    return LANES / PAIRS;
}

fn rescale_outputs(slot: u32) {
    for (var i = 0u; i < HEADS; i++) {
        if (slot + i * slots() < HEADS) {
            output[i] *= rescale[slot + i * slots()];
        }
    }
}

// Four keys' values times their weights.
fn add_values(slot: u32, k: u32, a: vec2<f32>, b: vec2<f32>, c: vec2<f32>, d: vec2<f32>) {
    for (var i = 0u; i < HEADS; i++) {
        let head = slot + i * slots();
        if (head < HEADS) {
            let p = weights_of(head, k);
            output[i] = fma(vec2<f32>(p.w), d, fma(vec2<f32>(p.z), c, fma(vec2<f32>(p.y), b, fma(vec2<f32>(p.x), a, output[i]))));
        }
    }
}

fn attend_window(lane: u32, position: u32) {
    let lowest = select(step.encoder_floor, step.decoder_floor, params.decoder == 1u);
    // A block sees the window before it, which ends with it, and itself.
    let end = select(position + 1u, step.position, params.block == 1u);
    let first = max(max(end, params.window) - params.window, lowest);
    let last = select(position, step.position + step.rows - 1u, params.block == 1u);
    for (var start = first; start <= last; start += TILE) {
        let keys = min(last + 1u - start, TILE);
        let key = lane / SLICES;
        score = array<f32, HEADS>();
        var place = 0u;
        if (key < keys) {
            place = window_place(start + key);
            score_window_key(lane % SLICES, place);
        }
        weigh_tile(lane, keys, place);
        let pair = lane % PAIRS;
        let slot = lane / PAIRS;
        if (slot < min(HEADS, slots())) {
            rescale_outputs(slot);
            for (var k = 0u; k < keys; k += 4u) {
                let a = window_value(k, keys, pair);
                let b = window_value(k + 1u, keys, pair);
                let c = window_value(k + 2u, keys, pair);
                let d = window_value(k + 3u, keys, pair);
                add_values(slot, k, a, b, c, d);
            }
        }
    }
}

#ifdef GLOBAL
fn attend_selected(lane: u32, row: u32) {
    let count = min(selection[row * (1u + params.topk)], params.topk);
    for (var start = 0u; start < count; start += TILE) {
        let keys = min(count - start, TILE);
        let key = lane / SLICES;
        score = array<f32, HEADS>();
        var place = 0u;
        if (key < keys) {
            place = (row * params.topk + start + key) * latent_words();
            score_entry(lane % SLICES, place);
        }
        weigh_tile(lane, keys, place);
        let pair = lane % PAIRS;
        let slot = lane / PAIRS;
        if (slot < min(HEADS, slots())) {
            rescale_outputs(slot);
            for (var k = 0u; k < keys; k += 4u) {
                let a = entry_value(k, keys, pair);
                let b = entry_value(k + 1u, keys, pair);
                let c = entry_value(k + 2u, keys, pair);
                let d = entry_value(k + 3u, keys, pair);
                add_values(slot, k, a, b, c, d);
            }
        }
    }
}
#endif

// Two channels of a query, rotated if they are among the trailing ones, zero beyond channel D or the last head.
fn query_pair(row: u32, head: u32, c: u32) -> vec2<f32> {
    if (c >= D || head >= params.heads) {
        return vec2<f32>(0.0);
    }
    let at = row * params.up_stride + params.query_at + head * D + c;
    let pair = vec2<f32>(up[at], up[at + 1u]);
    if (c + 2u * ROTATED < D) {
        return pair;
    }
    return rotate(pair, turns[(c + 2u * ROTATED - D) / 2u]);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = group.x;
    if (row >= step.rows) {
        return;
    }
    let position = step.position + row;
    let first_head = group.y * HEADS;
    for (var j = lane; j < ROTATED; j += LANES) {
        turns[j] = rotation(position, constants[j]);
    }
    // The sink is the first key: its weight is 1, its value 0.
    if (lane < HEADS) {
        highest[lane] = select(0.0, constants[ROTATED + min(first_head + lane, params.heads - 1u)], first_head + lane < params.heads);
    }
    denominator = 1.0;
    workgroupBarrier();
    for (var i = lane; i < HEADS * QUADS; i += LANES) {
        let head = first_head + i / QUADS;
        let c = i % QUADS * 4u;
        query[i] = vec4<f32>(query_pair(row, head, c), query_pair(row, head, c + 2u));
    }
    workgroupBarrier();

    attend_window(lane, position);
#ifdef GLOBAL
    attend_selected(lane, row);
#endif

    if (lane < HEADS) {
        denominators[lane] = denominator;
    }
    workgroupBarrier();
    let pair = lane % PAIRS;
    let slot = lane / PAIRS;
    for (var i = 0u; i < HEADS; i++) {
        let h = slot + i * slots();
        let head = first_head + h;
        if (slot < slots() && h < HEADS && head < params.heads) {
            var out = output[i] / denominators[h];
            if (2u * (pair + ROTATED) >= D) {
                let turn = turns[(2u * (pair + ROTATED) - D) / 2u];
                out = rotate(out, vec2<f32>(turn.x, -turn.y));
            }
            let at = row * params.out_stride + head / params.group_heads * params.group_stride + head % params.group_heads * D + 2u * pair;
            attended[at] = out.x;
            attended[at + 1u] = out.y;
        }
    }
}
