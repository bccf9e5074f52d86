//! Kernel `select`: the entries with the highest scores, and the candidate blocks (`numerics.md` §6).

use super::tiling::{CandidateDims, Pass, PerTile, Tiles};
use crate::error::Result;
use crate::gpu::{Binding, Buffer, Gpu, Layout, Pipeline, Recording, Traffic};
use std::sync::Arc;

/// Uniform of `select`, and of `select_merge`.
#[repr(C)]
#[derive(Debug, Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct Params {
    topk: u32,
    ratio: u32,
    capacity: u32,
    block_size: u32,
    blocks: u32,
}

/// `Params`, to be held against WGSL.
pub fn layout() -> Layout {
    crate::layout!("select", Params { topk, ratio, capacity, block_size, blocks })
}

/// The same of `select_merge`.
pub fn merge_layout() -> Layout {
    crate::layout!("select_merge", Params { topk, ratio, capacity, block_size, blocks })
}

/// What the scores are of, and what is written beside the selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SelectKind {
    /// Scores of all visible entries.
    Plain,
    /// The same; the candidate blocks are written too.
    Source,
    /// Scores of the slots of candidate blocks.
    Restricted,
}

impl SelectKind {
    /// Name of the variants of `select` and `select_merge`.
    pub(super) fn variant(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Source => "source",
            Self::Restricted => "restricted",
        }
    }
    /// The candidate blocks of a layer of this kind.
    pub(super) fn candidates(self, tiles: &Tiles) -> Option<CandidateDims> {
        tiles.tiling().dims().candidates.filter(|_| self != Self::Plain)
    }
}

/// Sizes that the kernels are made for; further sizes are those of the [`Tiles`].
#[derive(Debug, Clone, Copy)]
pub struct SelectDims {
    /// What is selected.
    pub kind: SelectKind,
    /// Tokens an entry.
    pub ratio: u32,
    /// Entries that the layer's cache holds.
    pub capacity: u32,
}

impl SelectDims {
    /// The uniform.
    ///
    /// # Panics
    /// When the kind has to do with candidates and the tiles are made without.
    pub(super) fn params(&self, tiles: &Tiles) -> Params {
        let candidates = self.kind.candidates(tiles);
        assert!(candidates.is_some() || self.kind == SelectKind::Plain, "tiles for candidate blocks");
        let capacity = match (self.kind, candidates) {
            (SelectKind::Restricted, Some(c)) => c.slots(self.capacity),
            _ => self.capacity,
        };
        Params {
            topk: tiles.tiling().dims().topk,
            ratio: self.ratio,
            capacity,
            block_size: candidates.map_or(1, |c| c.block_size),
            blocks: candidates.map_or(0, |c| c.blocks),
        }
    }
}

/// Buffers of the kernels. Scratch is as long as the [`Tiling`](super::tiling::Tiling) says.
#[derive(Debug, Clone, Copy)]
pub struct SelectBuffers<'a> {
    /// The step, uniform.
    pub step: &'a Buffer,
    /// Scores of a tile.
    pub scores: &'a Buffer,
    /// Lists of a tile's segments, scratch.
    pub lists: &'a Buffer,
    /// Keys that are carried from tile to tile, scratch.
    pub carry: &'a Buffer,
    /// Block maxima of a tile, scratch of [`SelectKind::Source`].
    pub maxima: &'a Buffer,
    /// Selection (T, 1 + topk): count, ascending entry ids; written.
    pub selection: &'a Buffer,
    /// Candidate blocks (T, 1 + blocks): count, ascending ids; [`SelectKind::Source`] writes them, [`SelectKind::Restricted`]
    /// reads them.
    pub candidates: &'a Buffer,
}

/// A kernel of one layer on its buffers, with a bind group a tile.
#[derive(Debug)]
pub(super) struct Tiled {
    pipeline: Arc<Pipeline>,
    /// Params and step, before the tile.
    uniforms: [Buffer; 2],
    storage: Vec<Buffer>,
    tiles: Tiles,
    bounds: PerTile,
}

impl Tiled {
    pub(super) fn new(
        gpu: &Gpu,
        pipeline: Arc<Pipeline>,
        uniforms: [Buffer; 2],
        storage: &[&Buffer],
        tiles: &Tiles,
    ) -> Result<Self> {
        let storage = storage.iter().map(|&buffer| buffer.clone()).collect();
        let tiled = Self { pipeline, uniforms, storage, tiles: tiles.clone(), bounds: PerTile::new(tiles) };
        // Buffers that do not fit show here.
        tiled.dispatch(gpu, &mut Recording::new(), 0, [0; 3])?;
        Ok(tiled)
    }

    pub(super) fn dispatch(&self, gpu: &Gpu, recording: &mut Recording, tile: usize, grid: [u32; 3]) -> Result<()> {
        let uniforms = [&self.uniforms[0], &self.uniforms[1], self.tiles.uniform(tile)];
        let bindings: Vec<_> = uniforms.into_iter().chain(&self.storage).map(Binding::Whole).collect();
        let bound = self.bounds.get(gpu, &self.pipeline, tile, &bindings)?;
        recording.dispatch(bound, grid, Traffic::NONE);
        Ok(())
    }
}

/// The kernel for one layer.
#[derive(Debug)]
pub struct Select(Tiled);

impl Select {
    /// Makes the pipeline.
    ///
    /// # Errors
    /// Those of [`Gpu::pipeline`], [`Gpu::uniform`] and [`Gpu::bind`].
    ///
    /// # Panics
    /// When the kind has to do with candidates and the tiles are made without.
    pub fn new(gpu: &Gpu, dims: &SelectDims, buffers: &SelectBuffers<'_>, tiles: &Tiles) -> Result<Self> {
        let params = gpu.uniform("select params", &dims.params(tiles))?;
        let pipeline = gpu.pipeline("select", dims.kind.variant(), &[])?;
        let mut storage = vec![buffers.scores, buffers.selection, buffers.lists];
        match dims.kind {
            SelectKind::Plain => {}
            SelectKind::Source => storage.extend([buffers.maxima, buffers.candidates]),
            SelectKind::Restricted => storage.push(buffers.candidates),
        }
        Ok(Self(Tiled::new(gpu, pipeline, [params, buffers.step.clone()], &storage, tiles)?))
    }

    /// Selects from the scores of a pass for `rows` rows.
    ///
    /// # Errors
    /// Those of [`Gpu::bind`]: bind groups are made when they are first needed.
    pub fn record(&self, gpu: &Gpu, recording: &mut Recording, rows: u32, pass: &Pass) -> Result<()> {
        self.0.dispatch(gpu, recording, pass.tile, [pass.segments, rows, 1])
    }
}
