//! CPU twin of `route`: which experts a row goes to (`numerics.md` §9).

use super::math::softplus;
use super::select::order_key;

/// Experts of one row.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    /// The k chosen experts, best first.
    pub ids: Vec<u32>,
    /// Their weights (k).
    pub weights: Vec<f32>,
    /// Scores of all experts (E).
    pub scores: Vec<f32>,
}

/// Chooses `k` experts by `sqrt(softplus(logit)) + bias`, equal ones by lower id. Weights are the scores without bias,
/// divided by their sum when `normalise`, times `scale`. `logits` and `bias` are (E).
pub fn route(logits: &[f32], bias: &[f32], k: usize, normalise: bool, scale: f32) -> Route {
    let scores: Vec<f32> = logits.iter().map(|&x| softplus(x).sqrt()).collect();
    let key = |e: u32| order_key(scores[e as usize] + bias[e as usize]);
    let mut ids: Vec<u32> = (0..scores.len() as u32).collect();
    ids.sort_by_key(|&e| (std::cmp::Reverse(key(e)), e));
    ids.truncate(k);
    let mut weights: Vec<f32> = ids.iter().map(|&e| scores[e as usize]).collect();
    if normalise {
        let sum = weights.iter().sum::<f32>() + 1e-20;
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    weights.iter_mut().for_each(|w| *w *= scale);
    Route { ids, weights, scores }
}
