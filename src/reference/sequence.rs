//! A text on the CPU: reads tokens, makes tokens, is cut and copied. The same face as the device's `model::Sequence`.

use super::model::{LogitRows, Model, State};
use super::sample;
use crate::reading::{Prefill, Replay};
use crate::sampling::{Generator, Request};
use crate::{Error, Result};
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
}

impl Sequence {
    /// An empty text.
    pub fn new(model: impl Into<Arc<Model>>) -> Self {
        let model = model.into();
        let (prefill, generator) = (Prefill::default(), Generator::default());
        Self { state: model.state(), model, tokens: vec![], prefill, generator }
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
        Ok(Generation { sequence: self, request: request.clone(), made: 0, done: false })
    }
}

/// Tokens being made; see [`Sequence::generate`].
pub struct Generation<'a> {
    sequence: &'a mut Sequence,
    request: Request,
    made: usize,
    done: bool,
}

impl Generation<'_> {
    fn step(&mut self) -> Result<Option<u32>> {
        let Sequence { model, state, tokens, generator, .. } = &mut *self.sequence;
        let logits = model.forward(state, &tokens[state.position..], LogitRows::Last, None)?;
        let token = sample::sample(&logits[0], &self.request.sampling, generator.drawn)
            .ok_or(Error::NonFinite { position: state.position - 1 })?;
        self.made += 1;
        generator.drawn = generator.drawn.wrapping_add(1);
        tokens.push(token);
        Ok(Some(token).filter(|token| !self.request.stop_ids.contains(token)))
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
