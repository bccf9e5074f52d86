//! A text on the device: reads tokens, goes back, is copied. How it makes tokens is in [`generation`](super::generation).

use super::generation::Run;
use super::plan::{readback_bytes, READBACK_SLOTS};
use super::step::{LayerRows, Rows, StepKernels};
use super::{Model, POISON};
use crate::cache::{history_before, Cache, Page, Pages};
use crate::gpu::{Gpu, ReadbackRing, Recording};
use crate::kernels::Step;
use crate::layout::PAGE_TOKENS;
use crate::reading::{Depth, Floors, Prefill, Reading, Replay};
use crate::reference::sequence::check_tokens;
use crate::sampling::Generator;
use crate::spec::{Draft, Scheduler};
use crate::{Error, Result};
use std::ops::{ControlFlow, Range};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

/// What of the state besides the pages is that of the tokens read so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Windows {
    /// All of it.
    Ready,
    /// The encoder's: a bounded or exact reading ended early.
    EncoderReady,
    /// Nothing: only pages were kept.
    Lost,
}

/// Hears how many tokens of a reading are done; says whether it goes on.
pub type Progress<'a> = &'a mut dyn FnMut(usize) -> ControlFlow<()>;

/// A model's kernels on one cache, and the text that the cache holds.
#[derive(Debug)]
pub struct Sequence {
    pub(super) model: Arc<Model>,
    pub(super) cache: Cache,
    pub(super) kernels: StepKernels,
    pub(super) readback: ReadbackRing,
    /// The whole text.
    pub(super) tokens: Vec<u32>,
    /// Tokens of it that are in the cache; the rest, one at most between two calls, is read by the next step.
    pub(super) cached: usize,
    /// Tokens whose groups were in the pages when the windows were last rebuilt: those entries are not written again.
    kept: usize,
    pub(super) floors: Floors,
    pub(super) windows: Windows,
    pub(super) generator: Generator,
    /// When to draft.
    pub(super) scheduler: Scheduler,
    /// Lowest position whose keys drafted blocks may see.
    pub(super) draft_floor: usize,
    replayed: usize,
    /// Number of the step that was sent last, if it makes tokens, and whether it is a round of drafting.
    pub(super) looked: Option<(u64, bool)>,
    /// What was before a reading that has not ended.
    reading: Option<Before>,
    pub(super) run: Option<Run>,
}

/// A text before a reading.
#[derive(Debug, Clone, Copy)]
struct Before {
    length: usize,
    cached: usize,
    floors: Floors,
    windows: Windows,
}

/// What a sequence knows besides rings, remainders and pages: with those it can be made again.
#[derive(Debug, Clone, PartialEq)]
pub struct Standing {
    /// Tokens that are in the cache; what follows waits to be read.
    pub cached: usize,
    /// Tokens whose groups are in the pages.
    pub paged: usize,
    /// Lowest positions whose window keys may be seen.
    pub floors: Floors,
    /// Entries of groups that end before this position are not written again.
    pub kept: usize,
    /// Draws so far.
    pub generator: Generator,
}

impl Sequence {
    /// An empty text.
    ///
    /// # Errors
    /// The device's.
    pub fn new(model: Arc<Model>) -> Result<Self> {
        let gpu = &model.gpu;
        let cache = Cache::new(gpu, &model.config, &model.layout)?;
        if model.options.poison {
            cache.poison(gpu, POISON);
            model.scratch.poison(gpu, POISON);
        }
        let kernels = StepKernels::new(&model, &cache)?;
        let readback = ReadbackRing::new(gpu, READBACK_SLOTS, readback_bytes(&model.layout))?;
        Ok(Self {
            cache,
            kernels,
            readback,
            tokens: vec![],
            cached: 0,
            kept: 0,
            floors: Floors::default(),
            windows: Windows::Ready,
            generator: Generator::default(),
            scheduler: Scheduler::new(Draft::Off, model.block_size()),
            draft_floor: 0,
            replayed: 0,
            looked: None,
            reading: None,
            run: None,
            model,
        })
    }

