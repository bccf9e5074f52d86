//! CPU twin of `attend`: one softmax over window keys, selected entries and the sink (`numerics.md` §4).

use super::math::dot;
use super::rope::rotate_heads;

/// Output (H, D) before the inverse rope. `q` is (H, D), rotated; every key (D) is also its value; `sink` (H) is a logit
/// that only enters the denominator, unscaled.
pub fn attend(q: &[f32], keys: &[&[f32]], sink: &[f32], scale: f32) -> Vec<f32> {
    let d = q.len() / sink.len();
    let mut out = vec![0.0; q.len()];
    for ((q, out), &sink) in q.chunks_exact(d).zip(out.chunks_exact_mut(d)).zip(sink) {
        let logits: Vec<f32> = keys.iter().map(|key| dot(q, key) * scale).collect();
        let max = logits.iter().fold(sink, |m, &l| m.max(l));
        let weights: Vec<f32> = logits.iter().map(|l| (l - max).exp()).collect();
        let sum = weights.iter().sum::<f32>() + (sink - max).exp();
        for (key, weight) in keys.iter().zip(&weights) {
            let p = weight / sum;
            out.iter_mut().zip(*key).for_each(|(out, k)| *out += p * k);
        }
    }
    out
}

/// The whole kernel: [`attend`], then every head rotated back by the query's position.
pub fn attend_and_rotate_back(
    q: &[f32],
    keys: &[&[f32]],
    sink: &[f32],
    scale: f32,
    position: u32,
    freqs: &[f32],
) -> Vec<f32> {
    let mut out = attend(q, keys, sink, scale);
    rotate_heads(&mut out, q.len() / sink.len(), position, freqs, true);
    out
}
