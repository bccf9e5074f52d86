//! The layers, wired from kernels: loading ([`weights`]), the plan of the device's memory ([`MemoryPlan`]), and the step that
//! prefill and decoding share ([`Sequence`]).

pub mod pack;
mod plan;
mod scratch;
mod sequence;
mod step;
#[cfg(not(target_arch = "wasm32"))]
mod trace;
pub mod weights;

pub use crate::layout::Options;
pub use plan::MemoryPlan;
pub use sequence::{Finish, Generation, Sequence};

use crate::checkpoint::Checkpoint;
use crate::config::Config;
use crate::gpu::Gpu;
use crate::layout::{boundary_dims, Layout};
use crate::text::NgramTables;
use crate::Result;
use scratch::Scratch;
use std::sync::Arc;
use weights::{WeightPlan, Weights};

/// NaN in every format of a cache or of scratch: what unwritten memory holds when [`Options::poison`] is set.
pub const POISON: u32 = u32::MAX;

/// A model on a device: its weights, and the scratch that all its sequences share.
#[derive(Debug)]
pub struct Model {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) config: Config,
    pub(crate) options: Options,
    pub(crate) layout: Layout,
    pub(crate) weights: Weights,
    pub(crate) scratch: Scratch,
    /// Compressed id of what lies before the text.
    pub(crate) ngrams: NgramTables,
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
        let layout = Layout::new(&config, options)?;
        let limit = options.slice_bytes.unwrap_or(u64::MAX).min(pack::slice_limit(&gpu));
        let weight_plan = WeightPlan::of(checkpoint, &layout, limit)?;
        let plan = MemoryPlan::new(&config, &layout, &weight_plan);
        plan.check(&config, &layout, gpu.limits())?;
        let total = weight_plan.bytes();
        let dims = boundary_dims(&config);
        let weights = weight_plan.load(&gpu, checkpoint, tables, &dims, &mut |bytes| progress(bytes, total)).await?;
        let scratch = Scratch::new(&gpu, &config, &layout)?;
        let ngrams = NgramTables { token_map: vec![], ..tables.clone() };
        Ok(Self { gpu, config, options: options.clone(), layout, weights, scratch, ngrams, plan })
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

    /// Widths and sizes on the device.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
}
