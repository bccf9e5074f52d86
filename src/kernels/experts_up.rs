//! Kernel `experts_up`: the hidden vectors of the chosen experts (`numerics.md` §9). Also what a pack of experts is.

use super::group_rows::{max_tiles, tile};
use super::linear::{bind_tiles, fold, lane_groups};
use crate::gpu::{Binding, Bound, Buffer, Features, Gpu, Layout, Recording, Traffic};
use crate::{layout, Result};
use bytemuck::{Pod, Zeroable};

/// The matrices of one kind of a run of experts. Twin of `ExpertSegment` in `shared/experts.wgsl`. Codes and scales as
/// in a [`Segment`](super::linear::Segment).
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct ExpertSegment {
    /// A [`Format`](crate::checkpoint::Format) as a number.
    pub format: u32,
    /// Word offset of the codes of the first expert, a multiple of 4.
    pub data: u32,
    /// Word offset of its scales.
    pub scales: u32,
    /// Rows of a matrix.
    pub rows: u32,
    /// Words from one expert's codes to the next's, a multiple of 4.
    pub data_stride: u32,
    /// Words from one expert's scales to the next's.
    pub scale_stride: u32,
    /// Id of the first expert; the shared expert's id is the number of routed experts.
    pub first_expert: u32,
    /// How many; 0: this slice has none.
    pub experts: u32,
}

/// A part of a pack of experts that can be bound at once. Experts are never cut.
#[derive(Debug, Clone)]
pub struct ExpertSlice {
    /// The weights.
    pub weights: Buffer,
    /// `w1, w3` of the routed experts, then of the shared one; or `w2` of the routed experts, then of the shared one.
    pub segments: Vec<ExpertSegment>,
}

/// The experts of a layer, in one buffer, or in several where the device cannot bind it whole.
#[derive(Debug, Clone)]
pub struct ExpertPack {
    /// Channels of a weight row.
    pub k: u32,
    /// Rows of a matrix.
    pub rows: u32,
    /// Routed experts.
    pub experts: u32,
    /// Bytes of one routed expert, and of the shared one.
    pub expert_bytes: [u64; 2],
    /// By rising expert; one of them has the shared expert.
    pub slices: Vec<ExpertSlice>,
}

impl ExpertPack {
    /// What the slices are expected to read, one figure each: for a routed expert, min(rows · k / E, 1) of its bytes,
    /// k chosen of E; exact for one row, an upper bound beyond, as long as an expert has no more than one tile. The shared
    /// expert once a tile.
    pub(super) fn traffic(&self, rows: u32, slots: u32) -> impl Iterator<Item = Traffic> + '_ {
        let read = (rows as u64 * (slots as u64 - 1)).min(self.experts as u64);
        let shared = rows.div_ceil(super::group_rows::tile_pairs(rows)) as u64;
        // Cumulated, so that the slices' shares add up to the whole.
        let upto = move |experts: u32| read * experts as u64 / self.experts.max(1) as u64;
        self.slices.iter().map(move |slice| {
            let of_kind = slice.segments.len() / 2;
            let (routed, shared_here) = (slice.segments[0], slice.segments[of_kind].experts as u64);
            let end = routed.first_expert + routed.experts;
            let routed = if routed.experts == 0 { 0 } else { upto(end) - upto(routed.first_expert) };
            let weights = routed * self.expert_bytes[0] + shared_here * shared * self.expert_bytes[1];
            Traffic { weights, ..Traffic::NONE }
        })
    }

    /// The formats that occur, repeated.
    pub(super) fn formats(&self) -> impl Iterator<Item = u32> + '_ {
        self.slices.iter().flat_map(|slice| &slice.segments).filter(|s| s.experts > 0).map(|s| s.format)
    }
}

/// Uniforms of `experts_up`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    k: u32,
    x_stride: u32,
    u_stride: u32,
    slots: u32,
    shared_expert: u32,
    eps: f32,
    limit: f32,
    p0: u32,
    segment: [ExpertSegment; 4],
}

/// The host's view of [`Params`], to be held against the shader's.
pub fn layout() -> Layout {
    layout!("experts_up", Params { k, x_stride, u_stride, slots, shared_expert, eps, limit, p0, segment })
}

