//! Kernel `select`: the entries with the highest scores, and the candidate blocks (`numerics.md` §6).

use crate::error::Result;
use crate::gpu::{Binding, Bound, Buffer, Gpu, Layout, Recording, Traffic};

/// Uniform of the kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Params {
    topk: u32,
    ratio: u32,
    capacity: u32,
    score_stride: u32,
    block_size: u32,
    blocks: u32,
    maxima_stride: u32,
}

/// [`Params`], to be held against WGSL.
pub fn layout() -> Layout {
    crate::layout!("select", Params { topk, ratio, capacity, score_stride, block_size, blocks, maxima_stride })
}

/// Candidate blocks of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CandidateDims {
    /// Entries a block.
    pub block_size: u32,
    /// Blocks that are kept.
    pub blocks: u32,
}

impl CandidateDims {
    /// Candidate slots of a row over a cache of `capacity` entries.
    pub fn slots(&self, capacity: u32) -> u32 {
        self.blocks.min(capacity.div_ceil(self.block_size)) * self.block_size
    }
    /// Words of a row of the candidate list: the count and the block ids.
    pub fn list_words(&self) -> u32 {
        1 + self.blocks
    }
    /// Words of a row of block maxima, the scratch of [`SelectKind::Source`].
    pub fn maxima_words(&self, capacity: u32) -> u32 {
        capacity.div_ceil(self.block_size).next_multiple_of(4)
    }
}

/// Words between rows of scores of `slots` entries or candidate slots: `select` reads them four at a time.
pub fn score_stride(slots: u32) -> u32 {
    slots.next_multiple_of(4)
}

/// What the scores are of, and what is written beside the selection.
#[derive(Debug, Clone, Copy)]
pub enum SelectKind<'a> {
    /// Scores of all visible entries.
    Plain,
    /// The same; the candidate blocks are written too.
    Source {
        /// Their sizes.
        dims: CandidateDims,
        /// Block maxima (T, [`CandidateDims::maxima_words`]), scratch.
        maxima: &'a Buffer,
        /// Candidate blocks (T, 1 + blocks): count, ascending ids; written.
        candidates: &'a Buffer,
    },
    /// Scores of the slots of candidate blocks.
    Restricted {
        /// Their sizes.
        dims: CandidateDims,
        /// Candidate blocks (T, 1 + blocks): count, ascending ids.
        candidates: &'a Buffer,
    },
}

/// Sizes that the kernel is made for.
#[derive(Debug, Clone, Copy)]
pub struct SelectDims {
    /// Most entries of a selection.
    pub topk: u32,
    /// Tokens an entry.
    pub ratio: u32,
    /// Entries that the cache holds.
    pub capacity: u32,
}

/// Buffers of the kernel, whatever its kind.
#[derive(Debug, Clone, Copy)]
pub struct SelectBuffers<'a> {
    /// The step, uniform.
    pub step: &'a Buffer,
    /// Scores (T, [`score_stride`]).
    pub scores: &'a Buffer,
    /// Selection (T, 1 + topk): count, ascending entry ids; written.
    pub selection: &'a Buffer,
}

/// The kernel for one layer.
#[derive(Debug)]
pub struct Select {
    bound: Bound,
}

impl Select {
    /// Makes the pipeline and its bindings.
    pub fn new(gpu: &Gpu, dims: &SelectDims, kind: SelectKind<'_>, buffers: &SelectBuffers<'_>) -> Result<Self> {
        let (variant, candidate) = match kind {
            SelectKind::Plain => ("plain", None),
            SelectKind::Source { dims, .. } => ("source", Some(dims)),
            SelectKind::Restricted { dims, .. } => ("restricted", Some(dims)),
        };
        let slots = match kind {
            SelectKind::Restricted { dims: candidate, .. } => candidate.slots(dims.capacity),
            _ => dims.capacity,
        };
        let params = Params {
            topk: dims.topk,
            ratio: dims.ratio,
            capacity: slots,
            score_stride: score_stride(slots) / 4,
            block_size: candidate.map_or(1, |c| c.block_size),
            blocks: candidate.map_or(0, |c| c.blocks),
            maxima_stride: candidate.map_or(0, |c| c.maxima_words(dims.capacity) / 4),
        };
        let params = gpu.uniform("select params", &params)?;
        let mut bindings = vec![
            Binding::Whole(&params),
            Binding::Whole(buffers.step),
            Binding::Whole(buffers.scores),
            Binding::Whole(buffers.selection),
        ];
        match kind {
            SelectKind::Plain => {}
            SelectKind::Source { maxima, candidates, .. } => {
                bindings.extend([Binding::Whole(maxima), Binding::Whole(candidates)]);
            }
            SelectKind::Restricted { candidates, .. } => bindings.push(Binding::Whole(candidates)),
        }
        let pipeline = gpu.pipeline("select", variant, &[])?;
        Ok(Self { bound: gpu.bind(&pipeline, &bindings)? })
    }

    /// Selects for `rows` rows.
    pub fn record(&self, recording: &mut Recording, rows: u32) {
        recording.dispatch(&self.bound, [rows, 1, 1], Traffic { weights: 0, cache: 0 });
    }
}
