// Dot products of four weight rows with a tile of R input rows, by a group of LANES lanes.
//
// The order of every sum is fixed by the channel count alone: lane l takes chunks l, l + LANES, ...; inside a chunk one
// fma chain over its 32 channels from zero, times the chunk's scale by fma into the lane's sum; then a binary tree over
// the lanes. So a product is the same bits whatever R is, and however many rows or segments are in flight.
//
// The importing kernel declares `params.k` (channels), `weights: array<vec4<u32>>`, `x: array<vec4<f32>>`,
// `NORM` (bool), `fn norm_quad(q: u32) -> vec4<f32>` (weights of the RMS norm of the input, four channels) and
// `fn x_row(i: u32) -> u32` (where row i of the tile starts in x; rows beyond the last repeat it).
#import weights
#import rows

const WORKGROUP: u32 = 128u;
override LANES: u32;
// Formats that occur, a bit each: what is left out is not compiled.
override FORMATS: u32;
override HAS_F32: bool = (FORMATS & 1u) != 0u;
override HAS_BF16: bool = (FORMATS & 2u) != 0u;
override HAS_F16: bool = (FORMATS & 4u) != 0u;
override HAS_FP8: bool = (FORMATS & 24u) != 0u;
override HAS_FP4: bool = (FORMATS & 32u) != 0u;
// Whether the last chunk has fewer than 32 channels.
override TAIL: bool;

// Four channels of the tile.
struct Quad {
    x: Rows,
    y: Rows,
    z: Rows,
    w: Rows,
}

// The products with the four weight rows.
struct Four {
    a: Rows,
    b: Rows,
    c: Rows,
    d: Rows,
}

var<private> x_at: RowIndex;
// Squares of the lane's channels, when NORM.
var<private> squares: Rows;
var<workgroup> lane_sums: array<Four, WORKGROUP>;

fn four_zero() -> Four {
    return Four(rows_zero(), rows_zero(), rows_zero(), rows_zero());
}

fn four_add(p: Four, q: Four) -> Four {
    return Four(rows_add(p.a, q.a), rows_add(p.b, q.b), rows_add(p.c, q.c), rows_add(p.d, q.d));
}

// Channels 4q .. 4q + 3 of a vector, zero beyond channel k: what lies there may be anything.
fn inside(v: vec4<f32>, q: u32) -> vec4<f32> {
    if (!TAIL) {
        return v;
    }
    let channel = vec4<u32>(4u * q) + vec4<u32>(0u, 1u, 2u, 3u);
    return select(vec4<f32>(0.0), v, channel < vec4<u32>(params.k));
}

// Channels 4q .. 4q + 3 of the input row that starts at `at`.
fn load_row(at: u32, q: u32) -> vec4<f32> {
    return inside(x[at + q], q);
}

// Channels 4q .. 4q + 3 of the tile, times the norm's weights.
fn load_quad(q: u32) -> Quad {
#ifdef R1
    let v = load_row(x_at, q);
    let t = Quad(v.x, v.y, v.z, v.w);
#endif
#ifdef R4
    let m = transpose(mat4x4<f32>(load_row(x_at.x, q), load_row(x_at.y, q), load_row(x_at.z, q), load_row(x_at.w, q)));
    let t = Quad(m[0], m[1], m[2], m[3]);
#endif
#ifdef R8
    let l = x_at.lo;
    let h = x_at.hi;
    let m = transpose(mat4x4<f32>(load_row(l.x, q), load_row(l.y, q), load_row(l.z, q), load_row(l.w, q)));
    let n = transpose(mat4x4<f32>(load_row(h.x, q), load_row(h.y, q), load_row(h.z, q), load_row(h.w, q)));
    let t = Quad(Rows(m[0], n[0]), Rows(m[1], n[1]), Rows(m[2], n[2]), Rows(m[3], n[3]));
#endif
    if (!NORM) {
        return t;
    }
    squares = rows_square(t.w, rows_square(t.z, rows_square(t.y, rows_square(t.x, squares))));
    let g = inside(norm_quad(q), q);
    let zero = rows_zero();
    return Quad(mac(g.x, t.x, zero), mac(g.y, t.y, zero), mac(g.z, t.z, zero), mac(g.w, t.w, zero));
}

