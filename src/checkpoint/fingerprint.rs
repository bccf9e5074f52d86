//! What tells one model from another without reading all of it.

use std::fmt;

use serde_json::Value;

use super::{Checkpoint, Tensor};
use crate::store::hash16;

/// Bytes of a sample of a tensor.
const SAMPLE: usize = 1024;

/// The identity of a model: what it is, what it weighs, how it reads. Caches made with one are of no use to another.
///
/// Each part is the first 16 bytes of a BLAKE3 hash. That of the weights covers every tensor's name, format and shape, and
/// up to three samples of 1 KiB of its bytes and of its scales: hashing hundreds of gigabytes whenever a model opens is
/// no option. Two checkpoints that differ in none of that, but elsewhere, count as the same.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint {
    /// `config.json`, whatever the order of its fields and its blanks.
    pub config: [u8; 16],
    /// Names, formats, shapes and samples of all tensors.
    pub weights: [u8; 16],
    /// The bytes of `tokenizer.json`; zeros where there is none.
    pub tokenizer: [u8; 16],
}

impl Fingerprint {
    /// Of a checkpoint and the bytes of its `tokenizer.json`.
    pub fn new(checkpoint: &Checkpoint, tokenizer: Option<&[u8]>) -> Self {
        let mut weights = blake3::Hasher::new();
        for tensor in checkpoint.names().filter_map(|name| checkpoint.tensor(name).ok()) {
            hash_tensor(&mut weights, &tensor);
        }
        Self {
            config: checkpoint.config_hash,
            weights: *weights.finalize().as_bytes().first_chunk().expect("a hash has 32 bytes"),
            tokenizer: tokenizer.map_or([0; 16], hash16),
        }
    }

    /// The parts with their names.
    pub fn parts(&self) -> [(&'static str, [u8; 16]); 3] {
        [("config", self.config), ("weights", self.weights), ("tokenizer", self.tokenizer)]
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("Fingerprint");
        for (name, part) in self.parts() {
            fields.field(name, &format_args!("{:032x}", u128::from_be_bytes(part)));
        }
        fields.finish()
    }
}

fn hash_tensor(hasher: &mut blake3::Hasher, tensor: &Tensor<'_>) {
    let mut number = |n: usize| {
        hasher.update(&(n as u64).to_le_bytes());
    };
    number(tensor.name.len());
    number(tensor.format as usize);
    number(tensor.shape.len());
    tensor.shape.iter().for_each(|&n| number(n));
    hasher.update(tensor.name.as_bytes());
    for bytes in [Some(tensor.data), tensor.scales.map(|(scales, _)| scales)].into_iter().flatten() {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        if bytes.len() <= 3 * SAMPLE {
            hasher.update(bytes);
        } else {
            let last = bytes.len() - SAMPLE;
            for at in [0, last / 2, last] {
                hasher.update(&bytes[at..at + SAMPLE]);
            }
        }
    }
}

/// The hash of a `config.json` that has been parsed before.
pub(super) fn config_hash(json: &str) -> [u8; 16] {
    let mut text = String::new();
    write_canonical(&serde_json::from_str(json).unwrap_or_default(), &mut text);
    hash16(text.as_bytes())
}

/// JSON without blanks, fields in the order of their names.
fn write_canonical(value: &Value, text: &mut String) {
    let mut list = |brackets: [char; 2], items: Vec<(Option<&String>, &Value)>| {
        text.push(brackets[0]);
        for (i, (name, item)) in items.into_iter().enumerate() {
            if i > 0 {
                text.push(',');
            }
            if let Some(name) = name {
                text.push_str(&Value::from(name.as_str()).to_string());
                text.push(':');
            }
            write_canonical(item, text);
        }
        text.push(brackets[1]);
    };
    match value {
        Value::Object(map) => {
            let mut fields: Vec<_> = map.iter().map(|(name, value)| (Some(name), value)).collect();
            fields.sort_by_key(|(name, _)| *name);
            list(['{', '}'], fields);
        }
        Value::Array(items) => list(['[', ']'], items.iter().map(|item| (None, item)).collect()),
        other => text.push_str(&other.to_string()),
    }
}
