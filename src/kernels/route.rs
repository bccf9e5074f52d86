//! Kernel `route`: which experts a row goes to, and with what weights (`numerics.md` §9).

use crate::gpu::{Binding, Bound, Buffer, Gpu, Layout, Recording, Traffic};
use crate::{layout, Error, Result};
use bytemuck::{Pod, Zeroable};

/// Most routed experts: three words each in workgroup memory.
pub const MAX_EXPERTS: u32 = 1365;

/// Uniforms of `route`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    logit_stride: u32,
    k: u32,
    normalise: u32,
    scale: f32,
}

/// The host's view of [`Params`], to be held against the shader's.
pub fn layout() -> Layout {
    layout!("route", Params { logit_stride, k, normalise, scale })
}

/// Numbers of a router.
#[derive(Debug, Clone, Copy)]
pub struct RouteDims {
    /// Routed experts.
    pub experts: u32,
    /// Experts chosen for a row.
    pub k: u32,
    /// From one row of logits to the next.
    pub logit_stride: u32,
    /// Divide the chosen scores by their sum.
    pub normalise: bool,
    /// Routed scaling factor.
    pub scale: f32,
}

/// Buffers of a [`Route`]; slots = k + 1, the last for the shared expert.
#[derive(Debug, Clone, Copy)]
pub struct RouteIo<'a> {
    /// The step's state.
    pub step: &'a Buffer,
    /// (T, `logit_stride`) f32.
    pub logits: &'a Buffer,
    /// (experts) f32.
    pub bias: &'a Buffer,
    /// (T, slots) u32.
    pub ids: &'a Buffer,
    /// (T, slots) f32.
    pub gains: &'a Buffer,
    /// (T · slots) u32; written when a single row is in flight.
    pub pairs: &'a Buffer,
    /// [`tiles_words`](super::group_rows::tiles_words) u32; written when a single row is in flight.
    pub tiles: &'a Buffer,
}

/// Chooses the experts of every row.
#[derive(Debug)]
pub struct Route {
    bound: Bound,
}

impl Route {
    /// Makes pipeline and bind group.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for more than [`MAX_EXPERTS`] experts, or fewer experts than are to be chosen.
    pub fn new(gpu: &Gpu, dims: &RouteDims, io: &RouteIo<'_>) -> Result<Self> {
        let RouteDims { experts, k, .. } = *dims;
        if experts > MAX_EXPERTS || k > experts {
            let what = format!("choosing {k} of {experts} experts (at most {MAX_EXPERTS} experts)");
            return Err(Error::Unsupported { what });
        }
        let params = Params { logit_stride: dims.logit_stride, k, normalise: dims.normalise as u32, scale: dims.scale };
        let params = gpu.uniform("route params", &params)?;
        let pipeline = gpu.pipeline("route", "plain", &[("EXPERTS", experts as f64)])?;
        let buffers = [&params, io.step, io.logits, io.bias, io.ids, io.gains, io.pairs, io.tiles];
        Ok(Self { bound: gpu.bind(&pipeline, &buffers.map(Binding::Whole))? })
    }

    /// Records the choice for `rows` rows.
    pub fn record(&self, recording: &mut Recording, rows: u32) {
        recording.dispatch(&self.bound, [rows, 1, 1], Traffic::NONE);
    }
}
