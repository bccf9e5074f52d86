//! Kernel `index_score`: how well each entry of the global cache answers a row's index queries (`numerics.md` §6).

use super::cache_append::PageLayout;
use super::tiling::{CandidateDims, Pass, PerTile, Tiles};
use crate::error::{Error, Result};
use crate::formats::CacheFormat;
use crate::gpu::{Binding, Buffer, Gpu, Layout, Pipeline, Recording, Traffic};
use std::sync::Arc;

/// Slots that a workgroup scores.
const LANES: u32 = 256;
/// Channels of a block with one scale.
const BLOCK: u32 = 32;
/// Most heads whose queries are in workgroup memory at a time: the released number. More would cost occupancy.
const MOST_HEADS: u32 = 32;
/// Workgroup memory that every device has.
const WORKGROUP_BYTES: u32 = 16 << 10;

/// Bytes of a decoded block in workgroup memory: 32 channels, a byte or two each, and the scale, padded to 16.
fn block_bytes(variant: &str) -> u32 {
    BLOCK * if variant == "dot4" { 1 } else { 2 } + 16
}

/// Uniform of the kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    heads: u32,
    code_words: u32,
    row_words: u32,
    weight_stride: u32,
    weight_offset: u32,
    weight_scale: f32,
    ratio: u32,
    page_entries: u32,
    page_words: u32,
    key_offset: u32,
    capacity: u32,
    block_size: u32,
    candidate_stride: u32,
    zero: u32,
}

/// [`Params`], to be held against WGSL.
pub fn layout() -> Layout {
    crate::layout!(
        "index_score",
        Params {
            heads,
            code_words,
            row_words,
            weight_stride,
            weight_offset,
            weight_scale,
            ratio,
            page_entries,
            page_words,
            key_offset,
            capacity,
            block_size,
            candidate_stride,
            zero
        }
    )
}

/// Sizes that the kernel is made for.
#[derive(Debug, Clone, Copy)]
pub struct IndexScoreDims {
    /// Index heads H_i.
    pub heads: u32,
    /// Channels of an index query or key, D_i.
    pub head_dim: u32,
    /// Words of a row of raw head weights.
    pub weight_stride: u32,
    /// Word of the row at which the H_i weights start.
    pub weight_offset: u32,
    /// Tokens an entry.
    pub ratio: u32,
    /// Where the keys lie in a page.
    pub page: PageLayout,
    /// Entries that the layer's cache holds.
    pub capacity: u32,
    /// Score these candidate blocks only.
    pub candidates: Option<CandidateDims>,
}

impl IndexScoreDims {
    /// Slots of a row: entries, or those of candidate blocks.
    pub fn slots(&self) -> u32 {
        self.candidates.map_or(self.capacity, |c| c.slots(self.capacity))
    }
    /// The uniform.
    fn params(&self) -> Params {
        Params {
            heads: self.heads,
            code_words: CacheFormat::Mxfp4.code_words(self.head_dim as usize) as u32,
            row_words: self.page.key_words as u32,
            weight_stride: self.weight_stride,
            weight_offset: self.weight_offset,
            // The kernel's dots are of doubled values: a quarter, which is exact.
            weight_scale: weight_scale(self.heads, self.head_dim) * 0.25,
            ratio: self.ratio,
            page_entries: self.page.entries as u32,
            page_words: self.page.page_words as u32,
            key_offset: self.page.key(0) as u32,
            capacity: self.slots(),
            block_size: self.candidates.map_or(0, |c| c.block_size),
            candidate_stride: self.candidates.map_or(0, |c| c.list_words()),
            zero: 0,
        }
    }
}

/// Scale of the raw head weights, `D_i^-0.5 H_i^-0.5`.
pub fn weight_scale(heads: u32, head_dim: u32) -> f32 {
    (1.0 / (head_dim as f64 * heads as f64).sqrt()) as f32
}

/// Buffers of the kernel.
#[derive(Debug, Clone, Copy)]
pub struct IndexScoreBuffers<'a> {
    /// The step, uniform.
    pub step: &'a Buffer,
    /// The session's page table, uniform.
    pub table: &'a Buffer,
    /// Index queries (T, H_i, key words), MXFP4.
    pub queries: &'a Buffer,
    /// Rows with the raw head weights (T, weight_stride).
    pub weights: &'a Buffer,
    /// Candidate blocks (T, 1 + blocks); read with [`IndexScoreDims::candidates`] only.
    pub candidates: &'a Buffer,
    /// Scores of a tile, [`Tiling::score_words`](super::tiling::Tiling::score_words) long; written.
    pub scores: &'a Buffer,
}

