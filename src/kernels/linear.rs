//! Kernel `linear`: matrix products over a pack of weights, with the RMS norm of the input inside (`numerics.md` §3).
//! Also what a pack of weights is, and how a dot product falls to lanes, which the other weight kernels share.

use crate::checkpoint::Format;
use crate::gpu::{Binding, Bound, Buffer, Features, Gpu, Layout, Pipeline, Recording, Traffic};
use crate::{layout, Result};
use bytemuck::{Pod, Zeroable};
use std::ops::Range;
use std::sync::Arc;

/// Most matrices in one slice of a pack.
pub const MAX_SEGMENTS: usize = 8;
/// Lanes of a workgroup of the dot product kernels.
const WORKGROUP: u32 = 128;

/// One matrix, or a run of its rows, in a pack. Twin of `Segment` in `linear.wgsl`. Codes are rows of whole chunks of 32
/// channels; scales, where the format has any, rows of UE8M0 bytes in whole words.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Segment {
    /// A [`Format`] as a number.
    pub format: u32,
    /// Word offset of the codes, a multiple of 4.
    pub data: u32,
    /// Word offset of the scales.
    pub scales: u32,
    /// Rows here.
    pub rows: u32,
    /// Where the first of them goes in an output row.
    pub out: u32,
    /// Which row of the whole matrix the first of them is, a multiple of 32.
    pub first_row: u32,
    /// Rows that share a group of input channels; 0: every row reads the same channels.
    pub group_rows: u32,
    /// Distance of the groups in x, in floats, a multiple of 4.
    pub group_stride: u32,
}

/// A part of a pack that can be bound at once.
#[derive(Debug, Clone)]
pub struct Slice {
    /// The weights.
    pub weights: Buffer,
    /// At most [`MAX_SEGMENTS`] matrices.
    pub segments: Vec<Segment>,
}

/// Matrices that read the same input, in one buffer, or in several where the device cannot bind it whole.
#[derive(Debug, Clone)]
pub struct Pack {
    /// Channels of a weight row.
    pub k: u32,
    /// In order.
    pub slices: Vec<Slice>,
}

impl Pack {
    /// The matrices whose outputs lie at `outputs`, without those beside them.
    pub fn part(&self, outputs: Range<usize>) -> Self {
        let slice = |slice: &Slice| {
            let segments = part(&slice.segments, &outputs);
            (!segments.is_empty()).then(|| Slice { weights: slice.weights.clone(), segments })
        };
        Self { k: self.k, slices: self.slices.iter().filter_map(slice).collect() }
    }
}

/// Those of `segments` whose outputs lie at `outputs`.
pub(crate) fn part(segments: &[Segment], outputs: &Range<usize>) -> Vec<Segment> {
    segments.iter().filter(|segment| outputs.contains(&(segment.out as usize))).copied().collect()
}

/// Uniforms of `linear`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    k: u32,
    x_stride: u32,
    x_offset: u32,
    y_stride: u32,
    y_offset: u32,
    last_row: u32,
    segments: u32,
    eps: f32,
    segment: [Segment; MAX_SEGMENTS],
}

/// The host's view of [`Params`], to be held against the shader's.
pub fn layout() -> Layout {
    layout!("linear", Params { k, x_stride, x_offset, y_stride, y_offset, last_row, segments, eps, segment })
}

/// The host's view of [`Segment`].
pub fn segment_layout() -> Layout {
    layout!("linear", Segment { format, data, scales, rows, out, first_row, group_rows, group_stride })
}

/// Input and output of a [`Linear`]. Strides and offsets in floats; those of x are multiples of 4.
#[derive(Debug, Clone, Copy)]
pub struct LinearIo<'a> {
    /// The step's state.
    pub step: &'a Buffer,
    /// (T, `x_stride`).
    pub x: &'a Buffer,
    /// From one row of x to the next.
    pub x_stride: u32,
    /// Where a row's channels start.
    pub x_offset: u32,
    /// Weight of the RMS norm of the input (K, in whole quads), and the norm's epsilon.
    pub norm: Option<(&'a Buffer, f32)>,
    /// (T, `y_stride`), or (1, `y_stride`) with `last_row`.
    pub y: &'a Buffer,
    /// From one row of y to the next.
    pub y_stride: u32,
    /// Added to every segment's place.
    pub y_offset: u32,
    /// Make the newest row only, as row 0 of y.
    pub last_row: bool,
}

/// `y = RMS(x) Wᵀ` for all matrices of a pack.
#[derive(Debug)]
pub struct Linear {
    last_row: bool,
    slices: Vec<SliceDispatch>,
}

#[derive(Debug)]
struct SliceDispatch {
    tiles: [Bound; 3],
    grid: [u32; 2],
    bytes: u64,
}

impl Linear {
    /// Makes pipelines and bind groups.
    pub fn new(gpu: &Gpu, pack: &Pack, io: &LinearIo<'_>) -> Result<Self> {
        Self::with_features(gpu, gpu.features(), pack, io)
    }

