//! CPU twin of `engram_gather`: which table rows a token's n-grams name (`numerics.md` §8).

/// Stands in a history for a token before the text.
pub const BEFORE_TEXT: u32 = u32::MAX;

/// Compressed ids of the newest N tokens. `recent` holds raw ids, newest first; [`BEFORE_TEXT`] and all that is older
/// become `pad`, itself a compressed id.
pub fn compress(recent: &[u32], token_map: &[u32], pad: u32) -> Vec<u32> {
    let mut within = true;
    recent
        .iter()
        .map(|&id| {
            within &= id != BEFORE_TEXT;
            if within {
                token_map[id as usize]
            } else {
                pad
            }
        })
        .collect()
}

/// Rows of a layer's table, (N - 1) · heads of them, in the order (n-gram size, head). `compressed` and `multipliers` are
/// (N), newest token first; `primes` and `offsets` ((N - 1) · heads).
pub fn hash(compressed: &[u32], multipliers: &[u64], primes: &[u32], offsets: &[u32]) -> Vec<u32> {
    let heads = primes.len() / (multipliers.len() - 1);
    let mut mixed = compressed[0] as u64 * multipliers[0];
    let mut rows = Vec::with_capacity(primes.len());
    for s in 1..multipliers.len() {
        mixed ^= compressed[s] as u64 * multipliers[s];
        let these = (s - 1) * heads..s * heads;
        let slots = primes[these.clone()].iter().zip(&offsets[these]);
        rows.extend(slots.map(|(&prime, offset)| (mixed % prime as u64) as u32 + offset));
    }
    rows
}
