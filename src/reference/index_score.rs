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

/// The queries of a row, laid out for many keys: [`Scorer::score`] is [`score`] bit for bit, in a fraction of the time. Heads lie beside
/// each other, so that a sum over channels needs no sum over lanes.
pub struct Scorer {
    /// (groups of LANES heads, D_i); zeros where there is no head.
    queries: Vec<[f32; LANES]>,
    weights: Vec<f32>,
    head_dim: usize,
}

/// Heads of a group.
const LANES: usize = 4;

impl Scorer {
    /// `queries` is (H_i, D_i), `weights` (H_i).
    pub fn new(queries: &[f32], weights: Vec<f32>, head_dim: usize) -> Self {
        let heads = queries.len() / head_dim;
        let value = |head: usize, c: usize| if head < heads { queries[head * head_dim + c] } else { 0.0 };
        let groups = (0..heads).step_by(LANES);
        let queries = groups.flat_map(|first| (0..head_dim).map(move |c| (first, c)));
        let queries = queries.map(|(first, c)| std::array::from_fn(|lane| value(first + lane, c))).collect();
        Self { queries, weights, head_dim }
    }

    /// How well the entry with this key (D_i) answers.
    pub fn score(&self, key: &[f32]) -> f32 {
        let groups = self.queries.chunks_exact(self.head_dim).zip(self.weights.chunks(LANES));
        groups.fold(0.0, |sum, (queries, weights)| {
            let blocks = queries.chunks(BLOCK).zip(key.chunks(BLOCK));
            let dots = blocks.map(|(q, k)| dots(q, k)).reduce(plus).expect("a key has channels");
            weights.iter().zip(dots).fold(sum, |sum, (w, dot)| sum + w * dot.max(0.0))
        })
    }
}

fn plus(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
    std::array::from_fn(|lane| a[lane] + b[lane])
}

/// The dot products of a block, each summed as [`dot`] does it.
fn dots(queries: &[[f32; LANES]], key: &[f32]) -> [f32; LANES] {
    let product = |i: usize| queries[i].map(|q| q * key[i]);
    // A whole block, without a loop: no sum leaves its register.
    if let (Ok(queries), Ok(key)) = (<&[[f32; LANES]; BLOCK]>::try_from(queries), <&[f32; BLOCK]>::try_from(key)) {
        let product = |i: usize| queries[i].map(|q| q * key[i]);
        let of_16 = |i: usize| plus(product(i), product(i + 16));
        let of_8 = |i: usize| plus(of_16(i), of_16(i + 8));
        let of_4 = |i: usize| plus(of_8(i), of_8(i + 4));
        return plus(plus(of_4(0), of_4(2)), plus(of_4(1), of_4(3)));
    }
    let whole = key.len() / 16 * 16;
    let mut sums = [[0.0; LANES]; 16];
    (0..whole).for_each(|i| sums[i % 16] = plus(sums[i % 16], product(i)));
    for half in [8, 4, 2, 1] {
        (0..half).for_each(|i| sums[i] = plus(sums[i], sums[i + half]));
    }
    plus(sums[0], (whole..key.len()).map(product).fold([0.0; LANES], plus))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scorer_gives_the_bits_of_score() {
        let mut state = 7u32;
        let mut value = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 2f32.powi(23) - 1.0
        };
        for (heads, head_dim) in [(1, 1), (4, 64), (3, 32), (5, 7), (8, 128), (9, 48), (2, 100), (32, 33)] {
            let queries: Vec<f32> = (0..heads * head_dim).map(|_| value()).collect();
            let weights: Vec<f32> = (0..heads).map(|_| value()).collect();
            let scorer = Scorer::new(&queries, weights.clone(), head_dim);
            for _ in 0..20 {
                let key: Vec<f32> = (0..head_dim).map(|_| value()).collect();
                let (found, wanted) = (scorer.score(&key), score(&queries, &weights, &key));
                assert_eq!(found.to_bits(), wanted.to_bits(), "{heads} heads of {head_dim}: {found} for {wanted}");
            }
        }
    }
}
