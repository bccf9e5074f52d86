//! Sessions in stores: saving what is new, and opening what was saved.

use super::prefix::Owner;
use super::{Engine, Session};
use crate::cache::Page;
use crate::config::Role;
use crate::gpu::Recording;
use crate::layout::PAGE_TOKENS;
use crate::model::{Model, Sequence, Standing};
use crate::snapshot::{Geometry, Head, Manifest, PagePart, Reader, Saved, State, Writer, Written};
use crate::store::Store;
use crate::{Error, Result};
use std::rc::Rc;

/// Bytes of pages that are on their way to a store at a time.
const BATCH: usize = 8 << 20;

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
pub(super) struct Committed {
    store: Rc<dyn Store>,
    saved: Saved,
}

impl Committed {
    /// The session was cut to `tokens` tokens.
    pub(super) fn cut(&mut self, tokens: usize) {
        self.saved = self.saved.clone().truncated(tokens);
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

/// Zeroes what a page with `tokens` tokens holds beyond them: another text's leftovers.
fn blank(model: &Model, page: &mut [u32], tokens: usize) {
    for (layer, part) in model.layout().page_parts.iter().enumerate() {
        let Some(part) = part else { continue };
        let entries = tokens / model.config().layers[layer].ratio;
        let keys = part.at + part.entries * part.latent_words;
        page[part.at + entries * part.latent_words..keys].fill(0);
        page[keys + entries * part.key_words..part.at + part.words()].fill(0);
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

impl Session {
    /// Saves the session under a name: what is new since its last save to this store is written, and one commit makes it
    /// count. Until then the store has what it had.
    ///
    /// # Errors
    /// [`Error::Closed`]; the device's and the store's.
    pub async fn save_async(&mut self, store: &Rc<dyn Store>, name: &str, rings: Rings) -> Result<Written> {
        let engine = self.engine.clone();
        self.sequence()?.settle_async().await?;
        let (sequence, at) = (self.open_sequence()?, self.saved.iter().position(|c| Rc::ptr_eq(&c.store, store)));
        let previous = at.map(|at| &self.saved[at].saved);
        let (saved, written) = match write(&engine, sequence, &**store, name, rings, previous).await {
            // The records of the last save went with the session that it was saved as.
            Err(Error::Session { .. }) if previous.is_some() => {
                write(&engine, sequence, &**store, name, rings, None).await?
            }
            done => done?,
        };
        let paged = sequence.paged().min(sequence.len());
        engine.know_stored(store, name, &sequence.tokens()[..paged]);
        let committed = Committed { store: store.clone(), saved };
        match at {
            Some(at) => self.saved[at] = committed,
            None => self.saved.push(committed),
        }
        Ok(written)
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

async fn write(
    engine: &Engine,
    sequence: &Sequence,
    store: &dyn Store,
    name: &str,
    rings: Rings,
    previous: Option<&Saved>,
) -> Result<(Saved, Written)> {
    let model = &*engine.model;
    let (gpu, pool) = (model.gpu(), model.pool());
    let standing = sequence.standing();
    let head = Head {
        fingerprint: engine.fingerprint,
        geometry: geometry(model),
        tokens: sequence.tokens(),
        cached: standing.cached,
        kept: standing.paged,
        floors: standing.floors,
        generator: standing.generator,
        saved_at: now(),
    };
    let mut writer = Writer::new(store, name, previous, head)?;
    let pages = sequence.pages().with(|pages| pages.clone());
    let page_words = pool.layout().page_words;
    let batch = (BATCH / (4 * page_words).max(1)).max(1);
    let new = writer.pages();
    for first in new.clone().step_by(batch) {
        let bytes = pool.read(gpu, &pages[first..new.end.min(first + batch)]).await?;
        writer.feed(&bytemuck::allocation::pod_collect_to_vec::<u8, u32>(&bytes)).await?;
    }
    let begun = standing.paged % PAGE_TOKENS;
    let mut tail = None;
    if begun > 0 && page_words > 0 {
        let number = standing.paged / PAGE_TOKENS;
        let bytes = pool.read(gpu, &pages[number..=number]).await?;
        let mut words = bytemuck::allocation::pod_collect_to_vec::<u8, u32>(&bytes);
        blank(model, &mut words, begun);
        tail = Some(words);
    }
    let state = match sequence.has_windows() {
        true => Some(state(model, sequence, &standing, rings).await?),
        false => None,
    };
    writer.finish(tail.as_deref(), state.as_ref()).await
}

/// Remainders, history and, if they are to be saved, rings.
async fn state(model: &Model, sequence: &Sequence, standing: &Standing, rings: Rings) -> Result<State> {
    let cache = sequence.cache();
    let whole = |buffer| {
        let buffer: &crate::gpu::Buffer = buffer;
        (buffer, 0, buffer.bytes())
    };
    let remainders: Vec<_> = cache.remainders.iter().flatten().map(whole).collect();
    let kept: Vec<_> = cache.rings.iter().map(whole).filter(|_| rings == Rings::Saved).collect();
    let split = remainders.iter().map(|(.., bytes)| *bytes as usize).sum::<usize>();
    let bytes = model.gpu().read_parts(&[remainders, kept].concat()).await?;
    let mut words: Vec<u32> = bytemuck::allocation::pod_collect_to_vec(&bytes);
    let ring_words = words.split_off(split / 4);
    // Slots that hold nothing of this text may hold anything, NaN bits too.
    let mut remainders: Vec<f32> = words.into_iter().map(f32::from_bits).collect();
    let mut at = 0;
    for layer in model.config().layers.iter().filter(|layer| layer.role == Role::Full) {
        let row = 2 * model.config().head_dim;
        for slot in 0..layer.ratio - 1 {
            if slot >= standing.cached % layer.ratio {
                remainders[at..at + row].fill(0.0);
            }
            at += row;
        }
    }
    let rings = (rings == Rings::Saved).then_some(ring_words);
    Ok(State { remainders, history: sequence.history(), rings })
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
        let mut sequence = Sequence::new(self.model.clone())?;
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
                let mut remainders = bytemuck::cast_slice::<f32, u8>(remainders);
                let mut rings = bytemuck::cast_slice::<u32, u8>(rings);
                let cache = sequence.cache();
                for (buffers, bytes) in [
                    (cache.remainders.iter().flatten().collect::<Vec<_>>(), &mut remainders),
                    (cache.rings.iter().collect(), &mut rings),
                ] {
                    for buffer in buffers {
                        let (own, rest) = bytes.split_at(buffer.bytes() as usize);
                        model.gpu().upload(buffer, 0, own);
                        *bytes = rest;
                    }
                }
                sequence.resume_exactly(tokens, pages, &standing);
            }
            _ => sequence.resume(tokens, pages, paged, generator),
        }
        let saved = reader.saved();
        let mut session = self.adopt(sequence);
        session.saved.push(Committed { store: store.clone(), saved });
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
