//! The manifest: what a session is, and which records hold it.

use super::bytes::{Input, Output};
use super::records::{pages_bytes, tokens_bytes};
use crate::checkpoint::Fingerprint;
use crate::formats::CacheFormat;
use crate::reading::Floors;
use crate::sampling::Generator;
use crate::store::{hash16, RecordId, MAX_RECORD};
use crate::{Error, Result};

const MAGIC: [u8; 8] = *b"CEDRA\r\n\x1a";
/// The version that this code writes, and the only one that there has been.
const VERSION: u32 = 1;
/// Flags: the session has these.
const TAIL: u32 = 1;
const STATE: u32 = 2;
const RINGS: u32 = 4;
const DRAFT: u32 = 8;

/// Sizes that pages, rings and remainders follow from. They follow from the config themselves; they are written down so
/// that a program that lays out pages otherwise does not take these for its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Words of a page: the parts of all Full layers.
    pub page_words: u32,
    /// Slots of a window ring.
    pub window: u32,
    /// Layers, each with a ring.
    pub layers: u32,
    /// Channels of a window key and of a latent.
    pub head_dim: u32,
    /// Raw ids that a step must know of the text before it.
    pub history: u32,
    /// The Full layers, in order.
    pub parts: Vec<PagePart>,
}

/// A Full layer's part of a page: its latents, then its index keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PagePart {
    /// Index of the layer.
    pub layer: u32,
    /// Tokens an entry.
    pub ratio: u32,
    /// Word of the page at which the part begins.
    pub at: u32,
    /// Words of a packed latent.
    pub latent_words: u32,
    /// Words of a packed index key.
    pub key_words: u32,
}

impl Geometry {
    /// Words of the incomplete groups of all Full layers.
    pub fn remainder_words(&self) -> u64 {
        self.parts.iter().map(|part| u64::from(part.ratio - 1) * 2 * u64::from(self.head_dim)).sum()
    }
    /// Words of the window rings of all layers.
    pub fn ring_words(&self) -> u64 {
        let row = CacheFormat::Fp8.row_words(self.head_dim as usize) as u64;
        u64::from(self.layers).saturating_mul(u64::from(self.window)).saturating_mul(row)
    }
    /// Whether so many words are whole rings.
    pub(super) fn are_rings(&self, words: u64) -> bool {
        let row = CacheFormat::Fp8.row_words(self.head_dim as usize) as u64;
        words.is_multiple_of((u64::from(self.window) * row).max(1))
    }

    fn problem(&self) -> Option<String> {
        let part_fits = |part: &PagePart| {
            let words = u64::from(part.latent_words) + u64::from(part.key_words);
            (1..=self.page_tokens).contains(&part.ratio)
                && self.page_tokens.is_multiple_of(part.ratio)
                && u64::from(part.at) + u64::from(self.page_tokens / part.ratio) * words <= u64::from(self.page_words)
        };
        if self.page_tokens == 0 || pages_bytes(self, 1) > MAX_RECORD as u64 || self.head_dim as usize > MAX_RECORD {
            let (tokens, words) = (self.page_tokens, self.page_words);
            return Some(format!("a page of {tokens} tokens and {words} words, vectors of {}", self.head_dim));
        }
        let part = self.parts.iter().find(|part| !part_fits(part))?;
        Some(format!("{part:?} in a page of {} tokens and {} words", self.page_tokens, self.page_words))
    }
}

/// A record that a manifest names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordRef {
    /// The hash of its bytes.
    pub id: RecordId,
    /// How many there are.
    pub bytes: u32,
}

/// A record of the text's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenRun {
    /// The record.
    pub record: RecordRef,
    /// Position of its first token.
    pub first: u32,
    /// Tokens in it.
    pub tokens: u32,
    /// Tokens of it that count, from the first: fewer when the text was cut back since.
    pub used: u32,
}

/// A record of complete pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRun {
    /// The record.
    pub record: RecordRef,
    /// Its first page.
    pub first: u32,
    /// Pages in it.
    pub pages: u32,
    /// Pages of it that count, from the first: fewer when the text was cut back since.
    pub used: u32,
}

