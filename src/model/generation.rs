//! Making tokens: one submission a token, or a round of drafting, recorded ahead of the device.
//!
//! The host sends steps that make a token each and takes sampled ids back in batches; or it sends rounds, which draft a block, read it
//! in one pass and keep what stands (`numerics.md` §13). How many tokens a round makes is known when its record is back, and the
//! next rounds are on their way by then: what they need of its outcome is on the device, and the host goes by bounds. Steps and
//! rounds are never on their way together.

use super::plan::READBACK_TOKENS;
use super::sequence::{Sequence, Windows};
use super::step::Rows;
use super::Model;
use crate::cache::{OUT_RING, ROUND_RING};
use crate::gpu::{Buffer, ReadbackRing, Recording};
use crate::kernels::draft_begin::round_words;
use crate::kernels::verify::record_words;
use crate::kernels::Step;
use crate::reading::{Depth, Replay};
use crate::reference::sequence::check_room;
use crate::sampling::Request;
use crate::spec::{self, Counters, Draft, Plan, Round, Scheduler};
use crate::{Error, Result};
use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;

/// Status of a sampled token's record, or a round's (see `sample.wgsl`, `verify.wgsl`).
pub(super) const STOPPED: u32 = 1;
pub(super) const NON_FINITE: u32 = 2;

/// Steps that may be on their way: enough to keep the device busy while the host reads, few enough to stop soon.
const AHEAD: usize = 2 * READBACK_TOKENS;
/// Rounds that may be on their way; each has a slot of the readback ring and a record of its own.
const ROUNDS_AHEAD: usize = ROUND_RING - 1;

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A stop id was sampled.
    Stop,
    /// `max_tokens` were made.
    Length,
}

/// A generation in progress.
#[derive(Debug)]
pub(super) struct Run {
    max_tokens: usize,
    /// Tokens that came back.
    made: usize,
    steps: Steps,
    rounds: Rounds,
    /// How the next round is to be, when it could not be sent yet.
    next: Option<Option<Plan>>,
    clock: Clock,
    /// Arrived and not taken: tokens, and whether they were drafted.
    ready: VecDeque<(u32, bool)>,
    /// Whether the token taken last was drafted.
    drafted: bool,
    finish: Option<Finish>,
    /// Position of a row whose logits are not finite: what is ready comes before it.
    failed: Option<usize>,
}

/// Steps of a token each, since the last round of drafting.
#[derive(Debug, Default)]
struct Steps {
    /// Tokens drawn before them.
    drawn: u32,
    /// Steps sent, and tokens that came back.
    submitted: usize,
    received: usize,
    /// Steps covered by the readbacks recorded so far.
    covered: usize,
}

impl Steps {
    fn on_their_way(&self) -> usize {
        self.submitted - self.received
    }
    /// Slot of the first step that no readback covers, and how many steps that are: they never wrap.
    fn uncovered(&self) -> (usize, usize) {
        ((self.drawn as usize + self.covered) % OUT_RING, self.submitted - self.covered)
    }
}

/// Rounds of drafting.
#[derive(Debug, Default)]
struct Rounds {
    /// How those on their way draft, the oldest first.
    sent: VecDeque<Plan>,
    /// Rounds that came back.
    received: usize,
}

/// Times records from one to the next: what a round takes, host and device together, when others are on their way.
#[derive(Debug, Default)]
struct Clock {
    /// When the last one arrived, and when the next was first asked for.
    arrived: Option<f64>,
    asked: Option<f64>,
}

/// Share of the time between two records that whoever takes the tokens may take for himself.
const ELSEWHERE: f64 = 0.2;

impl Clock {
    /// The next record is wanted.
    fn asked(&mut self) {
        self.asked.get_or_insert_with(spec::seconds);
    }

    /// It is there. Seconds since the one before, if it was asked for soon after that: otherwise they say nothing of the device.
    fn arrived(&mut self) -> Option<f64> {
        let now = spec::seconds();
        let (before, asked) = (self.arrived.replace(now), self.asked.take());
        let (before, asked) = (before?, asked?);
        (asked - before <= ELSEWHERE * (now - before)).then_some(now - before)
    }
}

impl Run {
    /// Tokens that are certain to come of what is on its way.
    fn coming(&self) -> usize {
        self.steps.on_their_way() + self.rounds.sent.len()
    }
}

/// What a generation has sent and the host knows nothing of yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Ahead {
    /// Slot of the first record, in the ring of sampled tokens or in that of rounds.
    pub slot: usize,
    /// Steps of a token each.
    pub steps: usize,
    /// Rounds of drafting.
    pub rounds: usize,
}

/// What a round's record says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Made {
    pub tokens: Vec<u32>,
    pub status: u32,
    pub verified: usize,
    pub accepted: usize,
}

