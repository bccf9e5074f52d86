//! Saved sessions: what a save writes, what an opened session is, and what damage does to it.

mod support;

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use cedra::checkpoint::{Checkpoint, Fingerprint};
use cedra::formats::CacheFormat;
use cedra::reading::Floors;
use cedra::snapshot::{
    fork, DraftWindow, Generator, Geometry, Head, Manifest, PagePart, Reader, Saved, State, Writer, Written,
};
use cedra::store::{Listed, MemoryStore, Record, RecordId, RedbStore, Store, Usage};
use cedra::{Error, Result};
use futures::future::LocalBoxFuture;
use pollster::block_on;
use proptest::prelude::*;
use support::fixture;

const PAGE: usize = 8;

/// Small pages: 8 tokens, a layer of ratio 2 and one of ratio 1.
fn geometry() -> Geometry {
    let parts = vec![
        PagePart { layer: 1, ratio: 2, at: 0, latent_words: 3, key_words: 2 },
        PagePart { layer: 3, ratio: 1, at: 20, latent_words: 3, key_words: 2 },
    ];
    Geometry { page_tokens: PAGE as u32, page_words: 60, window: 3, layers: 4, head_dim: 4, history: 2, parts }
}

fn fingerprint() -> Fingerprint {
    Fingerprint { config: [1; 16], weights: [2; 16], tokenizer: [3; 16] }
}

/// A session as its owner knows it: pages are a function of a seed that changes whenever the text is cut back.
#[derive(Debug, Clone, PartialEq)]
struct Model {
    tokens: Vec<u32>,
    kept: usize,
    pages: Vec<Vec<u32>>,
    state: Option<State>,
    saved_at: u64,
}

fn words(seed: u64, count: usize) -> Vec<u32> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 16) as u32
    };
    (0..count).map(|_| next()).collect()
}

fn state(seed: u64, rings: bool) -> State {
    let ring = 4 * 3 * CacheFormat::Fp8.row_words(4);
    State {
        remainders: words(seed, 8).into_iter().map(|w| w as f32).collect(),
        history: words(seed + 1, 2),
        rings: rings.then(|| words(seed + 2, ring)),
        draft: (rings && seed.is_multiple_of(2)).then(|| DraftWindow { floor: 3, rings: words(seed + 3, ring / 2) }),
    }
}

impl Model {
    /// A text of `len` tokens, all but the last of which are in the pages.
    fn new(seed: u64, len: usize) -> Self {
        let mut model = Self { tokens: vec![], kept: 0, pages: vec![], state: None, saved_at: seed };
        model.extend(seed, len);
        model.state = Some(state(seed, true));
        model
    }
    fn extend(&mut self, seed: u64, more: usize) {
        // Few different tokens, so that runs of them are alike.
        self.tokens.extend(words(seed, more).into_iter().map(|w| w % 2));
        self.fill(seed, self.tokens.len().saturating_sub(1));
    }
    fn fill(&mut self, seed: u64, kept: usize) {
        self.kept = kept;
        if !kept.is_multiple_of(PAGE) || self.pages.len() * PAGE > kept {
            self.pages.truncate(kept / PAGE);
        }
        while self.pages.len() < kept.div_ceil(PAGE) {
            self.pages.push(words(seed + 100 * self.pages.len() as u64, 60));
        }
    }
    fn cut(&mut self, seed: u64, len: usize) {
        self.tokens.truncate(len);
        self.fill(seed, self.kept.min(len.saturating_sub(1)));
    }
    fn complete(&self) -> usize {
        self.kept / PAGE
    }
    fn head(&self) -> Head<'_> {
        Head {
            fingerprint: fingerprint(),
            geometry: geometry(),
            tokens: &self.tokens,
            cached: self.kept,
            kept: self.kept,
            floors: Floors { encoder: 1, decoder: 2 },
            generator: Generator { seed: 0x0123_4567_89ab_cdef, drawn: 9 },
            saved_at: self.saved_at,
        }
    }
    fn save(&self, store: &dyn Store, session: &str, previous: Option<&Saved>) -> Result<(Saved, Written)> {
        block_on(async {
            let mut writer = Writer::new(store, session, previous, self.head())?;
            // In portions of any size.
            let pages = &self.pages[writer.pages()];
            for portion in pages.chunks(1 + self.tokens.len() % 3) {
                writer.feed(&portion.concat()).await?;
            }
            let begun = (!self.kept.is_multiple_of(PAGE)).then(|| self.pages.last().unwrap().as_slice());
            writer.finish(begun, self.state.as_ref()).await
        })
    }
}

async fn open<'a>(store: &'a dyn Store, session: &str) -> Result<Reader<'a>> {
    Reader::open(store, session, &fingerprint(), &geometry()).await
}

