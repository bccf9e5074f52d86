//! `tap`: what the draft stages are told of the rows in flight at a target layer (`numerics.md` §13).

use crate::gpu::{Binding, Bound, Buffer, Gpu, Layout, Recording, Traffic};
use crate::Result;
use bytemuck::{Pod, Zeroable};

/// Twin of `Params` in `tap.wgsl`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct Params {
    hidden: u32,
    padded: u32,
    streams: u32,
    stride: u32,
    at: u32,
}

/// The uniform struct, to be held against the shader.
pub fn layout() -> Layout {
    crate::layout!("tap", Params { hidden, padded, streams, stride, at })
}

/// Sizes, and where the mean goes.
#[derive(Debug, Clone, Copy)]
pub struct Dims {
    /// Channels, h.
    pub hidden: u32,
    /// Residual streams, n.
    pub streams: u32,
    /// Floats from one row of features to the next.
    pub stride: u32,
    /// Where in a row the layer's channels begin.
    pub at: u32,
}

/// The kernel at one target layer.
#[derive(Debug)]
pub struct Tap {
    bound: Bound,
    groups: u32,
}

impl Tap {
    /// `streams` is (T, n, h4), as the boundary before the layer's attention left them; `features` (T, stride).
    ///
    /// # Errors
    /// Those of [`Gpu::pipeline`] and [`Gpu::uniform`].
    pub fn new(gpu: &Gpu, dims: &Dims, step: &Buffer, streams: &Buffer, features: &Buffer) -> Result<Self> {
        let &Dims { hidden, streams: n, stride, at } = dims;
        let params = Params { hidden, padded: hidden.next_multiple_of(4), streams: n, stride, at };
        let params = gpu.uniform("tap params", &params)?;
        let pipeline = gpu.pipeline("tap", "plain", &[])?;
        let bound = gpu.bind(&pipeline, &[&params, step, streams, features].map(Binding::Whole))?;
        Ok(Self { bound, groups: hidden.div_ceil(64) })
    }

    /// For up to `rows` rows.
    pub fn record(&self, recording: &mut Recording, rows: u32) {
        recording.dispatch(&self.bound, [self.groups, rows, 1], Traffic::NONE);
    }
}