impl Made {
    /// From the words of a record.
    pub fn of(words: &[u32]) -> Self {
        let [made, status, verified, accepted] = [words[0], words[1], words[2], words[3]];
        let tokens = words[4..4 + made as usize].to_vec();
        // A round behind the end of a text says nothing else.
        let known = |n: u32| if made > 0 || status == NON_FINITE { n as usize } else { 0 };
        Self { tokens, status, verified: known(verified), accepted: known(accepted) }
    }
    /// Rows that stand: each is of a token of the text, which is in the caches with it.
    pub fn rows(&self) -> usize {
        self.tokens.len() + usize::from(self.status == NON_FINITE)
    }
}

impl Sequence {
    /// How many tokens are drafted from now on; nothing is when this is not called. Greedy text is the same with every choice, and
    /// sampled text has the same distribution. What was measured stays, unless another number of tokens is asked for.
    ///
    /// # Errors
    /// [`Error::Setting`] for more tokens than a block of the model has, and for a model whose draft stages are not loaded.
    pub fn set_draft(&mut self, draft: Draft) -> Result<()> {
        let block = self.model.block_size();
        draft.validate(block)?;
        if draft != self.scheduler.draft() {
            self.scheduler = Scheduler::new(draft, block);
        }
        Ok(())
    }

    /// How many tokens are drafted.
    pub fn draft(&self) -> Draft {
        self.scheduler.draft()
    }

    /// What drafting did since it was chosen.
    pub fn draft_counters(&self) -> &Counters {
        self.scheduler.counters()
    }

    pub(super) fn ahead(&self) -> Ahead {
        let Some(run) = self.run.as_ref().filter(|run| run.finish.is_none() && run.failed.is_none()) else {
            return Ahead::default();
        };
        let (steps, rounds) = (run.steps.on_their_way(), run.rounds.sent.len());
        let slot = match rounds {
            0 => (run.steps.drawn as usize + run.steps.received) % OUT_RING,
            _ => run.rounds.received % ROUND_RING,
        };
        Ahead { slot, steps, rounds }
    }

