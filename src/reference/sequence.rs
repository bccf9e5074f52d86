//! A text on the CPU: reads tokens, makes tokens. The same face as the device's `model::Sequence`.

use super::model::{LogitRows, Model, State};
use super::sample;
use crate::sampling::Request;
use crate::{Error, Result};

/// Rows of one prefill chunk: between two chunks progress is told.
const CHUNK: usize = 64;

/// A model and the state of one text.
pub struct Sequence {
    model: Model,
    state: State,
    /// Tokens that are part of the text and not read yet: the last one's logits choose the next token.
    pending: Vec<u32>,
}

impl Sequence {
    /// An empty text.
    pub fn new(model: Model) -> Self {
        Self { state: model.state(), model, pending: vec![] }
    }

    /// Tokens of the text.
    pub fn len(&self) -> usize {
        self.state.position + self.pending.len()
    }

    /// Whether the text has no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads tokens, all but the last: that one is read when the next token is asked for. `progress` hears how many are done.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`], [`Error::TokenId`], [`Error::Context`]; the text is as before then.
    pub fn append(&mut self, tokens: &[u32], progress: &mut dyn FnMut(usize)) -> Result<()> {
        let config = &self.model.config;
        check_tokens(tokens, config.vocab_size, self.len(), config.max_position_embeddings)?;
        self.pending.extend(tokens);
        let ready: Vec<u32> = self.pending.drain(..self.pending.len() - 1).collect();
        let mut done = 0;
        for chunk in ready.chunks(CHUNK) {
            self.model.forward(&mut self.state, chunk, LogitRows::None, None)?;
            done += chunk.len();
            progress(done);
        }
        Ok(())
    }

    /// Makes tokens until a stop id, `max_tokens` or an error.
    ///
    /// # Errors
    /// [`Error::Setting`], [`Error::EmptyPrompt`] for an empty text, [`Error::Context`] when the text would grow too long.
    pub fn generate<'a>(&'a mut self, request: &Request) -> Result<Generation<'a>> {
        let config = &self.model.config;
        request.validate(config.vocab_size)?;
        if self.pending.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        check_room(self.len(), request.max_tokens, config.max_position_embeddings)?;
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
        let Sequence { model, state, pending } = &mut *self.sequence;
        let logits = model.forward(state, pending, LogitRows::Last, None)?;
        pending.clear();
        let token = sample::sample(&logits[0], &self.request.sampling, self.made as u32)
            .ok_or(Error::NonFinite { position: state.position - 1 })?;
        self.made += 1;
        pending.push(token);
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
