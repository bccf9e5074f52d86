//! A text on the CPU: reads tokens, makes tokens, is cut and copied. The same face as the device's `model::Sequence`.

use super::math::sigmoid;
use super::model::{LogitRows, Model, State};
use super::trace::Trace;
use super::verify::{verify, Drafted};
use crate::reading::{Prefill, Replay};
use crate::sampling::{Generator, Request};
use crate::spec::{self, Counters, Draft, Plan, Round, Scheduler};
use crate::{Error, Result};
use std::collections::VecDeque;
use std::sync::Arc;

/// A model and the state of one text. A clone is a fork: both go on from here.
#[derive(Debug, Clone)]
pub struct Sequence {
    model: Arc<Model>,
    /// Behind all tokens but the last, which waits to be read: its logits choose the next token.
    state: State,
    tokens: Vec<u32>,
    prefill: Prefill,
    generator: Generator,
    scheduler: Scheduler,
}

impl Sequence {
    /// An empty text.
    pub fn new(model: impl Into<Arc<Model>>) -> Self {
        let model = model.into();
        let (prefill, generator) = (Prefill::default(), Generator::default());
        let scheduler = Scheduler::new(Draft::Off, model.block_size());
        Self { state: model.state(), model, tokens: vec![], prefill, generator, scheduler }
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The caches.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// The text.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens of the text.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether the text has no token.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Tokens that still fit.
    pub fn remaining(&self) -> usize {
        self.model.config.max_position_embeddings - self.tokens.len()
    }

    /// The generator, as the last generation left it.
    pub fn generator(&self) -> Generator {
        self.generator
    }

    /// How tokens are read from now on.
    pub fn set_prefill(&mut self, prefill: Prefill) {
        self.prefill = prefill;
    }

    /// How many tokens are drafted from now on; nothing is when this is not called. Greedy text is the same with every choice,
    /// and sampled text has the same distribution. The counters begin anew.
    ///
    /// # Errors
    /// [`Error::Setting`] for more tokens than a block of the model has.
    pub fn set_draft(&mut self, draft: Draft) -> Result<()> {
        draft.validate(self.model.block_size())?;
        self.scheduler = Scheduler::new(draft, self.model.block_size());
        Ok(())
    }

    /// What drafting did since it was chosen.
    pub fn draft_counters(&self) -> &Counters {
        self.scheduler.counters()
    }

    /// Reads tokens, all but the last: that one is read when the next token is asked for. `progress` hears how many are done.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`], [`Error::TokenId`], [`Error::Context`]; the text is as before then.
    pub fn append(&mut self, tokens: &[u32], progress: &mut dyn FnMut(usize)) -> Result<()> {
        let config = &self.model.config;
        check_tokens(tokens, config.vocab_size, self.tokens.len(), config.max_position_embeddings)?;
        self.tokens.extend(tokens);
        let unread = &self.tokens[self.state.position..];
        self.model.append(&mut self.state, unread, self.prefill, progress)
    }

    /// Cuts the text to its first `length` tokens. What the caches hold of their groups stays; the rest of the state is rebuilt.
    /// Nothing changes when the text is not longer.
    ///
    /// # Errors
    /// None that a text which was read can cause.
    pub fn truncate(&mut self, length: usize, replay: Replay) -> Result<()> {
        if length >= self.tokens.len() {
            return Ok(());
        }
        self.tokens.truncate(length);
        let kept = self.kept().min(length);
        self.model.rebuild(&mut self.state, &self.tokens, kept, replay)
    }

    /// Rebuilds the state from its entries alone, as opening a text does that was saved without rings.
    ///
    /// # Errors
    /// None that a text which was read can cause.
    pub fn rebuild(&mut self, replay: Replay) -> Result<()> {
        let kept = self.kept();
        self.model.rebuild(&mut self.state, &self.tokens, kept, replay)
    }

    /// Tokens whose groups have their entries.
    fn kept(&self) -> usize {
        self.state.position.max(self.state.kept)
    }

    /// The same text again, to go on otherwise.
    pub fn fork(&self) -> Self {
        self.clone()
    }

    /// Makes tokens until a stop id, `max_tokens` or an error.
    ///
    /// # Errors
    /// [`Error::Setting`], [`Error::EmptyPrompt`] when no token waits to be read, [`Error::Context`] when the text would grow
    /// too long.
    pub fn generate<'a>(&'a mut self, request: &Request) -> Result<Generation<'a>> {
        let config = &self.model.config;
        request.validate(config.vocab_size)?;
        if self.state.position == self.tokens.len() {
            return Err(Error::EmptyPrompt);
        }
        check_room(self.tokens.len(), request.max_tokens, config.max_position_embeddings)?;
        self.generator = self.generator.with_seed(request.sampling.seed);
        Ok(Generation { sequence: self, request: request.clone(), made: 0, ready: VecDeque::new(), done: false })
    }

    /// Drafts tokens to follow the one that waits, `most` of them at most.
    fn draft(&self, plan: &Plan, request: &Request, most: usize) -> Vec<Drafted> {
        let mut drafting = self.model.draft(&self.state, self.tokens[self.state.position], &mut Trace::off());
        let (mut drafted, mut outlook) = (vec![], plan.outlook());
        while drafted.len() < most && !drafting.is_done() {
            if !outlook.more(sigmoid(drafting.confidence())) {
                break;
            }
            let counter = self.generator.drawn.wrapping_add(drafted.len() as u32);
            let Some(next) = Drafted::draw(&drafting.logits(), &request.sampling, counter) else { break };
            drafting.take(next.token);
            drafted.push(next);
        }
        drafted
    }

    /// Reads the waiting token and `drafted` ones in one pass, and puts what stands of these and one token more behind the text.
    /// What a token or an error is to a generation comes back, in order.
    fn verify(&mut self, drafted: &[Drafted], request: &Request) -> Result<(usize, VecDeque<Made>)> {
        let Self { model, state, tokens, generator, .. } = self;
        let mut rows = tokens[state.position..].to_vec();
        rows.extend(drafted.iter().map(|drafted| drafted.token));
        let logits = model.forward(state, &rows, LogitRows::All, None)?;
        let verdict = verify(&logits, drafted, &request.sampling, generator.drawn);
        let mut made = VecDeque::new();
        for token in drafted[..verdict.accepted].iter().map(|drafted| Some(drafted.token)).chain([verdict.next]) {
            made.push_back(match token {
                Some(token) if request.stop_ids.contains(&token) => Made::Stop,
                Some(token) => Made::Token(token),
                None => Made::NonFinite { position: tokens.len() - 1 },
            });
            tokens.extend(token);
            generator.drawn = generator.drawn.wrapping_add(token.is_some() as u32);
            if made.back() == Some(&Made::Stop) {
                break;
            }
        }
        let waiting = !matches!(made.back(), Some(Made::NonFinite { .. }));
        model.take_back(state, &tokens[..tokens.len() - waiting as usize]);
        Ok((verdict.accepted, made))
    }
}