    /// The device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.model.gpu
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The caches.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The pages.
    pub fn pages(&self) -> &Pages {
        &self.cache.pages
    }

    /// Tokens of the text.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether the text has no token.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The text.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that still fit.
    pub fn remaining(&self) -> usize {
        self.model.layout.context - self.tokens.len()
    }

    /// Tokens whose groups are in the pages: a prefix of the text.
    pub fn paged(&self) -> usize {
        self.cached.max(self.kept)
    }

    /// What is needed, besides pages, rings and remainders, to make this sequence again, by what the host knows: of steps that
    /// are on their way, [`Sequence::moment_async`] tells.
    pub fn standing(&self) -> Standing {
        let Self { cached, floors, kept, generator, .. } = *self;
        Standing { cached, paged: self.paged(), floors, kept, generator }
    }

    /// Raw ids before the tokens that wait, newest first: what a step must know of them.
    pub fn history(&self) -> Vec<u32> {
        history_before(&self.model.config, &self.tokens[..self.cached])
    }

    /// Whether rings and remainders are those of the text.
    pub fn has_windows(&self) -> bool {
        self.windows == Windows::Ready
    }

    /// Rows that were computed again to rebuild windows, since the sequence was made.
    pub fn replayed(&self) -> usize {
        self.replayed
    }

    /// Rows that each layer has run since the sequence was made.
    pub fn layer_rows(&self) -> Vec<LayerRows> {
        self.kernels.layer_rows()
    }

    /// Forgets the text.
    ///
    /// # Errors
    /// The device's.
    pub async fn clear_async(&mut self) -> Result<()> {
        self.settle_async().await.or_else(|error| {
            if matches!(error, Error::NonFinite { .. }) {
                Ok(())
            } else {
                Err(error)
            }
        })?;
        self.cache.clear(&self.model.gpu);
        self.looked = None;
        self.tokens.clear();
        (self.cached, self.kept, self.floors, self.windows) = (0, 0, Floors::default(), Windows::Ready);
        self.generator = Generator::default();
        self.draft_floor = 0;
        Ok(())
    }

    /// Reads tokens, all but the last: that one is read by the step that makes the next token. When `progress` stops the
    /// reading, the text holds what was read until then. Windows that are missing are rebuilt first, as far as the reading
    /// needs them: as [`Prefill::replay`] says.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`], [`Error::TokenId`], [`Error::Context`], with the text as before; [`Error::Stopped`] when
    /// `progress` said so; the device's errors.
    pub async fn append_async(&mut self, tokens: &[u32], prefill: Prefill, progress: Progress<'_>) -> Result<()> {
        self.settle_async().await?;
        let model = self.model.clone();
        let Model { config, layout, .. } = &*model;
        check_tokens(tokens, config.vocab_size, self.tokens.len(), layout.context)?;
        let (before, end) = (self.tokens.len(), self.tokens.len() + tokens.len());
        let mut reading = Reading::append(config, prefill, self.floors, self.cached, end);
        match self.windows {
            Windows::Ready => {}
            Windows::EncoderReady if reading.begins_below_decoder(config) => {
                // No row of the decoder goes back beyond its first one, so what is missing before it is not missed.
                let first = reading.spans.get(1).map_or(end, |span| span.start);
                reading.floors.decoder = reading.floors.decoder.min(first);
            }
            Windows::EncoderReady | Windows::Lost => {
                self.rebuild(prefill.replay()).await?;
                reading = Reading::append(config, prefill, self.floors, self.cached, end);
            }
        }
        let Self { cached, floors, windows, .. } = *self;
        self.reading = Some(Before { length: before, cached, floors, windows });
        self.tokens.extend(tokens);
        // A reading that leaves rows out does so in the decoder, from its first row on.
        let shallow = reading.spans.first().is_some_and(|span| span.depth != Depth::all(config));
        let left = if shallow { Windows::EncoderReady } else { windows };
        let whole = match self.read(&reading, left, progress).await {
            Ok(whole) => whole,
            Err(error) => {
                // What was read stays, as when a reading is stopped. A device that cannot even say so is lost or has failed.
                let _ = self.settle_async().await;
                return Err(error);
            }
        };
        if !whole {
            self.settle_async().await?;
            return Err(Error::Stopped { read: self.tokens.len() - before, of: tokens.len() });
        }
        self.reading = None;
        self.draft_floor = self.draft_floor.max(self.first_remembered());
        Ok(())
    }

