//! What Engram needs besides its tables: the compressed token ids, and each layer's hash constants (`numerics.md` §8).
//! No file has them. They follow from config and tokenizer, and are refused when they disagree with the config.

use std::collections::{HashMap, HashSet};

use unicode_normalization::char::is_combining_mark;
use unicode_normalization::UnicodeNormalization;

use super::numpy_random::Pcg64;
use super::tokenizer::{error, Tokenizer};
use crate::config::{Config, EngramConfig};
use crate::{Error, Result};

/// Token map and hash constants of all Engram layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NgramTables {
    /// Compressed id of every token id; empty when the model has no Engram.
    pub token_map: Vec<u32>,
    /// Compressed id of what lies before the text.
    pub pad: u32,
    /// One entry an Engram layer, in the order of `engram_layer_ids`.
    pub layers: Vec<NgramLayer>,
}

/// Hash constants of a layer. The row of n-gram size s + 1 and head j, with slot i = (s - 1) · heads + j, is
/// `offsets[i] + x_s mod primes[i]`, where x_s is the XOR of `compressed id of token t - k · multipliers[k]` for k ≤ s.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NgramLayer {
    /// One a position back, N in all. A product with a compressed id is below 2^63.
    pub multipliers: Vec<u64>,
    /// One a slot, (N - 1) · heads in all.
    pub primes: Vec<u32>,
    /// First row of each slot.
    pub offsets: Vec<u32>,
}

impl NgramTables {
    /// Derives them. Fails when the tokenizer or the row counts are not those that the config was made for.
    pub fn new(config: &Config, tokenizer: &Tokenizer) -> Result<Self> {
        let Some(engram) = &config.engram else {
            return Ok(Self { token_map: Vec::new(), pad: 0, layers: Vec::new() });
        };
        if tokenizer.vocab_size() > config.vocab_size {
            let found = format!("ids up to {}", tokenizer.vocab_size() - 1);
            return Err(error(found, format!("ids below vocab_size {}", config.vocab_size)));
        }
        let (token_map, keys) = token_map(config.vocab_size, tokenizer);
        if keys != engram.compressed_vocab_size {
            let allowed = format!("{keys}, the distinct keys of the tokenizer");
            return Err(Error::config("engram_compressed_vocab_size", engram.compressed_vocab_size, allowed));
        }
        let primes = primes(engram)?;
        let layers = engram.layer_ids.iter().zip(primes).map(|(&id, primes)| {
            let offsets = primes.iter().scan(0, |next, &prime| Some(std::mem::replace(next, *next + prime)));
            NgramLayer { multipliers: multipliers(id, engram), offsets: offsets.collect(), primes }
        });
        Ok(Self { pad: token_map[engram.pad_token_id as usize], layers: layers.collect(), token_map })
    }
}

/// Compressed ids: tokens with the same key share one, numbered by first appearance. And how many there are.
fn token_map(vocab_size: usize, tokenizer: &Tokenizer) -> (Vec<u32>, usize) {
    let mut numbers: HashMap<String, u32> = HashMap::new();
    let key = |id: u32| match (tokenizer.bytes(id), tokenizer.id_to_token(id)) {
        (Ok(bytes), Ok(token)) => key(&String::from_utf8_lossy(bytes), token),
        // The embedding may have more rows than the tokenizer has ids: those decode to nothing.
        _ => String::new(),
    };
    let map = (0..vocab_size as u32).map(|id| {
        let next = numbers.len() as u32;
        *numbers.entry(key(id)).or_insert(next)
    });
    (map.collect(), numbers.len())
}

/// The key of a token: its decoded text, normalised; its vocabulary string where it is no text of its own.
fn key(text: &str, token: &str) -> String {
    if text.contains('\u{fffd}') {
        return token.to_string();
    }
    let folded: String = text.nfkc().nfd().filter(|&c| !is_combining_mark(c)).flat_map(char::to_lowercase).collect();
    let mut spaced = String::with_capacity(folded.len());
    let blank = |c: char| matches!(c, ' ' | '\t' | '\r' | '\n');
    for c in folded.chars() {
        match blank(c) {
            true if spaced.ends_with(' ') => {}
            true => spaced.push(' '),
            false => spaced.push(c),
        }
    }
    match spaced.as_str() {
        " " => spaced,
        other if other.trim().is_empty() => text.to_string(),
        other => other.trim().to_string(),
    }
}

/// The primes of every layer: for each n-gram size the next ones from `engram_vocab_size` on that nobody has yet.
fn primes(engram: &EngramConfig) -> Result<Vec<Vec<u32>>> {
    let mut taken = HashSet::new();
    let mut layers = Vec::new();
    for (slot, &rows) in engram.num_embeddings.iter().enumerate() {
        let mut primes = Vec::new();
        let mut sum = 0u64;
        let mismatch = |allowed: String| Error::config(format!("engram_num_embeddings[{slot}]"), rows, allowed);
        for _ in 2..=engram.max_ngram_size {
            let mut candidates = engram.vocab_size as u64..;
            for _ in 0..engram.n_heads {
                let prime = candidates.by_ref().find(|&n| is_prime(n) && !taken.contains(&n)).unwrap_or(u64::MAX);
                taken.insert(prime);
                sum = sum.saturating_add(prime);
                // Also what bounds this search, whatever the config says.
                if sum > rows as u64 {
                    return Err(mismatch(format!("the sum of the layer's primes, at least {sum}")));
                }
                primes.push(prime as u32);
            }
        }
        if sum != rows as u64 {
            return Err(mismatch(format!("{sum}, the sum of the layer's primes")));
        }
        layers.push(primes);
    }
    Ok(layers)
}

fn is_prime(n: u64) -> bool {
    n >= 2 && (2..).take_while(|d| d * d <= n).all(|d| !n.is_multiple_of(d))
}

/// The odd multipliers of a layer: no product with a compressed id overflows an i64.
fn multipliers(layer: usize, engram: &EngramConfig) -> Vec<u64> {
    let bound = (i64::MAX as u64 / engram.compressed_vocab_size as u64 / 2).max(1);
    let mut rng = Pcg64::seeded(10007 * layer as u64);
    (0..engram.max_ngram_size).map(|_| rng.below(bound) * 2 + 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_fold_case_accents_and_blanks() {
        assert_eq!(key(" The", "ĠThe"), "the");
        assert_eq!(key("É\u{301}", ""), "e");
        assert_eq!(key("ﬁ", ""), "fi");
        assert_eq!(key("ΣΑΣ", ""), "σασ"); // letter by letter: no final sigma
        assert_eq!(key(" \t\n", ""), " ");
        assert_eq!(key("a\t \nb", ""), "a b");
        assert_eq!(key("\u{301}", ""), "\u{301}"); // nothing left: the text itself
        assert_eq!(key("\u{fffd}", "Ã"), "Ã");
        assert_eq!(key("", ""), "");
    }
}
