//! Kernel `experts_down`: the outputs of the chosen experts, one vector a pair (`numerics.md` §9).

use super::experts_up::{record_tiles, ExpertPack, ExpertSegment, ExpertSlice};
use super::linear::{bind_tiles, lane_groups};
use crate::gpu::{Binding, Bound, Buffer, Features, Gpu, Layout, Recording};
use crate::{layout, Result};
use bytemuck::{Pod, Zeroable};

/// Uniforms of `experts_down`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    k: u32,
    x_stride: u32,
    z_stride: u32,
    shared_expert: u32,
    segment: [ExpertSegment; 2],
}

/// The host's view of [`Params`], to be held against the shader's.
pub fn layout() -> Layout {
    layout!("experts_down", Params { k, x_stride, z_stride, shared_expert, segment })
}

/// Input and output of [`ExpertsDown`]; slots = k + 1, the last for the shared expert.
#[derive(Debug, Clone, Copy)]
pub struct ExpertsDownIo<'a> {
    /// The step's state.
    pub step: &'a Buffer,
    /// (T · slots, `u_stride`), by pair id.
    pub u: &'a Buffer,
    /// From one pair's row of u to the next, in floats, a multiple of 4.
    pub u_stride: u32,
    /// Pairs by expert.
    pub pairs: &'a Buffer,
    /// Their tiles.
    pub tiles: &'a Buffer,
    /// (T, slots, `z_stride`).
    pub z: &'a Buffer,
    /// From one pair's row of z to the next, in floats.
    pub z_stride: u32,
    /// Pairs of a row.
    pub slots: u32,
}

/// `z = w2 u` for every pair.
#[derive(Debug)]
pub struct ExpertsDown {
    pack: ExpertPack,
    slices: Vec<[Bound; 3]>,
    slots: u32,
}

impl ExpertsDown {
    /// Makes pipelines and bind groups. The slices have two segments each.
    pub fn new(gpu: &Gpu, pack: &ExpertPack, io: &ExpertsDownIo<'_>) -> Result<Self> {
        Self::with_features(gpu, gpu.features(), pack, io)
    }

    /// The same, in the variants that use these of the device's features.
    pub fn with_features(gpu: &Gpu, features: Features, pack: &ExpertPack, io: &ExpertsDownIo<'_>) -> Result<Self> {
        assert!(io.u_stride.is_multiple_of(4), "rows of u are read in quads: stride {}", io.u_stride);
        let bind = |slice: &ExpertSlice| {
            let params = Params {
                k: pack.k,
                x_stride: io.u_stride,
                z_stride: io.z_stride,
                shared_expert: pack.experts,
                segment: slice.segments[..].try_into().expect("w2, routed and shared"),
            };
            let params = gpu.uniform("experts_down params", &params)?;
            bind_tiles(gpu, features, "experts_down", pack.k, pack.formats(), None, |pipeline| {
                let buffers = [&params, io.step, &slice.weights, io.u, io.pairs, io.tiles, io.z];
                gpu.bind(pipeline, &buffers.map(Binding::Whole))
            })
        };
        Ok(Self { slices: pack.slices.iter().map(bind).collect::<Result<_>>()?, pack: pack.clone(), slots: io.slots })
    }

    /// Records the outputs of `rows` rows. Weights read, an estimate: min(rows · k, E) routed experts, and the shared
    /// expert once a tile.
    pub fn record(&self, recording: &mut Recording, rows: u32) {
        let channels = self.pack.rows.div_ceil(4 * lane_groups(self.pack.k));
        record_tiles(recording, &self.pack, &self.slices, rows, self.slots, channels);
    }
}
