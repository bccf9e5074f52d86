// Matrix products y = x Wᵀ over several weight matrices of one pack, with the RMS norm of the input inside:
// y_r = (Σ_k W_rk norm_k x_k) · rsqrt(mean x² + eps)  (numerics.md §3). A group of LANES lanes makes four outputs of R rows.
//
//   2 weights   the pack: `segments` matrices (rows, K) of any formats
//   3 norm      (K) weight of the norm, when NORM
//   4 x         (T, x_stride); a segment with groups reads group g of the row at g * group_stride
//   5 y         (T, y_stride); each segment writes its rows from `out` on
//
// Grid: (row tiles; four-output tiles of all segments / groups of lanes, folded into y and z). Workgroups that read the same
// weights are neighbours, so that in prefill a cache can answer all row tiles but the first. With `last_row` only the newest
// row is made, and written to row 0 of y.
#import step
#import dot

struct Segment {
    format: u32,
    // Word offsets of the codes and of the scales.
    data: u32,
    scales: u32,
    rows: u32,
    // Where row 0 goes in the output row.
    out: u32,
    // Row 0 counted from the start of the whole matrix.
    first_row: u32,
    // Rows that share a group of input channels (0: no groups), and the distance of the groups in x.
    group_rows: u32,
    group_stride: u32,
}

struct Params {
    k: u32,
    x_stride: u32,
    x_offset: u32,
    y_stride: u32,
    y_offset: u32,
    last_row: u32,
    segments: u32,
    eps: f32,
    segment: array<Segment, 8>,
}

override NORM: bool;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<storage, read> weights: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> norm: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> y: array<f32>;

// First row of the tile, last row in flight, and where the group's channels start in a row of x.
var<private> first_row: u32;
var<private> last_row: u32;
var<private> x_base: u32;

fn norm_quad(q: u32) -> vec4<f32> {
    return norm[q];
}

fn x_row(i: u32) -> u32 {
    return (min(first_row + i, last_row) * params.x_stride + x_base) / 4u;
}

// Outputs of a tile: four, or one where a tile of four could straddle two groups.
fn tile_outputs(s: u32) -> u32 {
    return select(4u, 1u, params.segment[s].group_rows % 4u != 0u);
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
    let first = select(group.x * R, step.rows - 1u, params.last_row != 0u);
    if (step.rows == 0u || first >= step.rows) {
        return;
    }
    first_row = first;
    last_row = step.rows - 1u;

    var tile = (group.z * groups.y + group.y) * (WORKGROUP / LANES) + local / LANES;
    var s = 0u;
    while (s < params.segments) {
        let outputs = tile_outputs(s);
        let tiles = (params.segment[s].rows + outputs - 1u) / outputs;
        if (tile < tiles) {
            break;
        }
        tile -= tiles;
        s += 1u;
    }

    let lane = local % LANES;
    let live = s < params.segments;
    var sum = four_zero();
    var row = 0u;
    var end = 0u;
    if (live) {
        let segment = params.segment[s];
        let outputs = tile_outputs(s);
        row = tile * outputs;
        end = min(row + outputs, segment.rows);
        x_base = params.x_offset;
        if (segment.group_rows > 0u) {
            x_base += (segment.first_row + row) / segment.group_rows * segment.group_stride;
        }
        let r = min(vec4<u32>(row) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(end - 1u));
        let chunks = (params.k + 31u) / 32u;
        let data = vec4<u32>(segment.data / 4u) + r * (chunks * chunk_quads(segment.format));
        let scales = vec4<u32>(segment.scales) + scale_rows(segment.format, r, chunks);
        sum = lane_dot(segment.format, data, scales, lane);
    }
    sum = reduce_four(local, width, sum);
    var square_sum = rows_zero();
    if (NORM) {
        square_sum = reduce_rows(local, width, squares);
    }
    if (!live) {
        return;
    }

    let count = select(min(R, step.rows - first), 1u, params.last_row != 0u);
    let y_row = select(first, 0u, params.last_row != 0u);
    let at = params.y_offset + params.segment[s].out + row;
    for (var i = lane; i < count; i += LANES) {
        var v = vec4<f32>(rows_get(sum.a, i), rows_get(sum.b, i), rows_get(sum.c, i), rows_get(sum.d, i));
        if (NORM) {
            v *= rms_factor(rows_get(square_sum, i), params.eps);
        }
        let to = (y_row + i) * params.y_stride + at;
        for (var o = 0u; o < end - row; o++) {
            y[to + o] = v[o];
        }
    }
}
