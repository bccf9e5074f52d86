//! Sessions in stores: saving what is new while the text goes on, and opening what was saved.

use super::prefix::Owner;
use super::{Engine, Session, Writing};
use crate::cache::Page;
use crate::gpu::Recording;
use crate::layout::PAGE_TOKENS;
use crate::model::{Model, Moment, Past, Sequence, Standing};
use crate::snapshot::{Geometry, Head, Manifest, PagePart, Reader, Saved, State, Writer, Written};
use crate::store::Store;
use crate::{Error, Result};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};

/// Bytes of pages that are copied off the device at a time, and how many copies may be under way.
const BATCH: usize = 2 << 20;
const UNDER_WAY: usize = 4;

/// How often a save is tried that finds its records gone: another session of the store, of another tab perhaps, had the same
/// ones and let go of them before this one's commit.
const TRIES: usize = 4;

/// What a save keeps of the window rings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Rings {
    /// Nothing: they are computed again when the session is opened, from the last window of tokens.
    #[default]
    Replay,
    /// All of them: an opened session is exactly the one that was saved.
    Saved,
}

/// What a session's last commit to a store holds.
#[derive(Debug, Clone)]
struct Committed {
    store: Rc<dyn Store>,
    saved: Saved,
}

/// What the stores have of a session. Shared with its saves under way, which end when they end.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    committed: RefCell<Vec<Committed>>,
    /// Of each save under way: how short the text has been since.
    cuts: RefCell<Vec<Weak<Cell<usize>>>>,
}

impl Ledger {
    /// A fork has what the session has saved: its manifest can name it, too.
    pub(super) fn forked(&self) -> Rc<Self> {
        Rc::new(Self { committed: self.committed.clone(), cuts: RefCell::default() })
    }

    /// The session was cut to `tokens` tokens.
    pub(super) fn cut(&self, tokens: usize) {
        for committed in self.committed.borrow_mut().iter_mut() {
            committed.saved = committed.saved.clone().truncated(tokens);
        }
        self.cuts.borrow_mut().retain(|cut| {
            let under_way = cut.upgrade();
            under_way.is_some_and(|cut| {
                cut.set(cut.get().min(tokens));
                true
            })
        });
    }

    /// A save begins.
    fn watch(&self) -> Rc<Cell<usize>> {
        let cut = Rc::new(Cell::new(usize::MAX));
        self.cuts.borrow_mut().push(Rc::downgrade(&cut));
        cut
    }

    fn commit(&self, store: &Rc<dyn Store>, saved: Saved) {
        let mut committed = self.committed.borrow_mut();
        committed.retain(|known| !Rc::ptr_eq(&known.store, store));
        committed.push(Committed { store: store.clone(), saved });
    }
}

/// How pages, rings and remainders of a model are laid out.
pub fn geometry(model: &Model) -> Geometry {
    let (config, layout) = (model.config(), model.layout());
    let part = |(layer, part): (usize, &Option<crate::kernels::cache_append::PageLayout>)| {
        part.map(|part| PagePart {
            layer: layer as u32,
            ratio: config.layers[layer].ratio as u32,
            at: part.at as u32,
            latent_words: part.latent_words as u32,
            key_words: part.key_words as u32,
        })
    };
    Geometry {
        page_tokens: PAGE_TOKENS as u32,
        page_words: layout.pool.page_words as u32,
        window: config.sliding_window as u32,
        layers: config.layers.len() as u32,
        head_dim: config.head_dim as u32,
        history: crate::cache::history(config) as u32,
        parts: layout.page_parts.iter().enumerate().filter_map(part).collect(),
    }
}

fn now() -> u64 {
    #[cfg(not(target_arch = "wasm32"))]
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.as_millis() as u64);
    #[cfg(target_arch = "wasm32")]
    let now = js_sys::Date::now() as u64;
    now
}

/// A session as it was when the snapshot was taken, to be written to a store beside whatever the session does meanwhile: it may
/// go on, be cut, forked and closed.
#[derive(Debug)]
pub struct Snapshot {
    engine: Rc<Engine>,
    moment: Moment,
    saved_at: u64,
    ledger: Rc<Ledger>,
    /// What the stores had of the text then.
    before: Vec<Committed>,
    cut: Rc<Cell<usize>>,
}

