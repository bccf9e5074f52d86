//! A sequence's state on the device: what the model remembers of a text (`numerics.md` §12).
//!
//! Everything lies in its packed format. Sizes come from [`Layout`]; nothing grows after it was made.

use crate::config::{Config, Role};
use crate::gpu::{Buffer, Gpu, MemoryKind};
use crate::kernels::engram_gather::BEFORE_TEXT;
use crate::kernels::Step;
use crate::layout::Layout;
use crate::sampling::MAX_STOP_IDS;
use crate::Result;

/// Steps whose tokens the device keeps until the host has read them.
pub const OUT_RING: usize = 32;

/// Caches and step state of one sequence.
#[derive(Debug)]
pub struct Cache {
    /// The [`Step`].
    pub step: Buffer,
    /// Ids of the step in flight (T).
    pub tokens: Buffer,
    /// Raw ids before the step, newest first; one word at least.
    pub history: Buffer,
    /// Ids that end the text.
    pub stop_ids: Buffer,
    /// (OUT_RING, 2): sampled tokens and the status after them.
    pub out: Buffer,
    /// One a layer: (W, packed window key).
    pub rings: Vec<Buffer>,
    /// Full layers: pages of latents and index keys.
    pub pages: Vec<Option<Buffer>>,
    /// Full layers with a ratio above 1: the incomplete group, (ratio - 1, 2, D) f32.
    pub remainders: Vec<Option<Buffer>>,
}

/// Words of each buffer of a cache, in the order of [`Cache::new`], and its kind.
pub(crate) fn words(config: &Config, layout: &Layout) -> Vec<(MemoryKind, usize)> {
    let mut list = vec![
        (MemoryKind::Params, std::mem::size_of::<Step>() / 4),
        (MemoryKind::Cache, layout.rows),
        (MemoryKind::Cache, history(config).max(1)),
        (MemoryKind::Cache, MAX_STOP_IDS),
        (MemoryKind::Cache, 2 * OUT_RING),
    ];
    for layer in &config.layers {
        list.push((MemoryKind::Cache, config.sliding_window * layout.window_row));
        if layer.role == Role::Full {
            list.push((MemoryKind::Cache, layout.pages(layer.ratio)));
            if layer.ratio > 1 {
                list.push((MemoryKind::Cache, (layer.ratio - 1) * 2 * config.head_dim));
            }
        }
    }
    list
}

/// Ids that a step must know of the text before it.
pub fn history(config: &Config) -> usize {
    config.engram.as_ref().map_or(0, |engram| engram.max_ngram_size - 1)
}

impl Cache {
    /// An empty text's cache.
    ///
    /// # Errors
    /// As [`Gpu::buffer`].
    pub fn new(gpu: &Gpu, config: &Config, layout: &Layout) -> Result<Self> {
        let mut sizes = words(config, layout).into_iter();
        let mut next = |label: &str| {
            let (kind, words) = sizes.next().expect("as many sizes as buffers");
            gpu.buffer(kind, label, 4 * words as u64)
        };
        let step = next("step")?;
        let tokens = next("tokens")?;
        let history = next("n-gram history")?;
        let stop_ids = next("stop ids")?;
        let out = next("sampled tokens")?;
        let (mut rings, mut pages, mut remainders) = (vec![], vec![], vec![]);
        for layer in &config.layers {
            let (full, grouped) = (layer.role == Role::Full, layer.ratio > 1);
            rings.push(next(&format!("window ring of layer {}", layer.index))?);
            pages.push(if full { Some(next(&format!("pages of layer {}", layer.index))?) } else { None });
            let remainder = full && grouped;
            remainders.push(if remainder { Some(next(&format!("remainder of layer {}", layer.index))?) } else { None });
        }
        let cache = Self { step, tokens, history, stop_ids, out, rings, pages, remainders };
        cache.clear(gpu);
        Ok(cache)
    }

    /// Forgets the text. What the caches hold stays, and is never read.
    pub fn clear(&self, gpu: &Gpu) {
        gpu.upload(&self.step, 0, bytemuck::bytes_of(&Step::default()));
        gpu.fill(&self.history, BEFORE_TEXT);
    }

    /// Fills everything that a text writes with `word`: NaN bits show a read of something unwritten.
    pub fn poison(&self, gpu: &Gpu, word: u32) {
        let optional = self.pages.iter().chain(&self.remainders).flatten();
        for buffer in self.rings.iter().chain(optional) {
            gpu.fill(buffer, word);
        }
    }

    /// All buffers that hold the text's state, with their names: rings, pages, remainders, history.
    pub fn state(&self) -> impl Iterator<Item = &Buffer> {
        self.rings.iter().chain(self.pages.iter().chain(&self.remainders).flatten()).chain([&self.history])
    }
}
