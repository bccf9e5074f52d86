//! Byte-level BPE: text to ids by the `tokenizers` crate, ids to bytes by a table of our own.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use serde_json::Value;

use crate::{Error, Result};

/// The tokenizer of a checkpoint (`numerics.md` §15).
///
/// Control tokens are never made from user text: [`encode`](Self::encode) knows none of the added vocabulary.
pub struct Tokenizer {
    /// The BPE model without its added vocabulary.
    bpe: tokenizers::Tokenizer,
    /// Added tokens, longest first, so that the first that matches is the longest.
    added: Vec<(String, u32)>,
    ids: BTreeMap<String, u32>,
    /// By id: the token's string and bytes. Ids without a token have neither.
    tokens: Vec<Token>,
}

#[derive(Clone, Default)]
struct Token {
    text: String,
    bytes: Vec<u8>,
}

impl Tokenizer {
    /// Reads `tokenizer.json`, or the `tokenizer.json` of a folder.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_path_buf() };
        Self::from_bytes(&std::fs::read(&file).map_err(|e| Error::io(&file, e))?)
    }

    /// Parses the content of a `tokenizer.json`.
    pub fn from_bytes(json: &[u8]) -> Result<Self> {
        let mut root: Value =
            serde_json::from_slice(json).map_err(|e| error(format!("no JSON ({e})"), "a tokenizer.json"))?;
        let kind = |part: &str| root[part]["type"].as_str().unwrap_or("nothing").to_string();
        for (part, allowed) in [("model", "BPE"), ("decoder", "ByteLevel")] {
            if kind(part) != allowed {
                return Err(error(format!("{part} {}", kind(part)), format!("{part} {allowed}")));
            }
        }
        let normalizer = &root["normalizer"];
        if !normalizer.is_null() && normalizer["normalizers"].as_array().is_none_or(|parts| !parts.is_empty()) {
            return Err(error(format!("normalizer {}", kind("normalizer")), "no normalizer"));
        }

        let mut added = Vec::new();
        for token in std::mem::take(&mut root["added_tokens"]).as_array().into_iter().flatten() {
            let (content, id) = (token["content"].as_str(), token["id"].as_u64().and_then(|id| u32::try_from(id).ok()));
            match (content, id) {
                (Some(content), Some(id)) if !content.is_empty() => added.push((content.to_string(), id)),
                _ => return Err(error(format!("added token {token}"), "added tokens with content and id")),
            }
        }
        root["added_tokens"] = Value::Array(Vec::new());
        root["post_processor"] = Value::Null;

        // Added tokens that the model lists too leave its vocabulary: no text may reach them.
        let mut ids: BTreeMap<String, u32> = added.iter().cloned().collect();
        let vocab = root["model"]["vocab"].as_object_mut();
        for (text, id) in vocab.iter().flat_map(|v| v.iter()) {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
            let id = id.ok_or_else(|| error(format!("token {text:?} without an id"), "ids that are whole numbers"))?;
            ids.entry(text.clone()).or_insert(id);
        }
        if let Some(vocab) = vocab {
            added.iter().for_each(|(content, _)| drop(vocab.remove(content)));
        }

        let top = ids.values().max().map_or(0, |&id| id as usize + 1);
        // A sparse vocabulary is a broken one; and the table below has a place for every id.
        if top > 2 * ids.len() + 1024 {
            return Err(error(format!("ids up to {} for {} tokens", top - 1, ids.len()), "ids without large gaps"));
        }
        let mut tokens = vec![Token::default(); top];
        let byte_of = byte_alphabet();
        for (text, &id) in &ids {
            let token = &mut tokens[id as usize];
            if !token.text.is_empty() {
                let found = format!("id {id} for both {:?} and {text:?}", token.text);
                return Err(error(found, "one token an id"));
            }
            // A token that is not written in the byte alphabet stands for its own UTF-8.
            let bytes: Option<Vec<u8>> = text.chars().map(|c| byte_of.get(&c).copied()).collect();
            *token = Token { text: text.clone(), bytes: bytes.unwrap_or_else(|| text.clone().into_bytes()) };
        }

        let bpe = tokenizers::Tokenizer::from_bytes(root.to_string())
            .map_err(|e| error(format!("what the parser refuses: {e}"), "a byte-level BPE tokenizer.json"))?;
        added.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then(a.1.cmp(&b.1)));
        Ok(Self { bpe, added, ids, tokens })
    }

    /// Ids of a text. Control tokens written in it stay text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        self.append(text, &mut ids)?;
        Ok(ids)
    }

    /// Ids of a text in which added tokens, control tokens among them, become their ids: for prompts in raw form.
    pub fn encode_with_special(&self, text: &str) -> Result<Vec<u32>> {
        let (mut ids, mut start, mut at) = (Vec::new(), 0, 0);
        let mut first = [false; 256];
        self.added.iter().for_each(|(content, _)| first[content.as_bytes()[0] as usize] = true);
        while at < text.len() {
            let found = match first[text.as_bytes()[at] as usize] {
                true => self.added.iter().find(|(content, _)| text.as_bytes()[at..].starts_with(content.as_bytes())),
                false => None,
            };
            match found {
                Some((content, id)) => {
                    self.append(&text[start..at], &mut ids)?;
                    ids.push(*id);
                    at += content.len();
                    start = at;
                }
                None => at += 1,
            }
        }
        self.append(&text[start..], &mut ids)?;
        Ok(ids)
    }

    fn append(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        if !text.is_empty() {
            let encoding = self.bpe.encode_fast(text, false);
            let encoding = encoding.map_err(|e| error(format!("text that cannot be encoded: {e}"), "any text"))?;
            ids.extend_from_slice(encoding.get_ids());
        }
        Ok(())
    }

    /// Text of some ids, control tokens included. Bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        let mut bytes = Vec::new();
        for &id in ids {
            bytes.extend_from_slice(self.bytes(id)?);
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// A decoder for ids that come one by one.
    pub fn stream(&self) -> StreamDecoder<'_> {
        StreamDecoder { tokenizer: self, pieces: Pieces::default() }
    }

    /// Bytes that an id stands for: none when the vocabulary has a gap there.
    pub fn bytes(&self, id: u32) -> Result<&[u8]> {
        Ok(&self.token(id)?.bytes)
    }

    /// The string of an id as the vocabulary writes it.
    pub fn id_to_token(&self, id: u32) -> Result<&str> {
        Ok(&self.token(id)?.text)
    }

    /// The id of a token as the vocabulary writes it: how control tokens are found.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    /// Whether an id is of the added vocabulary, as control tokens are.
    pub fn is_added(&self, id: u32) -> bool {
        self.added.iter().any(|(_, added)| *added == id)
    }

    /// One more than the highest id.
    pub fn vocab_size(&self) -> usize {
        self.tokens.len()
    }

    fn token(&self, id: u32) -> Result<&Token> {
        self.tokens.get(id as usize).ok_or(Error::TokenId { id, vocabulary: self.tokens.len() })
    }
}