pub(super) async fn take(
    engine: &Rc<Engine>,
    sequence: &mut Sequence,
    ledger: &Rc<Ledger>,
    rings: Rings,
) -> Result<Snapshot> {
    let moment = sequence.moment_async(rings == Rings::Saved).await?;
    Ok(Snapshot {
        engine: engine.clone(),
        moment,
        saved_at: now(),
        ledger: ledger.clone(),
        before: ledger.committed.borrow().clone(),
        cut: ledger.watch(),
    })
}

impl Snapshot {
    /// Writes it under a name: what is new since the session's last save to this store, and one commit that makes it count.
    /// Until then the store has what it had, and when it fails, what was written of it goes.
    ///
    /// # Errors
    /// The device's and the store's.
    pub async fn write_async(self, store: &Rc<dyn Store>, name: &str) -> Result<Written> {
        let Self { engine, moment, saved_at, ledger, before, cut } = self;
        let past = moment.past().await?;
        let mut previous = before.iter().find(|known| Rc::ptr_eq(&known.store, store)).map(|known| &known.saved);
        let mut tries = 1;
        let (saved, written) = loop {
            match write(&engine, &past, saved_at, &**store, name, previous).await {
                // What the last save wrote went with the session that it was saved as, or somebody let go of what is new.
                Err(Error::Session { .. }) if tries < TRIES => {
                    tries += 1;
                    previous = None;
                }
                done => break done?,
            }
        };
        engine.know_stored(store, name, &past.tokens[..past.standing.paged.min(past.tokens.len())]);
        ledger.commit(store, saved.truncated(cut.get()));
        Ok(written)
    }

    /// [`Snapshot::write_async`], blocking.
    ///
    /// # Errors
    /// As [`Snapshot::write_async`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn write(self, store: &Rc<dyn Store>, name: &str) -> Result<Written> {
        pollster::block_on(self.write_async(store, name))
    }
}

impl Session {
    /// The session as it is now, to be saved while it goes on. Of a generation it has the tokens of all steps that were sent,
    /// the next few that the generation gives included; the generation goes on.
    ///
    /// # Errors
    /// [`Error::Closed`]; the device's.
    pub async fn snapshot_async(&mut self, rings: Rings) -> Result<Snapshot> {
        let sequence = self.sequence.as_mut().ok_or(Error::Closed)?;
        take(&self.engine, sequence, &self.ledger, rings).await
    }

    /// [`Session::snapshot_async`], blocking.
    ///
    /// # Errors
    /// As [`Session::snapshot_async`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn snapshot(&mut self, rings: Rings) -> Result<Snapshot> {
        pollster::block_on(self.snapshot_async(rings))
    }

    /// Saves the session as it is now under a name: a [`Snapshot`], written at once.
    ///
    /// # Errors
    /// [`Error::Closed`]; the device's and the store's.
    pub async fn save_async(&mut self, store: &Rc<dyn Store>, name: &str, rings: Rings) -> Result<Written> {
        self.snapshot_async(rings).await?.write_async(store, name).await
    }

    /// [`Session::save_async`], blocking.
    ///
    /// # Errors
    /// As [`Session::save_async`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn save(&mut self, store: &Rc<dyn Store>, name: &str, rings: Rings) -> Result<Written> {
        pollster::block_on(self.save_async(store, name, rings))
    }
}

impl Writing<'_> {
    /// As [`Session::snapshot_async`], between two tokens.
    ///
    /// # Errors
    /// As [`Session::snapshot_async`].
    pub async fn snapshot_async(&mut self, rings: Rings) -> Result<Snapshot> {
        take(self.engine, self.generation.sequence_mut(), self.ledger, rings).await
    }

    /// [`Writing::snapshot_async`], blocking.
    ///
    /// # Errors
    /// As [`Session::snapshot_async`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn snapshot(&mut self, rings: Rings) -> Result<Snapshot> {
        pollster::block_on(self.snapshot_async(rings))
    }
}