    /// The text is its first `length` tokens again, of a sequence whose device is gone: what it had computed is gone too.
    pub fn forget(&mut self, length: usize) {
        self.reading = None;
        self.run = None;
        self.tokens.truncate(length);
    }

    /// Goes back to the first `length` tokens. What their pages hold stays; windows are rebuilt as `replay` says.
    ///
    /// # Errors
    /// [`Error::Setting`] when the text is shorter; the device's errors.
    pub async fn truncate_async(&mut self, length: usize, replay: Replay) -> Result<()> {
        self.settle_async().await?;
        if length > self.tokens.len() {
            let (found, allowed) = (length.to_string(), format!("0 to {}", self.tokens.len()));
            return Err(Error::Setting { setting: "length", found, allowed });
        }
        if length == 0 {
            let generator = self.generator;
            self.clear_async().await?;
            self.generator = generator;
            return Ok(());
        }
        if length == self.tokens.len() {
            return Ok(());
        }
        self.tokens.truncate(length);
        if length > self.cached {
            return Ok(());
        }
        self.kept = self.paged().min(length);
        self.cached = self.kept;
        self.cache.pages.with(|pages| pages.truncate(self.kept.div_ceil(PAGE_TOKENS)));
        self.windows = Windows::Lost;
        self.rebuild(replay).await
    }

    /// The same text once more; its pages are shared until one of the two writes to them.
    ///
    /// # Errors
    /// The device's.
    pub async fn fork_async(&mut self) -> Result<Self> {
        self.settle_async().await?;
        let model = self.model.clone();
        let mut fork = model.gpu.settled(|| Self::new(model.clone())).await?;
        let mut recording = Recording::new();
        fork.cache.copy_windows(&mut recording, &self.cache);
        self.model.gpu.submit(recording)?;
        fork.cache.share_pages(&self.model.gpu, self.cache.pages.prefix(self.paged()));
        fork.tokens.clone_from(&self.tokens);
        (fork.cached, fork.kept, fork.floors) = (self.cached, self.kept, self.floors);
        (fork.windows, fork.generator) = (self.windows, self.generator);
        (fork.scheduler, fork.draft_floor) = (self.scheduler.clone(), self.draft_floor);
        Ok(fork)
    }

    /// An empty sequence becomes a text whose first `paged` tokens' groups lie in `pages`; windows are rebuilt when they are
    /// needed.
    ///
    /// # Panics
    /// When the sequence is not empty.
    pub fn resume(&mut self, tokens: Vec<u32>, pages: Vec<Page>, paged: usize, generator: Generator) {
        assert!(self.is_empty() && paged <= tokens.len(), "a text is resumed on an empty sequence");
        self.cache.share_pages(&self.model.gpu, pages);
        (self.tokens, self.cached, self.kept) = (tokens, paged, paged);
        (self.windows, self.generator) = (Windows::Lost, generator);
    }

    /// As [`Sequence::resume`], with rings and remainders that were written already.
    ///
    /// # Panics
    /// As [`Sequence::resume`].
    pub fn resume_exactly(&mut self, tokens: Vec<u32>, pages: Vec<Page>, standing: &Standing) {
        self.resume(tokens, pages, standing.paged, standing.generator);
        (self.cached, self.kept, self.floors) = (standing.cached, standing.kept, standing.floors);
        self.windows = Windows::Ready;
        self.draft_floor = self.cached;
    }

    /// Rebuilds windows that are missing, so that the next call reads new text only.
    ///
    /// # Errors
    /// The device's.
    pub async fn ready_async(&mut self, replay: Replay) -> Result<()> {
        self.settle_async().await?;
        if self.windows == Windows::Ready || self.tokens.is_empty() {
            return Ok(());
        }
        self.rebuild(replay).await
    }

