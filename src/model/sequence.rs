//! A text on the device: reads tokens, makes tokens.
//!
//! Making a token is one submission. The host records steps ahead of the device and takes sampled ids back in batches; it
//! never waits for the step that it has just sent.

use super::plan::{READBACK_SLOTS, READBACK_TOKENS};
use super::step::{Rows, StepKernels};
use super::{Model, POISON};
use crate::cache::{Cache, OUT_RING};
use crate::gpu::{Gpu, ReadbackRing, Recording};
use crate::kernels::Step;
use crate::reference::sequence::{check_room, check_tokens};
use crate::sampling::Request;
use crate::{Error, Result};
use std::collections::VecDeque;
use std::sync::Arc;

/// Status of a sampled token's record (see `sample.wgsl`).
const STOPPED: u32 = 1;
const NON_FINITE: u32 = 2;

/// Steps that may be on their way: enough to keep the device busy while the host reads, few enough to stop soon.
const AHEAD: usize = 2 * READBACK_TOKENS;

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A stop id was sampled.
    Stop,
    /// `max_tokens` were made.
    Length,
}

/// A model's kernels on one cache, and the text that the cache holds.
#[derive(Debug)]
pub struct Sequence {
    pub(super) model: Arc<Model>,
    pub(super) cache: Cache,
    pub(super) kernels: StepKernels,
    readback: ReadbackRing,
    /// The whole text.
    pub(super) tokens: Vec<u32>,
    /// Tokens of it that are in the cache; the rest is read by the next step.
    pub(super) cached: usize,
    run: Option<Run>,
}

/// A generation in progress.
#[derive(Debug)]
struct Run {
    max_tokens: usize,
    /// Steps sent, and tokens that came back.
    submitted: usize,
    received: usize,
    /// Steps covered by the readbacks recorded so far.
    covered: usize,
    /// Arrived and not taken.
    ready: VecDeque<u32>,
    finish: Option<Finish>,
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
        let readback = ReadbackRing::new(gpu, READBACK_SLOTS, 8 * READBACK_TOKENS as u64)?;
        Ok(Self { cache, kernels, readback, tokens: vec![], cached: 0, run: None, model })
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

    /// Forgets the text.
    ///
    /// # Errors
    /// The device's.
    pub async fn clear_async(&mut self) -> Result<()> {
        self.settle()
            .await
            .or_else(|error| if matches!(error, Error::NonFinite { .. }) { Ok(()) } else { Err(error) })?;
        self.cache.clear(&self.model.gpu);
        self.tokens.clear();
        self.cached = 0;
        Ok(())
    }

    /// Reads tokens, all but the last: that one is read by the step that makes the next token. `progress` hears how many are
    /// done.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`], [`Error::TokenId`], [`Error::Context`], with the text as before; the device's errors.
    pub async fn append_async(&mut self, tokens: &[u32], progress: &mut dyn FnMut(usize)) -> Result<()> {
        self.settle().await?;
        let model = self.model.clone();
        let Model { gpu, config, layout, .. } = &*model;
        check_tokens(tokens, config.vocab_size, self.tokens.len(), layout.context)?;
        self.tokens.extend(tokens);
        let (start, end) = (self.cached, self.tokens.len() - 1);
        let mut arrived = |payload: Vec<u8>| {
            let position = u32::from_le_bytes([payload[0], payload[1], payload[2], payload[3]]);
            progress(position as usize - start);
        };
        while self.cached < end {
            let count = (end - self.cached).min(layout.rows);
            let rows = self.send_rows(count, Step::default());
            let mut recording = Recording::new();
            self.kernels.record(&mut recording, rows, false, &mut ())?;
            self.kernels.record_advance(&mut recording);
            // The new position comes back when the chunk is done: progress, and a limit on how far the host runs ahead.
            let taken = self.readback.copy(&mut recording, &[(&self.cache.step, 0, 4)]);
            debug_assert!(taken, "two chunks at most are on their way");
            gpu.submit(recording)?;
            self.cached += count;
            if self.readback.in_flight() >= 2 {
                self.readback.oldest(gpu).await?.map(&mut arrived);
            }
        }
        while self.readback.in_flight() > 0 {
            self.readback.oldest(gpu).await?.map(&mut arrived);
        }
        Ok(())
    }