async fn write(
    engine: &Engine,
    past: &Past,
    saved_at: u64,
    store: &dyn Store,
    name: &str,
    previous: Option<&Saved>,
) -> Result<(Saved, Written)> {
    let model = &*engine.model;
    let Past { tokens, standing, pages, begun, windows, draft } = past;
    let head = Head {
        fingerprint: engine.fingerprint,
        geometry: geometry(model),
        tokens,
        cached: standing.cached,
        kept: standing.paged,
        floors: standing.floors,
        generator: standing.generator,
        saved_at,
    };
    let state = windows.as_ref().map(|(remainders, rings)| State {
        remainders: remainders.clone(),
        history: past.history(model),
        rings: rings.clone(),
        draft: draft.clone(),
    });
    let mut writer = Writer::new(store, name, previous, head)?.expecting(state.as_ref());
    let done = match feed(model, pages, &mut writer).await {
        Ok(()) => writer.finish(begun.as_deref(), state.as_ref()).await,
        Err(error) => Err(error),
    };
    if done.is_err() {
        // Why the save failed is what is told; what this leaves goes when the store is next opened.
        let _ = writer.abandon().await;
    }
    done
}

/// Hands over the pages that are new, a few copies ahead of what is being written.
async fn feed(model: &Model, pages: &[Page], writer: &mut Writer<'_>) -> Result<()> {
    let (gpu, pool) = (model.gpu(), model.pool());
    let batch = (BATCH / (4 * pool.layout().page_words).max(1)).max(1);
    let mut batches = pages[writer.pages()].chunks(batch);
    let mut copies = VecDeque::new();
    loop {
        while copies.len() < UNDER_WAY {
            let Some(next) = batches.next() else { break };
            copies.push_back(pool.copy_out(gpu, next)?);
        }
        let Some(copy) = copies.pop_front() else { return Ok(()) };
        let bytes = copy.bytes(gpu).await?;
        writer.feed(&bytemuck::allocation::pod_collect_to_vec::<u8, u32>(&bytes)).await?;
    }
}

impl Engine {
    /// Opens a session that was saved. Its pages go to the device; windows that were not saved are computed again when
    /// something needs them. Pages that are lost or damaged, and those after them, are made again from the text.
    ///
    /// # Errors
    /// [`Error::NoSession`], [`Error::Fingerprint`] for another model's session, [`Error::Session`] for one that is damaged
    /// beyond repair, [`Error::Context`] for one that is too long; the device's and the store's.
    pub async fn open_async(self: &Rc<Self>, store: &Rc<dyn Store>, name: &str) -> Result<Session> {
        let model = &*self.model;
        let mut reader = Reader::open(&**store, name, &self.fingerprint, &geometry(model)).await?;
        let context = model.layout().context;
        if reader.tokens.len() > context {
            return Err(Error::Context { needed: reader.tokens.len(), allowed: context });
        }
        let mut sequence = model.gpu().settled(|| Sequence::new(self.model.clone())).await?;
        let pages = upload(model, &mut reader, usize::MAX).await?;
        let Manifest { cached, kept, floors, generator, .. } = reader.manifest;
        // Without Full layers there are no pages to lose.
        let paged = if model.pool().layout().page_words > 0 { reader.kept() } else { kept as usize };
        let tokens = reader.tokens.clone();
        let rings = reader.state.as_ref().and_then(|state| Some((&state.remainders, state.rings.as_ref()?)));
        match rings {
            _ if tokens.is_empty() => {}
            Some((remainders, rings)) if paged == kept as usize => {
                let standing = Standing { cached: cached as usize, paged, floors, kept: paged, generator };
                sequence.upload_windows(remainders, rings, standing.cached);
                sequence.resume_exactly(tokens, pages, &standing);
                if let Some(window) = reader.state.as_ref().and_then(|state| state.draft.as_ref()) {
                    sequence.upload_draft(window, standing.cached);
                }
            }
            _ => sequence.resume(tokens, pages, paged, generator),
        }
        let saved = reader.saved();
        let session = self.adopt(sequence);
        session.ledger.commit(store, saved);
        Ok(session)
    }

