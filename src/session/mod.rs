//! Sessions: texts that are appended to, continued, cut, forked, saved, and found again by their prefixes.
//!
//! An [`Engine`] is a model with the sessions on its device. It knows the prefixes of all of them, and of those in the stores
//! that were attached: a prompt that begins as something seen before reads only the rest. An engine and its sessions live on
//! one thread.

pub mod prefix;
mod save;

pub use crate::snapshot::Written;
pub use save::{geometry, Rings, Snapshot};

use crate::cache::Pages;
use crate::checkpoint::Fingerprint;
use crate::model::{Finish, Generation, LayerRows, Model, Progress, Sequence};
use crate::reading::{Prefill, Replay};
use crate::reference::sequence::{check_room, check_tokens};
use crate::sampling::Request;
use crate::spec::{Counters, Draft};
use crate::store::Store;
use crate::{Error, Result};
use prefix::{Owner, PrefixIndex};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// Shorter prefixes are read again: taking them over would cost as much.
pub const MIN_REUSE: usize = 16;

/// A model, its sessions, and what they have in common.
#[derive(Debug)]
pub struct Engine {
    model: Arc<Model>,
    fingerprint: Fingerprint,
    sessions: Cell<u64>,
    index: RefCell<PrefixIndex>,
    /// Pages of the sessions on the device, by number.
    live: RefCell<HashMap<u64, Pages>>,
    stores: RefCell<Vec<Rc<dyn Store>>>,
}

/// How an append goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Append {
    /// Which rows the layers run.
    pub prefill: Prefill,
    /// Whether an empty session takes over the pages of a prefix that another session has.
    pub reuse: bool,
}

impl Default for Append {
    fn default() -> Self {
        Self { prefill: Prefill::Bounded, reuse: true }
    }
}

/// What an append did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Appended {
    /// Tokens that were taken over from another session's pages.
    pub reused: usize,
    /// Rows that were computed again because windows are not kept.
    pub replayed: usize,
}

impl Engine {
    /// An engine without sessions. `fingerprint` is that of the files that the model was loaded from.
    pub fn new(model: Arc<Model>, fingerprint: Fingerprint) -> Rc<Self> {
        Rc::new(Self {
            model,
            fingerprint,
            sessions: Cell::new(0),
            index: RefCell::default(),
            live: RefCell::default(),
            stores: RefCell::default(),
        })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// What saved sessions of this engine carry.
    pub fn fingerprint(&self) -> &Fingerprint {
        &self.fingerprint
    }

    /// Sessions on the device.
    pub fn live(&self) -> usize {
        self.live.borrow().len()
    }

    /// An empty session, once the device has answered for its buffers. One for which there is no memory leaves the others as
    /// they are.
    ///
    /// # Errors
    /// The device's.
    pub async fn session_async(self: &Rc<Self>) -> Result<Session> {
        let sequence = self.model.gpu().settled(|| Sequence::new(self.model.clone())).await?;
        Ok(self.adopt(sequence))
    }

    /// [`Engine::session_async`], blocking.
    ///
    /// # Errors
    /// As [`Engine::session_async`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn session(self: &Rc<Self>) -> Result<Session> {
        pollster::block_on(self.session_async())
    }

    fn adopt(self: &Rc<Self>, sequence: Sequence) -> Session {
        let number = self.sessions.get();
        self.sessions.set(number + 1);
        self.live.borrow_mut().insert(number, sequence.pages().clone());
        let ledger = Rc::default();
        let session = Session { engine: self.clone(), number, sequence: Some(sequence), ledger, reused: 0 };
        session.publish();
        session
    }

    /// A second session with the text of `session`; the two share pages until one of them writes.
    ///
    /// # Errors
    /// [`Error::OtherEngine`] for another engine's session, [`Error::Closed`]; the device's.
    pub async fn fork_async(self: &Rc<Self>, session: &mut Session) -> Result<Session> {
        if !Rc::ptr_eq(self, &session.engine) {
            return Err(Error::OtherEngine);
        }
        let sequence = session.sequence()?.fork_async().await?;
        session.publish();
        let mut fork = self.adopt(sequence);
        fork.ledger = session.ledger.forked();
        fork.reused = session.reused;
        Ok(fork)
    }