/// Opens a session and reads all that is left of it: pages as far as they are whole.
fn read(store: &dyn Store, session: &str) -> Result<(Model, Saved)> {
    block_on(async {
        let mut reader = open(store, session).await?;
        let mut pages = vec![];
        while let Some(run) = reader.next_pages().await? {
            assert_eq!(run.first, pages.len());
            assert_eq!(run.words.len() % 60, 0);
            pages.extend(run.words.chunks_exact(60).map(<[u32]>::to_vec));
            assert_eq!(pages.len(), reader.kept().div_ceil(PAGE));
            assert_eq!(run.complete, reader.kept() % PAGE == 0);
        }
        assert!(reader.next_pages().await?.is_none());
        assert_eq!(reader.pages_whole(), reader.kept() == reader.manifest.kept as usize);
        let (saved, kept, saved_at) = (reader.saved(), reader.kept(), reader.manifest.saved_at);
        Ok((Model { tokens: reader.tokens, kept, pages, state: reader.state, saved_at }, saved))
    })
}

/// Nothing is in the store that no session names.
fn assert_no_orphans(store: &dyn Store) {
    let listed = block_on(store.list()).unwrap();
    let named = listed.iter().flat_map(|l| Manifest::parse(&l.session, &l.manifest).unwrap().records());
    let named: BTreeSet<RecordId> = named.collect();
    assert_eq!(block_on(store.usage()).unwrap().records, named.len());
}

/// A store in which some records are not what they were.
#[derive(Debug, Default)]
struct Damaged {
    inner: MemoryStore,
    records: HashMap<RecordId, Damage>,
    manifest: Option<Vec<u8>>,
    gets: Cell<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Damage {
    Lost,
    Flipped(usize),
    Cut(usize),
    Longer,
}

impl Damage {
    fn of(self, mut bytes: Vec<u8>) -> Option<Vec<u8>> {
        match self {
            Self::Lost => return None,
            Self::Flipped(at) => bytes[at] ^= 1 << (at % 8),
            Self::Cut(length) => bytes.truncate(length),
            Self::Longer => bytes.push(0),
        }
        Some(bytes)
    }
}

impl Store for Damaged {
    fn name(&self) -> &str {
        "damaged"
    }
    fn put<'a>(&'a self, records: &'a [Record]) -> LocalBoxFuture<'a, Result<()>> {
        self.inner.put(records)
    }
    fn release<'a>(&'a self, records: &'a [RecordId]) -> LocalBoxFuture<'a, Result<()>> {
        self.inner.release(records)
    }
    fn commit<'a>(
        &'a self,
        session: &'a str,
        manifest: &'a [u8],
        records: &'a [RecordId],
    ) -> LocalBoxFuture<'a, Result<()>> {
        self.inner.commit(session, manifest, records)
    }
    fn open<'a>(&'a self, session: &'a str) -> LocalBoxFuture<'a, Result<Option<Vec<u8>>>> {
        match &self.manifest {
            Some(manifest) => Box::pin(async { Ok(Some(manifest.clone())) }),
            None => self.inner.open(session),
        }
    }
    fn get(&self, id: RecordId) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>>> {
        Box::pin(async move {
            self.gets.set(self.gets.get() + 1);
            let bytes = self.inner.get(id).await?;
            Ok(match self.records.get(&id) {
                Some(damage) => bytes.and_then(|bytes| damage.of(bytes)),
                None => bytes,
            })
        })
    }
    fn list(&self) -> LocalBoxFuture<'_, Result<Vec<Listed>>> {
        self.inner.list()
    }
    fn delete<'a>(&'a self, session: &'a str) -> LocalBoxFuture<'a, Result<bool>> {
        self.inner.delete(session)
    }
    fn usage(&self) -> LocalBoxFuture<'_, Result<Usage>> {
        self.inner.usage()
    }
}

/// A session of several runs, the first of which was cut: 29 tokens saved, cut to 22, 42 saved, 60 saved.
fn several_runs(store: &dyn Store) -> (Model, Saved) {
    let mut model = Model::new(1, 29);
    let (saved, _) = model.save(store, "s", None).unwrap();
    model.cut(2, 22);
    model.extend(3, 20);
    let (saved, _) = model.save(store, "s", Some(&saved.truncated(21))).unwrap();
    model.extend(4, 18);
    model.state = Some(state(5, true));
    let (saved, _) = model.save(store, "s", Some(&saved)).unwrap();
    (model, saved)
}

fn manifest_of(store: &dyn Store, session: &str) -> Manifest {
    Manifest::parse(session, &block_on(store.open(session)).unwrap().unwrap()).unwrap()
}

#[test]
fn a_session_is_what_was_saved_at_every_length() {
    for len in 0..=3 * PAGE + 2 {
        for rings in [None, Some(false), Some(true)] {
            let store = MemoryStore::new();
            let mut model = Model::new(7, len);
            model.state = rings.map(|rings| state(8, rings));
            let (saved, written) = model.save(&store, "s", None).unwrap();
            assert_eq!((saved.pages(), written.pages), (model.complete(), model.complete()));
            assert_eq!(read(&store, "s").unwrap(), (model.clone(), saved.clone()), "{len} tokens, rings {rings:?}");
            // Saving again what has not changed writes no page.
            let (again, written) = model.save(&store, "s", Some(&saved)).unwrap();
            assert_eq!((again, written.pages), (saved, 0));
            assert_no_orphans(&store);
        }
    }
}