/// What a round made, as its generation will say it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Made {
    /// A token of the text.
    Token(u32),
    /// A token that ends the generation.
    Stop,
    /// No token: the logits of the row at `position` are NaN or infinite.
    NonFinite { position: usize },
}

/// Tokens being made; see [`Sequence::generate`]. A round of drafting may make more than were asked for so far; those go again when
/// the generation is dropped before.
pub struct Generation<'a> {
    sequence: &'a mut Sequence,
    request: Request,
    made: usize,
    ready: VecDeque<Made>,
    done: bool,
}

impl Generation<'_> {
    /// Makes a token, and those that were drafted before it.
    fn round(&mut self) -> Result<()> {
        let started = spec::seconds();
        let plan = self.sequence.scheduler.begin();
        let most = self.request.max_tokens - self.made - 1;
        let drafted = plan.as_ref().map_or(vec![], |plan| self.sequence.draft(plan, &self.request, most));
        let (accepted, made) = self.sequence.verify(&drafted, &self.request)?;
        self.ready = made;
        let tokens = self.ready.iter().filter(|made| !matches!(made, Made::NonFinite { .. })).count();
        let seconds = Some(spec::seconds() - started);
        self.sequence.scheduler.end(plan.as_ref(), Round { tokens, verified: drafted.len(), accepted, seconds });
        Ok(())
    }

    fn step(&mut self) -> Result<Option<u32>> {
        if self.ready.is_empty() {
            self.round()?;
        }
        match self.ready.pop_front().expect("a round makes a token or an error") {
            Made::Token(token) => {
                self.made += 1;
                Ok(Some(token))
            }
            Made::Stop => Ok(None),
            Made::NonFinite { position } => Err(Error::NonFinite { position }),
        }
    }
}

impl Drop for Generation<'_> {
    fn drop(&mut self) {
        let Sequence { model, state, tokens, generator, .. } = &mut *self.sequence;
        if self.ready.is_empty() {
            return;
        }
        let unheard = self.ready.iter().filter(|made| !matches!(made, Made::NonFinite { .. })).count();
        tokens.truncate(tokens.len() - unheard);
        generator.drawn = generator.drawn.wrapping_sub(unheard as u32);
        model.take_back(state, &tokens[..tokens.len() - 1]);
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done || self.made == self.request.max_tokens {
            return None;
        }
        let step = self.step().transpose();
        self.done = !matches!(step, Some(Ok(_)));
        step
    }
}

/// Refuses tokens that cannot be appended to a text of `length`.
pub(crate) fn check_tokens(tokens: &[u32], vocabulary: usize, length: usize, context: usize) -> Result<()> {
    if tokens.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    if let Some(&id) = tokens.iter().find(|&&id| id as usize >= vocabulary) {
        return Err(Error::TokenId { id, vocabulary });
    }
    if length + tokens.len() > context {
        return Err(Error::Context { needed: length + tokens.len(), allowed: context });
    }
    Ok(())
}

/// Refuses a generation that a text of `length` has no room for.
pub(crate) fn check_room(length: usize, max_tokens: usize, context: usize) -> Result<()> {
    match length.checked_add(max_tokens) {
        Some(needed) if needed <= context => Ok(()),
        needed => Err(Error::Context { needed: needed.unwrap_or(usize::MAX), allowed: context }),
    }
}
