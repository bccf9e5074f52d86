//! Kernel `boundary`: from the output of a sublayer to the input of the next, over the residual streams (`numerics.md` §2).

use crate::gpu::{Binding, Bound, Features, Gpu, Layout, Recording, Traffic};
use crate::{layout, Result};
use bytemuck::{Pod, Zeroable};

/// Channels of a slice; `SLICE` in the shader.
const SLICE: u32 = 64;
/// Rows that the variant `r4` takes at once.
const TILE: u32 = 4;
/// Most streams for which `r4` fits WebGPU's 16 KiB of workgroup memory.
const TILE_STREAMS: u32 = 4;

const FIRST: u32 = 1;
const EXPAND: u32 = 2;
const MIX: u32 = 4;

/// What the mixes of a model have in common.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dims {
    /// Channels, h.
    pub hidden: u32,
    /// Residual streams, n; 1 to 8.
    pub streams: u32,
    /// Column steps of the Sinkhorn iteration.
    pub sinkhorn_iterations: u32,
    /// Added to the mean square of the streams.
    pub norm_eps: f32,
    /// Added to `pre` and in the Sinkhorn iteration.
    pub eps: f32,
}

impl Dims {
    /// Words of a row of one stream, h4.
    pub fn stride(&self) -> u32 {
        self.hidden.next_multiple_of(4)
    }
    /// Channel slices of a row, S.
    pub fn slices(&self) -> u32 {
        self.hidden.div_ceil(SLICE)
    }
    /// Projections of a mix, n (n + 2).
    pub fn projections(&self) -> u32 {
        self.streams * (self.streams + 2)
    }
    /// Words of a row of partial sums, S (n (n + 2) + 1).
    pub fn partials(&self) -> u32 {
        self.slices() * (self.projections() + 1)
    }
    /// A projection (n (n + 2), n h) with each stream's channels padded to h4 by zeros, as the kernel reads it.
    pub fn pad_mix_fn(&self, projection: &[f32]) -> Vec<f32> {
        let mut padded = vec![0.0; (self.projections() * self.streams * self.stride()) as usize];
        for (to, from) in
            padded.chunks_exact_mut(self.stride() as usize).zip(projection.chunks_exact(self.hidden as usize))
        {
            to[..from.len()].copy_from_slice(from);
        }
        padded
    }
    /// These of a device's features, less those that do not fit: a row of comb is worked on by as many lanes as there are
    /// streams, which have to lie in one subgroup, whatever its size.
    pub(super) fn usable(&self, features: Features) -> Features {
        let fit = self.streams.is_power_of_two() && self.streams <= features.subgroup_size.0;
        Features { subgroups: features.subgroups && fit, ..features }
    }
    pub(super) fn mix(&self) -> Mix {
        Mix {
            slices: self.slices(),
            sinkhorn_iterations: self.sinkhorn_iterations,
            norm_eps: self.norm_eps,
            eps: self.eps,
            inverse_width: 1.0 / (self.streams * self.hidden) as f32,
        }
    }
}

/// Uniforms of `shared/mix.wgsl`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Mix {
    slices: u32,
    sinkhorn_iterations: u32,
    norm_eps: f32,
    eps: f32,
    inverse_width: f32,
}

/// Uniforms of `boundary`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    flags: u32,
    hidden: u32,
    stride: u32,
    parts: u32,
    mix: Mix,
}

/// The host's view of [`Params`], to be held against the shader's.
pub fn layout() -> Layout {
    layout!("boundary", Params { flags, hidden, stride, parts, mix })
}

/// The host's view of [`Mix`].
pub fn mix_layout() -> Layout {
    layout!("boundary", Mix { slices, sinkhorn_iterations, norm_eps, eps, inverse_width })
}

/// Where in the model the boundary lies, with the weights that it reads there. `mix_fn` ([`Dims::pad_mix_fn`]) is the
/// projection of the sublayer that follows; `mix_const` [scale 3, base n (n + 2)] belongs to the one before.
#[derive(Debug, Clone, Copy)]
pub enum Place<'a> {
    /// Before the first sublayer: stream 0 is collapsed.
    First {
        /// Projection of the first mix.
        mix_fn: Binding<'a>,
    },
    /// Between two sublayers.
    Between {
        /// Projection of the next mix.
        mix_fn: Binding<'a>,
        /// Constants of the previous mix.
        mix_const: Binding<'a>,
    },
    /// Between two sublayers, where `engram_gate` has expanded the output of the first.
    AfterEngram {
        /// Projection of the next mix.
        mix_fn: Binding<'a>,
        /// Constants of the previous mix.
        mix_const: Binding<'a>,
    },
    /// After the last sublayer.
    Last {
        /// Constants of the last mix.
        mix_const: Binding<'a>,
    },
}