#[test]
fn only_new_pages_are_written() {
    let store = MemoryStore::new();
    let mut model = Model::new(1, 10 * PAGE + 1);
    let (saved, written) = model.save(&store, "s", None).unwrap();
    assert_eq!(written.pages, 10);
    model.extend(2, 2 * PAGE);
    let (saved, written) = model.save(&store, "s", Some(&saved)).unwrap();
    // Two pages, their tokens, the rest of the text twice, the state.
    let page = 4 * (PAGE + 60);
    let ring = 4 * 4 * 3 * CacheFormat::Fp8.row_words(4);
    let state = 16 + 4 * 10 + ring;
    let bytes = (12 + 2 * page) + (8 + 4 * 2 * PAGE) + (8 + 4) + (12 + 4) + state;
    assert_eq!(written, Written { records: 5, bytes: bytes as u64, pages: 2, tokens: model.tokens.len() });
    assert_eq!(manifest_of(&store, "s").page_runs.iter().map(|run| run.pages).collect::<Vec<_>>(), [10, 2]);
    // Cut back into the first run: its record stays, with fewer pages that count.
    model.cut(3, 4 * PAGE + 5);
    model.extend(3, 2 * PAGE);
    let (_, written) = model.save(&store, "s", Some(&saved.truncated(4 * PAGE + 4))).unwrap();
    assert_eq!(written.pages, 2);
    let runs = manifest_of(&store, "s").page_runs;
    assert_eq!(runs.iter().map(|run| (run.pages, run.used)).collect::<Vec<_>>(), [(10, 4), (2, 2)]);
    assert_eq!(read(&store, "s").unwrap().0, model);
    assert_no_orphans(&store);
}

#[test]
fn pages_fill_records_to_their_limit() {
    let store = MemoryStore::new();
    let tokens: Vec<u32> = (0..40 * 128 + 1).collect();
    let part = PagePart { layer: 0, ratio: 1, at: 0, latent_words: 600, key_words: 200 };
    let geometry = Geometry {
        page_tokens: 128,
        page_words: 128 * 800,
        window: 1,
        layers: 1,
        head_dim: 2,
        history: 0,
        parts: vec![part],
    };
    let model = Model::new(0, 1);
    let head = Head { geometry: geometry.clone(), tokens: &tokens, kept: 40 * 128, ..model.head() };
    let (_, written) = block_on(async {
        let mut writer = Writer::new(&store, "s", None, head)?;
        for page in 0..40 {
            writer.feed(&words(page, 128 * 800)).await?;
        }
        writer.finish(None, None).await
    })
    .unwrap();
    assert_eq!(written.pages, 40);
    let mut reader = block_on(Reader::open(&store, "s", &fingerprint(), &geometry)).unwrap();
    // 410,112 bytes a page: 20 of them stay below 8 MiB less 64 KiB.
    let runs: Vec<_> = reader.manifest.page_runs.iter().map(|run| (run.first, run.pages)).collect();
    assert_eq!(runs, [(0, 20), (20, 20)]);
    for first in [0, 20] {
        let pages = block_on(reader.next_pages()).unwrap().unwrap();
        let expected: Vec<u32> = (first..first + 20).flat_map(|page| words(page, 128 * 800)).collect();
        assert!(pages.words == expected && pages.complete);
    }
    assert!(reader.pages_whole() && reader.tokens == tokens);
}

#[test]
fn a_model_without_pages_keeps_its_text() {
    let store = MemoryStore::new();
    let geometry = Geometry { page_words: 0, parts: vec![], ..geometry() };
    let tokens: Vec<u32> = (0..100).collect();
    let model = Model::new(0, 1);
    let head = Head { geometry: geometry.clone(), tokens: &tokens, cached: 99, kept: 99, ..model.head() };
    let mut writer = Writer::new(&store, "s", None, head).unwrap();
    assert!(writer.pages().is_empty());
    block_on(writer.finish(None, None)).unwrap();
    let mut reader = block_on(Reader::open(&store, "s", &fingerprint(), &geometry)).unwrap();
    assert!(block_on(reader.next_pages()).unwrap().is_none() && reader.pages_whole());
    assert_eq!(reader.tokens, tokens);
}

#[test]
fn forks_share_every_record() {
    let store = MemoryStore::new();
    let (mut model, saved) = several_runs(&store);
    let before = block_on(store.usage()).unwrap();
    block_on(fork(&store, "s", "t")).unwrap();
    assert_eq!(block_on(store.usage()).unwrap(), Usage { sessions: 2, ..before });
    assert_eq!(read(&store, "t").unwrap(), (model.clone(), saved.clone()));
    // They part: the pages that they have in common are not written again.
    let original = model.clone();
    model.extend(9, PAGE);
    let (_, written) = model.save(&store, "t", Some(&saved)).unwrap();
    assert_eq!(written.pages, 1);
    assert_eq!(read(&store, "s").unwrap().0, original);
    assert_eq!(read(&store, "t").unwrap().0, model);
    block_on(store.delete("s")).unwrap();
    assert_eq!(read(&store, "t").unwrap().0, model);
    assert_no_orphans(&store);
    assert!(matches!(block_on(fork(&store, "s", "u")), Err(Error::NoSession { session }) if session == "s"));
    assert!(matches!(block_on(fork(&store, "t", "t")), Err(Error::SessionExists { session }) if session == "t"));
}

