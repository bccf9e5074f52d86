//! Kernel `verify`: which drafted tokens stand, and the token after them; moves the step on.

use crate::gpu::{Binding, Bound, Buffer, Gpu, Layout, Recording, Traffic};
use crate::{layout, Result};
use bytemuck::{Pod, Zeroable};

/// Uniforms of `verify`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    block: u32,
    vocabulary: u32,
    stride: u32,
    ring: u32,
    history: u32,
}

/// The host's view of [`Params`], to be held against the shader's.
pub fn layout() -> Layout {
    layout!("verify", Params { block, vocabulary, stride, ring, history })
}

/// Words of a round's record in `out`: tokens made, status, tokens verified, tokens accepted; then the tokens made.
pub fn record_words(block: usize) -> usize {
    4 + 1 + block
}

/// Sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// Tokens of a block, B.
    pub block: u32,
    /// Logits, V.
    pub vocabulary: u32,
    /// Words from one row of logits to the next.
    pub stride: u32,
    /// Slots of `out`.
    pub ring: u32,
    /// Ids in `history`; may be 0.
    pub history: u32,
}

/// Inputs, and the state that is moved on.
#[derive(Debug, Clone, Copy)]
pub struct Buffers<'a> {
    /// (1 + B, stride): of the model's rows.
    pub logits: &'a Buffer,
    /// (B, stride): of the drafted block.
    pub base: &'a Buffer,
    /// (B, stride): of the Markov head.
    pub markov: &'a Buffer,
    /// The [`Step`](super::Step): position, rows, sampled, status and round change.
    pub step: &'a Buffer,
    /// Ids of the step; slot 0 receives the token that waits then.
    pub tokens: &'a Buffer,
    /// Raw ids before the step, newest first; one word at least.
    pub history: &'a Buffer,
    /// Ids that end the text, as a uniform of 16 words.
    pub stop_ids: &'a Buffer,
    /// [`round_size`](super::draft_begin::round_size) words.
    pub round: &'a Buffer,
    /// (ring, [`record_words`]): round r in slot `r % ring`.
    pub out: &'a Buffer,
}

/// The end of a round.
#[derive(Debug)]
pub struct Verify {
    rows: Bound,
    judge: Bound,
}

impl Verify {
    /// Makes pipelines and bind groups.
    ///
    /// # Errors
    /// As [`Gpu::pipeline`], [`Gpu::uniform`] and [`Gpu::bind`].
    pub fn new(gpu: &Gpu, dims: &Dims, buffers: &Buffers<'_>) -> Result<Self> {
        let Dims { block, vocabulary, stride, ring, history } = *dims;
        let params = gpu.uniform("verify params", &Params { block, vocabulary, stride, ring, history })?;
        let Buffers { logits, base, markov, step, tokens, history, stop_ids, round, out } = *buffers;
        let rows = [&params, step, logits, round];
        let judge = [&params, logits, round, base, markov, tokens, history, out, stop_ids, step];
        Ok(Self {
            rows: gpu.bind(&gpu.pipeline("verify", "rows", &[])?, &rows.map(Binding::Whole))?,
            judge: gpu.bind(&gpu.pipeline("verify", "judge", &[])?, &judge.map(Binding::Whole))?,
        })
    }

    /// Records the judgement of a step of `rows` rows at most, and the advance to the next.
    pub fn record(&self, recording: &mut Recording, rows: u32) {
        recording.dispatch(&self.rows, [rows, 1, 1], Traffic::NONE);
        recording.dispatch(&self.judge, [1, 1, 1], Traffic::NONE);
    }
}
