//! `cedra bench --restore`: what it costs to go on with a saved session, beside reading its text anew.
//!
//! The sessions hold random tokens and random valid codes ([`Random`]), written as a save writes them.

use super::synthetic::Subject;
use crate::checkpoint::Fingerprint;
use crate::gpu::Gpu;
use crate::layout::PAGE_TOKENS;
use crate::model::synthetic::Random;
use crate::model::{Model, Options};
use crate::reading::Floors;
use crate::sampling::{Generator, Request, Sampling};
use crate::session::{geometry, Append, Engine, Session};
use crate::snapshot::{Head, Reader, Writer};
use crate::store::{MemoryStore, RedbStore, Store};
use crate::{Error, Result};
use serde::Serialize;
use std::fmt;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A text whose reading takes longer is not read to its end, and no time is given.
const PATIENCE: Duration = Duration::from_secs(180);
/// Room for the tokens that are made.
const MADE: usize = 2;
/// Name of the session in each store.
const NAME: &str = "restored";

/// What was measured.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    device: String,
    model: String,
    /// Longest context of the model, where it was raised to make room.
    #[serde(skip_serializing_if = "Option::is_none")]
    raised_from: Option<usize>,
    lengths: Vec<AtLength>,
}

/// A text of this length.
#[derive(Debug, Serialize)]
struct AtLength {
    tokens: usize,
    /// Seconds that reading the text takes; none when it was too long.
    read_anew_seconds: Option<f64>,
    /// Tokens that were read in that time.
    read_anew_tokens: usize,
    restores: Vec<Restore>,
}

/// A restore from a store.
#[derive(Debug, Serialize)]
struct Restore {
    store: &'static str,
    /// Bytes of the saved session.
    bytes: u64,
    /// Seconds to read it from the store and check it, by itself.
    store_seconds: f64,
    /// Seconds to open it: read, check, and lay its pages on the device.
    open_seconds: f64,
    /// Rows that were run again.
    replayed: usize,
    /// Seconds to the first token, the replay included, and to the one after it.
    first_token_seconds: f64,
    next_token_seconds: f64,
}

impl Restore {
    /// Seconds to open the session and replay its windows.
    fn seconds(&self) -> f64 {
        self.open_seconds + self.replay_seconds()
    }
    fn replay_seconds(&self) -> f64 {
        self.first_token_seconds - self.next_token_seconds
    }
}

/// A database file that goes with this value.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).ok();
    }
}

/// Saves and restores texts of these lengths, and reads them.
///
/// # Errors
/// [`Error::EmptyPrompt`] for a length of 0, [`Error::Setting`] for one that no text can have; those of the checkpoint, the device and the store.
pub(super) fn measure(gpu: &Arc<Gpu>, model: &Path, lengths: &[usize]) -> Result<Report> {
    if lengths.contains(&0) {
        return Err(Error::EmptyPrompt);
    }
    let longest = lengths.iter().copied().max().unwrap_or(1);
    let subject = Subject::open(model, longest + MADE)?;
    let options = Options { context: longest + MADE, ..Options::default() };
    let model = Model::load_blocking(gpu.clone(), &subject.checkpoint, &subject.ngrams, &options, &mut |_, _| {})?;
    let fingerprint = Fingerprint::new(&subject.checkpoint, None);
    let model = Arc::new(model);
    let bench = Bench { model: &model, fingerprint };
    // A driver may compile a kernel when it first runs.
    bench.at(longest.min(2 * PAGE_TOKENS))?;
    let lengths = lengths.iter().map(|&length| bench.at(length)).collect::<Result<_>>()?;
    let Subject { name, raised_from, .. } = subject;
    Ok(Report { device: gpu.describe(), model: name, raised_from, lengths })
}

struct Bench<'a> {
    model: &'a Arc<Model>,
    fingerprint: Fingerprint,
}