#[test]
fn sessions_of_other_models_are_refused() {
    let store = MemoryStore::new();
    several_runs(&store);
    let other = [9; 16];
    for (part, changed) in [
        ("config", Fingerprint { config: other, ..fingerprint() }),
        ("weights", Fingerprint { weights: other, ..fingerprint() }),
        ("tokenizer", Fingerprint { tokenizer: other, ..fingerprint() }),
    ] {
        let refused = block_on(Reader::open(&store, "s", &changed, &geometry())).unwrap_err();
        match &refused {
            Error::Fingerprint { session, part: found, allowed, .. } => {
                assert_eq!((session.as_str(), *found), ("s", part));
                assert_eq!(allowed, &"09".repeat(16));
            }
            other => panic!("{other:?}"),
        }
    }
    let wider = Geometry { window: 4, ..geometry() };
    match block_on(Reader::open(&store, "s", &fingerprint(), &wider)) {
        Err(Error::Session { problem, .. }) => assert!(problem.contains("another geometry"), "{problem}"),
        other => panic!("{other:?}"),
    }
    // What one model saved is nothing for another to build on.
    let (model, saved) = several_runs(&store);
    let head = Head { fingerprint: Fingerprint { config: other, ..fingerprint() }, ..model.head() };
    assert_eq!(Writer::new(&store, "s", Some(&saved), head).unwrap().pages(), 0..model.complete());
    assert!(matches!(read(&store, "none"), Err(Error::NoSession { session }) if session == "none"));
}

#[test]
fn heads_at_odds_with_themselves_are_refused() {
    let store = MemoryStore::new();
    let model = Model::new(1, 20);
    for head in [
        Head { kept: 21, ..model.head() },
        Head { cached: 21, ..model.head() },
        Head { geometry: Geometry { page_tokens: 0, ..geometry() }, ..model.head() },
        Head { geometry: Geometry { page_tokens: 9, ..geometry() }, ..model.head() },
        Head { geometry: Geometry { page_words: 59, ..geometry() }, ..model.head() },
        Head { geometry: Geometry { page_words: 3 << 20, ..geometry() }, ..model.head() },
    ] {
        let refused = Writer::new(&store, "s", None, head.clone());
        assert!(matches!(refused, Err(Error::Session { .. })), "{head:?}: {refused:?}");
    }
}

#[test]
fn a_save_that_fails_leaves_the_session_as_it_was() {
    let store = MemoryStore::new();
    let (model, saved) = several_runs(&store);
    let mut longer = model.clone();
    longer.extend(6, 3 * PAGE);
    // The session was deleted behind its back: what the last save wrote is not there.
    block_on(store.delete("s")).unwrap();
    assert!(matches!(longer.save(&store, "s", Some(&saved)), Err(Error::Session { .. })));
    assert_eq!(block_on(store.open("s")).unwrap(), None);
    let (saved, _) = model.save(&store, "s", None).unwrap();
    // A name that no store takes, found out at the end.
    assert!(matches!(longer.save(&store, "", Some(&saved)), Err(Error::Setting { .. })));
    assert_eq!(read(&store, "s").unwrap(), (model, saved));
}

#[test]
fn manifests_are_their_bytes() {
    let store = MemoryStore::new();
    several_runs(&store);
    let bytes = block_on(store.open("s")).unwrap().unwrap();
    assert_eq!(Manifest::parse("s", &bytes).unwrap().to_bytes(), bytes);
}

/// Every byte of a manifest in turn, and every length.
#[test]
fn damaged_manifests_are_refused() {
    let inner = MemoryStore::new();
    several_runs(&inner);
    let whole = block_on(inner.open("s")).unwrap().unwrap();
    let mut store = Damaged { inner, ..Damaged::default() };
    let mut refused = |manifest: Vec<u8>, what: String| {
        store.manifest = Some(manifest);
        match block_on(open(&store, "s")) {
            Err(Error::Session { session, problem }) => {
                assert_eq!(session, "s");
                problem
            }
            other => panic!("{what}: {other:?}"),
        }
    };
    for at in 0..whole.len() {
        for mask in [1, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= mask;
            let problem = refused(bytes, format!("byte {at}"));
            assert!((8..12).contains(&at) == problem.contains("version"), "byte {at}: {problem}");
        }
    }
    for length in 0..whole.len() {
        refused(whole[..length].to_vec(), format!("{length} bytes"));
    }
    refused([whole.as_slice(), &[0]].concat(), "a byte too many".into());
    let mut newer = whole.clone();
    newer[8] = 2;
    assert_eq!(refused(newer, "another version".into()), "format version 2 found, 1 allowed");
}

