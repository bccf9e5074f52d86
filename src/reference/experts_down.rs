//! CPU twin of `experts_down`: one expert's part of a row's output (`numerics.md` §9).

use super::math::Matrix;

/// `w2 u` (h): one of the k + 1 parts of the sublayer's output. `w2` is (h, I), `u` (I).
pub fn part(w2: &Matrix, u: &[f32]) -> Vec<f32> {
    w2.matvec(u)
}
