//! CPU twin of `experts_up`: the hidden vector of one expert for one row (`numerics.md` §9).

use super::math::{silu, Matrix};

/// `silu(min(w1 x, L)) · clamp(w3 x, -L, L) · weight` (I). `w1` and `w3` are (I, h), `x` (h), already normed.
pub fn hidden(w1: &Matrix, w3: &Matrix, x: &[f32], weight: f32, limit: f32) -> Vec<f32> {
    activate(&w1.matvec(x), &w3.matvec(x), weight, limit)
}

/// The same from the two products.
pub fn activate(gate: &[f32], up: &[f32], weight: f32, limit: f32) -> Vec<f32> {
    gate.iter().zip(up).map(|(&a, &b)| silu(a.min(limit)) * b.clamp(-limit, limit) * weight).collect()
}