/// A manifest that is whole, checksum and all, and lies.
#[test]
fn manifests_that_lie_are_refused() {
    let inner = MemoryStore::new();
    several_runs(&inner);
    let honest = manifest_of(&inner, "s");
    let lies: Vec<fn(&mut Manifest)> = vec![
        |m| m.tokens += 1,
        |m| m.tokens = u32::MAX,
        |m| m.kept = m.tokens + 1,
        |m| m.kept -= PAGE as u32,
        |m| m.kept += PAGE as u32,
        |m| m.cached = m.tokens + 1,
        |m| m.geometry.page_tokens = 0,
        |m| m.geometry.page_tokens = u32::MAX,
        |m| m.geometry.page_words = u32::MAX,
        |m| m.geometry.head_dim = u32::MAX,
        |m| m.geometry.parts[0].ratio = 0,
        |m| m.geometry.parts[0].ratio = 3,
        |m| m.geometry.parts[1].at = 21,
        |m| m.geometry.parts[1].latent_words = u32::MAX,
        |m| m.token_runs[0].used += 1,
        |m| m.token_runs[0].used = 0,
        |m| m.token_runs[1].first += 1,
        |m| m.token_runs[1].tokens = u32::MAX,
        |m| m.token_runs[1].record.bytes += 4,
        |m| m.token_runs.truncate(1),
        |m| m.page_runs.rotate_left(1),
        |m| m.page_runs[0].used = u32::MAX,
        |m| m.page_runs[0].pages = u32::MAX,
        |m| m.page_runs[0].record.bytes -= 1,
        |m| m.tail = None,
        |m| m.state = None,
    ];
    for (i, lie) in lies.iter().enumerate() {
        let mut manifest = honest.clone();
        lie(&mut manifest);
        let refused = Manifest::parse("s", &manifest.to_bytes());
        assert!(matches!(refused, Err(Error::Session { .. })), "lie {i}: {refused:?}");
    }
    // Counts that promise more than there is, with a checksum that fits.
    let whole = honest.to_bytes();
    for at in (16..whole.len() - 16).step_by(4) {
        let mut bytes = whole.clone();
        bytes[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        let body = bytes.len() - 16;
        let checksum = RecordId::of(&bytes[..body]);
        bytes[body..].copy_from_slice(&checksum.0);
        // Ids, floors and the generator may be anything.
        if let Ok(manifest) = Manifest::parse("s", &bytes) {
            assert_eq!(manifest.to_bytes(), bytes);
        }
    }
}

/// What an opened session may be after damage: the text whole, pages a beginning of those saved, the state whole or gone.
fn assert_mended(found: &Model, saved: &Model, context: &str) {
    assert_eq!(found.tokens, saved.tokens, "{context}");
    assert!(found.kept <= saved.kept && found.pages[..] == saved.pages[..found.kept.div_ceil(PAGE)], "{context}");
    assert!(found.kept == saved.kept || found.kept.is_multiple_of(PAGE), "{context}");
    assert!(found.state.is_none() || found.state == saved.state, "{context}");
}

/// Each record in turn, lost and damaged in every way: the stated repair, never an error, for each token is there twice.
#[test]
fn every_record_can_be_lost() {
    let inner = MemoryStore::new();
    let (model, _) = several_runs(&inner);
    let manifest = manifest_of(&inner, "s");
    let mut store = Damaged { inner, ..Damaged::default() };
    let pages_after = |run: usize| manifest.page_runs[run].first as usize * PAGE;
    for (i, id) in manifest.records().into_iter().enumerate() {
        let bytes = block_on(store.inner.get(id)).unwrap().unwrap().len();
        let damages = (0..bytes).flat_map(|at| [Damage::Flipped(at), Damage::Cut(at)]);
        for damage in damages.chain([Damage::Lost, Damage::Longer]) {
            let context = format!("record {i} {damage:?}");
            store.records = HashMap::from([(id, damage)]);
            let (found, saved) = read(&store, "s").unwrap();
            assert_mended(&found, &model, &context);
            let runs = manifest.token_runs.len();
            let (pages, state) = (runs + manifest.page_runs.len(), manifest.records().len() - 1);
            let kept = match i {
                i if (runs..pages).contains(&i) => pages_after(i - runs),
                i if i == pages => model.complete() * PAGE,
                _ => model.kept,
            };
            assert_eq!((found.kept, found.state.is_none()), (kept, i == state), "{context}");
            assert_eq!(saved.pages(), kept / PAGE, "{context}");
            if damage == Damage::Lost {
                // Re-read from there and saved again, it is whole.
                let (_, written) = model.save(&store, "s", Some(&saved)).unwrap();
                assert_eq!(written.pages, model.complete() - kept / PAGE, "{context}");
                store.records.clear();
                assert_eq!(read(&store, "s").unwrap().0, model, "{context}");
                assert_eq!(manifest_of(&store, "s").tokens, manifest.tokens);
                several_runs(&store);
            }
        }
    }
}

/// Any two records: repaired, or refused because both copies of a token are gone, and only then.
#[test]
fn any_two_records_can_be_lost() {
    let inner = MemoryStore::new();
    let (model, _) = several_runs(&inner);
    let manifest = manifest_of(&inner, "s");
    let ids = manifest.records();
    let mut store = Damaged { inner, ..Damaged::default() };
    let mut refused = 0;
    for (i, &first) in ids.iter().enumerate() {
        for &second in &ids[i + 1..] {
            store.records = HashMap::from([(first, Damage::Lost), (second, Damage::Lost)]);
            let gone = |id: &RecordId| [first, second].contains(id);
            let covered = |at: u32, id: RecordId, first: u32, used: u32, unit: u32| {
                (first * unit..(first + used) * unit).contains(&at) && !gone(&id)
            };
            let there = |at: u32| {
                manifest.token_runs.iter().any(|run| covered(at, run.record.id, run.first, run.used, 1))
                    || manifest.page_runs.iter().any(|run| covered(at, run.record.id, run.first, run.used, PAGE as u32))
                    || (at as usize >= manifest.tail_start() && !gone(&manifest.tail.unwrap().id))
            };
            let lost = (0..manifest.tokens).find(|&at| !there(at));
            match (read(&store, "s"), lost) {
                (Ok((found, _)), None) => assert_mended(&found, &model, "two records"),
                (Err(Error::Session { problem, .. }), Some(at)) => {
                    assert!(problem.starts_with(&format!("tokens {at}..")), "{problem}, {at} expected");
                    refused += 1;
                }
                (other, lost) => panic!("{other:?}, first lost {lost:?}"),
            }
        }
    }
    assert!(refused >= 4, "{refused} pairs refused");
}

#[test]
fn opening_reads_no_pages() {
    let inner = MemoryStore::new();
    several_runs(&inner);
    let manifest = manifest_of(&inner, "s");
    let store = Damaged { inner, ..Damaged::default() };
    let mut reader = block_on(open(&store, "s")).unwrap();
    assert_eq!(store.gets.get(), manifest.token_runs.len() + 1);
    block_on(reader.next_pages()).unwrap();
    assert_eq!(store.gets.get(), manifest.token_runs.len() + 2, "a record at a time");
    // What has not been read counts as not saved.
    assert_eq!(reader.saved().pages(), manifest.page_runs[0].used as usize);
}

/// What a test does to a session.
#[derive(Debug, Clone)]
enum Act {
    Extend(usize),
    Cut(usize),
    Save { rings: bool, forget: bool },
    Reopen,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (0..4 * PAGE).prop_map(Act::Extend),
        2 => (0..10 * PAGE).prop_map(Act::Cut),
        3 => (any::<bool>(), prop::bool::weighted(0.1)).prop_map(|(rings, forget)| Act::Save { rings, forget }),
        1 => Just(Act::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Two sessions in a store, extended, cut and saved in any order: each is what it was when it was last saved.
    #[test]
    fn sessions_are_what_they_were_when_last_saved(acts in prop::collection::vec((0..2usize, act()), 1..40)) {
        let store = MemoryStore::new();
        let names = ["a", "b"];
        let mut models = [Model::new(1, 0), Model::new(1, 0)];
        let mut saved: [Option<(Model, Saved)>; 2] = [None, None];
        let mut previous: [Option<Saved>; 2] = [None, None];
        for (seed, (i, act)) in acts.into_iter().enumerate() {
            let (model, seed) = (&mut models[i], 10_000 + seed as u64);
            match act {
                Act::Extend(more) => model.extend(seed, more),
                Act::Cut(len) => {
                    model.cut(seed, len.min(model.tokens.len()));
                    previous[i] = previous[i].take().map(|p| p.truncated(model.kept));
                }
                Act::Save { rings, forget } => {
                    model.state = Some(state(seed, rings));
                    model.saved_at = seed;
                    let before = previous[i].as_ref().filter(|_| !forget);
                    let pages = before.map_or(0, Saved::pages).min(model.complete());
                    let (now, written) = model.save(&store, names[i], before).unwrap();
                    prop_assert_eq!(written.pages, model.complete() - pages);
                    previous[i] = Some(now.clone());
                    saved[i] = Some((model.clone(), now));
                }
                Act::Reopen => if let Some((m, s)) = &saved[i] {
                    models[i] = m.clone();
                    previous[i] = Some(s.clone());
                }
            }
            for (name, saved) in names.iter().zip(&saved) {
                if let Some(saved) = saved {
                    prop_assert!(read(&store, name).unwrap() == *saved, "session {} is another", name);
                }
            }
            assert_no_orphans(&store);
        }
    }
}

/// What the dying child saves at its `n`th save: the session before, grown, or cut and grown, and what the cut kept.
fn nth_session(n: u64, before: Option<Model>) -> (Model, Option<usize>) {
    let mut model = before.unwrap_or_else(|| Model::new(0, 0));
    let cut = (n % 5 == 4).then(|| {
        model.cut(n, model.tokens.len() * 2 / 3);
        model.kept
    });
    model.extend(n, 1 + (n * 37 % 400) as usize);
    (model.state, model.saved_at) = (Some(state(n, n.is_multiple_of(2))), n);
    (model, cut)
}

/// Not a test: what [`killed_saves_leave_the_last_commit_or_the_next`] runs and kills.
#[test]
#[ignore = "runs until it is killed"]
fn dying_child() {
    let path = std::env::var_os("CEDRA_DYING_CHILD").expect("run by its parent");
    let store = RedbStore::open(path).unwrap();
    let (mut model, mut saved) = match block_on(store.open("s")).unwrap() {
        Some(_) => read(&store, "s").map(|(model, saved)| (Some(model), Some(saved))).unwrap(),
        None => (None, None),
    };
    let mut out = std::io::stdout().lock();
    for n in model.as_ref().map_or(0, |model| model.saved_at + 1).. {
        let (next, cut) = nth_session(n, model);
        saved = saved.map(|saved: Saved| cut.map_or(saved.clone(), |kept| saved.truncated(kept)));
        saved = Some(next.save(&store, "s", saved.as_ref()).unwrap().0);
        writeln!(out, "committed {n}").and_then(|()| out.flush()).unwrap();
        model = Some(next);
    }
}

/// A process that saves is killed at any moment: the store then has its last commit, or the one that it was about to tell of.
#[test]
fn killed_saves_leave_the_last_commit_or_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sessions.redb");
    let mut expected: Vec<Model> = vec![];
    let mut next: Option<u64> = None; // the commit after the last that the store is known to have
    let mut ahead = 0;
    for round in 0..50u64 {
        let luck = words(round + 1, 2);
        let (lines, last) = run_and_kill(&path, luck[0] % 3, Duration::from_micros((luck[1] % 12_000).into()));
        let told = last.or(next.map(|n| n.wrapping_sub(1)).filter(|&n| n != u64::MAX));
        let store = match RedbStore::open(&path) {
            Ok(store) => store,
            Err(e) => panic!("round {round}, after {lines} lines: {e}"),
        };
        assert_no_orphans(&store);
        let found = match read(&store, "s") {
            Ok((model, _)) => Some(model),
            Err(Error::NoSession { .. }) => None,
            Err(e) => panic!("round {round}: {e}"),
        };
        let n = found.as_ref().map(|model| model.saved_at);
        let allowed = [told, Some(told.map_or(0, |n| n + 1))];
        assert!(allowed.contains(&n), "round {round}: commit {n:?} found, {told:?} was told of");
        ahead += u64::from(n != told);
        if let (Some(model), Some(n)) = (found, n) {
            while expected.len() <= n as usize {
                let (model, _) = nth_session(expected.len() as u64, expected.last().cloned());
                expected.push(model);
            }
            let due = &expected[n as usize];
            assert_eq!((&model.tokens, model.kept), (&due.tokens, due.kept), "round {round}");
            let differ: Vec<usize> = (0..due.pages.len()).filter(|&p| model.pages.get(p) != due.pages.get(p)).collect();
            assert!(model == *due, "round {round}: pages {differ:?} differ, of {}", due.pages.len());
            next = Some(n + 1);
        }
    }
    assert!(next.is_some_and(|n| n > 20), "{next:?} commits");
    println!("{next:?} commits, {ahead} of 50 found that were not told of");
}

/// Starts the child, waits for some commits and then a moment, kills it. Lines that it wrote, and its last commit.
fn run_and_kill(path: &Path, commits: u32, moment: Duration) -> (usize, Option<u64>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "dying_child", "--ignored", "--nocapture"])
        .env("CEDRA_DYING_CHILD", path)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut told = lines.map_while(std::io::Result::ok).filter_map(|line| {
        let (_, n) = line.split_once("committed ")?;
        n.parse::<u64>().ok()
    });
    let mut last = None;
    for _ in 0..commits {
        last = told.next().or(last);
    }
    std::thread::sleep(moment);
    child.kill().unwrap();
    let rest: Vec<u64> = told.collect();
    child.wait().unwrap();
    (commits as usize + rest.len(), rest.last().copied().or(last))
}