    /// [`Engine::fork_async`], blocking.
    ///
    /// # Errors
    /// As [`Engine::fork_async`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn fork(self: &Rc<Self>, session: &mut Session) -> Result<Session> {
        pollster::block_on(self.fork_async(session))
    }
}

/// A text on the device, and what belongs to it.
#[derive(Debug)]
pub struct Session {
    engine: Rc<Engine>,
    number: u64,
    /// None once the session is closed.
    sequence: Option<Sequence>,
    /// What the last commit to each store holds.
    ledger: Rc<save::Ledger>,
    reused: usize,
}

impl Session {
    fn sequence(&mut self) -> Result<&mut Sequence> {
        self.sequence.as_mut().ok_or(Error::Closed)
    }

    fn open_sequence(&self) -> Result<&Sequence> {
        self.sequence.as_ref().ok_or(Error::Closed)
    }

    /// Tells the engine which prefix is in the pages now.
    fn publish(&self) {
        if let Some(sequence) = &self.sequence {
            publish(&self.engine, self.number, sequence);
        }
    }

    /// The engine.
    pub fn engine(&self) -> &Rc<Engine> {
        &self.engine
    }

    /// Tokens of the text; 0 once the session is closed.
    pub fn len(&self) -> usize {
        self.sequence.as_ref().map_or(0, Sequence::len)
    }

    /// Whether the text has no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens that still fit.
    pub fn remaining(&self) -> usize {
        self.sequence.as_ref().map_or(0, Sequence::remaining)
    }

    /// The text.
    pub fn tokens(&self) -> &[u32] {
        self.sequence.as_ref().map_or(&[], Sequence::tokens)
    }

    /// Tokens that were taken over from other sessions' pages.
    pub fn reused(&self) -> usize {
        self.reused
    }

    /// Rows that were computed again because windows are not kept.
    pub fn replayed(&self) -> usize {
        self.sequence.as_ref().map_or(0, Sequence::replayed)
    }

    /// Rows that each layer has run.
    pub fn layer_rows(&self) -> Vec<LayerRows> {
        self.sequence.as_ref().map_or(vec![], Sequence::layer_rows)
    }

