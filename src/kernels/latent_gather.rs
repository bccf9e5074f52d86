//! `latent_gather`: the packed latents of the selected entries, out of the pages into one place that `attend` reads.

use super::cache_append::PageLayout;
use crate::gpu::{Binding, Bound, Buffer, Gpu, Layout, Pipeline, Recording, Traffic};
use crate::Result;
use bytemuck::{Pod, Zeroable};
use std::sync::Arc;

/// Invocations of a workgroup; each copies a word.
const LANES: u32 = 256;

/// Twin of `Params` in `latent_gather.wgsl`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct Params {
    topk: u32,
    latent_words: u32,
    entries: u32,
    part_at: u32,
    page_words: u32,
}

/// The uniform struct, to be held against the shader.
pub fn layout() -> Layout {
    crate::layout!("latent_gather", Params { topk, latent_words, entries, part_at, page_words })
}

/// Sizes that the kernel is made for.
#[derive(Debug, Clone, Copy)]
pub struct LatentGatherDims {
    /// Most entries of a selection.
    pub topk: usize,
    /// Where the layer's entries lie in a page.
    pub page: PageLayout,
}

/// The kernel for a layer that selects.
#[derive(Debug)]
pub struct LatentGather {
    pipeline: Arc<Pipeline>,
    /// All that is bound, but for the slab.
    buffers: Vec<Buffer>,
    /// By slab.
    bound: Vec<Bound>,
    topk: u32,
    latent_words: u32,
}

impl LatentGather {
    /// On these buffers, without a slab: `table` is the session's uniform of places, `selection` is (T, 1 + topk): count,
    /// ascending entries; `latents`, (T, topk, latent words), is written.
    ///
    /// # Errors
    /// Those of [`Gpu::pipeline`] and [`Gpu::uniform`].
    pub fn new(
        gpu: &Gpu,
        dims: &LatentGatherDims,
        step: &Buffer,
        table: &Buffer,
        selection: &Buffer,
        latents: &Buffer,
    ) -> Result<Self> {
        let LatentGatherDims { topk, page } = *dims;
        let params = Params {
            topk: topk as u32,
            latent_words: page.latent_words as u32,
            entries: page.entries as u32,
            part_at: page.at as u32,
            page_words: page.page_words as u32,
        };
        let uniform = gpu.uniform("latent_gather params", &params)?;
        Ok(Self {
            pipeline: gpu.pipeline("latent_gather", "plain", &[])?,
            buffers: [&uniform, step, table, selection, latents].map(Buffer::clone).to_vec(),
            bound: vec![],
            topk: params.topk,
            latent_words: params.latent_words,
        })
    }

    /// Takes the next slab into use: its number is how many there were before.
    ///
    /// # Errors
    /// Those of [`Gpu::bind`].
    pub fn add_slab(&mut self, gpu: &Gpu, slab: &Buffer) -> Result<()> {
        let bindings: Vec<_> = self.buffers.iter().chain([slab]).map(Binding::Whole).collect();
        self.bound.push(gpu.bind(&self.pipeline, &bindings)?);
        Ok(())
    }

    /// For `rows` rows, from the slabs in which the session has pages. `visible` is an upper bound, known to the host, of the
    /// entries that the last row sees: it sizes the grid and the traffic.
    pub fn record(&self, recording: &mut Recording, rows: u32, visible: u32, slabs: &[usize]) {
        let words = visible.min(self.topk) * self.latent_words;
        // Every entry is read once, from the slab that has it; the counters have them all with the first.
        let mut cache = 4 * u64::from(rows) * u64::from(words);
        for &slab in slabs {
            recording.dispatch(&self.bound[slab], [words.div_ceil(LANES), rows, 1], Traffic { weights: 0, cache });
            cache = 0;
        }
    }
}
