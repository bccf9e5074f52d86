//! Saving a session: what is new is written, then the manifest replaces the one before.

use std::collections::BTreeSet;
use std::ops::Range;

use super::bytes::Output;
use super::records::{
    page_bytes, pages_bytes, state_bytes, tokens_bytes, write_page, write_pages, write_state, write_tail, write_tokens,
};
use super::{Generator, Geometry, Manifest, PageRun, RecordRef, State, TokenRun};
use crate::checkpoint::Fingerprint;
use crate::reading::Floors;
use crate::store::{Record, RecordId, Store, MAX_RECORD};
use crate::{Error, Result};

/// Most bytes of a record of pages, where one page is not more: a record that fills [`MAX_RECORD`] to the byte takes twice
/// its room in a store that hands out powers of two.
const RUN_BYTES: u64 = MAX_RECORD as u64 - (64 << 10);

/// What a session's last commit holds, so that the next writes only what is new.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    pub(super) fingerprint: Fingerprint,
    pub(super) geometry: Geometry,
    /// Tokens of the complete pages.
    pub(super) tokens: Vec<u32>,
    pub(super) token_runs: Vec<TokenRun>,
    pub(super) page_runs: Vec<PageRun>,
}

impl Saved {
    /// Of the records of complete pages; what comes after them is replaced by every save.
    pub(super) fn new(manifest: &Manifest, tokens: &[u32]) -> Self {
        let mut saved = Self {
            fingerprint: manifest.fingerprint,
            geometry: manifest.geometry.clone(),
            tokens: tokens.to_vec(),
            token_runs: manifest.token_runs.clone(),
            page_runs: manifest.page_runs.clone(),
        };
        // The last run of tokens is the tail's when it ends after the pages.
        let pages_end = manifest.tail_start();
        saved.token_runs.retain(|run| (run.first + run.used) as usize <= pages_end);
        saved.cut(tokens.len());
        saved
    }

    /// Complete pages that are saved.
    pub fn pages(&self) -> usize {
        self.page_runs.last().map_or(0, |run| (run.first + run.used) as usize)
    }

    /// The session was cut back since: of its pages, only entries of groups that end before position `kept` are those that were
    /// saved. To be said whenever it happens: the same tokens read again may leave other pages, and nothing else shows it.
    #[must_use]
    pub fn truncated(mut self, kept: usize) -> Self {
        self.cut(kept);
        self
    }

    /// Lets go of pages that are not complete within `tokens` tokens. A run that they end in keeps its record.
    fn cut(&mut self, tokens: usize) {
        let page_tokens = self.geometry.page_tokens;
        let pages = (tokens as u32 / page_tokens).min(self.pages() as u32);
        self.page_runs.retain_mut(|run| {
            run.used = run.used.min(pages.saturating_sub(run.first));
            run.used > 0
        });
        let tokens = pages * page_tokens;
        self.token_runs.retain_mut(|run| {
            run.used = run.used.min(tokens.saturating_sub(run.first));
            run.used > 0
        });
        self.tokens.truncate(tokens as usize);
    }
}

/// What a session is at the moment of a save, besides its pages and state.
#[derive(Debug, Clone)]
pub struct Head<'a> {
    /// The model.
    pub fingerprint: Fingerprint,
    /// How its pages and rings are laid out.
    pub geometry: Geometry,
    /// The text.
    pub tokens: &'a [u32],
    /// Tokens of it in the caches.
    pub cached: usize,
    /// Tokens of it whose groups are in the pages.
    pub kept: usize,
    /// Lowest positions whose window keys may be seen.
    pub floors: Floors,
    /// The sampler's generator.
    pub generator: Generator,
    /// Milliseconds since 1970.
    pub saved_at: u64,
}

/// What a save wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Written {
    /// Records handed to the store.
    pub records: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Complete pages in them.
    pub pages: usize,
    /// Tokens of the text that was saved.
    pub tokens: usize,
}

/// A save under way.
#[derive(Debug)]
pub struct Writer<'a> {
    store: &'a dyn Store,
    session: &'a str,
    tokens: &'a [u32],
    manifest: Manifest,
    /// Words of complete pages that are in no record yet.
    pending: Vec<u32>,
    put: BTreeSet<RecordId>,
    /// Bytes of the state record to come.
    state_bytes: u64,
    written: Written,
}