    /// The text's state on the device.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn state(&self) -> Result<&Sequence> {
        self.open_sequence()
    }

    /// Reads tokens, all but the last, which waits for the step that makes the next token. An empty session takes over the
    /// longest prefix that the engine knows, and reads the rest. `progress` hears how many tokens of the rest are done, and may
    /// stop the reading: the text then holds what was read.
    ///
    /// # Errors
    /// [`Error::Closed`], [`Error::EmptyPrompt`], [`Error::TokenId`], [`Error::Context`], with the text as before;
    /// [`Error::Stopped`]; the device's and the store's. When the device is lost the text is what it was.
    pub async fn append_async(&mut self, tokens: &[u32], how: Append, progress: Progress<'_>) -> Result<Appended> {
        let before = self.len();
        let done = self.read(tokens, how, progress).await;
        if let (Err(Error::DeviceLost { .. }), Some(sequence)) = (&done, &mut self.sequence) {
            sequence.forget(before);
        }
        self.publish();
        done
    }

    async fn read(&mut self, tokens: &[u32], how: Append, progress: Progress<'_>) -> Result<Appended> {
        let engine = self.engine.clone();
        let sequence = self.sequence()?;
        sequence.settle_async().await?;
        let (config, layout) = (engine.model.config(), engine.model.layout());
        check_tokens(tokens, config.vocab_size, sequence.len(), layout.context)?;
        let replayed = sequence.replayed();
        let mut rest = tokens;
        let mut reused = 0;
        if how.reuse && sequence.is_empty() {
            let hit = engine.index.borrow().find(tokens).filter(|hit| hit.tokens >= MIN_REUSE);
            if let Some(hit) = hit {
                reused = self.take_over(&hit.owner, &tokens[..hit.tokens]).await?;
                rest = &tokens[reused..];
            }
        }
        self.reused += reused;
        let sequence = self.sequence()?;
        let done = match rest {
            [] => sequence.ready_async(how.prefill.replay()).await,
            rest => sequence.append_async(rest, how.prefill, progress).await,
        };
        let replayed = sequence.replayed() - replayed;
        done?;
        Ok(Appended { reused, replayed })
    }

    /// Makes the empty text `tokens`, from the pages of another session; how many of them it could.
    async fn take_over(&mut self, owner: &Owner, tokens: &[u32]) -> Result<usize> {
        let engine = self.engine.clone();
        let pages = match owner {
            Owner::Live(number) => engine.live.borrow().get(number).map(|pages| pages.prefix(tokens.len())),
            Owner::Stored(store, name) => engine.stored_pages(*store, name, tokens).await?,
        };
        let Some(pages) = pages else { return Ok(0) };
        let whole = tokens.len().min(pages.len() * crate::layout::PAGE_TOKENS);
        if whole < MIN_REUSE {
            return Ok(0);
        }
        let generator = self.open_sequence()?.standing().generator;
        self.sequence()?.resume(tokens[..whole].to_vec(), pages, whole, generator);
        Ok(whole)
    }

    /// How many tokens are drafted from now on; see [`Sequence::set_draft`].
    ///
    /// # Errors
    /// [`Error::Closed`], and as [`Sequence::set_draft`].
    pub fn set_draft(&mut self, draft: Draft) -> Result<()> {
        self.sequence()?.set_draft(draft)
    }

    /// What drafting did since it was chosen.
    ///
    /// # Errors
    /// [`Error::Closed`].
    pub fn draft_counters(&self) -> Result<&Counters> {
        Ok(self.open_sequence()?.draft_counters())
    }

    /// Begins to make tokens; see [`Sequence::generate_async`].
    ///
    /// # Errors
    /// [`Error::Closed`], and as [`Sequence::generate_async`].
    pub async fn generate_async(&mut self, request: &Request) -> Result<Writing<'_>> {
        let draft = self.sequence.as_ref().map_or(Draft::Off, Sequence::draft);
        self.generate_drafting_async(request, draft).await
    }

    /// [`Session::set_draft`] and [`Session::generate_async`]: when either is refused, nothing has changed.
    ///
    /// # Errors
    /// As both.
    pub async fn generate_drafting_async(&mut self, request: &Request, draft: Draft) -> Result<Writing<'_>> {
        let (engine, number) = (&self.engine, self.number);
        let sequence = self.sequence.as_mut().ok_or(Error::Closed)?;
        request.validate(engine.model.config().vocab_size)?;
        draft.validate(engine.model.block_size())?;
        check_room(sequence.len(), request.max_tokens, engine.model.layout().context)?;
        if draft != sequence.draft() {
            sequence.settle_async().await?;
            sequence.set_draft(draft)?;
        }
        let generation = sequence.generate_async(request).await?;
        Ok(Writing { generation, engine, number, ledger: &self.ledger })
    }

    /// The generation that was begun last and that nothing has ended, for callers that keep no [`Writing`] between two tokens.
    pub fn writing(&mut self) -> Option<Writing<'_>> {
        let (engine, number) = (&self.engine, self.number);
        let generation = self.sequence.as_mut()?.generation()?;
        Some(Writing { generation, engine, number, ledger: &self.ledger })
    }

    /// Ends a generation that was left; its tokens are in the text. Every call that changes the text begins with this.
    ///
    /// # Errors
    /// [`Error::Closed`], and as [`Sequence::settle_async`].
    pub async fn settle_async(&mut self) -> Result<()> {
        let done = self.sequence()?.settle_async().await;
        self.publish();
        done
    }

    /// Goes back to the first `length` tokens; see [`Sequence::truncate_async`].
    ///
    /// # Errors
    /// [`Error::Closed`], and as [`Sequence::truncate_async`].
    pub async fn truncate_async(&mut self, length: usize, replay: Replay) -> Result<()> {
        let done = self.sequence()?.truncate_async(length, replay).await;
        self.ledger.cut(self.len());
        self.publish();
        done
    }

    /// Rebuilds the windows of an opened session now, and as `replay` says. Otherwise a reading does it as [`Prefill::replay`]
    /// says, and a generation by [`Replay::Bounded`].
    ///
    /// # Errors
    /// [`Error::Closed`]; the device's.
    pub async fn ready_async(&mut self, replay: Replay) -> Result<()> {
        let done = self.sequence()?.ready_async(replay).await;
        self.publish();
        done
    }

    /// A second session with the same text; see [`Engine::fork_async`].
    ///
    /// # Errors
    /// As [`Engine::fork_async`].
    pub async fn fork_async(&mut self) -> Result<Session> {
        self.engine.clone().fork_async(self).await
    }

    /// Gives everything back. What was saved stays; every further call is an [`Error::Closed`].
    pub fn close(&mut self) {
        if self.sequence.take().is_some() {
            self.engine.live.borrow_mut().remove(&self.number);
            self.engine.index.borrow_mut().remove(&Owner::Live(self.number));
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.close();
    }
}

