// The first half of the experts (numerics.md §9): u = silu(min(w1 x, L)) · clamp(w3 x, ±L) · g for the pairs (row of x,
// expert) of each tile, with the RMS norm of the input inside. A group of LANES lanes makes two channels of u of R pairs.
//
//   2 weights   the pack: w1 and w3 of routed experts, and of the shared expert
//   3 norm      (K) weight of the norm of the input
//   4 x         (T, x_stride)
//   5 gains     (T, slots) routing weights
//   6 pairs     pair ids t * slots + slot, grouped by expert
//   7 tiles     count, then (expert, first, pairs) a tile: at most R pairs of one expert, in `pairs` from `first` on
//   8 u         (T * slots, u_stride), by pair id
//
// Grid: (channels of u / channels of a workgroup; tiles, folded into y and z). Surplus tiles, and tiles of experts that
// are not in this pack, do nothing.
#import step
#import dot
#import experts

struct Params {
    k: u32,
    x_stride: u32,
    u_stride: u32,
    slots: u32,
    // The id of the shared expert: the number of routed experts.
    shared_expert: u32,
    eps: f32,
    limit: f32,
    p0: u32,
    // w1 and w3 of the routed experts, w1 and w3 of the shared expert.
    segment: array<ExpertSegment, 4>,
}

const NORM: bool = true;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> norm: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> gains: array<f32>;
@group(0) @binding(6) var<storage, read> pairs: array<u32>;
@group(0) @binding(7) var<storage, read> tiles: array<u32>;
@group(0) @binding(8) var<storage, read_write> u: array<f32>;

var<private> tile: ExpertTile;

fn norm_quad(q: u32) -> vec4<f32> {
    return norm[q];
}

fn x_row(i: u32) -> u32 {
    return tile_pair(i) / params.slots * params.x_stride / 4u;
}

// silu(a) b g after the clamps. A comparison with NaN is false, so that NaN stays NaN.
fn activate(gate: f32, up: f32, gain: f32) -> f32 {
    let a = select(gate, params.limit, gate > params.limit);
    let b = select(select(up, params.limit, up > params.limit), -params.limit, up < -params.limit);
    let e = exp(-abs(a));
    return a * (select(1.0, e, a < 0.0) / (1.0 + e)) * b * gain;
}

@compute @workgroup_size(128)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
#ifdef SUBGROUPS
    @builtin(subgroup_size) width: u32,
#endif
) {
#ifndef SUBGROUPS
    let width = 1u;
#endif
    let index = group.z * groups.y + group.y;
    if (step.rows == 0u || index >= tiles[0]) {
        return;
    }
    // Control flow up to a barrier reads the local: a private variable does not count as uniform.
    let here = ExpertTile(tiles[3u * index + 1u], tiles[3u * index + 2u], tiles[3u * index + 3u]);
    let first = select(0u, 2u, here.expert == params.shared_expert);
    let gate = params.segment[first];
    if (here.expert < gate.first_expert || here.expert - gate.first_expert >= gate.experts) {
        return;
    }
    tile = here;

    let lane = local % LANES;
    let row = 2u * (group.x * (WORKGROUP / LANES) + local / LANES);
    let live = row < gate.rows;
    var sum = four_zero();
    if (live) {
        let up = params.segment[first + 1u];
        let r = vec4<u32>(row, min(row + 1u, gate.rows - 1u), row, min(row + 1u, gate.rows - 1u));
        let which = vec4<bool>(false, false, true, true);
        let data = select(vec4<u32>(expert_data(gate)), vec4<u32>(expert_data(up)), which);
        let scales = select(vec4<u32>(expert_scales(gate)), vec4<u32>(expert_scales(up)), which);
        let chunks = (params.k + 31u) / 32u;
        sum = lane_dot(
            gate.format,
            data / vec4<u32>(4u) + r * (chunks * chunk_quads(gate.format)),
            scales + scale_rows(gate.format, r, chunks),
            lane,
        );
    }
    sum = reduce_four(local, width, sum);
    let square_sum = reduce_rows(local, width, squares);
    if (!live) {
        return;
    }

    for (var i = lane; i < tile.pairs; i += LANES) {
        let pair = tile_pair(i);
        let factor = rms_factor(rows_get(square_sum, i), params.eps);
        let at = pair * params.u_stride + row;
        u[at] = activate(rows_get(sum.a, i) * factor, rows_get(sum.c, i) * factor, gains[pair]);
        if (row + 1u < gate.rows) {
            u[at + 1u] = activate(rows_get(sum.b, i) * factor, rows_get(sum.d, i) * factor, gains[pair]);
        }
    }
}