    /// Uploads the next `count` tokens of the text and the step that reads them.
    pub(super) fn send_rows(&self, count: usize, step: Step) -> Rows {
        let rows = Rows { position: self.cached as u32, count: count as u32 };
        let gpu = &self.model.gpu;
        let step = Step { position: rows.position, rows: rows.count, ..step };
        gpu.upload(&self.cache.step, 0, bytemuck::bytes_of(&step));
        gpu.upload(&self.cache.tokens, 0, bytemuck::cast_slice(&self.tokens[self.cached..][..count]));
        rows
    }

    /// Begins to make tokens. Tokens that are made and not taken are part of the text all the same.
    ///
    /// # Errors
    /// [`Error::Setting`], [`Error::TokenId`]; [`Error::EmptyPrompt`] when no token waits to be read; [`Error::Context`] when
    /// the text would grow too long; the device's errors. The text is as before.
    pub async fn generate_async(&mut self, request: &Request) -> Result<Generation<'_>> {
        self.settle().await?;
        let model = self.model.clone();
        let Model { gpu, config, layout, .. } = &*model;
        request.validate(config.vocab_size)?;
        let waiting = self.tokens.len() - self.cached;
        if waiting == 0 {
            return Err(Error::EmptyPrompt);
        }
        check_room(self.tokens.len(), request.max_tokens, layout.context)?;
        let sampling = &request.sampling;
        let step = Step {
            seed_lo: sampling.seed as u32,
            seed_hi: (sampling.seed >> 32) as u32,
            top_k: sampling.top_k,
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            stop_count: request.stop_ids.len() as u32,
            ..Step::default()
        };
        gpu.upload(&self.cache.stop_ids, 0, bytemuck::cast_slice(&request.stop_ids));
        self.send_rows(waiting, step);
        self.run = Some(Run {
            max_tokens: request.max_tokens,
            submitted: 0,
            received: 0,
            covered: 0,
            ready: VecDeque::new(),
            finish: None,
        });
        Ok(Generation { sequence: self })
    }

    /// Sends the next step of a run: one token, one submission.
    fn send_step(&mut self) -> Result<()> {
        let run = self.run.as_mut().expect("a run is in progress");
        let rows = Rows { position: (self.cached + run.submitted) as u32, count: 1 };
        let mut recording = Recording::new();
        self.kernels.record(&mut recording, rows, true, &mut ())?;
        self.kernels.record_sample(&mut recording);
        run.submitted += 1;
        // The first token comes back at once; then whole batches, which never wrap in the ring; then what is left.
        let last = run.submitted == run.max_tokens;
        if run.submitted == 1 || run.submitted.is_multiple_of(READBACK_TOKENS) || last {
            let (slot, count) = (run.covered % OUT_RING, run.submitted - run.covered);
            let part = (&self.cache.out, 8 * slot as u64, 8 * count as u64);
            let taken = self.readback.copy(&mut recording, &[part]);
            debug_assert!(taken, "fewer steps ahead than the ring holds");
            run.covered = run.submitted;
        }
        self.model.gpu.submit(recording)
    }

    /// Takes the oldest batch of a run.
    async fn take_batch(&mut self) -> Result<()> {
        let payload = self.readback.oldest(&self.model.gpu).await?;
        let (Some(payload), Some(run)) = (payload, self.run.as_mut()) else { return Ok(()) };
        for record in payload.chunks_exact(8) {
            if run.finish.is_some() {
                break;
            }
            let word = |at: usize| u32::from_le_bytes([record[at], record[at + 1], record[at + 2], record[at + 3]]);
            let (token, status) = (word(0), word(4));
            self.cached += if run.received == 0 { self.tokens.len() - self.cached } else { 1 };
            run.received += 1;
            if status == NON_FINITE {
                let position = self.cached - 1;
                self.abandon().await?;
                return Err(Error::NonFinite { position });
            }
            self.tokens.push(token);
            if status == STOPPED {
                run.finish = Some(Finish::Stop);
            } else {
                run.ready.push_back(token);
                if run.received == run.max_tokens {
                    run.finish = Some(Finish::Length);
                }
            }
        }
        Ok(())
    }

    /// Ends a run whose device has stopped: what is still on its way holds no token.
    async fn abandon(&mut self) -> Result<()> {
        self.run = None;
        while self.readback.oldest(&self.model.gpu).await?.is_some() {}
        Ok(())
    }

    /// Ends a run that was left: takes what its submitted steps made into the text.
    async fn settle(&mut self) -> Result<()> {
        let Some(run) = self.run.as_mut() else { return Ok(()) };
        // Steps that no readback covers yet: those since the last batch.
        let (slot, count) = (run.covered % OUT_RING, run.submitted - run.covered);
        if count > 0 {
            run.covered = run.submitted;
            let mut recording = Recording::new();
            let part = (&self.cache.out, 8 * slot as u64, 8 * count as u64);
            let taken = self.readback.copy(&mut recording, &[part]);
            debug_assert!(taken, "fewer steps ahead than the ring holds");
            self.model.gpu.submit(recording)?;
        }
        while self.readback.in_flight() > 0 && self.run.is_some() {
            self.take_batch().await?;
        }
        self.run = None;
        Ok(())
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl Sequence {
    /// [`Sequence::append_async`], blocking.
    ///
    /// # Errors
    /// As [`Sequence::append_async`].
    pub fn append(&mut self, tokens: &[u32], progress: &mut dyn FnMut(usize)) -> Result<()> {
        pollster::block_on(self.append_async(tokens, progress))
    }

    /// [`Sequence::generate_async`], blocking; the result iterates over the tokens.
    ///
    /// # Errors
    /// As [`Sequence::generate_async`].
    pub fn generate(&mut self, request: &Request) -> Result<Generation<'_>> {
        pollster::block_on(self.generate_async(request))
    }

    /// [`Sequence::clear_async`], blocking.
    ///
    /// # Errors
    /// As [`Sequence::clear_async`].
    pub fn clear(&mut self) -> Result<()> {
        pollster::block_on(self.clear_async())
    }
}

