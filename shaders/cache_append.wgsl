// What the rows in flight add to a layer's caches (numerics.md §4 to §7): the window key; on a Full layer the latent and
// the index key of every group that a row completes; on layers that select, the packed index queries.
//
// One workgroup does one job of one row. Grid: (rows, jobs), jobs in the order
//   global entry (FULL) | window key | index queries, QUERY_HEADS heads a workgroup (FULL, REINDEX)
// A step that does not need all of them has a grid that ends earlier.
//
// Rows that share a group are all in `down`, or in `remainder` when they came with an earlier step. The first row that
// completes a group is the only one that may need the remainder, and its workgroup is the only one that renews it, channel
// by channel in the same invocation: no other order of workgroups is possible. Groups that end below step.kept are in the
// pages already: they are neither made nor written, but their tokens renew the remainder like any others.
//
// Entries whose page lies in another slab than the one that is bound are left out: such a step has a dispatch for each slab. It has
// no more rows than the remainder has room for, so that no dispatch renews a place that another one reads.
//
// 2 weights    constants as f32 bits (kv_norm D | freqs d_r / 2 | FULL: comp_norm D | k_norm D_i) and (FULL) the pack of
//              indexer.wk (D_i, D)
// 3 down       (T, down_stride)  rows of wkv x at key_at, compressor.wkv x at latent_at, compressor.wgate x at gate_at
// 4 ring       (slots, row words) packed FP8 window keys, slot position % slots; written when a single row is in flight
// 5 chunk      (T, row words)    the same rows, by row of the step; written when there are several, or they are a drafted block
// 6 up         (T, up_stride)    raw index queries (H_i, D_i) at query_at
// 7 queries    (T, H_i, row words)   packed MXFP4
// 8 remainder  (held, 2, D)          wkv x and wgate x of the newest token at each place of a group but the last; with room for
//              tokens that are taken back, of the newest `held` tokens
// 9 table      the session's pages
// 10 slab      pages of page_words; the layer's part, from word part_at on: (entries, latent words) packed NVFP4, then
//              (entries, key words) packed MXFP4
#import step
#import rope
#import cache_formats
#ifdef FULL
#import pages
#import weights
#endif

