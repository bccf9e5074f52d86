//! Kernel `index_score`: how well each entry of the global cache answers a row's index queries (`numerics.md` §6).

use super::select::{score_stride, CandidateDims};
use crate::error::{Error, Result};
use crate::formats::CacheFormat;
use crate::gpu::{Binding, Bound, Buffer, Gpu, Layout, Recording, Traffic};

/// Entries that a workgroup scores.
const TILE: u32 = 256;
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
    score_stride: u32,
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
            score_stride,
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
    /// Entries a page.
    pub page_entries: u32,
    /// Words of an entry's latent; a page's latents lie before its keys.
    pub latent_words: u32,
    /// Entries that the cache holds.
    pub capacity: u32,
    /// Score these candidate blocks only.
    pub candidates: Option<CandidateDims>,
}

impl IndexScoreDims {
    /// Scores of a row: entries, or candidate slots.
    pub fn slots(&self) -> u32 {
        self.candidates.map_or(self.capacity, |c| c.slots(self.capacity))
    }
    fn row_words(&self) -> u32 {
        CacheFormat::Mxfp4.row_words(self.head_dim as usize) as u32
    }
    /// The uniform.
    fn params(&self) -> Params {
        Params {
            heads: self.heads,
            code_words: CacheFormat::Mxfp4.code_words(self.head_dim as usize) as u32,
            row_words: self.row_words(),
            weight_stride: self.weight_stride,
            weight_offset: self.weight_offset,
            // The kernel's dots are of doubled values: a quarter, which is exact.
            weight_scale: weight_scale(self.heads, self.head_dim) * 0.25,
            ratio: self.ratio,
            page_entries: self.page_entries,
            page_words: self.page_entries * (self.latent_words + self.row_words()),
            key_offset: self.page_entries * self.latent_words,
            score_stride: score_stride(self.slots()),
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
    /// Index queries (T, H_i, row words), MXFP4.
    pub queries: &'a Buffer,
    /// Rows with the raw head weights (T, weight_stride).
    pub weights: &'a Buffer,
    /// Pages of the layer that owns the keys.
    pub pages: &'a Buffer,
    /// Candidate blocks (T, 1 + blocks); needed with [`IndexScoreDims::candidates`].
    pub candidates: Option<&'a Buffer>,
    /// Scores (T, score_stride), written.
    pub scores: &'a Buffer,
}

/// The kernel for one layer.
#[derive(Debug)]
pub struct IndexScore {
    bound: Bound,
    slots: u32,
    key_bytes: u64,
}

impl IndexScore {
    /// Makes the pipeline and its bindings; `dot4` is used where the device has packed integer dot products.
    pub fn new(gpu: &Gpu, dims: &IndexScoreDims, buffers: &IndexScoreBuffers<'_>) -> Result<Self> {
        let variant = if gpu.features().dot4 { "dot4" } else { "plain" };
        Self::with_variant(gpu, variant, dims, buffers)
    }

    /// The same with a variant by name: `plain` or `dot4`.
    pub fn with_variant(
        gpu: &Gpu,
        variant: &str,
        dims: &IndexScoreDims,
        buffers: &IndexScoreBuffers<'_>,
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
        let pipeline = gpu.pipeline("index_score", variant, &overrides)?;
        let params = gpu.uniform("index_score params", &dims.params())?;
        // Without candidates the binding is there but never read: any read-only buffer will do.
        let bound = gpu.bind(
            &pipeline,
            &[
                Binding::Whole(&params),
                Binding::Whole(buffers.step),
                Binding::Whole(buffers.queries),
                Binding::Whole(buffers.weights),
                Binding::Whole(buffers.pages),
                Binding::Whole(buffers.candidates.unwrap_or(buffers.queries)),
                Binding::Whole(buffers.scores),
            ],
        )?;
        Ok(Self { bound, slots: dims.slots(), key_bytes: dims.row_words() as u64 * 4 })
    }

    /// Scores `rows` rows. `visible` is an upper bound, known to the host, of the entries that the last row sees: it
    /// sizes the grid and the traffic; entries beyond it would stay unscored. The device knows the exact number.
    pub fn record(&self, recording: &mut Recording, rows: u32, visible: u32) {
        let slots = visible.min(self.slots);
        let cache = rows as u64 * slots as u64 * self.key_bytes;
        recording.dispatch(&self.bound, [slots.div_ceil(TILE), rows, 1], Traffic { weights: 0, cache });
    }
}
