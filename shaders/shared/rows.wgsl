// A tile of R input rows worked on at once (R1, R4 or R8). `Rows` is one number for each of them. Every operation is
// made row by row, so that a row's result is the same bits in every tile.
#ifdef R1
const R: u32 = 1u;
alias Rows = f32;
alias RowIndex = u32;

fn rows_zero() -> Rows {
    return 0.0;
}

// acc + w x
fn mac(w: f32, x: Rows, acc: Rows) -> Rows {
    return fma(w, x, acc);
}

// acc + x²
fn rows_square(x: Rows, acc: Rows) -> Rows {
    return fma(x, x, acc);
}

fn rows_add(a: Rows, b: Rows) -> Rows {
    return a + b;
}

fn rows_get(a: Rows, i: u32) -> f32 {
    return a;
}

#ifdef SUBGROUPS
// What the lane of the subgroup has whose number differs in the bit `s`.
fn rows_across(a: Rows, s: u32) -> Rows {
    return subgroupShuffleXor(a, s);
}
#endif
#endif
#ifdef R4
const R: u32 = 4u;
alias Rows = vec4<f32>;
alias RowIndex = vec4<u32>;

fn rows_zero() -> Rows {
    return vec4<f32>(0.0);
}

// acc + w x
fn mac(w: f32, x: Rows, acc: Rows) -> Rows {
    return fma(vec4<f32>(w), x, acc);
}

// acc + x²
fn rows_square(x: Rows, acc: Rows) -> Rows {
    return fma(x, x, acc);
}

fn rows_add(a: Rows, b: Rows) -> Rows {
    return a + b;
}

fn rows_get(a: Rows, i: u32) -> f32 {
    return a[i];
}
#endif
#ifdef R8
const R: u32 = 8u;
struct Rows {
    lo: vec4<f32>,
    hi: vec4<f32>,
}
struct RowIndex {
    lo: vec4<u32>,
    hi: vec4<u32>,
}

fn rows_zero() -> Rows {
    return Rows(vec4<f32>(0.0), vec4<f32>(0.0));
}

// acc + w x
fn mac(w: f32, x: Rows, acc: Rows) -> Rows {
    return Rows(fma(vec4<f32>(w), x.lo, acc.lo), fma(vec4<f32>(w), x.hi, acc.hi));
}

// acc + x²
fn rows_square(x: Rows, acc: Rows) -> Rows {
    return Rows(fma(x.lo, x.lo, acc.lo), fma(x.hi, x.hi, acc.hi));
}

fn rows_add(a: Rows, b: Rows) -> Rows {
    return Rows(a.lo + b.lo, a.hi + b.hi);
}

fn rows_get(a: Rows, i: u32) -> f32 {
    return select(a.lo[i % 4u], a.hi[i % 4u], i >= 4u);
}
#endif
