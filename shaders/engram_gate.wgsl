// Adds an Engram's memory to the residual streams (numerics.md §8), after expanding the output of the last sublayer
// into them as `boundary` does. Streams of image and padding tokens get no memory. One workgroup a row.
//
// 0 params
// 1 step
// 2 z (T, parts, h4): output of the last sublayer, to be summed over its parts
// 3 streams (T, n, h4): updated in place
// 4 partials_in (T, S, n(n+2)+1): partial sums of the previous mix
// 5 mix_const [scale 3, base n(n+2)] of the previous mix
// 6 kv (T, stride4((n+1) h)): a key of h a stream, then the value
// 7 qk (n, h): query weight times key weight
// 8 tokens (T): ids of the step

#import step

const ROWS: u32 = 1u;

#import mix

struct Params {
    // Whether the output of a sublayer waits to be expanded.
    expand: u32,
    // Channels h.
    hidden: u32,
    // h4.
    stride: u32,
    // Vectors of a row of z.
    parts: u32,
    // Words of a row of kv.
    kv_stride: u32,
    // Ids of the tokens that get no memory.
    image_token: u32,
    pad_token: u32,
    // h^-0.5.
    scale: f32,
    mix: Mix,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<storage, read> z: array<f32>;
@group(0) @binding(3) var<storage, read_write> streams: array<f32>;
@group(0) @binding(4) var<storage, read> partials_in: array<f32>;
@group(0) @binding(5) var<storage, read> mix_const: array<f32>;
@group(0) @binding(6) var<storage, read> kv: array<f32>;
@group(0) @binding(7) var<storage, read> qk: array<f32>;
@group(0) @binding(8) var<storage, read> tokens: array<u32>;

// Sums over channels: of stream * qk * key, of squares of the stream, of squares of the key.
var<workgroup> sums: array<vec3<f32>, 256>;
var<workgroup> gates: array<f32, STREAMS>;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
#ifdef SUBGROUPS
    @builtin(subgroup_invocation_id) invocation: u32,
    @builtin(subgroup_size) width: u32,
#endif
) {
#ifndef SUBGROUPS
    let invocation = 0u;
    let width = 1u;
#endif
    let row = group.x;
    if row >= step.rows {
        return;
    }
    let expand = params.expand != 0u;
    if expand {
        finish_mix(local, invocation, row, 1u, true);
    }

    // An invocation keeps to its channels, here and below: what it reads of the streams, no other one writes.
    let row_at = row * STREAMS * params.stride;
    let kv_at = row * params.kv_stride;
    var sum: array<vec3<f32>, 8>;
    for (var c = local; c < params.hidden; c += 256u) {
        var value: array<f32, 8>;
        for (var i = 0u; i < STREAMS; i++) {
            value[i] = streams[row_at + i * params.stride + c];
        }
        if expand {
            let old = value;
            let z_at = row * params.parts * params.stride + c;
            var y = z[z_at];
            for (var p = 1u; p < params.parts; p++) {
                y += z[z_at + p * params.stride];
            }
            for (var o = 0u; o < STREAMS; o++) {
                value[o] = mix_post[o] * y;
                for (var i = 0u; i < STREAMS; i++) {
                    value[o] = fma(mix_comb(0u, i, o), old[i], value[o]);
                }
                streams[row_at + o * params.stride + c] = value[o];
            }
        }
        for (var i = 0u; i < STREAMS; i++) {
            let v = value[i];
            let key = kv[kv_at + i * params.hidden + c];
            sum[i] = fma(vec3(v * qk[i * params.hidden + c], v, key), vec3(key, v, key), sum[i]);
        }
    }

    let hidden = f32(params.hidden);
    for (var i = 0u; i < STREAMS; i++) {
        sums[local] = sum[i];
        var half = 128u;
        // Up to `width` lanes have what the others have without shared memory.
        for (; half >= width; half >>= 1u) {
            workgroupBarrier();
            if local < half {
                sums[local] += sums[local + half];
            }
        }
        var total = sums[local];
#ifdef SUBGROUPS
        for (; half > 0u; half >>= 1u) {
            total += subgroupShuffleXor(total, half);
        }
#endif
        if local == 0u {
            let score = total.x * inverseSqrt(total.y / hidden + params.mix.norm_eps)
                * inverseSqrt(total.z / hidden + params.mix.norm_eps) * params.scale;
            let root = sqrt(max(abs(score), 1e-6));
            gates[i] = sigmoid(select(root, -root, (bitcast<u32>(score) >> 31u) != 0u));
        }
        workgroupBarrier();
    }
    let token = tokens[row];
    if token == params.image_token || token == params.pad_token {
        return;
    }
    for (var c = local; c < params.hidden; c += 256u) {
        let value = kv[kv_at + STREAMS * params.hidden + c];
        for (var i = 0u; i < STREAMS; i++) {
            let at = row_at + i * params.stride + c;
            streams[at] = fma(gates[i], value, streams[at]);
        }
    }
}
