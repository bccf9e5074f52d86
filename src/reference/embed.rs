//! CPU twin of `embed`.

/// The residual streams (n, h) of a token: its embedding row (h), `n` times (`numerics.md` §1).
pub fn embed(row: &[f32], n: usize) -> Vec<f32> {
    row.repeat(n)
}