    /// Computes rings, remainders and n-gram history again, for the whole text but its last token, which waits. Tokens whose
    /// groups are not in the pages are read for the first time.
    pub(super) async fn rebuild(&mut self, replay: Replay) -> Result<()> {
        let model = self.model.clone();
        let (length, kept) = (self.tokens.len(), self.paged().min(self.tokens.len()));
        if length == 0 {
            self.windows = Windows::Ready;
            return Ok(());
        }
        // Tokens that the pages do not have, beyond the one that waits, are read after the replay of those that they have.
        let replayed = if kept + 1 < length { kept } else { length };
        let mut reading = Reading::replay(&model.config, replay, replayed, kept);
        if replayed < length {
            let start = replayed.saturating_sub(1);
            let prefill = match replay {
                Replay::Bounded => Prefill::Bounded,
                Replay::Exact => Prefill::Exact,
            };
            let rest = Reading::append(&model.config, prefill, reading.floors, start, length);
            reading.spans.extend(rest.spans);
            reading.floors.decoder = rest.floors.decoder;
        }
        self.kept = kept;
        self.windows = Windows::Lost;
        self.cached = reading.spans.first().map_or(length - 1, |span| span.start);
        if model.options.poison {
            self.cache.poison(&model.gpu, POISON);
        }
        self.replayed += kept.min(length - 1).saturating_sub(self.cached);
        self.read(&reading, Windows::Lost, &mut |_| ControlFlow::Continue(())).await?;
        self.cached = length - 1;
        self.draft_floor = self.first_remembered();
        Ok(())
    }

    /// The first token of the text that a reading leaves a draft key of.
    fn first_remembered(&self) -> usize {
        self.tokens.len().saturating_sub(self.model.config.sliding_window)
    }

