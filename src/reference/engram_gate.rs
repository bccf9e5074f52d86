//! CPU twin of `engram_gate`: how much of an Engram's value enters each stream (`numerics.md` §8).

use super::math::{rms_factor, sigmoid};

/// Adds the gated value to every stream. `streams` is (n, h), `kv` ((n + 1) h): one key a stream, then the value; `qk` is
/// (n, h), the product of `q_weight` and `k_weight`.
pub fn gate(streams: &mut [f32], kv: &[f32], qk: &[f32], h: usize, eps: f32) {
    let (keys, value) = kv.split_at(streams.len());
    for ((stream, key), qk) in streams.chunks_exact_mut(h).zip(keys.chunks_exact(h)).zip(qk.chunks_exact(h)) {
        let sum: f32 = stream.iter().zip(qk).zip(key).map(|((r, w), k)| r * w * k).sum();
        let d = sum * rms_factor(stream, eps) * rms_factor(key, eps) * (h as f64).powf(-0.5) as f32;
        let g = sigmoid(d.abs().max(1e-6).sqrt().copysign(d));
        stream.iter_mut().zip(value).for_each(|(r, v)| *r += g * v);
    }
}
