// Finishes the mix of a sublayer (numerics.md §2) from the partial sums that `boundary` left for it: the projections
// over the root mean square of the streams, the sigmoids of pre and post, the softmax and Sinkhorn of comb.
//
// The importer declares `const ROWS`, the rows that a workgroup of 256 invocations takes, with ROWS * n * n <= 256 and
// n <= 8; the bindings `partials_in` (T, S, n(n+2)+1) f32 and `mix_const` [scale 3, base n(n+2)] f32, both of the mix
// to finish; and `params.mix: Mix`.

// Streams of a row, n.
override STREAMS: u32;
// Projections of a mix: n of pre, n of post, n * n of comb.
override PROJECTIONS: u32 = STREAMS * (STREAMS + 2u);
// Words of the partial sums of a channel slice: its projections, then its sum of squares.
override PARTIAL: u32 = PROJECTIONS + 1u;
// Partial sums are added up by GROUPS invocations a word.
override GROUPS: u32 = 256u / PARTIAL;

struct Mix {
    // Channel slices S of a row.
    slices: u32,
    // Column normalisations of comb; the rows are normalised between two of them.
    sinkhorn_iterations: u32,
    // Added to the mean square.
    norm_eps: f32,
    // Added to pre, to the softmax of comb, and to each sum that comb is divided by.
    eps: f32,
    // 1 / (n h).
    inverse_width: f32,
}

// (ROWS, n) pre and post of the finished mix.
var<workgroup> mix_pre: array<f32, ROWS * STREAMS>;
var<workgroup> mix_post: array<f32, ROWS * STREAMS>;
// (2, ROWS, n inputs, n outputs): the halves take turns in holding comb. The first has it in the end.
var<workgroup> mix_combs: array<f32, 2u * ROWS * STREAMS * STREAMS>;
// (ROWS, GROUPS, PARTIAL), then (ROWS, PARTIAL): sums over slices.
var<workgroup> mix_groups: array<f32, ROWS * GROUPS * PARTIAL>;
var<workgroup> mix_sums: array<f32, ROWS * PARTIAL>;

fn sigmoid(x: f32) -> f32 {
    let e = exp(-abs(x));
    return select(e, 1.0, x >= 0.0) / (1.0 + e);
}

// comb[input][output] of row r of the workgroup: the weight of a stream in a new stream.
fn mix_comb(r: u32, input: u32, output: u32) -> f32 {
    return mix_combs[(r * STREAMS + input) * STREAMS + output];
}

#ifdef SUBGROUPS
// The half that has the logits of comb.
const LOGITS: u32 = 1u;

// Comb of a row from its logits, in n neighbouring lanes of a subgroup: each has an input's weights in all outputs. n is a
// power of two.
fn finish_comb(local: u32, invocation: u32, rows: u32) {
    // Every invocation computes, those beyond the last row that row again: all lanes of a subgroup stay together.
    let at = (min(local / STREAMS, rows - 1u) * STREAMS + local % STREAMS) * STREAMS;
    let first = invocation / STREAMS * STREAMS;
    var comb: array<f32, 8>;
    for (var o = 0u; o < STREAMS; o++) {
        comb[o] = mix_combs[ROWS * STREAMS * STREAMS + at + o];
    }
    var largest = comb[0];
    for (var o = 1u; o < STREAMS; o++) {
        largest = max(largest, comb[o]);
    }
    var sum = 0.0;
    for (var o = 0u; o < STREAMS; o++) {
        sum += exp(comb[o] - largest);
    }
    for (var o = 0u; o < STREAMS; o++) {
        comb[o] = exp(comb[o] - largest) / sum + params.mix.eps;
    }
    for (var iteration = 0u; iteration < params.mix.sinkhorn_iterations; iteration++) {
        if iteration > 0u {
            var total = comb[0];
            for (var o = 1u; o < STREAMS; o++) {
                total += comb[o];
            }
            for (var o = 0u; o < STREAMS; o++) {
                comb[o] = comb[o] / (total + params.mix.eps);
            }
        }
        for (var o = 0u; o < STREAMS; o++) {
            var total = subgroupShuffle(comb[o], first);
            for (var i = 1u; i < STREAMS; i++) {
                total += subgroupShuffle(comb[o], first + i);
            }
            comb[o] = comb[o] / (total + params.mix.eps);
        }
    }
    if local < rows * STREAMS {
        for (var o = 0u; o < STREAMS; o++) {
            mix_combs[at + o] = comb[o];
        }
    }
    workgroupBarrier();
}
#else
// The half that has the logits of comb: an even number of steps follows.
const LOGITS: u32 = 0u;