    /// [`Engine::open_async`], blocking.
    ///
    /// # Errors
    /// As [`Engine::open_async`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn open(self: &Rc<Self>, store: &Rc<dyn Store>, name: &str) -> Result<Session> {
        pollster::block_on(self.open_async(store, name))
    }

    /// Lets prompts take over prefixes of the sessions in a store. Sessions of other models, and those that cannot be read,
    /// are left out.
    ///
    /// # Errors
    /// The store's.
    pub async fn attach_async(&self, store: &Rc<dyn Store>) -> Result<()> {
        if self.stores.borrow().iter().any(|known| Rc::ptr_eq(known, store)) {
            return Ok(());
        }
        self.stores.borrow_mut().push(store.clone());
        let geometry = geometry(&self.model);
        for listed in store.list().await? {
            match Reader::open(&**store, &listed.session, &self.fingerprint, &geometry).await {
                Ok(reader) => {
                    let paged = reader.manifest.kept as usize;
                    self.know_stored(store, &listed.session, &reader.tokens[..paged]);
                }
                Err(error @ Error::Store { .. }) => return Err(error),
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// [`Engine::attach_async`], blocking.
    ///
    /// # Errors
    /// As [`Engine::attach_async`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn attach(&self, store: &Rc<dyn Store>) -> Result<()> {
        pollster::block_on(self.attach_async(store))
    }

    /// Forgets a saved session; whether there was one.
    ///
    /// # Errors
    /// The store's.
    pub async fn delete_async(&self, store: &Rc<dyn Store>, name: &str) -> Result<bool> {
        let deleted = store.delete(name).await?;
        if let Some(owner) = self.owner(store, name) {
            self.index.borrow_mut().remove(&owner);
        }
        Ok(deleted)
    }

    /// [`Engine::delete_async`], blocking.
    ///
    /// # Errors
    /// As [`Engine::delete_async`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn delete(&self, store: &Rc<dyn Store>, name: &str) -> Result<bool> {
        pollster::block_on(self.delete_async(store, name))
    }

    /// A saved session in the prefix index; none for stores that were not attached.
    fn owner(&self, store: &Rc<dyn Store>, name: &str) -> Option<Owner> {
        let number = self.stores.borrow().iter().position(|known| Rc::ptr_eq(known, store))?;
        Some(Owner::Stored(number, name.into()))
    }

    fn know_stored(&self, store: &Rc<dyn Store>, name: &str, tokens: &[u32]) {
        if let Some(owner) = self.owner(store, name) {
            self.index.borrow_mut().set(&owner, tokens);
        }
    }

    /// Pages of a saved session that hold the text `tokens`, on the device; none when they cannot be read.
    pub(super) async fn stored_pages(&self, store: usize, name: &str, tokens: &[u32]) -> Result<Option<Vec<Page>>> {
        let store = self.stores.borrow()[store].clone();
        match Reader::open(&*store, name, &self.fingerprint, &geometry(&self.model)).await {
            Ok(mut reader) if reader.tokens.starts_with(tokens) => {
                let pages = upload(&self.model, &mut reader, tokens.len().div_ceil(PAGE_TOKENS)).await?;
                let whole = tokens.len().min(reader.kept()).div_ceil(PAGE_TOKENS);
                Ok((whole == tokens.len().div_ceil(PAGE_TOKENS)).then_some(pages))
            }
            Err(error @ Error::Store { .. }) => Err(error),
            // The session has changed or is damaged since it was indexed: the text is read.
            _ => Ok(None),
        }
    }
}

/// Pages of a saved session, `most` at most, on the device.
async fn upload(model: &Model, reader: &mut Reader<'_>, most: usize) -> Result<Vec<Page>> {
    let (gpu, pool) = (model.gpu(), model.pool());
    let page_words = pool.layout().page_words;
    let mut pages = vec![];
    while pages.len() < most {
        let Some(run) = reader.next_pages().await? else { break };
        pool.reserve(gpu, (run.words.len() / page_words).min(most - pages.len())).await?;
        for words in run.words.chunks(page_words).take(most - pages.len()) {
            let page = pool.take(gpu)?;
            pool.write(gpu, &page, words);
            pages.push(page);
        }
        // The queue holds a copy of what was written until something is submitted.
        gpu.submit(Recording::new())?;
    }
    gpu.settle().await?;
    Ok(pages)
}
