//! Kernel `select_merge`: the selection of a tile's segments, and of the tiles before it (`numerics.md` §6).

use super::select::{SelectBuffers, SelectDims, SelectKind, Tiled};
use super::tiling::{Pass, Tiles};
use crate::error::Result;
use crate::gpu::{Gpu, Recording};

pub use super::select::merge_layout as layout;

/// The kernel for one layer.
#[derive(Debug)]
pub struct SelectMerge {
    tiled: Tiled,
    /// Workgroups a row: entries, and blocks at a source.
    jobs: u32,
}

impl SelectMerge {
    /// Makes the pipeline.
    ///
    /// # Errors
    /// Those of [`Gpu::pipeline`], [`Gpu::uniform`] and [`Gpu::bind`].
    ///
    /// # Panics
    /// When the kind has to do with candidates and the tiles are made without.
    pub fn new(gpu: &Gpu, dims: &SelectDims, buffers: &SelectBuffers<'_>, tiles: &Tiles) -> Result<Self> {
        let params = gpu.uniform("select_merge params", &dims.params(tiles))?;
        let pipeline = gpu.pipeline("select_merge", dims.kind.variant(), &[])?;
        let mut storage = vec![buffers.lists, buffers.selection, buffers.carry];
        match dims.kind {
            SelectKind::Plain => {}
            SelectKind::Source => storage.extend([buffers.maxima, buffers.candidates]),
            SelectKind::Restricted => storage.push(buffers.candidates),
        }
        let tiled = Tiled::new(gpu, pipeline, [params, buffers.step.clone()], &storage, tiles)?;
        Ok(Self { tiled, jobs: if dims.kind == SelectKind::Source { 2 } else { 1 } })
    }

    /// Merges what `select` left of a pass; nothing where there is nothing to merge. Passes follow in order.
    ///
    /// # Errors
    /// Those of [`Gpu::bind`]: bind groups are made when they are first needed.
    pub fn record(&self, gpu: &Gpu, recording: &mut Recording, rows: u32, pass: &Pass) -> Result<()> {
        if !pass.merged {
            return Ok(());
        }
        self.tiled.dispatch(gpu, recording, pass.tile, [self.jobs, rows, 1])
    }
}
