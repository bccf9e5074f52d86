//! Which drafted tokens stand, and the token after them (`numerics.md` §13): the text is the model's, whatever the draft says.
//!
//! A drafted token d comes from the distribution q of its place, and the model's row before it has p. It is accepted with
//! probability `min(1, p(d) / q(d))`; the token in place of the first that is refused comes from the positive part of `p - q`, the
//! one after all of them from p. What comes out has distribution p, exactly: all of it is integer arithmetic on the probabilities
//! that a token is drawn from without a draft.
//!
//! A place has a counter, that of the token drawn there, and three streams of random numbers: one draws what is not drafted, as
//! without a draft; one draws what is; one accepts. When a token is refused, later places have told nothing to the text, so their
//! numbers may be drawn again.

use super::sample;
use crate::sampling::Sampling;

/// Stream of the drafted tokens.
const DRAFTED: u32 = 0x9e37_79b9;
/// Stream of their acceptance.
const ACCEPTED: u32 = 0x3c6e_f372;

/// A token that a draft proposes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drafted {
    /// The token.
    pub token: u32,
    /// The integer probabilities that it was drawn from (V); none at temperature 0.
    pub probabilities: Vec<u32>,
}

impl Drafted {
    /// The token of a row of a draft's logits (V), or none when one is NaN or infinite: what cannot be drawn is not drafted.
    /// `counter` is that of the token's place.
    pub fn draw(logits: &[f32], settings: &Sampling, counter: u32) -> Option<Self> {
        if settings.temperature == 0.0 {
            return sample::greedy(logits).map(|token| Self { token, probabilities: vec![] });
        }
        let probabilities = sample::distribution(logits, settings)?;
        let random = sample::random_of(settings.seed, DRAFTED, counter);
        let token = sample::pick(&probabilities, probabilities.iter().sum(), random);
        Some(Self { token, probabilities })
    }
}

/// What became of drafted tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// Drafted tokens that stand, from the first on.
    pub accepted: usize,
    /// The token after them; none when the row it would come from has a logit that is NaN or infinite.
    pub next: Option<u32>,
}

/// Judges drafted tokens by the model's logits (V) of the row before each of them, and of the row after them all. `counter` is
/// that of the first drafted token.
pub fn verify(logits: &[Vec<f32>], drafted: &[Drafted], settings: &Sampling, counter: u32) -> Verdict {
    assert_eq!(logits.len(), drafted.len() + 1, "a row before each drafted token, and one after them");
    for (place, drafted) in drafted.iter().enumerate() {
        match judge(&logits[place], drafted, settings, counter.wrapping_add(place as u32)) {
            Some(token) if token == drafted.token => {}
            next => return Verdict { accepted: place, next },
        }
    }
    let accepted = drafted.len();
    let next = sample::sample(&logits[accepted], settings, counter.wrapping_add(accepted as u32));
    Verdict { accepted, next }
}

/// The token of a place: the drafted one, if it stands.
fn judge(logits: &[f32], drafted: &Drafted, settings: &Sampling, counter: u32) -> Option<u32> {
    if settings.temperature == 0.0 {
        return sample::greedy(logits);
    }
    let (p, q) = (sample::distribution(logits, settings)?, &drafted.probabilities);
    let (stands, all) = acceptance(&p, q, drafted.token);
    if sample::mulhi(sample::random_of(settings.seed, ACCEPTED, counter), all) < stands {
        return Some(drafted.token);
    }
    let rest = residual(&p, q);
    Some(sample::pick(&rest, rest.iter().sum(), sample::random(settings.seed, counter)))
}

/// `p(d) / q(d)` as a fraction; above 1 it is as good as 1. `p` and `q` are integer probabilities (V) with sums below 2^32.
pub fn acceptance(p: &[u32], q: &[u32], drafted: u32) -> (u64, u64) {
    let (p_sum, q_sum) = (sum(p), sum(q));
    (p[drafted as usize] as u64 * q_sum, q[drafted as usize] as u64 * p_sum)
}

/// The positive part of `p - q` as integer weights (V), whose sum is below 2^64.
pub fn residual(p: &[u32], q: &[u32]) -> Vec<u64> {
    let (p_sum, q_sum) = (sum(p), sum(q));
    p.iter().zip(q).map(|(&p, &q)| (p as u64 * q_sum).saturating_sub(q as u64 * p_sum)).collect()
}

fn sum(weights: &[u32]) -> u64 {
    weights.iter().map(|&w| w as u64).sum()
}
