//! Kernel `draft_begin`: a round of drafting begins, with the block of the token that waits. And what its kernels hand on.

use crate::gpu::{Binding, Bound, Buffer, Gpu, Layout, Recording, Traffic};
use crate::{layout, Result};
use bytemuck::{Pod, Zeroable};

/// Uniforms of `draft_begin`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    block: u32,
}

/// The host's view of [`Params`], to be held against the shader's.
pub fn layout() -> Layout {
    layout!("draft_begin", Params { block })
}

/// First words of the buffer that a round's kernels share (`shared/round.wgsl`), for blocks of `costs.len() - 1` tokens: how many
/// tokens to verify whatever they promise, or none to verify as many as pay; seconds of a round by the tokens it verifies; the share
/// of tokens that are accepted, by place.
pub fn round_words(verify: Option<u32>, costs: &[f32], accepted: &[f32]) -> Vec<u32> {
    assert_eq!(costs.len(), accepted.len() + 1, "a cost more than places");
    let mut words = vec![verify.unwrap_or(u32::MAX), 0, 0, 0];
    words.extend(costs.iter().chain(accepted).map(|value| value.to_bits()));
    words
}

/// Words of that buffer in all, for blocks of `block` tokens: the odds of the model's rows and of the drafted ones come last.
pub fn round_size(block: usize) -> usize {
    (4 + 2 * block + 1).next_multiple_of(8) + 8 * (2 * block + 1)
}

/// The kernel on one text's buffers.
#[derive(Debug)]
pub struct DraftBegin {
    bound: Bound,
}

impl DraftBegin {
    /// `step` and `tokens` are the text's; the block is of `block` tokens and has `block_step` and `block_tokens`; `round` has
    /// [`round_size`] words.
    ///
    /// # Errors
    /// As [`Gpu::pipeline`], [`Gpu::uniform`] and [`Gpu::bind`].
    pub fn new(
        gpu: &Gpu,
        block: usize,
        [step, tokens]: [&Buffer; 2],
        round: &Buffer,
        [block_step, block_tokens]: [&Buffer; 2],
    ) -> Result<Self> {
        let params = gpu.uniform("draft_begin params", &Params { block: block as u32 })?;
        let pipeline = gpu.pipeline("draft_begin", "plain", &[])?;
        let buffers = [&params, step, tokens, round, block_step, block_tokens];
        Ok(Self { bound: gpu.bind(&pipeline, &buffers.map(Binding::Whole))? })
    }

    /// Records the beginning of a round.
    pub fn record(&self, recording: &mut Recording) {
        recording.dispatch(&self.bound, [1, 1, 1], Traffic::NONE);
    }
}
