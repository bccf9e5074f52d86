//! CPU twin of `sample`: the next token from a row of logits.
//!
//! Probabilities are 31-bit integers. What is made of them (top-k, top-p, the draw) is integer arithmetic, so that equal
//! probabilities give equal tokens on every device.

use std::cmp::Reverse;

use super::math::is_non_finite;
use super::select::order_key;
use crate::sampling::Sampling;

/// The integer probabilities that a row of logits (V) leaves to draw from, or none when one is NaN or infinite. `settings` have a
/// temperature.
pub fn distribution(logits: &[f32], settings: &Sampling) -> Option<Vec<u32>> {
    let best = greedy(logits)?;
    let probabilities = fixed_point(logits, logits[best as usize], settings.temperature);
    Some(keep(&probabilities, settings.top_k, settings.top_p))
}

/// The token of a row of logits (V), or none when one is NaN or infinite. `counter` is the number of tokens sampled
/// before.
pub fn sample(logits: &[f32], settings: &Sampling, counter: u32) -> Option<u32> {
    if settings.temperature == 0.0 {
        return greedy(logits);
    }
    let kept = distribution(logits, settings)?;
    Some(pick(&kept, kept.iter().sum(), random(settings.seed, counter)))
}

/// The best logit's id, the lower one among equals, or none when a logit is NaN or infinite.
pub fn greedy(logits: &[f32]) -> Option<u32> {
    if logits.iter().any(|&l| is_non_finite(l)) {
        return None;
    }
    (0..logits.len() as u32).min_by_key(|&i| Reverse(order_key(logits[i as usize])))
}

/// `floor(2^31 w_i / Σ w)` with `w_i = exp((l_i - max) / temperature)`.
pub fn fixed_point(logits: &[f32], max: f32, temperature: f32) -> Vec<u32> {
    let weights: Vec<f32> = logits.iter().map(|l| ((l - max) / temperature).exp()).collect();
    let sum: f32 = weights.iter().sum();
    weights.iter().map(|w| (w / sum * 2f32.powi(31)) as u32).collect()
}

/// Draws an id from integer probabilities whose sum is below 2^32. Order of likelihood: higher probability, then lower
/// id. Top-k keeps the first k of that order (0: all); top-p the shortest beginning of what is left whose sum reaches
/// `ceil(top_p · sum)`, that product in f32 (1 and above: all). The draw is `⌊random · sum / 2^32⌋`, and the token the
/// first in id order at which the running sum of kept probabilities exceeds it.
pub fn draw(probabilities: &[u32], top_k: u32, top_p: f32, random: u32) -> u32 {
    let kept = keep(probabilities, top_k, top_p);
    pick(&kept, kept.iter().sum(), random)
}

/// The integer probabilities of what top-k and top-p keep, zeros elsewhere.
pub fn keep(probabilities: &[u32], top_k: u32, top_p: f32) -> Vec<u32> {
    let mut kept: Vec<u32> = (0..probabilities.len() as u32).collect();
    let p = |id: u32| probabilities[id as usize];
    if top_k > 0 || top_p < 1.0 {
        kept.sort_by_key(|&id| (Reverse(p(id)), id));
    }
    if top_k > 0 {
        kept.truncate(top_k as usize);
    }
    if top_p < 1.0 {
        let total: u32 = kept.iter().map(|&id| p(id)).sum();
        let enough = ((top_p * total as f32).ceil() as u32).clamp(1, total);
        let mut sum = 0;
        let length = kept.iter().position(|&id| {
            sum += p(id);
            sum >= enough
        });
        kept.truncate(length.map_or(kept.len(), |last| last + 1));
    }
    let mut weights = vec![0; probabilities.len()];
    kept.iter().for_each(|&id| weights[id as usize] = p(id));
    weights
}

/// The first id at which the running sum of integer weights exceeds `⌊random · total / 2^32⌋`. `total` is their sum.
pub fn pick<W: Copy + Into<u64>>(weights: &[W], total: W, random: u32) -> u32 {
    let target = mulhi(random, total.into());
    let mut sum = 0;
    let drawn = weights.iter().position(|&weight| {
        sum += weight.into();
        sum > target
    });
    drawn.expect("the running sum ends at the total, which exceeds the target") as u32
}

/// `⌊a b / 2^32⌋`.
pub fn mulhi(a: u32, b: u64) -> u64 {
    ((a as u128 * b as u128) >> 32) as u64
}

/// The random number of a draw: `pcg(counter + pcg(high seed + pcg(low seed)))`, sums modulo 2^32.
pub fn random(seed: u64, counter: u32) -> u32 {
    pcg(counter.wrapping_add(pcg(((seed >> 32) as u32).wrapping_add(pcg(seed as u32)))))
}

/// The random number of another stream of draws than [`random`]'s: one hash more, of the stream. `stream` is a number that no
/// counter comes near.
pub fn random_of(seed: u64, stream: u32, counter: u32) -> u32 {
    let seed = pcg(((seed >> 32) as u32).wrapping_add(pcg(seed as u32)));
    pcg(counter.wrapping_add(pcg(stream.wrapping_add(seed))))
}

/// The PCG-RXS-M-XS hash of 32 bits (Jarzynski and Olano, "Hash Functions for GPU Rendering").
pub fn pcg(value: u32) -> u32 {
    let state = value.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
    let word = ((state >> ((state >> 28) + 4)) ^ state).wrapping_mul(277_803_737);
    (word >> 22) ^ word
}