/// Turns ids that come one by one into pieces of text that concatenate to the whole [`decode`](Tokenizer::decode), byte
/// for byte: a character is held back until all of its bytes have come.
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    pieces: Pieces,
}

impl StreamDecoder<'_> {
    /// Takes an id, gives the text that is now certain.
    pub fn push(&mut self, id: u32) -> Result<String> {
        Ok(self.pieces.push(self.tokenizer.bytes(id)?))
    }

    /// What is still held back, at the end of the ids.
    pub fn finish(self) -> String {
        self.pieces.finish()
    }
}

/// What a [`StreamDecoder`] holds back, for those who keep no decoder between two ids.
#[derive(Debug, Clone, Default)]
pub struct Pieces {
    pending: Vec<u8>,
}

impl Pieces {
    /// Takes the bytes of an id, gives the text that is now certain.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend_from_slice(bytes);
        let mut certain = 0;
        while let Err(e) = std::str::from_utf8(&self.pending[certain..]) {
            certain += e.valid_up_to();
            match e.error_len() {
                Some(length) => certain += length,
                None => break,
            }
        }
        if std::str::from_utf8(&self.pending[certain..]).is_ok() {
            certain = self.pending.len();
        }
        let piece = String::from_utf8_lossy(&self.pending[..certain]).into_owned();
        self.pending.drain(..certain);
        piece
    }

    /// Whether nothing is held back.
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// What is still held back, at the end of the ids.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// The characters in which byte-level vocabularies write bytes: printable ones stand for themselves, the others follow
/// from U+0100 on.
fn byte_alphabet() -> HashMap<char, u8> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..=255).filter(|&b| !printable(b)).zip('\u{100}'..);
    let own = (0..=255).filter(|&b| printable(b)).map(|b| (b as char, b));
    own.chain(others.map(|(b, c)| (c, b))).collect()
}

pub(super) fn error(found: impl Into<String>, allowed: impl Into<String>) -> Error {
    Error::Tokenizer { found: found.into(), allowed: allowed.into() }
}
