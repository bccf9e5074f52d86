//! CPU twin of `tap`: what the draft stages are told of a row at a target layer (`numerics.md` §13).

/// The mean (h) over `n` streams (n, h).
pub fn mean(streams: &[f32], n: usize) -> Vec<f32> {
    let h = streams.len() / n;
    (0..h).map(|c| streams.iter().skip(c).step_by(h).sum::<f32>() / n as f32).collect()
}
