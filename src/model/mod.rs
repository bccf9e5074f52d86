//! The layers, wired from kernels: loading ([`weights`]), the plan of the device's memory ([`MemoryPlan`]), and the step that
//! prefill and decoding share ([`Sequence`]).

mod draft;
mod figures;
mod generation;
mod moment;
pub mod pack;
mod plan;
mod scratch;
mod sequence;
mod step;
pub mod synthetic;
#[cfg(not(target_arch = "wasm32"))]
mod trace;
pub mod weights;

pub use crate::layout::Options;
#[doc(hidden)]
pub use draft::Block;
pub use figures::{Attention, LayerAttention, Ngrams};
pub use generation::{Finish, Generation};
pub use moment::{Moment, Past};
pub use plan::MemoryPlan;
pub use sequence::{Progress, Sequence, Standing};
pub use step::LayerRows;

use crate::cache::PagePool;
use crate::checkpoint::Checkpoint;
use crate::config::Config;
use crate::gpu::Gpu;
use crate::kernels::tiling::Tiles;
use crate::layout::{boundary_dims, Layout};
use crate::text::NgramTables;
use crate::Result;
use scratch::Scratch;
use std::sync::atomic::AtomicU64;
use std::sync::Arc;
use weights::{WeightPlan, Weights};

/// NaN in every format of a cache or of scratch: what unwritten memory holds when [`Options::poison`] is set.
pub const POISON: u32 = u32::MAX;

/// A model on a device: its weights, the scratch that all its sequences share, and the pages of their texts.
#[derive(Debug)]
pub struct Model {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) config: Config,
    pub(crate) options: Options,
    pub(crate) layout: Layout,
    pub(crate) weights: Weights,
    pub(crate) scratch: Scratch,
    /// How scores are cut, and the uniforms that say so.
    pub(crate) tiles: Tiles,
    /// Pages of all its texts.
    pub(crate) pool: PagePool,
    /// What n-grams are looked up by.
    pub(crate) ngrams: NgramTables,
    /// Steps that were sent, of all sequences: who finds it unchanged since its own knows that scratch holds what that left.
    pub(crate) steps: AtomicU64,
    plan: MemoryPlan,
}

impl Model {
    /// Checks that the device can hold the model, then streams the weights to it. `progress` hears the bytes that are there, and
    /// how many there will be.
    ///
    /// # Errors
    /// [`Error::DeviceLimit`](crate::Error::DeviceLimit) before anything is uploaded; the checkpoint's and the device's errors.
    pub async fn load(
        gpu: Arc<Gpu>,
        checkpoint: &Checkpoint,
        tables: &NgramTables,
        options: &Options,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self> {
        let config = checkpoint.config().clone();
        let bindable = pack::slice_limit(&gpu);
        let slab_bytes = options.slab_bytes.map(|bytes| bytes.min(bindable));
        let draft = options.draft && checkpoint.has_draft();
        let layout = Layout::new(&config, &Options { slab_bytes, draft, ..options.clone() })?;
        let limit = options.slice_bytes.unwrap_or(u64::MAX).min(bindable);
        let weight_plan = WeightPlan::of(checkpoint, &layout, limit)?;
        let plan = MemoryPlan::new(&config, &layout, &weight_plan);
        plan.check(&config, &layout, gpu.limits())?;
        let total = weight_plan.bytes();
        let dims = boundary_dims(&config);
        let weights = weight_plan.load(&gpu, checkpoint, tables, &dims, &mut |bytes| progress(bytes, total)).await?;
        let scratch = Scratch::new(&gpu, &config, &layout)?;
        let tiles = Tiles::new(&gpu, layout.tiling.clone())?;
        let pool = PagePool::new(&gpu, layout.pool, options.poison.then_some(POISON))?;
        let (options, ngrams, steps) = (options.clone(), tables.clone(), AtomicU64::new(0));
        Ok(Self { gpu, config, options, layout, weights, scratch, tiles, pool, ngrams, steps, plan })
    }

    /// [`Model::load`], blocking.
    ///
    /// # Errors
    /// As [`Model::load`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn load_blocking(
        gpu: Arc<Gpu>,
        checkpoint: &Checkpoint,
        tables: &NgramTables,
        options: &Options,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self> {
        pollster::block_on(Self::load(gpu, checkpoint, tables, options, progress))
    }

    /// What it is.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The device.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Device memory of the model with one sequence, by kind.
    pub fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Tokens of a drafted block; 0 where the draft stages are not loaded.
    pub fn block_size(&self) -> usize {
        self.layout.draft.as_ref().map_or(0, |draft| draft.block)
    }

    /// Pages of all texts.
    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// Logits of the step that ran last, of whatever text; the device keeps no others.
    ///
    /// # Errors
    /// The device's.
    pub async fn logits(&self) -> Result<Vec<f32>> {
        let bytes = 4 * self.config.vocab_size as u64;
        let bytes = self.gpu.read_range(&self.scratch.logits, 0, bytes).await?;
        Ok(bytemuck::allocation::pod_collect_to_vec(&bytes))
    }

    /// Widths and sizes on the device.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
}
