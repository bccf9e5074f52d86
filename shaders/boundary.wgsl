// The boundary of two sublayers (numerics.md §2): expands the output of the last one into the residual streams,
// projects the new streams for the next mix, and collapses them into the input of the next sublayer.
//
// A workgroup takes a slice of SLICE channels of ROWS rows; slices need nothing of each other. Each finishes the
// previous mix again from the partial sums of all slices, which is cheaper than a dispatch of its own.
//
// 0 params
// 1 step
// 2 z (T, parts, h4): output of the last sublayer, to be summed over its parts
// 3 streams (T, n, h4): updated in place
// 4 partials_in (T, S, n(n+2)+1): partial sums of the previous mix
// 5 partials_out (T, S, n(n+2)+1): partial sums of the next mix
// 6 mix_fn (n(n+2), n, h4): projections of the next mix, zeros beyond h
// 7 mix_const [scale 3, base n(n+2)] of the previous mix
// 8 x (T, h4): the collapsed streams, not normalised

#import step

#ifdef R4
const ROWS: u32 = 4u;
#else
const ROWS: u32 = 1u;
#endif

#import mix

// Bits of Params.flags.
// The first sublayer of all: no previous mix, it reads stream 0.
const FIRST: u32 = 1u;
// streams := post * (sum of z) + comb^T streams, with the previous mix.
const EXPAND: u32 = 2u;
// partials_out := the streams projected by mix_fn.
const MIX: u32 = 4u;

const SLICE: u32 = 64u;
// Invocations that share a dot product over a slice, with four neighbouring channels each.
const LANES: u32 = SLICE / 4u;
// Dot products at a time.
const DOTS: u32 = 256u / LANES;

struct Params {
    flags: u32,
    // Channels h.
    hidden: u32,
    // h4.
    stride: u32,
    // Vectors of a row of z.
    parts: u32,
    mix: Mix,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<uniform> step: Step;
@group(0) @binding(2) var<storage, read> z: array<f32>;
@group(0) @binding(3) var<storage, read_write> streams: array<f32>;
@group(0) @binding(4) var<storage, read> partials_in: array<f32>;
@group(0) @binding(5) var<storage, read_write> partials_out: array<f32>;
@group(0) @binding(6) var<storage, read> mix_fn: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read> mix_const: array<f32>;
@group(0) @binding(8) var<storage, read_write> x: array<f32>;

// (ROWS, n, 4, LANES): the new streams; channel c of the slice at [c % 4][c / 4].
var<workgroup> tile: array<f32, ROWS * STREAMS * SLICE>;
// (ROWS, DOTS, LANES): dot products before they are summed over lanes.
var<workgroup> dots: array<f32, ROWS * 256u>;

@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
#ifdef SUBGROUPS
    @builtin(subgroup_invocation_id) invocation: u32,
#endif
) {
#ifndef SUBGROUPS
    let invocation = 0u;
#endif
    let first_row = group.y * ROWS;
    if first_row >= step.rows {
        return;
    }
    let rows = min(ROWS, step.rows - first_row);
    let first_channel = group.x * SLICE;

    // One invocation a channel of a row, with all its streams: so they can be updated in place.
    let r = local / SLICE;
    let c = local % SLICE;
    let channel = first_channel + c;
    let live = r < rows && channel < params.hidden;
    let row = first_row + r;
    let stream_at = row * STREAMS * params.stride + channel;
    let expand = (params.flags & EXPAND) != 0u;
    // Loaded before the mix is finished, so that memory is waited for once.
    var old: array<f32, 8>;
    var y = 0.0;
    if live {
        for (var i = 0u; i < STREAMS; i++) {
            old[i] = streams[stream_at + i * params.stride];
        }
        if expand {
            let z_at = row * params.parts * params.stride + channel;
            y = z[z_at];
            for (var p = 1u; p < params.parts; p++) {
                y += z[z_at + p * params.stride];
            }
        }
    }
    if (params.flags & FIRST) != 0u {
        if local < rows * STREAMS {
            mix_pre[local] = select(0.0, 1.0, local % STREAMS == 0u);
        }
        workgroupBarrier();
    } else {
        finish_mix(local, invocation, first_row, rows, expand);
    }

    if r < rows {
        var collapsed = 0.0;
        for (var o = 0u; o < STREAMS; o++) {
            var value = 0.0;
            if live {
                value = old[o];
                if expand {
                    value = mix_post[r * STREAMS + o] * y;
                    for (var i = 0u; i < STREAMS; i++) {
                        value = fma(mix_comb(r, i, o), old[i], value);
                    }
                    streams[stream_at + o * params.stride] = value;
                }
                collapsed = fma(mix_pre[r * STREAMS + o], value, collapsed);
            }
            tile[(r * STREAMS + o) * SLICE + c % 4u * LANES + c / 4u] = value;
        }
        if live {
            x[row * params.stride + channel] = collapsed;
        }
    }
    if (params.flags & MIX) == 0u {
        return;
    }
    workgroupBarrier();

    // The dot products of the slice: the projections, and last the streams with themselves.
    let lane = local % LANES;
    let quad = first_channel / 4u + lane;
    for (var first = 0u; first < PARTIAL; first += DOTS) {
        let j = first + local / LANES;
        // Written out: a browser's compiler may zero a variable of a loop only once.
        var sums = array<f32, ROWS>();
        if j < PARTIAL && quad * 4u < params.stride {
            for (var i = 0u; i < STREAMS; i++) {
                var weights = vec4(0.0);
                if j < PROJECTIONS {
                    weights = mix_fn[(j * STREAMS + i) * (params.stride / 4u) + quad];
                }
                for (var t = 0u; t < ROWS; t++) {
                    let at = (t * STREAMS + i) * SLICE + lane;
                    let v = vec4(tile[at], tile[at + LANES], tile[at + 2u * LANES], tile[at + 3u * LANES]);
                    let w = select(v, weights, j < PROJECTIONS);
                    sums[t] = fma(w.w, v.w, fma(w.z, v.z, fma(w.y, v.y, fma(w.x, v.x, sums[t]))));
                }
            }
        }
        for (var t = 0u; t < ROWS; t++) {
            dots[t * 256u + local] = sums[t];
        }
        workgroupBarrier();
        if local < rows * DOTS {
            let dot_j = first + local % DOTS;
            if dot_j < PARTIAL {
                var sum = dots[local * LANES];
                for (var l = 1u; l < LANES; l++) {
                    sum += dots[local * LANES + l];
                }
                let at = (first_row + local / DOTS) * params.mix.slices + group.x;
                partials_out[at * PARTIAL + dot_j] = sum;
            }
        }
        workgroupBarrier();
    }
}