fn publish(engine: &Engine, number: u64, sequence: &Sequence) {
    let paged = sequence.paged().min(sequence.len());
    engine.index.borrow_mut().set(&Owner::Live(number), &sequence.tokens()[..paged]);
}

#[cfg(not(target_arch = "wasm32"))]
impl Session {
    /// [`Session::append_async`] by default, blocking.
    ///
    /// # Errors
    /// As [`Session::append_async`].
    pub fn append(&mut self, tokens: &[u32]) -> Result<Appended> {
        self.append_as(tokens, Append::default(), &mut |_| std::ops::ControlFlow::Continue(()))
    }

    /// [`Session::append_async`], blocking.
    ///
    /// # Errors
    /// As [`Session::append_async`].
    pub fn append_as(&mut self, tokens: &[u32], how: Append, progress: Progress<'_>) -> Result<Appended> {
        pollster::block_on(self.append_async(tokens, how, progress))
    }

    /// [`Session::generate_async`], blocking; the result iterates over the tokens.
    ///
    /// # Errors
    /// As [`Session::generate_async`].
    pub fn generate(&mut self, request: &Request) -> Result<Writing<'_>> {
        pollster::block_on(self.generate_async(request))
    }

    /// [`Session::truncate_async`], blocking.
    ///
    /// # Errors
    /// As [`Session::truncate_async`].
    pub fn truncate(&mut self, length: usize, replay: Replay) -> Result<()> {
        pollster::block_on(self.truncate_async(length, replay))
    }

    /// [`Session::ready_async`], blocking.
    ///
    /// # Errors
    /// As [`Session::ready_async`].
    pub fn ready(&mut self, replay: Replay) -> Result<()> {
        pollster::block_on(self.ready_async(replay))
    }

    /// [`Session::fork_async`], blocking.
    ///
    /// # Errors
    /// As [`Session::fork_async`].
    pub fn fork(&mut self) -> Result<Session> {
        pollster::block_on(self.fork_async())
    }
}

/// Tokens being made by a session. Natively an iterator; [`Writing::next_token`] everywhere. Left early, it leaves its tokens
/// in the text.
#[derive(Debug)]
pub struct Writing<'a> {
    generation: Generation<'a>,
    engine: &'a Rc<Engine>,
    number: u64,
    ledger: &'a Rc<save::Ledger>,
}

impl Writing<'_> {
    /// The next token, or none when the generation has ended.
    ///
    /// # Errors
    /// As [`Generation::next_token`].
    pub async fn next_token(&mut self) -> Result<Option<u32>> {
        self.generation.next_token().await
    }

    /// Whether the token that was given last had been drafted; see [`Generation::drafted`].
    pub fn drafted(&self) -> bool {
        self.generation.drafted()
    }

    /// Why it ended; none while it goes on, and after an error.
    pub fn finish(&self) -> Option<Finish> {
        self.generation.finish()
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        publish(self.engine, self.number, self.generation.sequence());
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl Iterator for Writing<'_> {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Self::Item> {
        self.generation.next()
    }
}