    /// The same, in the variants that use these of the device's features.
    pub fn with_features(gpu: &Gpu, features: Features, pack: &Pack, io: &LinearIo<'_>) -> Result<Self> {
        assert!(
            [io.x_stride, io.x_offset].iter().all(|n| n.is_multiple_of(4)),
            "rows of x are read in quads: stride {}, offset {}",
            io.x_stride,
            io.x_offset
        );
        let slice = |slice: &Slice| {
            let mut segment = [Segment::zeroed(); MAX_SEGMENTS];
            segment[..slice.segments.len()].copy_from_slice(&slice.segments);
            let params = Params {
                k: pack.k,
                x_stride: io.x_stride,
                x_offset: io.x_offset,
                y_stride: io.y_stride,
                y_offset: io.y_offset,
                last_row: io.last_row as u32,
                segments: slice.segments.len() as u32,
                eps: io.norm.map_or(0.0, |(_, eps)| eps),
                segment,
            };
            let params = gpu.uniform("linear params", &params)?;
            // Without a norm its binding is never read; x stands in.
            let norm = io.norm.map_or(io.x, |(weight, _)| weight);
            let formats = pack.slices.iter().flat_map(|slice| &slice.segments).map(|s| s.format);
            let norm_inside = Some(io.norm.is_some());
            let tiles = bind_tiles(gpu, features, "linear", pack.k, formats, norm_inside, |pipeline| {
                let buffers = [&params, io.step, &slice.weights, norm, io.x, io.y];
                gpu.bind(pipeline, &buffers.map(Binding::Whole))
            })?;
            let outputs: u32 = slice.segments.iter().map(Segment::tiles).sum();
            Ok(SliceDispatch {
                tiles,
                grid: fold(outputs.div_ceil(lane_groups(pack.k))),
                bytes: slice.segments.iter().map(|segment| segment.bytes(pack.k)).sum(),
            })
        };
        Ok(Self { last_row: io.last_row, slices: pack.slices.iter().map(slice).collect::<Result<_>>()? })
    }

    /// Records the products of `rows` rows. Weights read: the pack, once for each tile of rows.
    pub fn record(&self, recording: &mut Recording, rows: u32) {
        let rows = if self.last_row { rows.min(1) } else { rows };
        let (tile, size) = row_tile(rows);
        let row_tiles = rows.div_ceil(size);
        for slice in &self.slices {
            let traffic = Traffic { weights: slice.bytes * row_tiles as u64, ..Traffic::NONE };
            recording.dispatch(&slice.tiles[tile], [row_tiles, slice.grid[0], slice.grid[1]], traffic);
        }
    }
}

impl Segment {
    /// Bytes of its codes and scales, in whole quads, for rows of `k` channels.
    fn bytes(&self, k: u32) -> u64 {
        let codes = self.scales - self.data;
        let scale_rows = match self.format {
            format if format == Format::Fp8Block as u32 => self.rows.div_ceil(32),
            format if format > Format::Fp8Block as u32 => self.rows,
            _ => 0,
        };
        let words = codes + scale_rows * k.div_ceil(32).div_ceil(4);
        4 * words.next_multiple_of(4) as u64
    }

    /// Tiles of outputs: four, or one where four could straddle two groups.
    fn tiles(&self) -> u32 {
        self.rows.div_ceil(if self.group_rows.is_multiple_of(4) { 4 } else { 1 })
    }
}

/// Lanes that share a dot product over `k` channels: a power of two, at most 32, a chunk of 32 channels each.
pub(super) fn lanes(k: u32) -> u32 {
    k.div_ceil(32).next_power_of_two().min(32)
}

/// Groups of lanes in a workgroup: how many tiles of outputs it makes.
pub(super) fn lane_groups(k: u32) -> u32 {
    WORKGROUP / lanes(k)
}

/// Rows of x that a workgroup works on at once, by variant.
pub(super) const ROW_TILES: [u32; 3] = [1, 4, 8];

/// The smallest tile that holds `rows` rows, or the largest: its index and its size.
fn row_tile(rows: u32) -> (usize, u32) {
    let tile = ROW_TILES.iter().position(|&size| rows <= size).unwrap_or(ROW_TILES.len() - 1);
    (tile, ROW_TILES[tile])
}

/// One bind group for each of [`ROW_TILES`], whose variants give equal bits; `formats` are those that occur.
pub(super) fn bind_tiles(
    gpu: &Gpu,
    features: Features,
    kernel: &str,
    k: u32,
    formats: impl Iterator<Item = u32>,
    norm: Option<bool>,
    bind: impl Fn(&Arc<Pipeline>) -> Result<Bound>,
) -> Result<[Bound; 3]> {
    let formats = formats.fold(0, |set, format| set | 1 << format);
    let tail = !k.is_multiple_of(32) as u32;
    let mut overrides = vec![("LANES", lanes(k) as f64), ("FORMATS", formats as f64), ("TAIL", tail as f64)];
    overrides.extend(norm.map(|norm| ("NORM", norm as u32 as f64)));
    let tile = |variants: &[&str]| bind(&gpu.pipeline(kernel, features.choose(kernel, variants), &overrides)?);
    Ok([tile(&["r1_sub", "r1"])?, tile(&["r4"])?, tile(&["r8"])?])
}

/// A count of workgroups in two dimensions of at most 65,535.
pub(super) fn fold(count: u32) -> [u32; 2] {
    let y = count.div_ceil(65_535).max(1);
    [count.div_ceil(y), y]
}
