//! What a layer that selects runs: `index_score`, `select` and `select_merge`, a tile at a time (`numerics.md` §6).

use super::cache_append::PageLayout;
use super::index_score::{IndexScore, IndexScoreBuffers, IndexScoreDims};
use super::select::{Select, SelectBuffers, SelectDims, SelectKind};
use super::select_merge::SelectMerge;
use super::tiling::Tiles;
use crate::error::Result;
use crate::gpu::{Buffer, Gpu, Recording};
use std::ops::Range;

/// Sizes of a layer that selects; further sizes are those of the [`Tiles`].
#[derive(Debug, Clone, Copy)]
pub struct SelectorDims {
    /// What is selected.
    pub kind: SelectKind,
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
}

/// Buffers of a layer that selects.
#[derive(Debug, Clone, Copy)]
pub struct SelectorBuffers<'a> {
    /// The session's page table, uniform.
    pub table: &'a Buffer,
    /// Index queries (T, H_i, key words), MXFP4.
    pub queries: &'a Buffer,
    /// Rows with the raw head weights (T, weight_stride).
    pub weights: &'a Buffer,
    /// Step, scratch, selection and candidates.
    pub select: SelectBuffers<'a>,
}

/// The kernels of one layer.
#[derive(Debug)]
pub struct Selector {
    score: IndexScore,
    select: Select,
    merge: SelectMerge,
    tiles: Tiles,
    /// Slots of a row.
    slots: u32,
    /// Entries a page.
    page_entries: u32,
    restricted: bool,
}

impl Selector {
    /// Makes the pipelines. Slabs are added later.
    ///
    /// # Errors
    /// Those of [`IndexScore::new`] and [`Select::new`].
    ///
    /// # Panics
    /// When the kind has to do with candidates and the tiles are made without, or the tiles hold fewer slots.
    pub fn new(gpu: &Gpu, dims: &SelectorDims, buffers: &SelectorBuffers<'_>, tiles: &Tiles) -> Result<Self> {
        let &SelectorDims { kind, heads, head_dim, weight_stride, weight_offset, ratio, page, capacity } = dims;
        let restricted = kind == SelectKind::Restricted;
        let candidates = kind.candidates(tiles).filter(|_| restricted);
        let score_dims =
            IndexScoreDims { heads, head_dim, weight_stride, weight_offset, ratio, page, capacity, candidates };
        let SelectBuffers { step, candidates, scores, .. } = buffers.select;
        let &SelectorBuffers { table, queries, weights, .. } = buffers;
        let score_buffers = IndexScoreBuffers { step, table, queries, weights, candidates, scores };
        let select_dims = SelectDims { kind, ratio, capacity };
        let (slots, most) = (score_dims.slots(), tiles.tiling().dims().slots);
        assert!(slots <= most, "a layer of {slots} slots, tiles are for {most}");
        Ok(Self {
            score: IndexScore::new(gpu, &score_dims, &score_buffers, tiles)?,
            select: Select::new(gpu, &select_dims, &buffers.select, tiles)?,
            merge: SelectMerge::new(gpu, &select_dims, &buffers.select, tiles)?,
            tiles: tiles.clone(),
            slots,
            page_entries: page.entries as u32,
            restricted,
        })
    }

    /// Adds the slab of the next number.
    ///
    /// # Errors
    /// Those of [`Gpu::bind`].
    pub fn add_slab(&mut self, gpu: &Gpu, slab: &Buffer) -> Result<()> {
        self.score.add_slab(gpu, slab)
    }

    /// Selects for `rows` rows. `visible` is an upper bound, known to the host, of the entries that the last row sees: what
    /// lies beyond it would not be selected. The device knows the exact number. `slabs_of` says which slabs hold the pages of
    /// a range of pages, each slab once.
    ///
    /// # Errors
    /// Those of [`Gpu::bind`]: bind groups are made when they are first needed.
    pub fn record(
        &self,
        gpu: &Gpu,
        recording: &mut Recording,
        rows: u32,
        visible: u32,
        slabs_of: &dyn Fn(Range<usize>) -> Vec<usize>,
    ) -> Result<()> {
        for pass in self.tiles.tiling().passes(rows, visible.min(self.slots)) {
            // Candidate slots may be of any visible entry.
            let entries = if self.restricted { 0..visible } else { pass.first..pass.first + pass.slots };
            let page = |entry: u32| (entry / self.page_entries) as usize;
            let slabs = match entries.is_empty() {
                true => vec![],
                false => slabs_of(page(entries.start)..page(entries.end - 1) + 1),
            };
            self.score.record(gpu, recording, rows, &pass, &slabs)?;
            self.select.record(gpu, recording, rows, &pass)?;
            self.merge.record(gpu, recording, rows, &pass)?;
        }
        Ok(())
    }
}
