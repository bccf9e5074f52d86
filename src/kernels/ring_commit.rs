//! `ring_commit`: the rows of a step of several that later tokens can see go from the chunk into the window ring.

use crate::formats::CacheFormat;
use crate::gpu::{Binding, Bound, Buffer, Gpu, Layout, Recording, Traffic};
use crate::Result;
use bytemuck::{Pod, Zeroable};

/// Twin of `Params` in `ring_commit.wgsl`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct Params {
    row_words: u32,
    slots: u32,
}

/// The uniform struct, to be held against the shader.
pub fn layout() -> Layout {
    crate::layout!("ring_commit", Params { row_words, slots })
}

/// The kernel on one layer's buffers.
#[derive(Debug)]
pub struct RingCommit {
    bound: Bound,
    params: Params,
}

impl RingCommit {
    /// `chunk` is (T, row words), `ring` (`slots`, row words), both packed FP8 rows of `head_dim` channels.
    ///
    /// # Errors
    /// Those of [`Gpu::pipeline`] and [`Gpu::uniform`].
    pub fn new(gpu: &Gpu, step: &Buffer, head_dim: usize, slots: usize, chunk: &Buffer, ring: &Buffer) -> Result<Self> {
        let params = Params { row_words: CacheFormat::Fp8.row_words(head_dim) as u32, slots: slots as u32 };
        let uniform = gpu.uniform("ring_commit params", &params)?;
        let pipeline = gpu.pipeline("ring_commit", "plain", &[])?;
        Ok(Self { bound: gpu.bind(&pipeline, &[&uniform, step, chunk, ring].map(Binding::Whole))?, params })
    }

    /// For a step of `rows` rows, after `attend`. Nothing for a single row, which is in the ring already.
    pub fn record(&self, recording: &mut Recording, rows: u32) {
        if rows > 1 {
            let words = rows.min(self.params.slots) * self.params.row_words;
            recording.dispatch(&self.bound, [words.div_ceil(256), 1, 1], Traffic::NONE);
        }
    }
}