/// The session in the fixtures.
fn golden() -> Model {
    let mut model = Model::new(11, 3 * PAGE + 4);
    model.tokens = (0..model.tokens.len() as u32).map(|i| 1000 + i).collect();
    model.saved_at = 1_700_000_000_123;
    model
}

/// Not a test: makes the golden session. To be run once a format version.
#[test]
#[ignore = "writes a fixture"]
fn write_golden_session() {
    let store = MemoryStore::new();
    let mut model = golden();
    let whole = model.clone();
    model.cut(11, 2 * PAGE + 1);
    let (saved, _) = model.save(&store, "golden", None).unwrap();
    whole.save(&store, "golden", Some(&saved)).unwrap();
    let folder = fixture("session/v1");
    std::fs::create_dir_all(&folder).unwrap();
    let manifest = block_on(store.open("golden")).unwrap().unwrap();
    std::fs::write(folder.join("manifest"), &manifest).unwrap();
    for id in Manifest::parse("golden", &manifest).unwrap().records() {
        std::fs::write(folder.join(id.to_string()), block_on(store.get(id)).unwrap().unwrap()).unwrap();
    }
}

/// Sessions of version 1 stay readable, and every field of theirs stays where it is.
#[test]
fn golden_session_opens() {
    let store = MemoryStore::new();
    let mut ids = vec![];
    let folder = fixture("session/v1");
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap() == "manifest" {
            continue;
        }
        let record = Record::new(std::fs::read(&path).unwrap());
        assert_eq!(path.file_name().unwrap().to_str(), Some(record.id().to_string().as_str()));
        ids.push(record.id());
        block_on(store.put(&[record])).unwrap();
    }
    let bytes = std::fs::read(folder.join("manifest")).unwrap();
    block_on(store.commit("golden", &bytes, &ids)).unwrap();
    let manifest = Manifest::parse("golden", &bytes).unwrap();
    assert_eq!(manifest.records().into_iter().collect::<BTreeSet<_>>(), ids.into_iter().collect());
    assert_eq!(manifest.fingerprint, fingerprint());
    assert_eq!(manifest.geometry, geometry());
    assert_eq!((manifest.tokens, manifest.cached, manifest.kept), (28, 27, 27));
    assert_eq!(manifest.floors, Floors { encoder: 1, decoder: 2 });
    assert_eq!(manifest.generator, Generator { seed: 0x0123_4567_89ab_cdef, drawn: 9 });
    assert_eq!(manifest.saved_at, 1_700_000_000_123);
    assert_eq!(
        manifest.token_runs.iter().map(|r| (r.first, r.tokens, r.used)).collect::<Vec<_>>(),
        [(0, 16, 16), (16, 8, 8), (24, 4, 4)]
    );
    assert_eq!(
        manifest.page_runs.iter().map(|r| (r.first, r.pages, r.used)).collect::<Vec<_>>(),
        [(0, 2, 2), (2, 1, 1)]
    );
    assert!(manifest.rings && manifest.state.is_some() && manifest.tail.is_some());
    assert_eq!(read(&store, "golden").unwrap().0, golden());
    assert_eq!(manifest.to_bytes(), bytes);
    // Where docs/session-format.md says that they are.
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!(&bytes[..8], b"CEDRA\r\n\x1a");
    assert_eq!((word(8), word(12) as usize), (1, bytes.len()));
    assert_eq!(bytes[16..64], [[1; 16], [2; 16], [3; 16]].concat());
    assert_eq!([64, 68, 72, 76, 80, 84, 88].map(word), [8, 60, 3, 4, 4, 2, 2]);
    assert_eq!([92, 96, 100, 104, 108].map(word), [1, 2, 0, 3, 2]);
    assert_eq!([132, 136, 140, 144, 148].map(word), [28, 27, 27, 1, 2]);
    assert_eq!([152, 156, 160].map(word), [0x89ab_cdef, 0x0123_4567, 9]);
    assert_eq!([172, 192, 196, 200].map(word), [3, 72, 0, 16]);
}

