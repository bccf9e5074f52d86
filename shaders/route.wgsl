// The router (numerics.md §9): s = sqrt(softplus(logit)), the k experts with the largest s + bias (ties: the lower
// expert), their s normalised to one and scaled. Slot k is the shared expert, with weight 1. One workgroup a row.
//
//   2 logits    (T, logit_stride)
//   3 bias      (EXPERTS)
//   4 ids       (T, k + 1), by falling s + bias; slot k = EXPERTS
//   5 gains     (T, k + 1) routing weights
//   6 pairs     when one row is in flight, the pair ids by rising expert,
//   7 tiles     and a tile (expert, first, 1) for each: what `group_rows` makes of more rows
#import step

struct Params {
    logit_stride: u32,
    k: u32,
    normalise: u32,
    scale: f32,
}

override EXPERTS: u32;
const WORKGROUP: u32 = 256u;
// log(1 + e) = 2 atanh(z), z = e / (2 + e) <= 1/3: the coefficients of z², z⁴, ... in atanh(z) / z.
const ATANH = array<f32, 7>(0.33333333, 0.2, 0.14285714, 0.11111111, 0.09090909, 0.07692308, 0.06666667);

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read_write> ids: array<u32>;
@group(0) @binding(5) var<storage, read_write> gains: array<f32>;
@group(0) @binding(6) var<storage, read_write> pairs: array<u32>;
@group(0) @binding(7) var<storage, read_write> tiles: array<u32>;

var<workgroup> scores: array<f32, EXPERTS>;
var<workgroup> keys: array<u32, EXPERTS>;
var<workgroup> picked: array<u32, EXPERTS>;

// sqrt(log(1 + eˣ)), softplus being x itself above 20.
fn score(x: f32) -> f32 {
    if (x > 20.0) {
        return sqrt(x);
    }
    let e = exp(-abs(x));
    let z = e / (2.0 + e);
    let z2 = z * z;
    var series = ATANH[6];
    for (var i = 6u; i > 0u; i--) {
        series = fma(series, z2, ATANH[i - 1u]);
    }
    let log1p = 2.0 * fma(z * z2, series, z);
    return sqrt(max(x, 0.0) + log1p);
}

// Orders as the value does, as an integer; both zeros are equal.
fn order_key(v: f32) -> u32 {
    let bits = bitcast<u32>(v);
    if ((bits & 0x7fffffffu) == 0u) {
        return 0x80000000u;
    }
    return select(bits | 0x80000000u, ~bits, (bits >> 31u) != 0u);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let t = group.x;
    if (t >= step.rows) {
        return;
    }
    for (var e = local; e < EXPERTS; e += WORKGROUP) {
        let s = score(logits[t * params.logit_stride + e]);
        scores[e] = s;
        keys[e] = order_key(s + bias[e]);
    }
    workgroupBarrier();
    // An expert's rank is how many come before it; ranks are all different.
    for (var e = local; e < EXPERTS; e += WORKGROUP) {
        let key = keys[e];
        var rank = 0u;
        for (var j = 0u; j < EXPERTS; j++) {
            rank += select(0u, 1u, keys[j] > key || (keys[j] == key && j < e));
        }
        picked[rank] = e;
    }
    workgroupBarrier();

    let slots = params.k + 1u;
    for (var slot = local; slot < slots; slot += WORKGROUP) {
        let shared_slot = slot == params.k;
        var id = EXPERTS;
        var gain = 1.0;
        if (!shared_slot) {
            id = picked[slot];
            gain = scores[id];
            if (params.normalise != 0u) {
                var sum = 0.0;
                for (var j = 0u; j < params.k; j++) {
                    sum += scores[picked[j]];
                }
                gain /= sum + 1e-20;
            }
            gain *= params.scale;
        }
        ids[t * slots + slot] = id;
        gains[t * slots + slot] = gain;
        if (step.rows == 1u) {
            var at = 0u;
            for (var j = 0u; j < params.k; j++) {
                at += select(0u, 1u, picked[j] < id);
            }
            pairs[at] = slot;
            tiles[3u * at + 1u] = id;
            tiles[3u * at + 2u] = at;
            tiles[3u * at + 3u] = 1u;
        }
    }
    if (step.rows == 1u && local == 0u) {
        tiles[0] = slots;
    }
}
