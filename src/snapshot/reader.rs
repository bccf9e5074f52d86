//! Opening a session: the text at once, the pages a record at a time, and what damage leaves of them.

use super::records::{read_pages, read_state, read_tail, read_tokens};
use super::{Geometry, Manifest, RecordRef, Saved, State};
use crate::checkpoint::Fingerprint;
use crate::store::{RecordId, Store};
use crate::{Error, Result};

/// Pages of a session that follow each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pages {
    /// The first of them.
    pub first: usize,
    /// Their words, one page after the other.
    pub words: Vec<u32>,
    /// Whether all of them are complete; else this is the one page that has begun.
    pub complete: bool,
}

/// An opened session, and how far its pages have been read.
#[derive(Debug)]
pub struct Reader<'a> {
    store: &'a dyn Store,
    /// What was saved.
    pub manifest: Manifest,
    /// The whole text.
    pub tokens: Vec<u32>,
    /// Remainders, n-gram history and rings. None when they were not saved or are lost: they follow from the text.
    pub state: Option<State>,
    /// Records of tokens that are whole, from the first on.
    whole_token_runs: usize,
    /// Records of pages that were read and are whole.
    whole_page_runs: usize,
    kept: usize,
    ended: bool,
}

impl<'a> Reader<'a> {
    /// Opens a session that was saved with this model. Tokens whose record is lost are taken from the pages that they made.
    ///
    /// # Errors
    /// [`Error::NoSession`]; [`Error::Fingerprint`] for another model's; [`Error::Session`] for a manifest that is damaged, of
    /// another version or for pages of another geometry, and for tokens of which both copies are lost; the store's.
    pub async fn open(
        store: &'a dyn Store,
        session: &str,
        fingerprint: &Fingerprint,
        geometry: &Geometry,
    ) -> Result<Self> {
        let bytes = store.open(session).await?.ok_or_else(|| Error::NoSession { session: session.into() })?;
        let manifest = Manifest::parse(session, &bytes)?;
        for ((part, found), (_, allowed)) in manifest.fingerprint.parts().into_iter().zip(fingerprint.parts()) {
            if found != allowed {
                let (found, allowed) = (RecordId(found).to_string(), RecordId(allowed).to_string());
                return Err(Error::Fingerprint { session: session.into(), part, found, allowed });
            }
        }
        if manifest.geometry != *geometry {
            let problem = format!("caches of another geometry: found {:?}, allowed {geometry:?}", manifest.geometry);
            return Err(Error::Session { session: session.into(), problem });
        }
        let (tokens, whole_token_runs) = read_text(store, &manifest).await?;
        let lost = tokens.iter().position(Option::is_none);
        if let Some(first) = lost {
            let end = tokens[first..].iter().position(Option::is_some).map_or(tokens.len(), |n| first + n);
            let problem = format!("tokens {first}..{end} are lost: neither their record nor their pages can be read");
            return Err(Error::Session { session: session.into(), problem });
        }
        let state = match &manifest.state {
            Some(record) => {
                let bytes = fetch(store, record).await?;
                bytes.and_then(|bytes| read_state(&bytes, &manifest.geometry, manifest.rings, manifest.draft))
            }
            None => None,
        };
        Ok(Self {
            store,
            tokens: tokens.into_iter().flatten().collect(),
            state,
            manifest,
            whole_token_runs,
            whole_page_runs: 0,
            kept: 0,
            ended: false,
        })
    }

    /// The next pages, in order, the one that has begun last. None at the end, and where pages are lost: the text has to be
    /// read again from [`kept`](Self::kept) on.
    ///
    /// # Errors
    /// The store's.
    pub async fn next_pages(&mut self) -> Result<Option<Pages>> {
        if self.ended {
            return Ok(None);
        }
        let pages = match self.manifest.page_runs.get(self.whole_page_runs) {
            Some(run) => {
                let (record, first, count, used) = (run.record, run.first as usize, run.pages, run.used as usize);
                self.read_run(&record, first, count as usize, used).await?
            }
            None => self.read_begun().await?,
        };
        match &pages {
            Some(pages) if pages.complete => self.whole_page_runs += 1,
            _ => self.ended = true,
        }
        Ok(pages)
    }