struct Params {
    eps: f32,
    rotary: u32,      // d_r
    slots: u32,       // of the ring
    block: u32,       // 1: the rows are a drafted block, which no later row sees
    ratio: u32,       // tokens an entry
    cycle: u32,       // the token at a position is in row `position % cycle` of the remainder, if it has that
    held: u32,        // rows of the remainder
    down_stride: u32,
    key_at: u32,
    latent_at: u32,
    gate_at: u32,
    up_stride: u32,
    query_at: u32,
    heads: u32,       // H_i
    freqs_at: u32,    // words into `weights`; kv_norm stands at kv_norm_at and so on
    kv_norm_at: u32,
    comp_norm_at: u32,
    k_norm_at: u32,
    wk_format: u32,
    wk_data: u32,     // words into `weights`
    wk_scales: u32,
    entries: u32,     // a page
    part_at: u32,     // the layer's part of a page
    page_words: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> down: array<f32>;
@group(0) @binding(4) var<storage, read_write> ring: array<u32>;
@group(0) @binding(5) var<storage, read_write> chunk: array<u32>;
#ifdef QUERIES
@group(0) @binding(6) var<storage, read> up: array<f32>;
@group(0) @binding(7) var<storage, read_write> queries: array<u32>;
#endif
#ifdef FULL
@group(0) @binding(8) var<storage, read_write> remainder: array<f32>;
@group(0) @binding(9) var<uniform> table: PageTable;
@group(0) @binding(10) var<storage, read_write> slab: array<u32>;
#endif

const LANES: u32 = 256u;

override D: u32;
// Channels in whole groups of 32: of a window key, or of the index queries of a workgroup where these are more.
override VALUES: u32;
#ifdef QUERIES
override D_I: u32;
override QUERY_HEADS: u32;
#endif
#ifdef FULL
// D in whole groups of 32.
override LATENT: u32;
#endif

// What is to be packed, zero beyond the last channel, and the largest magnitude behind each word of codes, as bits.
var<workgroup> values: array<f32, VALUES>;
var<workgroup> maxima: array<u32, VALUES / 4u>;
var<workgroup> sums: array<f32, LANES>;
#ifdef FULL
// The latent, neither rotated nor quantised, zero beyond channel D.
var<workgroup> latent: array<f32, LATENT>;
// Number of the slab that is bound.
var<workgroup> bound: u32;
#endif

fn constant(at: u32) -> f32 {
    return bitcast<f32>(weights[at / 4u][at % 4u]);
}

// Sum over the invocations, as a tree: every one of them gets it.
fn total(lane: u32, value: f32) -> f32 {
    sums[lane] = value;
    for (var s = LANES / 2u; s > 0u; s /= 2u) {
        workgroupBarrier();
        if (lane < s) {
            sums[lane] += sums[lane + s];
        }
    }
    workgroupBarrier();
    let sum = sums[0];
    workgroupBarrier();
    return sum;
}

// A pair of channels (c, c + 1) of a vector of `channels`, rotated if it is among the trailing ones.
fn rotate_trailing(pair: vec2<f32>, c: u32, channels: u32, position: u32) -> vec2<f32> {
    if (c + params.rotary < channels) {
        return pair;
    }
    let frequency = constant(params.freqs_at + (c + params.rotary - channels) / 2u);
    return rotate(pair, rotation(position, frequency));
}

fn store_pair(at: u32, pair: vec2<f32>) {
    values[at] = pair.x;
    values[at + 1u] = pair.y;
}

// Zeroes `values` from `first` up to a whole group.
fn pad_group(lane: u32, first: u32) {
    let at = first + lane;
    if (at < (first + 31u) / 32u * 32u) {
        values[at] = 0.0;
    }
}

// Largest magnitude behind each of the first `words` words of codes, `codes` values a word. Waits for `values`.
fn find_maxima(lane: u32, words: u32, codes: u32) {
    workgroupBarrier();
    for (var w = lane; w < words; w += LANES) {
        var largest = 0u;
        for (var i = w * codes; i < (w + 1u) * codes; i++) {
            largest = max(largest, bitcast<u32>(values[i]) & 0x7fffffffu);
        }
        maxima[w] = largest;
    }
    workgroupBarrier();
}

// Largest magnitude of a group of `words` words of codes from `first` on.
fn group_amax(first: u32, words: u32) -> u32 {
    var largest = 0u;
    for (var w = first; w < first + words; w++) {
        largest = max(largest, maxima[w]);
    }
    return largest;
}

// Words of codes that share a scale.
const FP8_GROUP: u32 = 8u;
const NVFP4_GROUP: u32 = 2u;
const MXFP4_GROUP: u32 = 4u;

// Words of a packed row of D channels.
fn fp8_words() -> u32 {
    return (D + 3u) / 4u + (D + 127u) / 128u;
}

// Word i of the packed row of the D channels in `values`.
fn fp8_word(i: u32) -> u32 {
    let codes = (D + 3u) / 4u;
    var word = 0u;
    if (i < codes) {
        let scale = fp8_scale(group_amax(i / FP8_GROUP * FP8_GROUP, FP8_GROUP));
        for (var k = 0u; k < 4u; k++) {
            word |= fp8_code(bitcast<u32>(values[4u * i + k]), scale) << (8u * k);
        }
        return word;
    }
    for (var k = 0u; k < 4u; k++) {
        let group = 4u * (i - codes) + k;
        if (32u * group < D) {
            word |= fp8_scale(group_amax(FP8_GROUP * group, FP8_GROUP)) << (8u * k);
        }
    }
    return word;
}

#ifdef FULL
fn nvfp4_words() -> u32 {
    return (D + 7u) / 8u + (D + 63u) / 64u;
}

fn nvfp4_word(i: u32) -> u32 {
    let codes = (D + 7u) / 8u;
    var word = 0u;
    if (i < codes) {
        let scale = nvfp4_scale(group_amax(i / NVFP4_GROUP * NVFP4_GROUP, NVFP4_GROUP));
        for (var k = 0u; k < 8u; k++) {
            word |= nvfp4_code(bitcast<u32>(values[8u * i + k]), scale) << (4u * k);
        }
        return word;
    }
    for (var k = 0u; k < 4u; k++) {
        let group = 4u * (i - codes) + k;
        if (16u * group < D) {
            word |= nvfp4_scale(group_amax(NVFP4_GROUP * group, NVFP4_GROUP)) << (8u * k);
        }
    }
    return word;
}
#endif

#ifdef QUERIES
fn mxfp4_words() -> u32 {
    return (D_I + 7u) / 8u + (D_I + 127u) / 128u;
}

// Word i of the packed row of the D_I channels from values[first] on; `first` is a multiple of 32.
fn mxfp4_word(first: u32, i: u32) -> u32 {
    let codes = (D_I + 7u) / 8u;
    let maxima_at = first / 8u;
    var word = 0u;
    if (i < codes) {
        let scale = mxfp4_scale(group_amax(maxima_at + i / MXFP4_GROUP * MXFP4_GROUP, MXFP4_GROUP));
        for (var k = 0u; k < 8u; k++) {
            word |= mxfp4_code(bitcast<u32>(values[first + 8u * i + k]), scale) << (4u * k);
        }
        return word;
    }
    for (var k = 0u; k < 4u; k++) {
        let group = 4u * (i - codes) + k;
        if (32u * group < D_I) {
            word |= mxfp4_scale(group_amax(maxima_at + MXFP4_GROUP * group, MXFP4_GROUP)) << (8u * k);
        }
    }
    return word;
}
#endif

fn append_window_key(lane: u32, row: u32, position: u32) {
    let source = row * params.down_stride + params.key_at;
    var squares = 0.0;
    for (var c = 2u * lane; c < D; c += 2u * LANES) {
        squares = fma(down[source + c], down[source + c], squares);
        squares = fma(down[source + c + 1u], down[source + c + 1u], squares);
    }
    let factor = inverseSqrt(total(lane, squares) / f32(D) + params.eps);
    for (var c = 2u * lane; c < D; c += 2u * LANES) {
        let x = vec2<f32>(down[source + c], down[source + c + 1u]);
        let norm = vec2<f32>(constant(params.kv_norm_at + c), constant(params.kv_norm_at + c + 1u));
        store_pair(c, rotate_trailing(norm * (x * factor), c, D, position));
    }
    pad_group(lane, D);
    find_maxima(lane, (D + 31u) / 32u * FP8_GROUP, 4u);
    for (var i = lane; i < fp8_words(); i += LANES) {
        if (step.rows == 1u && params.block == 0u) {
            ring[position % params.slots * fp8_words() + i] = fp8_word(i);
        } else {
            chunk[row * fp8_words() + i] = fp8_word(i);
        }
    }
}

#ifdef QUERIES
fn append_queries(lane: u32, row: u32, position: u32, block: u32) {
    let first = block * QUERY_HEADS;
    let heads = min(QUERY_HEADS, params.heads - first);
    let padded = (D_I + 31u) / 32u * 32u;
    let source = row * params.up_stride + params.query_at + first * D_I;
    for (var i = 2u * lane; i < heads * padded; i += 2u * LANES) {
        let c = i % padded;
        var pair = vec2<f32>(0.0);
        if (c < D_I) {
            let at = source + i / padded * D_I + c;
            pair = rotate_trailing(vec2<f32>(up[at], up[at + 1u]), c, D_I, position);
        }
        store_pair(i, pair);
    }
    find_maxima(lane, heads * padded / 8u, 8u);
    for (var i = lane; i < heads * mxfp4_words(); i += LANES) {
        let at = (row * params.heads + first) * mxfp4_words();
        queries[at + i] = mxfp4_word(i / mxfp4_words() * padded, i % mxfp4_words());
    }
}
#endif

#ifdef FULL
// wkv x (part 0) or wgate x (part 1) of the token at `position`, channel c, for a row in the same group.
fn member(position: u32, part: u32, c: u32) -> f32 {
    if (position < step.position) {
        return remainder[(position % params.cycle * 2u + part) * D + c];
    }
    return down[(position - step.position) * params.down_stride + select(params.latent_at, params.gate_at, part == 1u) + c];
}

// Channel c of the group that starts at `start`: its tokens' values weighted by the softmax of their gates.
fn pool(start: u32, c: u32) -> f32 {
    if (params.ratio == 1u) {
        return member(start, 0u, c);
    }
    var largest = member(start, 1u, c);
    for (var j = 1u; j < params.ratio; j++) {
        largest = max(largest, member(start + j, 1u, c));
    }
    var sum = 0.0;
    var weighted = 0.0;
    for (var j = 0u; j < params.ratio; j++) {
        let weight = exp(member(start + j, 1u, c) - largest);
        sum += weight;
        weighted = fma(weight, member(start + j, 0u, c), weighted);
    }
    return weighted / sum;
}

// Channel c of the newest token of this step in each row of the remainder.
fn renew_remainder(c: u32) {
    let last = step.position + step.rows - 1u;
    for (var j = 0u; j < params.held; j++) {
        let back = (last % params.cycle + params.cycle - j) % params.cycle;
        if (back < step.rows) {
            let source = (step.rows - 1u - back) * params.down_stride;
            remainder[2u * j * D + c] = down[source + params.latent_at + c];
            remainder[(2u * j + 1u) * D + c] = down[source + params.gate_at + c];
        }
    }
}

fn chain(w: vec4<f32>, c: u32, sum: f32) -> f32 {
    return fma(w.w, latent[c + 3u], fma(w.z, latent[c + 2u], fma(w.y, latent[c + 1u], fma(w.x, latent[c], sum))));
}

// One chunk of 32 channels of a row of wk with the latent: a chain over its channels, before the scale.
fn chunk_product(quads: u32, c: u32) -> f32 {
    var sum = 0.0;
    let count = chunk_quads(params.wk_format);
    for (var i = 0u; i < count; i++) {
        let q = weights[quads + i];
        let at = c * 32u + i * (32u / count);
        switch params.wk_format {
            case FP4: {
                for (var k = 0u; k < 4u; k++) {
                    sum = chain(e2m1x4(q[k]), at + 8u * k, sum);
                    sum = chain(e2m1x4(q[k] >> 16u), at + 8u * k + 4u, sum);
                }
            }
            case FP8_BLOCK, FP8_ROW: {
                for (var k = 0u; k < 4u; k++) {
                    sum = chain(e4m3x4(q[k]), at + 4u * k, sum);
                }
            }
            case BF16: {
                sum = chain(bf16x4(q.z, q.w), at + 4u, chain(bf16x4(q.x, q.y), at, sum));
            }
            case F16: {
                sum = chain(f16x4(q.z, q.w), at + 4u, chain(f16x4(q.x, q.y), at, sum));
            }
            default: {
                sum = chain(bitcast<vec4<f32>>(q), at, sum);
            }
        }
    }
    return sum;
}

// values[r] = wk row r · latent, r below D_I: lanes over chunks, a tree over lanes, the order of `linear`.
fn project_latent(lane: u32) {
    let chunks = LATENT / 32u;
    var width = 1u;
    while (width < min(chunks, 32u)) {
        width *= 2u;
    }
    for (var first = 0u; first < D_I; first += LANES / width) {
        let r = first + lane / width;
        var sum = 0.0;
        if (r < D_I) {
            let quads = params.wk_data / 4u + r * chunks * chunk_quads(params.wk_format);
            for (var c = lane % width; c < chunks; c += width) {
                let product = chunk_product(quads + c * chunk_quads(params.wk_format), c);
                if (params.wk_format >= FP8_BLOCK) {
                    let byte = scale_byte(params.wk_scales + scale_rows(params.wk_format, vec4<u32>(r), chunks).x, c);
                    sum = fma(ue8m0(byte), ue8m0_half(byte) * product, sum);
                } else {
                    sum += product;
                }
            }
        }
        sums[lane] = sum;
        for (var s = width / 2u; s > 0u; s /= 2u) {
            workgroupBarrier();
            if (lane % width < s) {
                sums[lane] += sums[lane + s];
            }
        }
        workgroupBarrier();
        if (r < D_I && lane % width == 0u) {
            values[r] = sums[lane];
        }
        workgroupBarrier();
    }
}

fn append_entry(lane: u32, row: u32, position: u32) {
    let ratio = params.ratio;
    let page = position / ratio / params.entries;
    let place = table.places[page / 4u][page % 4u];
    if (lane == 0u) {
        bound = slab[0];
    }
    let completes = (position + 1u) % ratio == 0u && position >= step.kept && place_slab(place) == workgroupUniformLoad(&bound);
    let renews = row == min(ratio - 1u - step.position % ratio, step.rows - 1u);
    if (!completes && !renews) {
        return;
    }
    let start = position + 1u - ratio;
    var squares = 0.0;
    for (var c = lane; c < D; c += LANES) {
        if (completes) {
            let pooled = pool(start, c);
            squares = fma(pooled, pooled, squares);
            latent[c] = pooled;
        }
        if (renews) {
            renew_remainder(c);
        }
    }
    if (!completes) {
        return;
    }
    for (var c = D + lane; c < LATENT; c += LANES) {
        latent[c] = 0.0;
    }
    let factor = inverseSqrt(total(lane, squares) / f32(D) + params.eps);
    for (var c = 2u * lane; c < D; c += 2u * LANES) {
        let norm = vec2<f32>(constant(params.comp_norm_at + c), constant(params.comp_norm_at + c + 1u));
        let pair = norm * (vec2<f32>(latent[c], latent[c + 1u]) * factor);
        latent[c] = pair.x;
        latent[c + 1u] = pair.y;
        store_pair(c, rotate_trailing(pair, c, D, start));
    }
    pad_group(lane, D);
    find_maxima(lane, (D + 31u) / 32u * 4u, 8u);
    let entry = position / ratio % params.entries;
    let part = place_word(place, params.page_words) + params.part_at;
    for (var i = lane; i < nvfp4_words(); i += LANES) {
        slab[part + entry * nvfp4_words() + i] = nvfp4_word(i);
    }
    workgroupBarrier();

    project_latent(lane);
    squares = 0.0;
    for (var c = lane; c < D_I; c += LANES) {
        squares = fma(values[c], values[c], squares);
    }
    let key_factor = inverseSqrt(total(lane, squares) / f32(D_I) + params.eps);
    for (var c = 2u * lane; c < D_I; c += 2u * LANES) {
        let norm = vec2<f32>(constant(params.k_norm_at + c), constant(params.k_norm_at + c + 1u));
        store_pair(c, rotate_trailing(norm * (vec2<f32>(values[c], values[c + 1u]) * key_factor), c, D_I, start));
    }
    pad_group(lane, D_I);
    find_maxima(lane, (D_I + 31u) / 32u * MXFP4_GROUP, 8u);
    let keys = part + params.entries * nvfp4_words();
    for (var i = lane; i < mxfp4_words(); i += LANES) {
        slab[keys + entry * mxfp4_words() + i] = mxfp4_word(0u, i);
    }
}
#endif

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let row = group.x;
    if (row >= step.rows) {
        return;
    }
    let position = step.position + row;
    var job = group.y;
#ifdef FULL
    if (job == 0u) {
        append_entry(lane, row, position);
        return;
    }
    job -= 1u;
#endif
    if (job == 0u) {
        append_window_key(lane, row, position);
        return;
    }
#ifdef QUERIES
    append_queries(lane, row, position, job - 1u);
#endif
}
