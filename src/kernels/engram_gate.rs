//! Kernel `engram_gate`: adds an Engram's memory to the residual streams (`numerics.md` §8).

use super::boundary::{Dims, Mix};
use crate::gpu::{Binding, Bound, Features, Gpu, Layout, Recording, Traffic};
use crate::{layout, Result};
use bytemuck::{Pod, Zeroable};

/// Uniforms of `engram_gate`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    expand: u32,
    hidden: u32,
    stride: u32,
    parts: u32,
    kv_stride: u32,
    image_token: u32,
    pad_token: u32,
    scale: f32,
    mix: Mix,
}

/// The host's view of [`Params`], to be held against the shader's.
pub fn layout() -> Layout {
    layout!("engram_gate", Params { expand, hidden, stride, parts, kv_stride, image_token, pad_token, scale, mix })
}

/// The host's view of [`Mix`].
pub fn mix_layout() -> Layout {
    Layout { kernel: "engram_gate", ..super::boundary::mix_layout() }
}

/// The output of a sublayer that waits to be expanded, and its mix.
#[derive(Debug, Clone, Copy)]
pub struct Expand<'a> {
    /// (T, parts, h4).
    pub z: Binding<'a>,
    /// Vectors of a row of `z`, summed in order.
    pub parts: u32,
    /// (T, [`Dims::partials`]).
    pub partials_in: Binding<'a>,
    /// [scale 3, base n (n + 2)].
    pub mix_const: Binding<'a>,
}

/// Inputs, and the streams that are updated. T rows in flight, h channels, n streams.
#[derive(Debug, Clone, Copy)]
pub struct Buffers<'a> {
    /// The [`Step`](super::Step).
    pub step: Binding<'a>,
    /// f32 (T, n, h4), updated in place.
    pub streams: Binding<'a>,
    /// f32 (T, stride4((n + 1) h)): a key for each stream, then the value.
    pub kv: Binding<'a>,
    /// f32 (n, h): `q_weight` times `k_weight`.
    pub qk: Binding<'a>,
    /// Ids of the step (T).
    pub tokens: Binding<'a>,
}

/// The gate of one Engram.
#[derive(Debug, Clone)]
pub struct EngramGate {
    bound: Bound,
    weights: u64,
}

impl EngramGate {
    /// Makes pipeline and bind group. Without `expand` (before the first sublayer) the streams are taken as they are.
    /// Streams of image and padding tokens get no memory.
    ///
    /// # Errors
    /// As [`Gpu::pipeline`], [`Gpu::buffer`] and [`Gpu::bind`].
    pub fn new(
        gpu: &Gpu,
        dims: &Dims,
        image_token: Option<u32>,
        pad_token: Option<u32>,
        expand: Option<Expand<'_>>,
        buffers: &Buffers<'_>,
    ) -> Result<Self> {
        Self::with_features(gpu, gpu.features(), dims, image_token, pad_token, expand, buffers)
    }

    /// The same, in the variant that uses these of the device's features.
    ///
    /// # Errors
    /// As [`EngramGate::new`].
    pub fn with_features(
        gpu: &Gpu,
        features: Features,
        dims: &Dims,
        image_token: Option<u32>,
        pad_token: Option<u32>,
        expand: Option<Expand<'_>>,
        buffers: &Buffers<'_>,
    ) -> Result<Self> {
        let params = Params {
            expand: expand.is_some().into(),
            hidden: dims.hidden,
            stride: dims.stride(),
            parts: expand.map_or(0, |e| e.parts),
            kv_stride: ((dims.streams + 1) * dims.hidden).next_multiple_of(4),
            image_token: image_token.unwrap_or(u32::MAX),
            pad_token: pad_token.unwrap_or(u32::MAX),
            scale: (dims.hidden as f64).powf(-0.5) as f32,
            mix: dims.mix(),
        };
        let params = gpu.uniform("engram_gate params", &params)?;
        // Without an output to expand, its bindings are not read.
        let unread = Expand { z: buffers.qk, parts: 0, partials_in: buffers.qk, mix_const: buffers.qk };
        let expand = expand.unwrap_or(unread);
        let variant = dims.usable(features).choose("engram_gate", &["sub", "plain"]);
        let bound = gpu.bind(
            &gpu.pipeline("engram_gate", variant, &[("STREAMS", dims.streams.into())])?,
            &[
                Binding::Whole(&params),
                buffers.step,
                expand.z,
                buffers.streams,
                expand.partials_in,
                expand.mix_const,
                buffers.kv,
                buffers.qk,
                buffers.tokens,
            ],
        )?;
        Ok(Self { bound, weights: dims.streams as u64 * dims.hidden as u64 * 4 })
    }

    /// Records the gate for up to `rows` rows.
    pub fn record(&self, recording: &mut Recording, rows: u32) {
        recording.dispatch(&self.bound, [rows, 1, 1], Traffic { weights: self.weights, ..Traffic::NONE });
    }
}