    /// Begins to make tokens. Tokens that are made and not taken are part of the text all the same. Draws go on where an earlier
    /// generation with the same seed left off.
    ///
    /// # Errors
    /// [`Error::Setting`], [`Error::TokenId`]; [`Error::EmptyPrompt`] for an empty text; [`Error::Context`] when the text would
    /// grow too long; the device's errors. The text is as before.
    pub async fn generate_async(&mut self, request: &Request) -> Result<Generation<'_>> {
        self.settle_async().await?;
        let model = self.model.clone();
        let Model { gpu, config, layout, .. } = &*model;
        request.validate(config.vocab_size)?;
        if self.tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        check_room(self.tokens.len(), request.max_tokens, layout.context)?;
        if self.windows != Windows::Ready || self.cached == self.tokens.len() {
            self.rebuild(Replay::Bounded).await?;
        }
        let sampling = &request.sampling;
        self.generator = self.generator.with_seed(sampling.seed);
        let drawn = self.generator.drawn;
        let step = Step {
            sampled: drawn,
            seed_lo: sampling.seed as u32,
            seed_hi: (sampling.seed >> 32) as u32,
            top_k: sampling.top_k,
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            stop_count: request.stop_ids.len() as u32,
            limit: drawn.wrapping_add(request.max_tokens as u32),
            ..Step::default()
        };
        gpu.upload(&self.cache.stop_ids, 0, bytemuck::cast_slice(&request.stop_ids));
        self.send_rows(1, step).await?;
        self.send_block();
        self.run = Some(Run {
            max_tokens: request.max_tokens,
            made: 0,
            steps: Steps { drawn, ..Steps::default() },
            rounds: Rounds::default(),
            next: None,
            clock: Clock::default(),
            ready: VecDeque::new(),
            drafted: false,
            finish: None,
            failed: None,
        });
        Ok(Generation { sequence: self })
    }

    /// Uploads what does not change of the blocks of a generation.
    fn send_block(&self) {
        let Model { gpu, config, .. } = &*self.model;
        let Some((dspark, draft)) = config.dspark.as_ref().zip(self.cache.draft.as_ref()) else { return };
        let step = Step { decoder_floor: self.draft_floor as u32, ..Step::default() };
        gpu.upload(&draft.step, 0, bytemuck::bytes_of(&step));
        gpu.upload(&draft.tokens, 0, bytemuck::cast_slice(&vec![dspark.noise_token_id; dspark.block_size]));
    }

    /// The generation that was begun last and that nothing has ended.
    pub fn generation(&mut self) -> Option<Generation<'_>> {
        self.run.is_some().then_some(Generation { sequence: self })
    }

    /// Sends what may be on its way, and makes sure that the oldest of it comes back.
    async fn send_ahead(&mut self) -> Result<()> {
        loop {
            let Some(run) = self.run.as_mut() else { return Ok(()) };
            if run.finish.is_some() || run.made + run.coming() >= run.max_tokens {
                return Ok(());
            }
            let next = run.next.take().unwrap_or_else(|| self.scheduler.begin());
            let blocked = match next {
                None => !run.rounds.sent.is_empty() || run.steps.on_their_way() >= AHEAD,
                Some(_) => run.steps.on_their_way() > 0 || run.rounds.sent.len() >= ROUNDS_AHEAD,
            };
            if blocked {
                // No more steps come behind those that wait for their batch to be full.
                let last = next.is_some();
                run.next = Some(next);
                return if last { self.cover_steps() } else { Ok(()) };
            }
            match next {
                None => self.send_step().await?,
                Some(plan) => self.send_round(plan).await?,
            }
        }
    }

    /// Sends the next step of a run: one token, one submission.
    async fn send_step(&mut self) -> Result<()> {
        let run = self.run.as_ref().expect("a run is in progress");
        let position = self.cached + run.steps.on_their_way();
        self.own_pages(position..position + 1).await?;
        // Without drafts the stages are not told: should they be needed, their windows begin behind these tokens.
        let listen = self.scheduler.draft() != Draft::Off;
        let rows = Rows { position: position as u32, slack: 0, count: 1, floors: self.floors, listen };
        let mut recording = Recording::new();
        let depth = Depth::all(&self.model.config);
        self.kernels.record(&mut recording, &self.cache, rows, depth, true, &mut ())?;
        self.kernels.record_sample(&mut recording);
        let run = self.run.as_mut().expect("a run is in progress");
        if run.steps.submitted == 0 {
            run.steps.drawn = self.generator.drawn;
        }
        run.steps.submitted += 1;
        // The first token comes back at once; then whole batches, which never wrap in the ring; then what is left.
        let Steps { drawn, submitted, .. } = run.steps;
        let last = run.made + run.coming() == run.max_tokens;
        if submitted == 1 || (drawn as usize + submitted).is_multiple_of(READBACK_TOKENS) || last {
            run.steps.cover(&mut self.readback, &mut recording, &self.cache.out);
        }
        self.looked = Some((self.model.steps.fetch_add(1, Relaxed) + 1, false));
        self.model.gpu.submit(recording)
    }

    /// Brings back the steps that no readback covers yet.
    fn cover_steps(&mut self) -> Result<()> {
        let Some(run) = self.run.as_mut().filter(|run| run.steps.uncovered().1 > 0) else { return Ok(()) };
        let mut recording = Recording::new();
        run.steps.cover(&mut self.readback, &mut recording, &self.cache.out);
        self.model.gpu.submit(recording)
    }

    /// Sends a round of drafting: one submission.
    async fn send_round(&mut self, plan: Plan) -> Result<()> {
        let model = self.model.clone();
        let run = self.run.as_ref().expect("a run is in progress");
        let (block, before) = (model.block_size(), run.rounds.sent.len());
        // What a round takes is to depend on how many tokens it takes, not on how many were recorded.
        let places = if self.scheduler.draft() == Draft::Auto { block } else { plan.verify.unwrap_or(block) };
        // Each round before it has made a token at least; and no text is longer than it may be.
        let end = self.cached + run.max_tokens - run.made;
        let lowest = self.cached + before;
        let highest = (self.cached + before * (1 + block)).min(end - 1);
        self.own_pages(lowest..(highest + 1 + places).min(end)).await?;
        let rows = Rows {
            position: lowest as u32,
            slack: (highest - lowest) as u32,
            count: 1 + places as u32,
            floors: self.floors,
            listen: true,
        };
        let draft = self.cache.draft.as_ref().expect("the draft stages are loaded");
        let verify = plan.verify.map(|tokens| tokens as u32);
        let words = round_words(verify, &plan.costs, &plan.accepted);
        model.gpu.upload(&draft.round, 0, bytemuck::cast_slice(&words));
        let mut recording = Recording::new();
        self.kernels.record_round(&mut recording, &self.cache, rows, self.draft_floor as u32, places)?;
        let run = self.run.as_mut().expect("a run is in progress");
        let slot = (run.rounds.received + before) % ROUND_RING;
        let bytes = 4 * record_words(block) as u64;
        let taken = self.readback.copy(&mut recording, &[(&draft.out, slot as u64 * bytes, bytes)]);
        debug_assert!(taken, "fewer rounds ahead than slots");
        run.rounds.sent.push_back(plan);
        self.looked = Some((model.steps.fetch_add(1, Relaxed) + 1, true));
        model.gpu.submit(recording)
    }

    /// Takes the oldest record of a run: a batch of steps, or a round.
    async fn take_oldest(&mut self) -> Result<()> {
        let gpu = self.model.gpu.clone();
        let payload = self.readback.oldest(&gpu).await?;
        let (Some(payload), Some(run)) = (payload, self.run.as_mut()) else { return Ok(()) };
        let since = run.clock.arrived();
        let words: Vec<u32> = bytemuck::allocation::pod_collect_to_vec(&payload);
        match run.rounds.sent.pop_front() {
            Some(plan) => {
                run.rounds.received += 1;
                let made = Made::of(&words);
                if run.finish.is_none() && run.failed.is_none() {
                    let Made { verified, accepted, .. } = made;
                    let round = Round { tokens: made.tokens.len(), verified, accepted, seconds: since };
                    self.take_tokens(&made.tokens, accepted, made.status);
                    self.scheduler.end(Some(&plan), round);
                }
            }
            None => {
                let seconds = since.map(|seconds| seconds / (words.len() / 2) as f64);
                for record in words.chunks_exact(2) {
                    let run = self.run.as_mut().expect("a run is in progress");
                    run.steps.received += 1;
                    if run.finish.is_none() && run.failed.is_none() {
                        let tokens = if record[1] == NON_FINITE { &[] } else { &record[..1] };
                        self.take_tokens(tokens, 0, record[1]);
                        let round = Round { tokens: tokens.len(), verified: 0, accepted: 0, seconds };
                        self.scheduler.end(None, round);
                    }
                }
            }
        }
        if let Some(run) = self.run.as_mut().filter(|run| run.coming() == 0) {
            // Steps begin anew behind rounds, and the other way round.
            run.steps = Steps::default();
            run.clock = Clock::default();
        }
        Ok(())
    }

    /// Puts tokens that a step or a round made behind the text. The first `accepted` of them were drafted.
    fn take_tokens(&mut self, tokens: &[u32], accepted: usize, status: u32) {
        let run = self.run.as_mut().expect("a run is in progress");
        self.tokens.extend(tokens);
        self.cached += tokens.len();
        self.generator.drawn = self.generator.drawn.wrapping_add(tokens.len() as u32);
        run.made += tokens.len();
        run.ready.extend(tokens.iter().enumerate().map(|(i, &token)| (token, i < accepted)));
        if status == NON_FINITE {
            run.failed = Some(self.cached);
            self.cached += 1;
        } else if status == STOPPED {
            run.ready.pop_back();
            run.finish = Some(Finish::Stop);
        } else if run.made == run.max_tokens {
            run.finish = Some(Finish::Length);
        }
        if self.scheduler.draft() == Draft::Off {
            self.draft_floor = self.cached;
        }
    }

    /// Ends a run whose device has stopped: what is still on its way holds no token.
    async fn abandon(&mut self) -> Result<()> {
        self.run = None;
        while self.readback.oldest(&self.model.gpu).await?.is_some() {}
        Ok(())
    }

    /// Ends what was left: takes what a run's submitted steps made into the text, and of a reading what was read.
    ///
    /// # Errors
    /// [`Error::NonFinite`] from a run that was left; the device's errors.
    pub async fn settle_async(&mut self) -> Result<()> {
        self.settle_reading().await?;
        self.cover_steps()?;
        while self.readback.in_flight() > 0 && self.run.is_some() {
            self.take_oldest().await?;
        }
        match self.run.take().and_then(|run| run.failed) {
            Some(position) => Err(Error::NonFinite { position }),
            None => Ok(()),
        }
    }
}

