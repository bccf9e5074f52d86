//! Kernel `draft_pick`: takes the token at a place of a drafted block, if verifying it pays.

use crate::gpu::{Binding, Bound, Buffer, Gpu, Layout, Recording, Traffic};
use crate::{layout, Result};
use bytemuck::{Pod, Zeroable};

/// Uniforms of `draft_pick`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    place: u32,
    block: u32,
    vocabulary: u32,
    stride: u32,
    hidden: u32,
    rank: u32,
}

/// The host's view of [`Params`], to be held against the shader's.
pub fn layout() -> Layout {
    layout!("draft_pick", Params { place, block, vocabulary, stride, hidden, rank })
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
    /// Channels of a residual, h; rows of them are stride4(h) words.
    pub hidden: u32,
    /// Channels of the Markov head's embedding, r; rows of them are stride4(r) words.
    pub rank: u32,
}

/// Inputs, and the state that is moved on.
#[derive(Debug, Clone, Copy)]
pub struct Buffers<'a> {
    /// (B, stride): logits of the block.
    pub base: &'a Buffer,
    /// (B, stride): what the Markov head makes of the token before each place.
    pub markov: &'a Buffer,
    /// (B, h4): residuals before the last norm.
    pub raw: &'a Buffer,
    /// (B, r4): the Markov head's embeddings of the tokens before the places.
    pub embeddings: &'a Buffer,
    /// (h + r): weights of the confidence head.
    pub confidence: &'a Buffer,
    /// The [`Step`](super::Step): gets a row for each token taken.
    pub step: &'a Buffer,
    /// Ids of the step: gets the tokens taken, behind the one that waits.
    pub tokens: &'a Buffer,
    /// [`round_size`](super::draft_begin::round_size) words.
    pub round: &'a Buffer,
}

/// The kernel at each place of a block.
#[derive(Debug)]
pub struct DraftPick {
    places: Vec<Bound>,
}

impl DraftPick {
    /// Makes pipeline and bind groups.
    ///
    /// # Errors
    /// As [`Gpu::pipeline`], [`Gpu::uniform`] and [`Gpu::bind`].
    pub fn new(gpu: &Gpu, dims: &Dims, buffers: &Buffers<'_>) -> Result<Self> {
        let pipeline = gpu.pipeline("draft_pick", "plain", &[])?;
        let Buffers { base, markov, raw, embeddings, confidence, step, tokens, round } = *buffers;
        let bind = |place| {
            let Dims { block, vocabulary, stride, hidden, rank } = *dims;
            let params =
                gpu.uniform("draft_pick params", &Params { place, block, vocabulary, stride, hidden, rank })?;
            let buffers = [&params, base, markov, raw, embeddings, confidence, step, tokens, round];
            gpu.bind(&pipeline, &buffers.map(Binding::Whole))
        };
        Ok(Self { places: (0..dims.block).map(bind).collect::<Result<_>>()? })
    }

    /// Records the choice at a place, those before it having been made.
    pub fn record(&self, recording: &mut Recording, place: usize) {
        recording.dispatch(&self.places[place], [1, 1, 1], Traffic::NONE);
    }
}