/// The host's view of [`ExpertSegment`].
pub fn segment_layout() -> Layout {
    layout!(
        "experts_up",
        ExpertSegment { format, data, scales, rows, data_stride, scale_stride, first_expert, experts }
    )
}

/// Input and output of [`ExpertsUp`]; slots = k + 1, the last for the shared expert.
#[derive(Debug, Clone, Copy)]
pub struct ExpertsUpIo<'a> {
    /// The step's state.
    pub step: &'a Buffer,
    /// Weight of the RMS norm of the input (K, in whole quads).
    pub norm: &'a Buffer,
    /// The norm's epsilon.
    pub eps: f32,
    /// (T, `x_stride`).
    pub x: &'a Buffer,
    /// From one row of x to the next, in floats, a multiple of 4.
    pub x_stride: u32,
    /// (T, slots) routing weights.
    pub gains: &'a Buffer,
    /// Pairs by expert.
    pub pairs: &'a Buffer,
    /// Their tiles.
    pub tiles: &'a Buffer,
    /// (T · slots, `u_stride`), by pair id.
    pub u: &'a Buffer,
    /// From one pair's row of u to the next, in floats.
    pub u_stride: u32,
    /// Pairs of a row.
    pub slots: u32,
    /// The clamp L.
    pub limit: f32,
}

/// `u = silu(min(w1 x, L)) · clamp(w3 x, ±L) · g` for every pair.
#[derive(Debug)]
pub struct ExpertsUp {
    pack: ExpertPack,
    slices: Vec<[Bound; 3]>,
    slots: u32,
}

impl ExpertsUp {
    /// Makes pipelines and bind groups. The slices have four segments each.
    pub fn new(gpu: &Gpu, pack: &ExpertPack, io: &ExpertsUpIo<'_>) -> Result<Self> {
        Self::with_features(gpu, gpu.features(), pack, io)
    }

    /// The same, in the variants that use these of the device's features.
    pub fn with_features(gpu: &Gpu, features: Features, pack: &ExpertPack, io: &ExpertsUpIo<'_>) -> Result<Self> {
        assert!(io.x_stride.is_multiple_of(4), "rows of x are read in quads: stride {}", io.x_stride);
        let bind = |slice: &ExpertSlice| {
            let params = Params {
                k: pack.k,
                x_stride: io.x_stride,
                u_stride: io.u_stride,
                slots: io.slots,
                shared_expert: pack.experts,
                eps: io.eps,
                limit: io.limit,
                p0: 0,
                segment: slice.segments[..].try_into().expect("w1 and w3, routed and shared"),
            };
            let params = gpu.uniform("experts_up params", &params)?;
            bind_tiles(gpu, features, "experts_up", pack.k, pack.formats(), None, |pipeline| {
                let buffers = [&params, io.step, &slice.weights, io.norm, io.x, io.gains, io.pairs, io.tiles, io.u];
                gpu.bind(pipeline, &buffers.map(Binding::Whole))
            })
        };
        Ok(Self { slices: pack.slices.iter().map(bind).collect::<Result<_>>()?, pack: pack.clone(), slots: io.slots })
    }

    /// Records the hidden vectors of `rows` rows. Weights read, an estimate: min(rows · k, E) routed experts, and the
    /// shared expert once a tile.
    pub fn record(&self, recording: &mut Recording, rows: u32) {
        // A group of lanes makes two channels of w1 and of w3.
        let channels = self.pack.rows.div_ceil(2 * lane_groups(self.pack.k));
        record_tiles(recording, &self.pack, &self.slices, rows, self.slots, channels);
    }
}

/// Records the dispatches of an expert kernel: `workgroups` for each tile, over all slices.
pub(super) fn record_tiles(
    recording: &mut Recording,
    pack: &ExpertPack,
    slices: &[[Bound; 3]],
    rows: u32,
    slots: u32,
    workgroups: u32,
) {
    if rows == 0 {
        return;
    }
    let [y, z] = fold(max_tiles(rows, slots, pack.experts + 1));
    for (bound, traffic) in slices.iter().zip(pack.traffic(rows, slots)) {
        recording.dispatch(&bound[tile(rows)], [workgroups, y, z], traffic);
    }
}
