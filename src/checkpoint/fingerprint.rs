//! What tells one model from another without reading all of it.

use std::fmt;

use futures::{FutureExt, StreamExt};
use serde_json::Value;

use super::Checkpoint;
use crate::store::hash16;
use crate::Result;

/// Bytes of a sample of a tensor.
const SAMPLE: u64 = 1024;
/// Tensors that are sampled at a time.
const READS: usize = 16;

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
    /// Of a checkpoint in memory and the bytes of its `tokenizer.json`.
    ///
    /// # Panics
    /// When files of the checkpoint are sources: they are sampled by [`Fingerprint::read`].
    pub fn new(checkpoint: &Checkpoint, tokenizer: Option<&[u8]>) -> Self {
        let read = Self::read(checkpoint, tokenizer).now_or_never();
        read.and_then(Result::ok).expect("the checkpoint is in memory")
    }

    /// Of a checkpoint wherever it is, and the bytes of its `tokenizer.json`.
    ///
    /// # Errors
    /// The sources'.
    pub async fn read(checkpoint: &Checkpoint, tokenizer: Option<&[u8]>) -> Result<Self> {
        let mut weights = blake3::Hasher::new();
        let names = futures::stream::iter(checkpoint.names());
        let mut sampled = names.map(|name| sample(checkpoint, name)).buffered(READS);
        while let Some(bytes) = sampled.next().await {
            weights.update(&bytes?);
        }
        Ok(Self {
            config: checkpoint.config_hash,
            weights: *weights.finalize().as_bytes().first_chunk().expect("a hash has 32 bytes"),
            tokenizer: tokenizer.map_or([0; 16], hash16),
        })
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

/// What the hash covers of a tensor.
async fn sample(checkpoint: &Checkpoint, name: &str) -> Result<Vec<u8>> {
    let tensor = checkpoint.weight(name)?;
    let mut sample = vec![];
    let mut number = |n: u64| sample.extend_from_slice(&n.to_le_bytes());
    number(tensor.name.len() as u64);
    number(tensor.format as u64);
    number(tensor.shape.len() as u64);
    tensor.shape.iter().for_each(|&n| number(n as u64));
    sample.extend_from_slice(tensor.name.as_bytes());
    for bytes in [Some(tensor.data), tensor.scales.map(|(scales, _)| scales)].into_iter().flatten() {
        let length = bytes.len();
        sample.extend_from_slice(&length.to_le_bytes());
        if length <= 3 * SAMPLE {
            sample.extend_from_slice(&bytes.read(0..length).await?);
        } else {
            let last = length - SAMPLE;
            for at in [0, last / 2, last] {
                sample.extend_from_slice(&bytes.read(at..at + SAMPLE).await?);
            }
        }
    }
    Ok(sample)
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
