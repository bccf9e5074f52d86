//! CPU twin of `boundary`: single-pass hyper-connections (`numerics.md` §2).

use std::ops::Range;

use super::math::{add, dot, sigmoid, Matrix};
use crate::config::Config;

/// Weights of one mix. With n streams of h channels: projection (n(n + 2), n h), scale (3), base (n(n + 2)).
#[derive(Debug, Clone, Default)]
pub struct MixWeights {
    /// `hc_*_fn`: rows for pre (n), post (n), comb (n²).
    pub projection: Matrix,
    /// `hc_*_scale`: one factor each for pre, post, comb.
    pub scale: Vec<f32>,
    /// `hc_*_base`.
    pub base: Vec<f32>,
}

/// What all mixes of a model have in common.
#[derive(Debug, Clone, Copy)]
pub struct MixShape {
    /// Residual streams, n.
    pub streams: usize,
    /// Column steps of the Sinkhorn iteration; row steps are one fewer.
    pub sinkhorn_iters: usize,
    /// Added to the mean square.
    pub rms_eps: f32,
    /// Added in the Sinkhorn iteration and to `pre`.
    pub hc_eps: f32,
}

impl MixShape {
    /// That of a config.
    pub fn new(config: &Config) -> Self {
        Self {
            streams: config.hc_mult,
            sinkhorn_iters: config.hc_sinkhorn_iters,
            rms_eps: config.rms_norm_eps,
            hc_eps: config.hc_eps,
        }
    }
}

/// A finished mix of one row.
#[derive(Debug, Clone, PartialEq)]
pub struct Mix {
    /// Weights that collapse the streams into the input of the NEXT sublayer (n).
    pub pre: Vec<f32>,
    /// Weights of this sublayer's output in each stream (n).
    pub post: Vec<f32>,
    /// (n, n) row-major: `comb[i * n + o]` is what input stream i gives to output stream o.
    pub comb: Vec<f32>,
}

/// Partial sums of the mix over some channels of every stream: n(n + 2) projections, then the sum of squares.
/// `streams` is (n, h).
pub fn partials(streams: &[f32], projection: &Matrix, n: usize, channels: Range<usize>) -> Vec<f32> {
    let h = streams.len() / n;
    let parts = |row: &[f32]| -> f32 {
        (0..n).map(|i| dot(&row[i * h..][channels.clone()], &streams[i * h..][channels.clone()])).sum()
    };
    projection.iter().map(parts).chain([parts(streams)]).collect()
}

/// Finishes a mix from its sums over all `channels` = n h channels.
pub fn finish(sums: &[f32], channels: usize, weights: &MixWeights, shape: MixShape) -> Mix {
    let MixShape { streams: n, sinkhorn_iters, rms_eps, hc_eps } = shape;
    let (projections, square_sum) = (&sums[..n * (n + 2)], sums[n * (n + 2)]);
    let factor = 1.0 / (square_sum / channels as f32 + rms_eps).sqrt();
    let scale = |i: usize| weights.scale[(i / n).min(2)];
    let l: Vec<f32> = projections.iter().enumerate().map(|(i, m)| m * factor * scale(i) + weights.base[i]).collect();

    let pre = l[..n].iter().map(|&x| sigmoid(x) + hc_eps).collect();
    let post = l[n..2 * n].iter().map(|&x| 2.0 * sigmoid(x)).collect();
    let mut comb = l[2 * n..].to_vec();
    for row in comb.chunks_exact_mut(n) {
        let max = row.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
        row.iter_mut().for_each(|x| *x = (*x - max).exp());
        let sum: f32 = row.iter().sum();
        row.iter_mut().for_each(|x| *x = *x / sum + hc_eps);
    }
    normalise_columns(&mut comb, n, hc_eps);
    for _ in 1..sinkhorn_iters {
        for row in comb.chunks_exact_mut(n) {
            let sum = row.iter().sum::<f32>() + hc_eps;
            row.iter_mut().for_each(|x| *x /= sum);
        }
        normalise_columns(&mut comb, n, hc_eps);
    }
    Mix { pre, post, comb }
}