/// What a saved session is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// The model that made it.
    pub fingerprint: Fingerprint,
    /// How its pages and rings are laid out.
    pub geometry: Geometry,
    /// Tokens of the text.
    pub tokens: u32,
    /// Tokens in the caches: all but the last, or none when the state behind the text has to be rebuilt.
    pub cached: u32,
    /// Tokens whose groups are in the pages. All pages before that position are complete, and the next has begun if the
    /// position lies in it.
    pub kept: u32,
    /// Lowest positions whose window keys may be seen.
    pub floors: Floors,
    /// The sampler's generator.
    pub generator: Generator,
    /// Milliseconds since 1970.
    pub saved_at: u64,
    /// Records of tokens, one after the other from 0 on: together the text.
    pub token_runs: Vec<TokenRun>,
    /// Records of complete pages, one after the other from 0 on.
    pub page_runs: Vec<PageRun>,
    /// The record of what comes after the complete pages: tokens and the page that has begun. None when nothing does.
    pub tail: Option<RecordRef>,
    /// The record of remainders, n-gram history and rings. None when they were not saved.
    pub state: Option<RecordRef>,
    /// Whether the state record has the window rings.
    pub rings: bool,
    /// Whether it has those of the draft stages.
    pub draft: bool,
}

impl Manifest {
    /// Complete pages. A model without Full layers has none.
    pub fn pages(&self) -> usize {
        if self.geometry.page_words == 0 {
            return 0;
        }
        (self.kept / self.geometry.page_tokens) as usize
    }

    /// Whether a page has begun after the complete ones.
    pub fn begun(&self) -> bool {
        self.geometry.page_words > 0 && !self.kept.is_multiple_of(self.geometry.page_tokens)
    }

    /// Position of the first token after the complete pages.
    pub fn tail_start(&self) -> usize {
        self.pages() * self.geometry.page_tokens as usize
    }

    /// Every record that it names.
    pub fn records(&self) -> Vec<RecordId> {
        let runs = self.token_runs.iter().map(|run| run.record).chain(self.page_runs.iter().map(|run| run.record));
        runs.chain(self.tail).chain(self.state).map(|record| record.id).collect()
    }

    /// Its bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Output::default();
        out.0.extend(MAGIC);
        out.u32(VERSION);
        out.u32(0); // the length, below
        for (_, part) in self.fingerprint.parts() {
            out.0.extend(part);
        }
        let g = &self.geometry;
        out.words(&[g.page_tokens, g.page_words, g.window, g.layers, g.head_dim, g.history, g.parts.len() as u32]);
        for part in &g.parts {
            out.words(&[part.layer, part.ratio, part.at, part.latent_words, part.key_words]);
        }
        let floors = [self.floors.encoder as u32, self.floors.decoder as u32];
        out.words(&[self.tokens, self.cached, self.kept, floors[0], floors[1]]);
        out.u64(self.generator.seed);
        out.u32(self.generator.drawn);
        out.u64(self.saved_at);
        out.u32(self.token_runs.len() as u32);
        for run in &self.token_runs {
            write_record(&mut out, &run.record);
            out.words(&[run.first, run.tokens, run.used]);
        }
        out.u32(self.page_runs.len() as u32);
        for run in &self.page_runs {
            write_record(&mut out, &run.record);
            out.words(&[run.first, run.pages, run.used]);
        }
        let flags =
            [(self.tail.is_some(), TAIL), (self.state.is_some(), STATE), (self.rings, RINGS), (self.draft, DRAFT)];
        out.u32(flags.iter().filter(|(set, _)| *set).map(|(_, flag)| flag).sum());
        for record in [&self.tail, &self.state].into_iter().flatten() {
            write_record(&mut out, record);
        }
        let length = (out.0.len() + 16) as u32;
        out.0[12..16].copy_from_slice(&length.to_le_bytes());
        out.0.extend(hash16(&out.0));
        out.0
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote. `session` is for messages.
    ///
    /// # Errors
    /// [`Error::Session`] for bytes that are no manifest, damaged, of another version, or at odds with themselves.
    pub fn parse(session: &str, bytes: &[u8]) -> Result<Self> {
        let error = |problem: String| Error::Session { session: session.into(), problem };
        let mut input = Input(bytes);
        if input.array() != Some(MAGIC) {
            return Err(error("its manifest does not begin as one".into()));
        }
        let cut = || error(format!("its manifest is cut short: {} bytes found", bytes.len()));
        let version = input.u32().ok_or_else(cut)?;
        if version != VERSION {
            return Err(error(format!("format version {version} found, {VERSION} allowed")));
        }
        let length = input.u32().ok_or_else(cut)?;
        if length as usize != bytes.len() {
            return Err(error(format!("manifest of {} bytes found, {length} expected", bytes.len())));
        }
        let (body, checksum) = bytes.split_last_chunk::<16>().ok_or_else(cut)?;
        if hash16(body) != *checksum {
            return Err(error("its manifest does not have the checksum that it ends with".into()));
        }
        let mut input = Input(body.get(16..).ok_or_else(cut)?);
        let manifest = Self::read(&mut input).and_then(|manifest| input.done().map(|()| manifest));
        let manifest = manifest.ok_or_else(|| error("its manifest lists more or less than it holds".into()))?;
        manifest.check().map_err(error)?;
        Ok(manifest)
    }