impl<'a> Writer<'a> {
    /// Begins a save of a session under this name. `previous` is what the session's last commit to this store holds; pages that it has and that the text
    /// still has are not written again.
    ///
    /// # Errors
    /// [`Error::Session`] when `head` is at odds with itself.
    pub fn new(store: &'a dyn Store, session: &'a str, previous: Option<&Saved>, head: Head<'a>) -> Result<Self> {
        let at_odds = |problem| Error::Session { session: session.into(), problem };
        let Head { fingerprint, geometry, tokens, cached, kept, floors, generator, saved_at } = head;
        let manifest = Manifest {
            fingerprint,
            geometry,
            tokens: tokens.len() as u32,
            cached: cached as u32,
            kept: kept as u32,
            floors,
            generator,
            saved_at,
            token_runs: vec![],
            page_runs: vec![],
            tail: None,
            state: None,
            rings: false,
            draft: false,
        };
        manifest.check_sizes().map_err(at_odds)?;
        let written = Written { tokens: tokens.len(), ..Written::default() };
        let (pending, put) = (vec![], BTreeSet::new());
        let mut writer = Self { store, session, tokens, manifest, pending, put, state_bytes: 0, written };
        let same = |saved: &&Saved| {
            saved.fingerprint == writer.manifest.fingerprint && saved.geometry == writer.manifest.geometry
        };
        if let Some(saved) = previous.filter(same) {
            let common = saved.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
            let saved = saved.clone().truncated(common.min(kept));
            writer.manifest.token_runs = saved.token_runs;
            writer.manifest.page_runs = saved.page_runs;
        }
        Ok(writer)
    }

    /// Says which state will be given in the end, so that an [`Error::StoreFull`] of before knows how much is still to come.
    #[must_use]
    pub fn expecting(mut self, state: Option<&State>) -> Self {
        self.state_bytes = state.map_or(0, state_bytes);
        self
    }

    /// Bytes that are still to be written: of records that the store lacks, and of the manifest.
    fn needed(&self) -> u64 {
        let (manifest, geometry) = (&self.manifest, &self.manifest.geometry);
        let pages = (manifest.pages() - self.in_records()) as u64;
        let logged = manifest.token_runs.last().map_or(0, |run| (run.first + run.used) as usize);
        let tokens = (self.tokens.len() - logged) as u64;
        let end = self.tokens.len() - manifest.tail_start();
        let begun = if manifest.begun() { u64::from(geometry.page_words) } else { 0 };
        let tail = if end > 0 && manifest.tail.is_none() { 12 + 4 * (end as u64 + begun) } else { 0 };
        let state = if manifest.state.is_none() { self.state_bytes } else { 0 };
        pages_bytes(geometry, pages) + tokens_bytes(tokens) + tail + state + manifest.to_bytes().len() as u64
    }

    /// A full store's refusal, with what was still to be written. Browsers may name a quota that they do not grant: room that
    /// would have been enough is not told.
    fn told(&self, error: Error) -> Error {
        match error {
            Error::StoreFull { store, available, .. } => {
                let needed = self.needed();
                Error::StoreFull { store, needed: Some(needed), available: available.filter(|bytes| *bytes < needed) }
            }
            other => other,
        }
    }

    /// Gives up what was written: the save has failed.
    ///
    /// # Errors
    /// The store's.
    pub async fn abandon(self) -> Result<()> {
        let records: Vec<RecordId> = self.put.into_iter().collect();
        self.store.release(&records).await
    }

    /// Complete pages that have to be fed, in order.
    pub fn pages(&self) -> Range<usize> {
        self.next_page()..self.manifest.pages()
    }

    /// The first page that was not fed.
    fn next_page(&self) -> usize {
        let pending = self.pending.len() / (self.manifest.geometry.page_words as usize).max(1);
        self.in_records() + pending
    }

    /// Complete pages that are in records.
    fn in_records(&self) -> usize {
        self.manifest.page_runs.last().map_or(0, |run| (run.first + run.used) as usize)
    }