/// Divides every column (fixed o) by its sum over the input streams.
fn normalise_columns(comb: &mut [f32], n: usize, eps: f32) {
    for o in 0..n {
        let sum = (0..n).map(|i| comb[i * n + o]).sum::<f32>() + eps;
        (0..n).for_each(|i| comb[i * n + o] /= sum);
    }
}

/// The mix of one row's streams (n, h).
pub fn mix(streams: &[f32], weights: &MixWeights, shape: MixShape) -> Mix {
    let n = shape.streams;
    finish(&partials(streams, &weights.projection, n, 0..streams.len() / n), streams.len(), weights, shape)
}

/// New streams: `R'_o = post_o y + Σ_i comb[i][o] R_i`. `streams` is (n, h), `y` (h).
pub fn expand(streams: &[f32], y: &[f32], mix: &Mix) -> Vec<f32> {
    let (n, h) = (mix.post.len(), y.len());
    let mut out = vec![0.0; n * h];
    for (o, out) in out.chunks_exact_mut(h).enumerate() {
        for (i, stream) in streams.chunks_exact(h).enumerate() {
            let c = mix.comb[i * n + o];
            out.iter_mut().zip(stream).for_each(|(out, r)| *out += c * r);
        }
        out.iter_mut().zip(y).for_each(|(out, y)| *out += mix.post[o] * y);
    }
    out
}

/// Input of a sublayer before its norm: `Σ_i pre_i R_i`. `streams` is (n, h), `pre` (n).
pub fn collapse(streams: &[f32], pre: &[f32]) -> Vec<f32> {
    let h = streams.len() / pre.len();
    let mut out = vec![0.0; h];
    for (stream, p) in streams.chunks_exact(h).zip(pre) {
        out.iter_mut().zip(stream).for_each(|(out, r)| *out += p * r);
    }
    out
}

/// Sum of a sublayer's output parts (parts, h), in order.
pub fn sum_parts(parts: &[f32], h: usize) -> Vec<f32> {
    let mut sum = parts[..h].to_vec();
    parts[h..].chunks_exact(h).for_each(|part| add(&mut sum, part));
    sum
}

/// The pre-mix before the first layer: stream 0 only.
pub fn first_pre(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i == 0) as u32 as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_of_the_mix_sum_to_one_and_slices_to_the_whole() {
        for n in [1, 3, 4] {
            let h = 10;
            let wave = |len: usize, step: f32| (0..len).map(|i| (i as f32 * step).sin()).collect::<Vec<f32>>();
            let projection = Matrix::new(n * (n + 2), n * h, wave(n * (n + 2) * n * h, 0.37));
            let weights = MixWeights { projection, scale: vec![0.9, 0.7, 0.8], base: wave(n * (n + 2), 1.3) };
            let shape = MixShape { streams: n, sinkhorn_iters: 20, rms_eps: 1e-20, hc_eps: 1e-6 };
            let streams = wave(n * h, 0.9);
            let whole = mix(&streams, &weights, shape);
            for o in 0..n {
                let column: f32 = (0..n).map(|i| whole.comb[i * n + o]).sum();
                assert!((column - 1.0).abs() < 1e-5);
            }
            let mut sums = partials(&streams, &weights.projection, n, 0..4);
            add(&mut sums, &partials(&streams, &weights.projection, n, 4..h));
            let sliced = finish(&sums, n * h, &weights, shape);
            assert!(whole.comb.iter().zip(&sliced.comb).all(|(a, b)| (a - b).abs() < 1e-5));
        }
    }

    #[test]
    fn expand_reads_the_mix_as_in_out() {
        let mix = Mix { pre: vec![1.0, 0.0], post: vec![2.0, 3.0], comb: vec![0.0, 1.0, 0.0, 0.0] };
        // Stream 0 goes to stream 1, and nothing goes to stream 0.
        assert_eq!(expand(&[5.0, 7.0], &[1.0], &mix), [2.0, 8.0]);
        assert_eq!(collapse(&[5.0, 7.0], &mix.pre), [5.0]);
    }
}