fn chain(w: vec4<f32>, t: Quad, acc: Rows) -> Rows {
    return mac(w.w, t.w, mac(w.z, t.z, mac(w.y, t.y, mac(w.x, t.x, acc))));
}

// Adds the products of channels 4q .. 4q + 3 with the decoded weights of the four rows.
fn advance(sum: Four, q: u32, a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>) -> Four {
    let t = load_quad(q);
    return Four(chain(a, t, sum.a), chain(b, t, sum.b), chain(c, t, sum.c), chain(d, t, sum.d));
}

fn scaled(sum: Rows, part: Rows, at: u32, c: u32) -> Rows {
    let byte = scale_byte(at, c);
    return mac(ue8m0(byte), mac(ue8m0_half(byte), part, rows_zero()), sum);
}

// Adds the chunk's sums, each times its row's scale.
fn add_scaled(sum: Four, part: Four, scales: vec4<u32>, c: u32) -> Four {
    return Four(
        scaled(sum.a, part.a, scales.x, c),
        scaled(sum.b, part.b, scales.y, c),
        scaled(sum.c, part.c, scales.z, c),
        scaled(sum.d, part.d, scales.w, c),
    );
}

// This lane's part of the products with four weight rows of one format: `data` where each starts in `weights`, `scales`
// the word where each one's scales start.
fn lane_dot(format: u32, data: vec4<u32>, scales: vec4<u32>, lane: u32) -> Four {
#ifdef R1
    x_at = x_row(0u);
#endif
#ifdef R4
    x_at = vec4<u32>(x_row(0u), x_row(1u), x_row(2u), x_row(3u));
#endif
#ifdef R8
    x_at.lo = vec4<u32>(x_row(0u), x_row(1u), x_row(2u), x_row(3u));
    x_at.hi = vec4<u32>(x_row(4u), x_row(5u), x_row(6u), x_row(7u));
#endif
    squares = rows_zero();
    var sum = four_zero();
    let chunks = (params.k + 31u) / 32u;
    // Loops inside a chunk stay rolled, the words of a 16-byte load moving up by one: a shader that compiles quickly.
    if (HAS_FP4 && format == FP4) {
        for (var c = lane; c < chunks; c += LANES) {
            var ra = weights[data.x + c];
            var rb = weights[data.y + c];
            var rc = weights[data.z + c];
            var rd = weights[data.w + c];
            var part = four_zero();
            for (var q = 8u * c; q < 8u * c + 8u; q += 2u) {
                part = advance(part, q, e2m1x4(ra.x), e2m1x4(rb.x), e2m1x4(rc.x), e2m1x4(rd.x));
                part = advance(
                    part, q + 1u, e2m1x4(ra.x >> 16u), e2m1x4(rb.x >> 16u), e2m1x4(rc.x >> 16u), e2m1x4(rd.x >> 16u),
                );
                ra = ra.yzwx;
                rb = rb.yzwx;
                rc = rc.yzwx;
                rd = rd.yzwx;
            }
            sum = add_scaled(sum, part, scales, c);
        }
    }
    if (HAS_FP8 && (format == FP8_BLOCK || format == FP8_ROW)) {
        for (var c = lane; c < chunks; c += LANES) {
            var part = four_zero();
            for (var i = 2u * c; i < 2u * c + 2u; i++) {
                var ra = weights[data.x + i];
                var rb = weights[data.y + i];
                var rc = weights[data.z + i];
                var rd = weights[data.w + i];
                for (var q = 4u * i; q < 4u * i + 4u; q++) {
                    part = advance(part, q, e4m3x4(ra.x), e4m3x4(rb.x), e4m3x4(rc.x), e4m3x4(rd.x));
                    ra = ra.yzwx;
                    rb = rb.yzwx;
                    rc = rc.yzwx;
                    rd = rd.yzwx;
                }
            }
            sum = add_scaled(sum, part, scales, c);
        }
    }
    if (HAS_BF16 && format == BF16) {
        for (var c = lane; c < chunks; c += LANES) {
            var part = four_zero();
            for (var i = 4u * c; i < 4u * c + 4u; i++) {
                var ra = weights[data.x + i];
                var rb = weights[data.y + i];
                var rc = weights[data.z + i];
                var rd = weights[data.w + i];
                for (var q = 2u * i; q < 2u * i + 2u; q++) {
                    part = advance(part, q, bf16x4(ra.x, ra.y), bf16x4(rb.x, rb.y), bf16x4(rc.x, rc.y), bf16x4(rd.x, rd.y));
                    ra = ra.zwxy;
                    rb = rb.zwxy;
                    rc = rc.zwxy;
                    rd = rd.zwxy;
                }
            }
            sum = four_add(sum, part);
        }
    }
    if (HAS_F16 && format == F16) {
        for (var c = lane; c < chunks; c += LANES) {
            var part = four_zero();
            for (var i = 4u * c; i < 4u * c + 4u; i++) {
                var ra = weights[data.x + i];
                var rb = weights[data.y + i];
                var rc = weights[data.z + i];
                var rd = weights[data.w + i];
                for (var q = 2u * i; q < 2u * i + 2u; q++) {
                    part = advance(part, q, f16x4(ra.x, ra.y), f16x4(rb.x, rb.y), f16x4(rc.x, rc.y), f16x4(rd.x, rd.y));
                    ra = ra.zwxy;
                    rb = rb.zwxy;
                    rc = rc.zwxy;
                    rd = rd.zwxy;
                }
            }
            sum = four_add(sum, part);
        }
    }
    if (HAS_F32 && format == F32) {
        for (var c = lane; c < chunks; c += LANES) {
            var part = four_zero();
            for (var q = 8u * c; q < 8u * c + 8u; q++) {
                let ra = bitcast<vec4<f32>>(weights[data.x + q]);
                let rb = bitcast<vec4<f32>>(weights[data.y + q]);
                let rc = bitcast<vec4<f32>>(weights[data.z + q]);
                let rd = bitcast<vec4<f32>>(weights[data.w + q]);
                part = advance(part, q, ra, rb, rc, rd);
            }
            sum = four_add(sum, part);
        }
    }
    return sum;
}