impl Steps {
    /// Brings back all that were sent so far.
    fn cover(&mut self, readback: &mut ReadbackRing, recording: &mut Recording, out: &Buffer) {
        let (slot, count) = self.uncovered();
        let taken = readback.copy(recording, &[(out, 8 * slot as u64, 8 * count as u64)]);
        debug_assert!(taken, "fewer steps ahead than the ring holds");
        self.covered = self.submitted;
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
            if let Some((token, drafted)) = run.ready.pop_front() {
                run.drafted = drafted;
                return Ok(Some(token));
            }
            if let Some(position) = run.failed {
                self.sequence.abandon().await?;
                return Err(Error::NonFinite { position });
            }
            if run.finish.is_some() {
                return Ok(None);
            }
            run.clock.asked();
            self.sequence.send_ahead().await?;
            self.sequence.take_oldest().await?;
        }
    }

    /// Whether the token that was given last had been drafted. Of the tokens of a round, all but the last had.
    pub fn drafted(&self) -> bool {
        self.sequence.run.as_ref().is_some_and(|run| run.drafted)
    }

    /// The sequence.
    pub fn sequence(&self) -> &Sequence {
        self.sequence
    }

    /// The sequence, to look at between two tokens.
    pub(crate) fn sequence_mut(&mut self) -> &mut Sequence {
        self.sequence
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