    /// Runs the rows of a reading; `left` is what is left of the windows when it ends early. False when `progress` ended it.
    async fn read(&mut self, reading: &Reading, left: Windows, progress: Progress<'_>) -> Result<bool> {
        let model = self.model.clone();
        let Model { gpu, layout, .. } = &*model;
        let start = self.cached;
        let mut going = true;
        let mut arrived = |payload: Vec<u8>, going: &mut bool| {
            let position = u32::from_le_bytes([payload[0], payload[1], payload[2], payload[3]]);
            *going &= progress(position as usize - start).is_continue();
        };
        self.floors = reading.floors;
        self.windows = left;
        'spans: for span in &reading.spans {
            debug_assert_eq!(self.cached, span.start);
            while self.cached < span.end {
                let rows = self.send_rows((span.end - self.cached).min(layout.rows), Step::default()).await?;
                let mut recording = Recording::new();
                self.kernels.record(&mut recording, &self.cache, rows, span.depth, false, &mut ())?;
                self.kernels.record_advance(&mut recording);
                // The new position comes back when the chunk is done: progress, and a limit on how far the host runs ahead.
                let taken = self.readback.copy(&mut recording, &[(&self.cache.step, 0, 4)]);
                debug_assert!(taken, "two chunks at most are on their way");
                gpu.submit(recording)?;
                self.cached += rows.count as usize;
                if self.readback.in_flight() >= 2 {
                    if let Some(payload) = self.readback.oldest(gpu).await? {
                        arrived(payload, &mut going);
                    }
                }
                if !going {
                    break 'spans;
                }
            }
        }
        while self.readback.in_flight() > 0 {
            if let Some(payload) = self.readback.oldest(gpu).await? {
                arrived(payload, &mut going);
            }
        }
        let whole = reading.spans.last().is_none_or(|span| self.cached == span.end);
        if whole {
            self.windows = Windows::Ready;
        }
        Ok(whole)
    }

    /// Uploads the next tokens of the text, `most` at most and as many as lie in pages of one slab, and the step that reads
    /// them.
    pub(super) async fn send_rows(&mut self, most: usize, step: Step) -> Result<Rows> {
        let model = self.model.clone();
        let gpu = &model.gpu;
        let start = self.cached;
        model.steps.fetch_add(1, Relaxed);
        self.looked = None;
        self.own_pages(start..start + most).await?;
        let slab =
            |position: usize| self.cache.pages.with(|pages| pages.get(position / PAGE_TOKENS).map_or(0, Page::slab));
        let first = slab(start);
        let count = (1..most).find(|&row| slab(start + row) != first).unwrap_or(most);
        let rows = Rows { position: start as u32, slack: 0, count: count as u32, floors: self.floors, listen: true };
        let step = Step {
            position: rows.position,
            rows: rows.count,
            encoder_floor: self.floors.encoder as u32,
            decoder_floor: self.floors.decoder as u32,
            kept: self.kept as u32,
            ..step
        };
        gpu.upload(&self.cache.step, 0, bytemuck::bytes_of(&step));
        gpu.upload(&self.cache.tokens, 0, bytemuck::cast_slice(&self.tokens[start..start + count]));
        gpu.upload(&self.cache.history, 0, bytemuck::cast_slice(&self.history()));
        Ok(rows)
    }

    /// Pages for the tokens at `positions`, and kernels that know their slabs.
    pub(super) async fn own_pages(&mut self, positions: Range<usize>) -> Result<()> {
        let Model { gpu, pool, .. } = &*self.model;
        if pool.layout().page_words > 0 {
            let positions = positions.start.max(self.kept)..positions.end.max(self.kept);
            pool.reserve(gpu, self.cache.missing_pages(positions.clone())).await?;
            self.cache.own_pages(gpu, pool, positions)?;
        }
        self.kernels.know_slabs(pool)
    }

    /// Ends a reading that was left: what was read stays.
    pub(super) async fn settle_reading(&mut self) -> Result<()> {
        if let Some(before) = self.reading {
            while self.readback.in_flight() > 0 {
                self.readback.oldest(&self.model.gpu).await?;
            }
            self.reading = None;
            self.tokens.truncate(self.cached.max(before.length));
            if self.cached == before.cached {
                (self.floors, self.windows) = (before.floors, before.windows);
            }
        }
        Ok(())
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl Sequence {
    /// [`Sequence::append_async`] as [`Prefill::Bounded`] says, blocking.
    ///
    /// # Errors
    /// As [`Sequence::append_async`].
    pub fn append(&mut self, tokens: &[u32], progress: &mut dyn FnMut(usize)) -> Result<()> {
        self.append_as(tokens, Prefill::default(), &mut |done| {
            progress(done);
            ControlFlow::Continue(())
        })
    }

    /// [`Sequence::append_async`], blocking.
    ///
    /// # Errors
    /// As [`Sequence::append_async`].
    pub fn append_as(&mut self, tokens: &[u32], prefill: Prefill, progress: Progress<'_>) -> Result<()> {
        pollster::block_on(self.append_async(tokens, prefill, progress))
    }

    /// [`Sequence::generate_async`], blocking; the result iterates over the tokens.
    ///
    /// # Errors
    /// As [`Sequence::generate_async`].
    pub fn generate(&mut self, request: &crate::sampling::Request) -> Result<super::Generation<'_>> {
        pollster::block_on(self.generate_async(request))
    }

    /// [`Sequence::truncate_async`], blocking.
    ///
    /// # Errors
    /// As [`Sequence::truncate_async`].
    pub fn truncate(&mut self, length: usize, replay: Replay) -> Result<()> {
        pollster::block_on(self.truncate_async(length, replay))
    }

    /// [`Sequence::fork_async`], blocking.
    ///
    /// # Errors
    /// As [`Sequence::fork_async`].
    pub fn fork(&mut self) -> Result<Self> {
        pollster::block_on(self.fork_async())
    }

    /// [`Sequence::ready_async`], blocking.
    ///
    /// # Errors
    /// As [`Sequence::ready_async`].
    pub fn ready(&mut self, replay: Replay) -> Result<()> {
        pollster::block_on(self.ready_async(replay))
    }

    /// [`Sequence::clear_async`], blocking.
    ///
    /// # Errors
    /// As [`Sequence::clear_async`].
    pub fn clear(&mut self) -> Result<()> {
        pollster::block_on(self.clear_async())
    }
}