// Sums over the lanes of the group; every lane gets them. To be called by the whole workgroup. Of `width` neighbouring
// lanes, a power of two, each can have what another has without shared memory: 1, or the size of a subgroup. The tree is the
// same for all; in the part of it without shared memory every lane adds, to its sum that of the lane across.
fn reduce_four(local: u32, width: u32, value: Four) -> Four {
    let lane = local % LANES;
    var sum = value;
    var s = LANES / 2u;
    if (LANES > width) {
        lane_sums[local] = sum;
        for (; s >= width; s /= 2u) {
            workgroupBarrier();
            if (lane < s) {
                lane_sums[local] = four_add(lane_sums[local], lane_sums[local + s]);
            }
        }
        workgroupBarrier();
        sum = lane_sums[local - lane + lane % width];
        workgroupBarrier();
    }
#ifdef SUBGROUPS
    for (; s > 0u; s /= 2u) {
        sum = four_add(sum, Four(rows_across(sum.a, s), rows_across(sum.b, s), rows_across(sum.c, s), rows_across(sum.d, s)));
    }
#endif
    return sum;
}

fn reduce_rows(local: u32, width: u32, value: Rows) -> Rows {
    let lane = local % LANES;
    var sum = value;
    var s = LANES / 2u;
    if (LANES > width) {
        lane_sums[local].a = sum;
        for (; s >= width; s /= 2u) {
            workgroupBarrier();
            if (lane < s) {
                lane_sums[local].a = rows_add(lane_sums[local].a, lane_sums[local + s].a);
            }
        }
        workgroupBarrier();
        sum = lane_sums[local - lane + lane % width].a;
    }
#ifdef SUBGROUPS
    for (; s > 0u; s /= 2u) {
        sum = rows_add(sum, rows_across(sum, s));
    }
#endif
    return sum;
}

// The factor of the RMS norm of row i of the tile (numerics.md §3), from the row's square sum.
fn rms_factor(square_sum: f32, eps: f32) -> f32 {
    return inverseSqrt(square_sum / f32(params.k) + eps);
}
