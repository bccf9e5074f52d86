//! CPU twin of `index_score`: how well an entry answers a row's index queries (`numerics.md` §6).

use super::math::dot;
use crate::formats::{e2m1_to_f32, CacheFormat};

/// Channels of a scale block of the index formats.
const BLOCK: usize = 32;

/// `S = Σ_h w_h relu(q_h · k)`, heads in order, product and sum rounded apart (not every device fuses them). `queries` is
/// (H_i, D_i), `weights` (H_i, already scaled by `D_i^-0.5 H_i^-0.5`), `key` (D_i). The dot products sum blocks of 32
/// channels in order: with MXFP4 values each block is exact, and the result is that of [`score_packed`] bit for bit.
pub fn score(queries: &[f32], weights: &[f32], key: &[f32]) -> f32 {
    let dots = queries.chunks_exact(key.len()).map(|q| {
        let blocks = q.chunks(BLOCK).zip(key.chunks(BLOCK));
        blocks.map(|(q, k)| dot(q, k)).sum()
    });
    weighted(dots, weights)
}

/// The same from packed MXFP4 rows, exactly: twice an E2M1 value is an integer, so a block is an integer sum times
/// `2^(e_q + e_k - 2)`. `queries` is (H_i, row words), `key` (row words).
pub fn score_packed(queries: &[u32], weights: &[f32], key: &[u32], head_dim: usize) -> f32 {
    weighted(queries.chunks_exact(key.len()).map(|q| dot_packed(q, key, head_dim)), weights)
}

fn weighted(dots: impl Iterator<Item = f32>, weights: &[f32]) -> f32 {
    dots.zip(weights).fold(0.0, |sum, (dot, w)| sum + w * dot.max(0.0))
}

/// Dot product of two packed MXFP4 rows of `channels`.
pub fn dot_packed(q: &[u32], k: &[u32], channels: usize) -> f32 {
    let format = CacheFormat::Mxfp4;
    let scales_at = format.code_words(channels);
    let scale = |row: &[u32], block: usize| format.scale((row[scales_at + block / 4] >> (block % 4 * 8)) as u8);
    let doubled = |row: &[u32], c: usize| 2.0 * e2m1_to_f32((row[c / 8] >> (c % 8 * 4)) as u8 & 15);
    (0..channels.div_ceil(BLOCK))
        .map(|block| {
            let in_block = block * BLOCK..channels.min((block + 1) * BLOCK);
            let sum: i32 = in_block.map(|c| doubled(q, c) as i32 * doubled(k, c) as i32).sum();
            sum as f32 * (scale(q, block) * 0.5) * (scale(k, block) * 0.5)
        })
        .sum()
}