/// The kernel for one layer.
#[derive(Debug)]
pub struct IndexScore {
    pipeline: Arc<Pipeline>,
    params: Buffer,
    step: Buffer,
    table: Buffer,
    queries: Buffer,
    weights: Buffer,
    candidates: Buffer,
    scores: Buffer,
    tiles: Tiles,
    /// By number.
    slabs: Vec<(Buffer, PerTile)>,
    key_bytes: u64,
}

impl IndexScore {
    /// Makes the pipeline; `dot4` is used where the device has packed integer dot products. Slabs are added later.
    ///
    /// # Errors
    /// [`Error::DeviceLimit`] for queries that do not fit into workgroup memory, and those of [`Gpu::pipeline`] and
    /// [`Gpu::uniform`].
    pub fn new(gpu: &Gpu, dims: &IndexScoreDims, buffers: &IndexScoreBuffers<'_>, tiles: &Tiles) -> Result<Self> {
        let variant = if gpu.features().dot4 { "dot4" } else { "plain" };
        Self::with_variant(gpu, variant, dims, buffers, tiles)
    }

    /// The same with a variant by name: `plain` or `dot4`.
    ///
    /// # Errors
    /// As [`IndexScore::new`].
    pub fn with_variant(
        gpu: &Gpu,
        variant: &str,
        dims: &IndexScoreDims,
        buffers: &IndexScoreBuffers<'_>,
        tiles: &Tiles,
    ) -> Result<Self> {
        let blocks = dims.head_dim.div_ceil(BLOCK);
        let head_bytes = blocks * block_bytes(variant) + 4;
        let Some(most_heads) = (WORKGROUP_BYTES / head_bytes).checked_ilog2() else {
            return Err(Error::DeviceLimit {
                what: format!("workgroup memory of an index query of {} channels", dims.head_dim),
                needed: head_bytes.into(),
                allowed: WORKGROUP_BYTES.into(),
            });
        };
        // Queries are decoded into workgroup memory, a power of two of heads at a time.
        let head_tile = MOST_HEADS.min(1 << most_heads);
        let overrides = [("blocks", blocks.into()), ("head_tile", head_tile.into())];
        Ok(Self {
            pipeline: gpu.pipeline("index_score", variant, &overrides)?,
            params: gpu.uniform("index_score params", &dims.params())?,
            step: buffers.step.clone(),
            table: buffers.table.clone(),
            queries: buffers.queries.clone(),
            weights: buffers.weights.clone(),
            candidates: buffers.candidates.clone(),
            scores: buffers.scores.clone(),
            tiles: tiles.clone(),
            slabs: vec![],
            key_bytes: dims.page.key_words as u64 * 4,
        })
    }

    /// Adds the slab of the next number.
    ///
    /// # Errors
    /// Those of [`Gpu::bind`].
    pub fn add_slab(&mut self, gpu: &Gpu, slab: &Buffer) -> Result<()> {
        let bounds = PerTile::new(&self.tiles);
        // A slab that cannot be bound shows here.
        bounds.get(gpu, &self.pipeline, 0, &self.bindings(slab, self.tiles.uniform(0)))?;
        self.slabs.push((slab.clone(), bounds));
        Ok(())
    }

    fn bindings<'a>(&'a self, slab: &'a Buffer, tile: &'a Buffer) -> [Binding<'a>; 9] {
        let Self { params, step, table, queries, weights, candidates, scores, .. } = self;
        [params, step, table, tile, queries, weights, slab, candidates, scores].map(Binding::Whole)
    }

    /// Scores the slots of a pass for `rows` rows, as far as their pages lie in these slabs; others stay unscored.
    ///
    /// # Errors
    /// Those of [`Gpu::bind`]: bind groups are made when they are first needed.
    pub fn record(&self, gpu: &Gpu, recording: &mut Recording, rows: u32, pass: &Pass, slabs: &[usize]) -> Result<()> {
        // All slabs together hold each key once.
        let mut cache = rows as u64 * pass.slots as u64 * self.key_bytes;
        for &slab in slabs {
            let (slab, bounds) = &self.slabs[slab];
            let bindings = self.bindings(slab, self.tiles.uniform(pass.tile));
            let bound = bounds.get(gpu, &self.pipeline, pass.tile, &bindings)?;
            let traffic = Traffic { weights: 0, cache: std::mem::take(&mut cache) };
            recording.dispatch(bound, [pass.slots.div_ceil(LANES), rows, 1], traffic);
        }
        Ok(())
    }
}
