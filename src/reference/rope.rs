//! Rotary embedding: adjacent pairs of the trailing channels (`numerics.md` §4).

use crate::config::Config;

/// Frequencies of a layer, `d_r / 2` of them: θ and no scaling for window-only layers, the compressed θ with YaRN for
/// layers with a ratio. In f32, as the models were trained.
pub fn frequencies(config: &Config, compressed: bool) -> Vec<f32> {
    let d = config.qk_rope_head_dim;
    let theta = if compressed { config.compress_rope_theta } else { config.rope_theta };
    let base = |j: usize| {
        let exponent = (2 * j) as f32 / d as f32;
        1.0 / (theta as f32 as f64).powf(exponent as f64) as f32
    };
    if !compressed {
        return (0..d / 2).map(base).collect();
    }
    let yarn = &config.yarn;
    // The (fractional) pair whose wave turns `rotations` times within the original context.
    let pair = |rotations: f64| {
        let length = yarn.original_max_position_embeddings as f64;
        d as f64 * (length / (rotations * 2.0 * std::f64::consts::PI)).ln() / (2.0 * theta.ln())
    };
    let low = pair(yarn.beta_fast).floor().max(0.0);
    let high = pair(yarn.beta_slow).ceil().min(d as f64 - 1.0);
    let width = (high - low).max(1e-3) as f32;
    (0..d / 2)
        .map(|j| {
            let (f, ramp) = (base(j), ((j as f32 - low as f32) / width).clamp(0.0, 1.0));
            f / yarn.factor as f32 * ramp + f * (1.0 - ramp)
        })
        .collect()
}

/// Cosine and sine of `position * frequency`: the angle rounded to f32, its functions exact and then rounded.
pub fn turn(position: u32, frequency: f32) -> (f32, f32) {
    let (sin, cos) = ((position as f32 * frequency) as f64).sin_cos();
    (cos as f32, sin as f32)
}

/// Rotates the last `2 * freqs.len()` channels of `x` by the position, or back by it.
pub fn rotate(x: &mut [f32], position: u32, freqs: &[f32], inverse: bool) {
    let first = x.len() - 2 * freqs.len();
    for (pair, &frequency) in x[first..].chunks_exact_mut(2).zip(freqs) {
        let (cos, sin) = turn(position, frequency);
        let sin = if inverse { -sin } else { sin };
        let (a, b) = (pair[0], pair[1]);
        pair[0] = a * cos - b * sin;
        pair[1] = a * sin + b * cos;
    }
}

/// [`rotate`] for every head of `x`, heads of `head_dim` channels one after the other.
pub fn rotate_heads(x: &mut [f32], head_dim: usize, position: u32, freqs: &[f32], inverse: bool) {
    x.chunks_exact_mut(head_dim).for_each(|head| rotate(head, position, freqs, inverse));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inverse_turns_back_and_leading_channels_stay() {
        let x: Vec<f32> = (0..10).map(|i| i as f32 - 4.5).collect();
        let freqs = [1.0, 0.1, 1e-4];
        for position in [0, 1, 65_537, 1_048_575] {
            let mut y = x.clone();
            rotate(&mut y, position, &freqs, false);
            assert_eq!(y[..4], x[..4]);
            let (cos, sin) = turn(position, freqs[1]);
            assert_eq!(y[6..8], [x[6] * cos - x[7] * sin, x[6] * sin + x[7] * cos]);
            rotate(&mut y, position, &freqs, true);
            assert!(x.iter().zip(&y).all(|(a, b)| (a - b).abs() < 1e-6));
        }
    }
}
