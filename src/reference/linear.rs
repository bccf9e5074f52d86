//! CPU twin of `linear`: a matrix product of one row, the RMS norm of its input folded in.

use super::math::{dot, rms_factor, Matrix};

/// `W x`, or `W (norm · x) / rms(x)` where a norm is given as (weight, eps): the scalar is applied last, as the kernel
/// does. `w` is (out, in), `x` (in).
pub fn linear(w: &Matrix, x: &[f32], norm: Option<(&[f32], f32)>) -> Vec<f32> {
    let Some((weight, eps)) = norm else { return w.matvec(x) };
    let factor = rms_factor(x, eps);
    let scaled: Vec<f32> = x.iter().zip(weight).map(|(x, w)| x * w).collect();
    w.matvec(&scaled).into_iter().map(|y| y * factor).collect()
}

/// A block-diagonal product (`wo_a`, `numerics.md` §4): the rows of `w` (out, in / groups) fall into `groups` equal parts,
/// and part g reads part g of `x` (in).
pub fn grouped(w: &Matrix, x: &[f32], groups: usize) -> Vec<f32> {
    let rows = w.rows / groups;
    w.iter().enumerate().map(|(r, row)| dot(row, &x[r / rows * w.cols..][..w.cols])).collect()
}
