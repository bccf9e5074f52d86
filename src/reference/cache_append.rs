//! CPU twin of `cache_append`: what a token adds to the caches, before quantisation (`numerics.md` §4, §5, §6).

use super::math::{rms_norm, Matrix};
use super::rope::{rotate, rotate_heads};

/// Window key (D) of a token from `wkv x`: norm, then rope at its position.
pub fn window_key(kv: &[f32], norm: &[f32], eps: f32, position: u32, freqs: &[f32]) -> Vec<f32> {
    let mut key = rms_norm(kv, norm, eps);
    rotate(&mut key, position, freqs, false);
    key
}

/// Pools the tokens of a group, channel by channel: their values weighted by the softmax of their gates. `values` and
/// `gates` are `wkv x` and `wgate x` (D) of each token, oldest first.
pub fn pool(values: &[&[f32]], gates: &[&[f32]]) -> Vec<f32> {
    (0..values[0].len())
        .map(|c| {
            let max = gates.iter().fold(f32::NEG_INFINITY, |m, gate| m.max(gate[c]));
            let weights: Vec<f32> = gates.iter().map(|gate| (gate[c] - max).exp()).collect();
            let sum: f32 = weights.iter().sum();
            values.iter().zip(&weights).map(|(value, w)| value[c] * (w / sum)).sum()
        })
        .collect()
}

/// Latent (D) of an entry from its pooled value: un-rotated, what the index key is made from.
pub fn latent(pooled: &[f32], norm: &[f32], eps: f32) -> Vec<f32> {
    rms_norm(pooled, norm, eps)
}

/// Global entry (D): the latent, rope at the first position of its group.
pub fn entry(latent: &[f32], group_start: u32, freqs: &[f32]) -> Vec<f32> {
    let mut entry = latent.to_vec();
    rotate(&mut entry, group_start, freqs, false);
    entry
}

/// Index key (D_i) of an entry from its un-rotated latent (D): `wk`, norm, rope at the first position of its group.
pub fn index_key(latent: &[f32], wk: &Matrix, norm: &[f32], eps: f32, group_start: u32, freqs: &[f32]) -> Vec<f32> {
    let mut key = rms_norm(&wk.matvec(latent), norm, eps);
    rotate(&mut key, group_start, freqs, false);
    key
}

/// Index queries (H_i, D_i) of a token from the rows of `indexer.wq_b`: rope at its position, head by head.
pub fn index_query(projected: &[f32], head_dim: usize, position: u32, freqs: &[f32]) -> Vec<f32> {
    let mut query = projected.to_vec();
    rotate_heads(&mut query, head_dim, position, freqs, false);
    query
}