    fn read(input: &mut Input<'_>) -> Option<Self> {
        let fingerprint = Fingerprint { config: input.array()?, weights: input.array()?, tokenizer: input.array()? };
        let mut geometry = Geometry {
            page_tokens: input.u32()?,
            page_words: input.u32()?,
            window: input.u32()?,
            layers: input.u32()?,
            head_dim: input.u32()?,
            history: input.u32()?,
            parts: vec![],
        };
        for _ in 0..input.u32()? {
            geometry.parts.push(PagePart {
                layer: input.u32()?,
                ratio: input.u32()?,
                at: input.u32()?,
                latent_words: input.u32()?,
                key_words: input.u32()?,
            });
        }
        let (tokens, cached, kept) = (input.u32()?, input.u32()?, input.u32()?);
        let floors = Floors { encoder: input.u32()? as usize, decoder: input.u32()? as usize };
        let generator = Generator { seed: input.u64()?, drawn: input.u32()? };
        let saved_at = input.u64()?;
        let (mut token_runs, mut page_runs) = (vec![], vec![]);
        for _ in 0..input.u32()? {
            let (record, first) = (read_record(input)?, input.u32()?);
            token_runs.push(TokenRun { record, first, tokens: input.u32()?, used: input.u32()? });
        }
        for _ in 0..input.u32()? {
            let (record, first) = (read_record(input)?, input.u32()?);
            page_runs.push(PageRun { record, first, pages: input.u32()?, used: input.u32()? });
        }
        let flags = input.u32()?;
        if flags >= 2 * DRAFT {
            return None;
        }
        let tail = if flags & TAIL != 0 { Some(read_record(input)?) } else { None };
        let state = if flags & STATE != 0 { Some(read_record(input)?) } else { None };
        let (rings, draft) = (flags & RINGS != 0, flags & DRAFT != 0);
        Some(Self {
            fingerprint,
            geometry,
            tokens,
            cached,
            kept,
            floors,
            generator,
            saved_at,
            token_runs,
            page_runs,
            tail,
            state,
            rings,
            draft,
        })
    }

    /// Whether the sizes agree, and what does not.
    pub(super) fn check_sizes(&self) -> std::result::Result<(), String> {
        if let Some(problem) = self.geometry.problem() {
            return Err(format!("no page has this geometry: {problem}"));
        }
        if self.cached > self.tokens || self.kept > self.tokens {
            let (tokens, cached, kept) = (self.tokens, self.cached, self.kept);
            return Err(format!("{cached} tokens in the caches and {kept} in the pages, of a text of {tokens}"));
        }
        Ok(())
    }

    /// Whether all of it agrees, and what does not.
    pub(super) fn check(&self) -> std::result::Result<(), String> {
        self.check_sizes()?;
        let tokens = self.token_runs.iter().map(|run| [run.first, run.tokens, run.used, run.record.bytes]);
        covers("token", tokens, self.tokens, tokens_bytes)?;
        let pages = self.page_runs.iter().map(|run| [run.first, run.pages, run.used, run.record.bytes]);
        covers("page", pages, self.pages() as u32, |count| pages_bytes(&self.geometry, count))?;
        if self.tail.is_some() != (self.tokens as usize > self.tail_start()) {
            let there = if self.tail.is_some() { "a record" } else { "no record" };
            return Err(format!("{there} of what comes after {} of {} tokens", self.tail_start(), self.tokens));
        }
        if (self.rings || self.draft) && self.state.is_none() {
            return Err("window rings without a state record".into());
        }
        Ok(())
    }
}

/// Whether runs follow each other from 0 to `end`, each of the right length. A run: first, count, used, bytes.
fn covers(
    kind: &str,
    runs: impl Iterator<Item = [u32; 4]>,
    end: u32,
    bytes_of: impl Fn(u64) -> u64,
) -> std::result::Result<(), String> {
    let mut next = 0u64;
    for [first, count, used, bytes] in runs {
        if u64::from(first) != next || used == 0 || used > count || u64::from(bytes) != bytes_of(count.into()) {
            return Err(format!("a {kind} record from {first} on, {used} of {count} in {bytes} bytes, after {next}"));
        }
        next += u64::from(used);
    }
    if next == u64::from(end) {
        return Ok(());
    }
    Err(format!("{kind} records end at {next}, {end} expected"))
}

fn write_record(out: &mut Output, record: &RecordRef) {
    out.0.extend(record.id.0);
    out.u32(record.bytes);
}

fn read_record(input: &mut Input<'_>) -> Option<RecordRef> {
    Some(RecordRef { id: input.id()?, bytes: input.u32()? })
}
