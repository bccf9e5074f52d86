//! Device memory, by kind, before anything is allocated.

use super::scratch;
use super::weights::{Stored, WeightPlan};
use crate::cache;
use crate::checkpoint::layout::expected;
use crate::config::{Config, Role};
use crate::gpu::{Buffer, MemoryKind, SHADERS};
use crate::kernels::verify::record_words;
use crate::layout::{selects, Layout, Options};
use crate::{Error, Result};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};

/// Slots of a sequence's readback ring, and bytes of each.
pub(super) const READBACK_SLOTS: usize = 4;
/// Tokens that come back together.
pub(super) const READBACK_TOKENS: usize = 4;

/// Bytes of a slot of a sequence's readback ring: sampled tokens, or the record of a round of drafting.
pub(super) fn readback_bytes(layout: &Layout) -> u64 {
    let round = layout.draft.as_ref().map_or(0, |draft| 4 * record_words(draft.block));
    (8 * READBACK_TOKENS).max(round) as u64
}

/// Bytes on the device of a model with one sequence. What is allocated is this, to the byte.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// Weights.
    pub weights: u64,
    /// Caches of a sequence of no token, and what the pool of pages has besides slabs.
    pub cache: u64,
    /// Slabs of pages for a whole context; the pool grows by one of [`MemoryPlan::slab`] bytes at a time.
    pub pages: u64,
    /// Bytes of a slab.
    pub slab: u64,
    /// Activations.
    pub scratch: u64,
    /// Uniforms and step state.
    pub params: u64,
    /// Host-visible slots.
    pub readback: u64,
}

impl MemoryPlan {
    /// Adds everything up.
    pub fn new(config: &Config, layout: &Layout, weights: &WeightPlan) -> Self {
        let bytes = |words: usize| Buffer::allocated(4 * words as u64);
        let cache = cache::words(config, layout);
        let of = |kind| cache.iter().filter(|(k, _)| *k == kind).map(|&(_, words)| bytes(words)).sum::<u64>();
        Self {
            weights: weights.bytes(),
            cache: of(MemoryKind::Cache) + bytes(layout.pool.page_words),
            pages: layout.pool.slabs(layout.pages(layout.context)) as u64 * bytes(layout.pool.slab_words()),
            slab: bytes(layout.pool.slab_words()),
            scratch: scratch::words(config, layout).iter().map(|&(_, words)| bytes(words)).sum(),
            params: of(MemoryKind::Params) + uniforms(config, weights) + layout.tiling.uniform_bytes(),
            readback: READBACK_SLOTS as u64 * Buffer::allocated(readback_bytes(layout)),
        }
    }

    /// The plan of a config alone: weights stored as the release stores them, in slices that every device can bind.
    ///
    /// # Errors
    /// As [`Layout::new`] and [`WeightPlan::new`].
    pub fn of_config(config: &Config, options: &Options) -> Result<Self> {
        let layout = Layout::new(config, options)?;
        let specs: HashMap<String, Stored> =
            expected(config).iter().map(|spec| (spec.name.clone(), Stored::from(spec))).collect();
        let stored = &mut |name: &str| {
            specs.get(name).copied().ok_or_else(|| Error::tensor(name, "no such tensor", "a tensor of the config"))
        };
        let limit = wgpu::Limits::default().max_storage_buffer_binding_size;
        Ok(Self::new(config, &layout, &WeightPlan::new(config, &layout, limit, stored)?))
    }

    /// All kinds together.
    pub fn total(&self) -> u64 {
        self.weights + self.cache + self.pages + self.scratch + self.params + self.readback
    }

    /// The plan while the sequence holds `tokens` tokens: slabs come as they are needed.
    pub fn at(&self, layout: &Layout, tokens: usize) -> Self {
        Self { pages: layout.pool.slabs(layout.pages(tokens)) as u64 * self.slab, ..self.clone() }
    }

    /// All together by kind.
    pub fn by_kind(&self) -> BTreeMap<MemoryKind, u64> {
        use MemoryKind::*;
        let bytes = [self.weights, self.cache + self.pages, self.scratch, self.params, self.readback];
        [Weights, Cache, Scratch, Params, Readback].into_iter().zip(bytes).collect()
    }

    /// Refuses a cache or scratch buffer that the device cannot bind.
    ///
    /// # Errors
    /// [`Error::DeviceLimit`] names the buffer.
    pub fn check(&self, config: &Config, layout: &Layout, limits: &wgpu::Limits) -> Result<()> {
        let allowed = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
        let cache = cache::words(config, layout).into_iter().map(|(_, words)| ("a cache of this context", words));
        for (what, words) in cache.chain(scratch::words(config, layout)) {
            let needed = 4 * words as u64;
            if needed > allowed {
                return Err(Error::DeviceLimit { what: format!("buffer `{what}`"), needed, allowed });
            }
        }
        Ok(())
    }
}

/// Bytes of all uniforms that a sequence's kernels have.
fn uniforms(config: &Config, weights: &WeightPlan) -> u64 {
    let slices = weights.slices();
    let layers = config.layers.len();
    let stages = weights.stages();
    let dspark = config.dspark.as_ref().filter(|_| stages > 0);
    let taps = dspark.map_or(0, |dspark| dspark.target_layer_ids.len());
    let block = dspark.map_or(0, |dspark| dspark.block_size);
    // A Full layer without remainder binds an empty buffer in its place.
    let placeholders = config.layers.iter().filter(|layer| layer.role == Role::Full && layer.ratio == 1).count();
    let selecting = config.layers.iter().filter(|layer| selects(layer)).count();
    let count = [
        ("embed", slices.embed),
        ("engram_gather", slices.tables),
        ("engram_gate", config.layers.iter().filter(|layer| layer.engram.is_some()).count()),
        ("boundary", 2 * layers + 1 + if stages > 0 { 2 * stages + 1 } else { 0 }),
        ("linear", slices.linear + slices.parts + block * slices.markov),
        ("draft_begin", block.min(1)),
        ("draft_pick", block),
        ("verify", block.min(1)),
        // Of a stage, once for a block and once for the text.
        ("cache_append", layers + 2 * stages),
        ("tap", taps),
        ("index_score", selecting),
        ("select", selecting),
        ("select_merge", selecting),
        ("latent_gather", selecting),
        ("attend", layers + stages),
        ("ring_commit", layers + stages),
        ("route", layers + stages),
        ("group_rows", 2 * (layers + stages)),
        ("experts_up", slices.experts_up),
        ("experts_down", slices.experts_down),
        ("sample", 2),
    ];
    let uniforms = count.iter().map(|&(kernel, count)| count as u64 * Buffer::allocated(params_bytes(kernel)));
    uniforms.sum::<u64>() + placeholders as u64 * Buffer::allocated(0)
}

/// Bytes of a kernel's `Params`, as its shader declares them.
fn params_bytes(kernel: &str) -> u64 {
    let shader = SHADERS.iter().find(|shader| shader.kernel == kernel).expect("a kernel of the table");
    let params = shader.structs.iter().find(|structure| structure.name == "Params").expect("every kernel has Params");
    params.size as u64
}
