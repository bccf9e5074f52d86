// The second half of the experts (numerics.md §9): z = w2 u for the pairs of each tile. A group of LANES lanes makes four
// channels of z of R pairs.
//
//   2 weights   the pack: w2 of routed experts, and of the shared expert
//   3 x         (T * slots, u_stride): u by pair id
//   4 pairs     pair ids t * slots + slot, grouped by expert
//   5 tiles     count, then (expert, first, pairs) a tile: at most R pairs of one expert, in `pairs` from `first` on
//   6 z         (T, slots, z_stride): the pairs' vectors, by pair id
//
// Grid: (channels of z / channels of a workgroup; tiles, folded into y and z). Surplus tiles, and tiles of experts that
// are not in this pack, do nothing.
#import step
#import dot
#import experts

struct Params {
    k: u32,
    x_stride: u32,
    z_stride: u32,
    // The id of the shared expert: the number of routed experts.
    shared_expert: u32,
    // w2 of the routed experts, and of the shared expert.
    segment: array<ExpertSegment, 2>,
}

const NORM: bool = false;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> pairs: array<u32>;
@group(0) @binding(5) var<storage, read> tiles: array<u32>;
@group(0) @binding(6) var<storage, read_write> z: array<f32>;

var<private> tile: ExpertTile;

fn norm_quad(q: u32) -> vec4<f32> {
    return vec4<f32>(1.0);
}

fn x_row(i: u32) -> u32 {
    return tile_pair(i) * params.x_stride / 4u;
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
    let segment = params.segment[select(0u, 1u, here.expert == params.shared_expert)];
    if (here.expert < segment.first_expert || here.expert - segment.first_expert >= segment.experts) {
        return;
    }
    tile = here;

    let lane = local % LANES;
    let row = 4u * (group.x * (WORKGROUP / LANES) + local / LANES);
    let live = row < segment.rows;
    let end = min(row + 4u, segment.rows);
    var sum = four_zero();
    if (live) {
        let r = min(vec4<u32>(row) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(end - 1u));
        let chunks = (params.k + 31u) / 32u;
        sum = lane_dot(
            segment.format,
            vec4<u32>(expert_data(segment) / 4u) + r * (chunks * chunk_quads(segment.format)),
            vec4<u32>(expert_scales(segment)) + scale_rows(segment.format, r, chunks),
            lane,
        );
    }
    sum = reduce_four(local, width, sum);
    if (!live) {
        return;
    }

    for (var i = lane; i < tile.pairs; i += LANES) {
        let v = vec4<f32>(rows_get(sum.a, i), rows_get(sum.b, i), rows_get(sum.c, i), rows_get(sum.d, i));
        let at = tile_pair(i) * params.z_stride + row;
        for (var o = 0u; o < end - row; o++) {
            z[at + o] = v[o];
        }
    }
}