/// Tokens being made. Natively an iterator; [`Generation::next_token`] everywhere.
#[derive(Debug)]
pub struct Generation<'a> {
    sequence: &'a mut Sequence,
}

impl Generation<'_> {
    /// The next token, or none when the generation has ended.
    ///
    /// # Errors
    /// [`Error::NonFinite`], which ends the generation; the device's errors.
    pub async fn next_token(&mut self) -> Result<Option<u32>> {
        loop {
            let Some(run) = self.sequence.run.as_mut() else { return Ok(None) };
            if let Some(token) = run.ready.pop_front() {
                return Ok(Some(token));
            }
            if run.finish.is_some() {
                return Ok(None);
            }
            while let Some(run) = &self.sequence.run {
                if run.submitted == run.max_tokens || run.submitted - run.received >= AHEAD {
                    break;
                }
                self.sequence.send_step()?;
            }
            self.sequence.take_batch().await?;
        }
    }

    /// Why it ended; none while it goes on, and after an error.
    pub fn finish(&self) -> Option<Finish> {
        self.sequence.run.as_ref().and_then(|run| run.finish)
    }
}

#[cfg(not(target_arch = "wasm32"))]
impl Iterator for Generation<'_> {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = pollster::block_on(self.next_token()).transpose();
        if matches!(next, Some(Err(_))) {
            self.sequence.run = None;
        }
        next
    }
}