    async fn read_run(&mut self, record: &RecordRef, first: usize, count: usize, used: usize) -> Result<Option<Pages>> {
        let geometry = &self.manifest.geometry;
        let (page_tokens, page_words) = (geometry.page_tokens as usize, geometry.page_words as usize);
        let bytes = fetch(self.store, record).await?;
        let Some((tokens, mut words)) = bytes.and_then(|bytes| read_pages(&bytes, geometry, count)) else {
            return Ok(None);
        };
        let end = (first + used) * page_tokens;
        if tokens[..used * page_tokens] != self.tokens[first * page_tokens..end] {
            return Ok(None); // pages of another text
        }
        words.truncate(used * page_words);
        self.kept = end;
        Ok(Some(Pages { first, words, complete: true }))
    }

    async fn read_begun(&mut self) -> Result<Option<Pages>> {
        let first = self.manifest.pages();
        let record = self.manifest.tail.filter(|_| self.manifest.begun());
        let Some(record) = record else { return Ok(None) };
        let Some((tokens, words)) = fetch_tail(self.store, &self.manifest, &record).await? else { return Ok(None) };
        if tokens != self.tokens[self.manifest.tail_start()..] {
            return Ok(None);
        }
        self.kept = self.manifest.kept as usize;
        Ok(Some(Pages { first, words, complete: false }))
    }

    /// Tokens whose groups are in the pages that were read so far: what a rebuild need not make again.
    pub fn kept(&self) -> usize {
        self.kept
    }

    /// Whether all that was saved of the pages has been read.
    pub fn pages_whole(&self) -> bool {
        self.kept == if self.manifest.geometry.page_words > 0 { self.manifest.kept as usize } else { 0 }
    }

    /// What the next save need not write again: of the pages, those that were read.
    pub fn saved(&self) -> Saved {
        let mut manifest = self.manifest.clone();
        manifest.token_runs.truncate(self.whole_token_runs);
        manifest.page_runs.truncate(self.whole_page_runs);
        let pages = manifest.page_runs.last().map_or(0, |run| (run.first + run.used) as usize);
        Saved::new(&manifest, &self.tokens[..pages * manifest.geometry.page_tokens as usize])
    }
}

/// A record's bytes, if they are those that were saved.
async fn fetch(store: &dyn Store, record: &RecordRef) -> Result<Option<Vec<u8>>> {
    let bytes = store.get(record.id).await?;
    Ok(bytes.filter(|bytes| bytes.len() == record.bytes as usize && RecordId::of(bytes) == record.id))
}

async fn fetch_tail(
    store: &dyn Store,
    manifest: &Manifest,
    record: &RecordRef,
) -> Result<Option<(Vec<u32>, Vec<u32>)>> {
    let tokens = manifest.tokens as usize - manifest.tail_start();
    let page_words = if manifest.begun() { manifest.geometry.page_words as usize } else { 0 };
    Ok(fetch(store, record).await?.and_then(|bytes| read_tail(&bytes, tokens, page_words)))
}

/// The text as far as there is a copy of it, and how many token records are whole, from the first on.
async fn read_text(store: &dyn Store, manifest: &Manifest) -> Result<(Vec<Option<u32>>, usize)> {
    let mut text = vec![];
    let mut whole = None;
    for (i, run) in manifest.token_runs.iter().enumerate() {
        let bytes = fetch(store, &run.record).await?;
        match bytes.and_then(|bytes| read_tokens(&bytes, run.tokens as usize)) {
            Some(tokens) => text.extend(tokens[..run.used as usize].iter().copied().map(Some)),
            None => {
                whole.get_or_insert(i);
                text.resize(text.len() + run.used as usize, None);
            }
        }
    }
    let missing = |text: &[Option<u32>], first: usize, end: usize| text[first..end].contains(&None);
    let page_tokens = manifest.geometry.page_tokens as usize;
    for run in &manifest.page_runs {
        let (first, used) = (run.first as usize * page_tokens, run.used as usize * page_tokens);
        if missing(&text, first, first + used) {
            let bytes = fetch(store, &run.record).await?;
            let pages = bytes.and_then(|bytes| read_pages(&bytes, &manifest.geometry, run.pages as usize));
            fill(&mut text[first..first + used], pages.map(|(tokens, _)| tokens));
        }
    }
    if let Some(record) = manifest.tail.filter(|_| missing(&text, manifest.tail_start(), text.len())) {
        let tail = fetch_tail(store, manifest, &record).await?;
        fill(&mut text[manifest.tail_start()..], tail.map(|(tokens, _)| tokens));
    }
    Ok((text, whole.unwrap_or(manifest.token_runs.len())))
}

fn fill(text: &mut [Option<u32>], copy: Option<Vec<u32>>) {
    for (place, token) in text.iter_mut().zip(copy.unwrap_or_default()) {
        *place = Some(place.unwrap_or(token));
    }
}