// Comb of a row from its logits. One invocation an element of comb. Each step reads one half of mix_combs and writes the
// other.
fn finish_comb(local: u32, invocation: u32, rows: u32) {
    let area = STREAMS * STREAMS;
    let r = local / area;
    let input = local % area / STREAMS;
    let output = local % STREAMS;
    let row_at = r * area + input * STREAMS;
    let column_at = r * area + output;
    let half = ROWS * area;
    if r < rows {
        var largest = mix_combs[row_at];
        for (var o = 1u; o < STREAMS; o++) {
            largest = max(largest, mix_combs[row_at + o]);
        }
        var sum = 0.0;
        for (var o = 0u; o < STREAMS; o++) {
            sum += exp(mix_combs[row_at + o] - largest);
        }
        mix_combs[half + row_at + output] = exp(mix_combs[row_at + output] - largest) / sum + params.mix.eps;
    }
    workgroupBarrier();
    // Even steps divide by the sums of the columns (over inputs), odd steps by those of the rows (over outputs).
    let steps = 2u * params.mix.sinkhorn_iterations - 1u;
    for (var step = 0u; step < steps; step++) {
        let rows_turn = (step & 1u) == 1u;
        let source = select(half, 0u, rows_turn);
        if r < rows {
            let first = source + select(column_at, row_at, rows_turn);
            let stride = select(STREAMS, 1u, rows_turn);
            var sum = mix_combs[first];
            for (var k = 1u; k < STREAMS; k++) {
                sum += mix_combs[first + k * stride];
            }
            mix_combs[half - source + row_at + output] = mix_combs[source + row_at + output] / (sum + params.mix.eps);
        }
        workgroupBarrier();
    }
}
#endif

// Leaves pre of rows first_row .. first_row + rows in mix_pre and, if `whole`, post and comb too. Ends with a barrier.
// `rows` and `whole` are uniform; every invocation of the workgroup calls it, `invocation` being its number in its subgroup.
fn finish_mix(local: u32, invocation: u32, first_row: u32, rows: u32, whole: bool) {
    if local < GROUPS * PARTIAL {
        let words = params.mix.slices * PARTIAL;
        for (var r = 0u; r < rows; r++) {
            let row = (first_row + r) * words;
            var sum = 0.0;
            // A stride of whole slices: an invocation stays on one word of them.
            for (var i = local; i < words; i += GROUPS * PARTIAL) {
                sum += partials_in[row + i];
            }
            mix_groups[r * GROUPS * PARTIAL + local] = sum;
        }
    }
    workgroupBarrier();
    for (var i = local; i < rows * PARTIAL; i += 256u) {
        let at = i / PARTIAL * GROUPS * PARTIAL + i % PARTIAL;
        var sum = mix_groups[at];
        for (var g = 1u; g < GROUPS; g++) {
            sum += mix_groups[at + g * PARTIAL];
        }
        mix_sums[i] = sum;
    }
    workgroupBarrier();

    let area = STREAMS * STREAMS;
    for (var i = local; i < rows * PROJECTIONS; i += 256u) {
        let r = i / PROJECTIONS;
        let j = i % PROJECTIONS;
        let scale = inverseSqrt(fma(mix_sums[r * PARTIAL + PROJECTIONS], params.mix.inverse_width, params.mix.norm_eps));
        let part = min(j / STREAMS, 2u);
        let logit = fma(mix_sums[r * PARTIAL + j] * scale, mix_const[part], mix_const[3u + j]);
        switch part {
            case 0u: { mix_pre[r * STREAMS + j] = sigmoid(logit) + params.mix.eps; }
            case 1u: { mix_post[r * STREAMS + j - STREAMS] = 2.0 * sigmoid(logit); }
            default: { mix_combs[LOGITS * ROWS * area + r * area + j - 2u * STREAMS] = logit; }
        }
    }
    workgroupBarrier();
    if whole {
        finish_comb(local, invocation, rows);
    }
}