impl Bench<'_> {
    fn at(&self, length: usize) -> Result<AtLength> {
        let mut random = Random::new(length as u64);
        let tokens = random.tokens(self.model.config().vocab_size, length);
        let pages = self.model.layout().pages(length.saturating_sub(1));
        let page_words = self.model.layout().pool.page_words;
        let mut words = vec![0; pages * page_words];
        words
            .chunks_mut(page_words.max(1))
            .for_each(|page| random.page(self.model.config(), self.model.layout(), page));

        let file = Scratch(std::env::temp_dir().join(format!("cedra-restore-{}.redb", std::process::id())));
        let on_disk: Rc<dyn Store> = Rc::new(RedbStore::open(&file.0)?);
        let bytes = self.save(&*on_disk, &tokens, &words)?;
        drop(on_disk);
        let on_disk: Rc<dyn Store> = Rc::new(RedbStore::open(&file.0)?);
        let in_memory: Rc<dyn Store> = Rc::new(MemoryStore::new());
        self.save(&*in_memory, &tokens, &words)?;
        let restores = vec![self.restore("redb", &on_disk, bytes)?, self.restore("memory", &in_memory, bytes)?];

        let mut session = self.engine().session()?;
        let started = Instant::now();
        let mut patient = |_| match started.elapsed() < PATIENCE {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        };
        let read = session.append_as(&tokens, Append { reuse: false, ..Append::default() }, &mut patient);
        let read_anew_seconds = match read {
            Ok(_) => Some(started.elapsed().as_secs_f64()),
            Err(Error::Stopped { .. }) => None,
            Err(error) => return Err(error),
        };
        Ok(AtLength { tokens: length, read_anew_seconds, read_anew_tokens: session.len(), restores })
    }

    fn engine(&self) -> Rc<Engine> {
        Engine::new(self.model.clone(), self.fingerprint)
    }

    /// Saves a session of these tokens and pages; how many bytes that are.
    fn save(&self, store: &dyn Store, tokens: &[u32], words: &[u32]) -> Result<u64> {
        let cached = tokens.len() - 1;
        let head = Head {
            fingerprint: self.fingerprint,
            geometry: geometry(self.model),
            tokens,
            cached,
            kept: cached,
            floors: Floors::default(),
            generator: Generator::default(),
            saved_at: 0,
        };
        pollster::block_on(async {
            let mut writer = Writer::new(store, NAME, None, head)?;
            let (complete, begun) = words.split_at(cached / PAGE_TOKENS * self.model.layout().pool.page_words);
            writer.feed(complete).await?;
            let (_, written) = writer.finish((!begun.is_empty()).then_some(begun), None).await?;
            Ok(written.bytes)
        })
    }

    fn restore(&self, name: &'static str, store: &Rc<dyn Store>, bytes: u64) -> Result<Restore> {
        let started = Instant::now();
        pollster::block_on(async {
            let mut reader = Reader::open(&**store, NAME, &self.fingerprint, &geometry(self.model)).await?;
            while reader.next_pages().await?.is_some() {}
            Ok::<_, Error>(())
        })?;
        let store_seconds = started.elapsed().as_secs_f64();
        let started = Instant::now();
        let mut session = self.engine().open(store, NAME)?;
        let open_seconds = started.elapsed().as_secs_f64();
        let (first_token_seconds, next_token_seconds) = (token(&mut session)?, token(&mut session)?);
        let replayed = session.replayed();
        Ok(Restore {
            store: name,
            bytes,
            store_seconds,
            open_seconds,
            replayed,
            first_token_seconds,
            next_token_seconds,
        })
    }
}

/// Seconds that the next token takes.
fn token(session: &mut Session) -> Result<f64> {
    let request = Request { max_tokens: 1, sampling: Sampling::default(), stop_ids: vec![] };
    let started = Instant::now();
    session.generate(&request)?.try_for_each(|token| token.map(drop))?;
    Ok(started.elapsed().as_secs_f64())
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.device)?;
        writeln!(f, "{}; saved sessions of random codes", self.model)?;
        if let Some(longest) = self.raised_from {
            writeln!(f, "the model is made for {longest} tokens: its positions were allowed to go on in memory")?;
        }
        let heads =
            ["bytes", "rows replayed", "store, ms", "open, ms", "replay, ms", "in all, ms", "read anew, ms", "times"];
        write!(f, "{:>8} {:<7}", "tokens", "store")?;
        heads.iter().try_for_each(|head| write!(f, "{head:>15}"))?;
        writeln!(f)?;
        for at in &self.lengths {
            for restore in &at.restores {
                let ms = |seconds: f64| format!("{:.1}", 1e3 * seconds);
                let cells = [
                    restore.bytes.to_string(),
                    restore.replayed.to_string(),
                    ms(restore.store_seconds),
                    ms(restore.open_seconds),
                    ms(restore.replay_seconds()),
                    ms(restore.seconds()),
                    at.read_anew_seconds.map_or("too long".into(), ms),
                    at.read_anew_seconds.map_or("-".into(), |read| format!("{:.1}", read / restore.seconds())),
                ];
                write!(f, "{:>8} {:<7}", at.tokens, restore.store)?;
                cells.iter().try_for_each(|cell| write!(f, "{cell:>15}"))?;
                writeln!(f)?;
            }
        }
        Ok(())
    }
}
