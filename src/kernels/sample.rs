//! Kernel `sample`: chooses the next token on the device, and moves the step on.

use crate::gpu::{Binding, Bound, Gpu, Layout, Recording, Traffic};
use crate::{layout, Result};
use bytemuck::{Pod, Zeroable};

/// Token of a record in `out` that has none.
pub const NONE: u32 = u32::MAX;

/// Uniforms of `sample`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    sample: u32,
    vocabulary: u32,
    ring: u32,
    history: u32,
}

/// The host's view of [`Params`], to be held against the shader's.
pub fn layout() -> Layout {
    layout!("sample", Params { sample, vocabulary, ring, history })
}

/// Sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// Logits, V.
    pub vocabulary: u32,
    /// Slots of `out`.
    pub ring: u32,
    /// Ids in `history`; may be 0.
    pub history: u32,
}

/// Inputs and the state that is moved on.
#[derive(Debug, Clone, Copy)]
pub struct Buffers<'a> {
    /// f32 (stride4(V)): the last row of the step.
    pub logits: Binding<'a>,
    /// The [`Step`](super::Step): position, rows, sampled and status change.
    pub step: Binding<'a>,
    /// Ids of the step (T); slot 0 receives the token.
    pub tokens: Binding<'a>,
    /// Raw ids before the step, newest first; one word at least.
    pub history: Binding<'a>,
    /// Ids that end the text (`step.stop_count`).
    pub stop_ids: Binding<'a>,
    /// (ring, 2): token (or [`NONE`]) and status of the step that had sampled `slot` tokens before it, modulo the ring.
    pub out: Binding<'a>,
}

/// The end of a step.
#[derive(Debug, Clone)]
pub struct Sample {
    choose: Bound,
    advance: Bound,
}

impl Sample {
    /// Makes pipeline and bind groups.
    ///
    /// # Errors
    /// As [`Gpu::pipeline`], [`Gpu::buffer`] and [`Gpu::bind`].
    pub fn new(gpu: &Gpu, dims: &Dims, buffers: &Buffers<'_>) -> Result<Self> {
        let pipeline = gpu.pipeline("sample", "plain", &[])?;
        let bind = |sample| {
            let Dims { vocabulary, ring, history } = *dims;
            let params = gpu.uniform("sample params", &Params { sample, vocabulary, ring, history })?;
            let Buffers { logits, step, tokens, history, stop_ids, out } = *buffers;
            gpu.bind(&pipeline, &[Binding::Whole(&params), logits, step, tokens, history, stop_ids, out])
        };
        Ok(Self { choose: bind(1)?, advance: bind(0)? })
    }

    /// Records the choice of a token from the logits, and the advance to the next step.
    pub fn record(&self, recording: &mut Recording) {
        recording.dispatch(&self.choose, [1, 1, 1], Traffic::NONE);
    }

    /// Records the advance alone: position and history move on by the rows of the step, which the host sets anew.
    pub fn record_advance(&self, recording: &mut Recording) {
        recording.dispatch(&self.advance, [1, 1, 1], Traffic::NONE);
    }
}