    /// Takes the words of the next complete pages, and writes records as they fill.
    ///
    /// # Errors
    /// The store's.
    ///
    /// # Panics
    /// When `words` are no whole pages, or more than [`pages`](Self::pages) asks for.
    pub async fn feed(&mut self, words: &[u32]) -> Result<()> {
        if words.is_empty() {
            return Ok(());
        }
        let geometry = &self.manifest.geometry;
        let page_words = geometry.page_words as usize;
        let most = ((RUN_BYTES - pages_bytes(geometry, 0)) / page_bytes(geometry)).max(1) as usize;
        assert!(words.len().is_multiple_of(page_words), "whole pages");
        assert!(words.len() / page_words <= self.pages().len(), "pages that the text has");
        for page in words.chunks_exact(page_words) {
            self.pending.extend(page);
            if self.pending.len() == most * page_words {
                self.write_run().await?;
            }
        }
        Ok(())
    }

    /// Writes the pending pages as a record.
    async fn write_run(&mut self) -> Result<()> {
        let (first, end) = (self.in_records(), self.next_page());
        if first == end {
            return Ok(());
        }
        let geometry = &self.manifest.geometry;
        let page_tokens = geometry.page_tokens as usize;
        let mut out = write_pages(geometry, end - first);
        let tokens = self.tokens[first * page_tokens..end * page_tokens].chunks_exact(page_tokens);
        for (tokens, words) in tokens.zip(self.pending.chunks_exact(geometry.page_words as usize)) {
            write_page(&mut out, tokens, words);
        }
        let record = self.write(out).await?;
        self.pending.clear();
        let pages = (end - first) as u32;
        self.manifest.page_runs.push(PageRun { record, first: first as u32, pages, used: pages });
        self.written.pages += end - first;
        Ok(())
    }

    /// Puts a record, unless this save has put it before.
    async fn write(&mut self, out: Output) -> Result<RecordRef> {
        let record = Record::new(out.0);
        let reference = RecordRef { id: record.id(), bytes: record.bytes().len() as u32 };
        if !self.put.contains(&reference.id) {
            let put = self.store.put(std::slice::from_ref(&record)).await;
            put.map_err(|error| self.told(error))?;
            self.put.insert(reference.id);
            self.written.records += 1;
            self.written.bytes += record.bytes().len() as u64;
        }
        Ok(reference)
    }

    /// Writes the rest and commits: the page that has begun, if one has, and the state, if it is to be saved. Once.
    ///
    /// # Errors
    /// The store's. The session in the store is then what it was.
    ///
    /// # Panics
    /// When not all pages were fed, a page that has begun is missing or is none, or the state has other sizes than the
    /// geometry gives it.
    pub async fn finish(&mut self, tail: Option<&[u32]>, state: Option<&State>) -> Result<(Saved, Written)> {
        assert!(self.pages().is_empty(), "pages {:?} were not fed", self.pages());
        let page_words = self.manifest.geometry.page_words as usize;
        assert_eq!(tail.map(<[u32]>::len), self.manifest.begun().then_some(page_words), "the page that has begun");
        assert!(state.is_none_or(|state| state.fits(&self.manifest.geometry)), "sizes of the state");
        self.state_bytes = state.map_or(0, state_bytes);
        self.write_run().await?;

        let start = self.manifest.tail_start();
        let logged = self.manifest.token_runs.last().map_or(0, |run| (run.first + run.used) as usize);
        for tokens in [logged..start, start..self.tokens.len()] {
            for first in tokens.clone().step_by(TOKENS_RUN) {
                self.write_token_run(first..tokens.end.min(first + TOKENS_RUN)).await?;
            }
        }
        if start < self.tokens.len() {
            let out = Output(write_tail(&self.tokens[start..], tail));
            self.manifest.tail = Some(self.write(out).await?);
        }
        if let Some(state) = state {
            self.manifest.state = Some(self.write(Output(write_state(state))).await?);
            self.manifest.rings = state.rings.is_some();
            self.manifest.draft = state.draft.is_some();
        }
        debug_assert_eq!(self.manifest.check(), Ok(()));
        let committed = self.store.commit(self.session, &self.manifest.to_bytes(), &self.manifest.records()).await;
        committed.map_err(|error| self.told(error))?;
        Ok((Saved::new(&self.manifest, &self.tokens[..start]), self.written))
    }

    async fn write_token_run(&mut self, range: Range<usize>) -> Result<()> {
        let record = self.write(Output(write_tokens(&self.tokens[range.clone()]))).await?;
        let tokens = range.len() as u32;
        self.manifest.token_runs.push(TokenRun { record, first: range.start as u32, tokens, used: tokens });
        Ok(())
    }
}

/// Most tokens of a record of tokens: 1 MiB.
const TOKENS_RUN: usize = 1 << 18;