#[test]
fn fingerprints_tell_models_apart() {
    let folder = fixture("golden/ckpt_fp8fp4");
    let json = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let file = std::fs::read(folder.join("model.safetensors")).unwrap();
    let tokenizer = std::fs::read(folder.join("tokenizer.json")).unwrap();
    let of = |json: &str, file: &[u8]| {
        let checkpoint = Checkpoint::from_files(json, vec![("model.safetensors".into(), file.to_vec())]).unwrap();
        Fingerprint::new(&checkpoint, Some(&tokenizer))
    };
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let original = Fingerprint::new(&checkpoint, Some(&tokenizer));
    assert_eq!(of(&json, &file), original);
    assert_eq!(original.tokenizer, RecordId::of(&tokenizer).0);
    let parts = |other: Fingerprint| [other.config, other.weights, other.tokenizer];
    let differs = |other: Fingerprint| {
        let pairs = parts(original).into_iter().zip(parts(other));
        pairs.map(|(a, b)| a != b).collect::<Vec<_>>()
    };
    assert_eq!(differs(Fingerprint::new(&checkpoint, None)), [false, false, true]);
    assert_eq!(differs(Fingerprint::new(&checkpoint, Some(b"{}"))), [false, false, true]);

    // Blanks and the order of fields are no difference; a value is, even one that the runtime does not read.
    let value: serde_json::Value = serde_json::from_str(&json).unwrap();
    let reversed: Vec<String> =
        value.as_object().unwrap().iter().rev().map(|(name, value)| format!("{name:?} : {value}")).collect();
    assert_eq!(of(&format!("{{\n{}\n}}", reversed.join(",\n")), &file), original);
    let noted = json.replacen('{', "{\"a note\": [1, {\"b\": null}],", 1);
    assert_eq!(differs(of(&noted, &file)), [true, false, false]);

    // A byte at the beginning, in the middle or at the end of any tensor.
    let header = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let data: serde_json::Value = serde_json::from_slice(&file[8..header]).unwrap();
    let [mut tensors, mut changed] = [0; 2];
    for (_, tensor) in data
        .as_object()
        .unwrap()
        .iter()
        .filter(|(name, _)| *name == "embed.weight" || name.ends_with("experts.0.w1.weight"))
    {
        let [start, end] = [0, 1].map(|i| header + tensor["data_offsets"][i].as_u64().unwrap() as usize);
        tensors += 1;
        for at in [start, (start + end) / 2, end - 1] {
            let mut other = file.clone();
            other[at] ^= 1;
            assert_eq!(differs(of(&json, &other)), [false, true, false], "byte {at}");
            changed += 1;
        }
    }
    assert!(tensors > 2 && changed == 3 * tensors);
}
