// Embedding lookup: the row of each token, copied to all n residual streams (numerics.md §1).
//
//   2 weights   rows [first_row, first_row + rows) of the table (V, h), any format
//   3 tokens    (T) token ids
//   4 streams   (T, n, h4)
//
// Grid: (quads of a row / 64, rows in flight). Tokens that are not in this pack do nothing.
#import step
#import weights

struct Params {
    format: u32,
    // Word offsets of the codes and of the scales.
    data: u32,
    scales: u32,
    first_row: u32,
    rows: u32,
    h: u32,
    streams: u32,
    p0: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> tokens: array<u32>;
@group(0) @binding(4) var<storage, read_write> streams: array<vec4<f32>>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(global_invocation_id) id: vec3<u32>) {
    let t = group.y;
    let q = id.x;
    let quads = (params.h + 3u) / 4u;
    if (t >= step.rows || q >= quads) {
        return;
    }
    let row = tokens[t] - params.first_row;
    if (tokens[t] < params.first_row || row >= params.rows) {
        return;
    }
    let chunks = (params.h + 31u) / 32u;
    let at = params.data / 4u + row * (chunks * chunk_quads(params.format));
    var v: vec4<f32>;
    switch params.format {
        case FP4: {
            v = e2m1x4(weights[at + q / 8u][q / 2u % 4u] >> (16u * (q % 2u)));
        }
        case FP8_BLOCK, FP8_ROW: {
            v = e4m3x4(weights[at + q / 4u][q % 4u]);
        }
        case BF16: {
            let w = weights[at + q / 2u];
            let two = select(w.xy, w.zw, q % 2u == 1u);
            v = bf16x4(two.x, two.y);
        }
        case F16: {
            let w = weights[at + q / 2u];
            let two = select(w.xy, w.zw, q % 2u == 1u);
            v = f16x4(two.x, two.y);
        }
        default: {
            v = bitcast<vec4<f32>>(weights[at + q]);
        }
    }
    if (params.format >= FP8_BLOCK) {
        let scales = params.scales + scale_rows(params.format, vec4<u32>(row), chunks).x;
        let byte = scale_byte(scales, q / 8u);
        v = v * ue8m0_half(byte) * ue8m0(byte);
    }
    for (var s = 0u; s < params.streams; s++) {
        streams[(t * params.streams + s) * quads + q] = v;
    }
}