/// Activations, all f32. T rows in flight, h4 = [`Dims::stride`].
#[derive(Debug, Clone, Copy)]
pub struct Buffers<'a> {
    /// The [`Step`](super::Step).
    pub step: Binding<'a>,
    /// Output of the last sublayer (T, parts, h4), read where it is to be expanded.
    pub z: Binding<'a>,
    /// Vectors of a row of `z`, summed in order.
    pub parts: u32,
    /// (T, n, h4), updated in place.
    pub streams: Binding<'a>,
    /// (T, [`Dims::partials`]) of the previous mix.
    pub partials_in: Binding<'a>,
    /// (T, [`Dims::partials`]) of the next mix, another buffer.
    pub partials_out: Binding<'a>,
    /// The collapsed streams (T, h4), not normalised.
    pub x: Binding<'a>,
}

/// One boundary of the model.
#[derive(Debug, Clone)]
pub struct Boundary {
    row: Bound,
    tile: Option<Bound>,
    slices: u32,
    weights: u64,
}

impl Boundary {
    /// Makes pipelines and bind groups.
    ///
    /// # Errors
    /// As [`Gpu::pipeline`], [`Gpu::buffer`] and [`Gpu::bind`].
    pub fn new(gpu: &Gpu, dims: &Dims, place: Place<'_>, buffers: &Buffers<'_>) -> Result<Self> {
        Self::with_features(gpu, gpu.features(), dims, place, buffers)
    }

    /// The same, in the variants that use these of the device's features.
    ///
    /// # Errors
    /// As [`Boundary::new`].
    pub fn with_features(
        gpu: &Gpu,
        features: Features,
        dims: &Dims,
        place: Place<'_>,
        buffers: &Buffers<'_>,
    ) -> Result<Self> {
        // What a place does not read is bound to what it does.
        let (flags, mix_fn, mix_const) = match place {
            Place::First { mix_fn } => (FIRST | MIX, mix_fn, mix_fn),
            Place::Between { mix_fn, mix_const } => (EXPAND | MIX, mix_fn, mix_const),
            Place::AfterEngram { mix_fn, mix_const } => (MIX, mix_fn, mix_const),
            Place::Last { mix_const } => (EXPAND, mix_const, mix_const),
        };
        let params =
            Params { flags, hidden: dims.hidden, stride: dims.stride(), parts: buffers.parts, mix: dims.mix() };
        let params = gpu.uniform("boundary params", &params)?;
        let features = dims.usable(features);
        let bind = |variants: &[&str]| {
            let variant = features.choose("boundary", variants);
            gpu.bind(
                &gpu.pipeline("boundary", variant, &[("STREAMS", dims.streams.into())])?,
                &[
                    Binding::Whole(&params),
                    buffers.step,
                    buffers.z,
                    buffers.streams,
                    buffers.partials_in,
                    buffers.partials_out,
                    mix_fn,
                    mix_const,
                    buffers.x,
                ],
            )
        };
        let projection = dims.projections() as u64 * dims.streams as u64 * dims.stride() as u64 * 4;
        Ok(Self {
            row: bind(&["r1_sub", "r1"])?,
            tile: if dims.streams <= TILE_STREAMS { Some(bind(&["r4_sub", "r4"])?) } else { None },
            slices: dims.slices(),
            weights: if flags & MIX != 0 { projection } else { 0 },
        })
    }

    /// Records the boundary for up to `rows` rows.
    pub fn record(&self, recording: &mut Recording, rows: u32) {
        let (bound, groups) = match &self.tile {
            Some(tile) if rows > 1 => (tile, rows.div_ceil(TILE)),
            _ => (&self.row, rows),
        };
        recording.dispatch(bound, [self.slices, groups, 1], Traffic { weights: self.weights, ..Traffic::NONE });
    }
}
