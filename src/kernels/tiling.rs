//! How scores and selections are cut, so that scratch does not grow with the context: `select` and `select_merge` work on
//! tiles of slots, one after the other.

use crate::error::Result;
use crate::gpu::{Binding, Bound, Buffer, Gpu, Layout, Pipeline};
use std::sync::{Arc, OnceLock};

/// Most words of scores at a time: 8 rows see a million entries in one tile.
pub const SCORE_BUDGET: u32 = 8 << 20;
/// Most slots that one workgroup selects from: 64 KiB of scores, which stay in a cache over its passes.
pub const SEGMENT: u32 = 16 << 10;
/// Rows in flight up to which tiles are as long as so few rows allow.
const NARROW_ROWS: u32 = 8;

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
}

/// What a [`Tiling`] follows from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TilingDims {
    /// Most rows in flight.
    pub rows: u32,
    /// Most slots of a row, of all layers that share the tiles.
    pub slots: u32,
    /// Most entries of a selection.
    pub topk: u32,
    /// Candidate blocks, where a layer is their source.
    pub candidates: Option<CandidateDims>,
}

/// Twin of `Tile` in `shared/tile.wgsl`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
struct Tile {
    first: u32,
    count: u32,
    segment: u32,
    whole: u32,
}

/// `Tile`, to be held against WGSL.
pub fn layout() -> Layout {
    crate::layout!("select", Tile { first, count, segment, whole })
}

/// Tiles for up to so many rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Class {
    rows: u32,
    /// Slots a tile: whole segments, or all that there are.
    count: u32,
    /// Slots a segment: whole groups of four blocks.
    segment: u32,
    /// Tiles that hold all slots.
    tiles: u32,
}

impl Class {
    fn new(rows: u32, dims: &TilingDims, budget: u32, segment: u32) -> Self {
        let group = 4 * dims.candidates.map_or(1, |c| c.block_size);
        let all = dims.slots.max(1).next_multiple_of(group);
        let most = budget / rows;
        let segment = (segment.min(most).min(all) / group).max(1) * group;
        let count = all.min((most / segment).max(1) * segment);
        Self { rows, count, segment, tiles: all.div_ceil(count) }
    }
    /// Whether rows may see more than one segment.
    fn merges(&self) -> bool {
        self.tiles > 1 || self.count > self.segment
    }
    /// Its uniforms: the one for rows that see no more than the first segment, then the tiles if there is more.
    fn uniforms(&self) -> Vec<Tile> {
        let tile = |i: u32, whole| Tile { first: i * self.count, count: self.count, segment: self.segment, whole };
        let tiles = if self.merges() { self.tiles } else { 0 };
        std::iter::once(tile(0, 1)).chain((0..tiles).map(|i| tile(i, 0))).collect()
    }
    /// Words of all rows' lists.
    fn list_words(&self, topk: u32) -> u64 {
        if !self.merges() {
            return 0;
        }
        let listed = self.count / self.segment * topk.min(self.segment) + topk.min(self.count % self.segment);
        self.rows as u64 * 2 * listed.next_multiple_of(4) as u64
    }
}

/// How slots are cut into tiles and these into segments, and what scratch that takes.
///
/// There are two classes of tiles: those for up to 8 rows in flight, so long that a decode step at a million entries is one
/// tile, and those for up to all rows. Scores of a tile stay within a budget, or are those of one segment of four blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tiling {
    dims: TilingDims,
    /// By rising number of rows.
    classes: Vec<Class>,
}

/// One round over a tile: scores, selection of its segments, and the merge of these if there is more than one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// The tile's uniform.
    pub tile: usize,
    /// First slot.
    pub first: u32,
    /// Slots that rows may see in the tile.
    pub slots: u32,
    /// Words between rows of scores.
    pub stride: u32,
    /// Segments that the slots reach into; at least one.
    pub segments: u32,
    /// Whether `select_merge` follows.
    pub merged: bool,
}

impl Tiling {
    /// Within [`SCORE_BUDGET`], in segments of up to [`SEGMENT`].
    pub fn new(dims: &TilingDims) -> Self {
        Self::within(dims, SCORE_BUDGET, SEGMENT)
    }

    /// Within another budget of words, in segments of up to so many slots.
    pub fn within(dims: &TilingDims, budget: u32, segment: u32) -> Self {
        let mut rows = vec![dims.rows.clamp(1, NARROW_ROWS)];
        if dims.rows > NARROW_ROWS {
            rows.push(dims.rows);
        }
        Self { dims: *dims, classes: rows.into_iter().map(|rows| Class::new(rows, dims, budget, segment)).collect() }
    }

    /// What it was made for.
    pub fn dims(&self) -> &TilingDims {
        &self.dims
    }

    /// The passes over `slots` slots, an upper bound of what any of `rows` rows sees. At least one: it writes counts of zero.
    ///
    /// # Panics
    /// When these are more rows or slots than the tiling is for.
    pub fn passes(&self, rows: u32, slots: u32) -> Vec<Pass> {
        assert!(
            rows <= self.dims.rows && slots <= self.dims.slots,
            "{rows} rows of {slots} slots, tiles are for {:?}",
            self.dims
        );
        let at = self.classes.iter().position(|class| rows <= class.rows).expect("the last class has all rows");
        let class = &self.classes[at];
        let before: usize = self.classes[..at].iter().map(|class| class.uniforms().len()).sum();
        if slots <= class.segment {
            return vec![Pass { tile: before, first: 0, slots, stride: class.count, segments: 1, merged: false }];
        }
        let pass = |i: u32| {
            let first = i * class.count;
            let slots = class.count.min(slots - first);
            let segments = slots.div_ceil(class.segment);
            Pass { tile: before + 1 + i as usize, first, slots, stride: class.count, segments, merged: true }
        };
        (0..slots.div_ceil(class.count)).map(pass).collect()
    }

    /// Words between the scores of two rows when `rows` rows are in flight: a tile's slots.
    pub fn score_stride(&self, rows: u32) -> usize {
        self.classes.iter().find(|class| rows <= class.rows).map_or(0, |class| class.count as usize)
    }

    /// Words of the scores.
    pub fn score_words(&self) -> usize {
        self.most(|class| class.rows as u64 * class.count as u64)
    }
    /// Words of the segments' lists.
    pub fn list_words(&self) -> usize {
        self.most(|class| class.list_words(self.dims.topk))
    }
    /// Words of the keys that are carried from tile to tile.
    pub fn carry_words(&self) -> usize {
        let row = self.dims.topk.next_multiple_of(4) + self.dims.candidates.map_or(0, |c| c.blocks.next_multiple_of(4));
        self.most(|class| if class.merges() { class.rows as u64 * row as u64 } else { 0 })
    }
    /// Words of the block maxima.
    pub fn maxima_words(&self) -> usize {
        let block_size = |c: CandidateDims| c.block_size as u64;
        self.most(|class| self.dims.candidates.map_or(0, |c| class.rows as u64 * class.count as u64 / block_size(c)))
    }
    /// Number of the tiles' uniforms.
    pub fn uniforms(&self) -> usize {
        self.classes.iter().map(|class| class.uniforms().len()).sum()
    }
    /// Bytes of [`Tiles`] on the device.
    pub fn uniform_bytes(&self) -> u64 {
        self.uniforms() as u64 * Buffer::allocated(std::mem::size_of::<Tile>() as u64)
    }

    fn most(&self, words: impl Fn(&Class) -> u64) -> usize {
        self.classes.iter().map(words).max().unwrap_or(0) as usize
    }
}

/// A tiling and its uniforms, shared by all layers. Clones share them.
#[derive(Debug, Clone)]
pub struct Tiles {
    tiling: Tiling,
    uniforms: Vec<Buffer>,
}

impl Tiles {
    /// Makes the uniforms.
    ///
    /// # Errors
    /// Those of [`Gpu::uniform`].
    pub fn new(gpu: &Gpu, tiling: Tiling) -> Result<Self> {
        let tiles = tiling.classes.iter().flat_map(Class::uniforms);
        let uniforms = tiles.map(|tile| gpu.uniform("tile", &tile)).collect::<Result<_>>()?;
        Ok(Self { tiling, uniforms })
    }
    /// How slots are cut.
    pub fn tiling(&self) -> &Tiling {
        &self.tiling
    }
    /// The uniform of a [`Pass::tile`].
    pub fn uniform(&self, tile: usize) -> &Buffer {
        &self.uniforms[tile]
    }
}

/// Bind groups of a kernel, one a tile, made when first used: contexts are rarely as long as they may be.
#[derive(Debug)]
pub(super) struct PerTile(Vec<OnceLock<Bound>>);

impl PerTile {
    pub(super) fn new(tiles: &Tiles) -> Self {
        Self(tiles.uniforms.iter().map(|_| OnceLock::new()).collect())
    }

    pub(super) fn get(
        &self,
        gpu: &Gpu,
        pipeline: &Arc<Pipeline>,
        tile: usize,
        bindings: &[Binding<'_>],
    ) -> Result<&Bound> {
        let cell = &self.0[tile];
        if let Some(bound) = cell.get() {
            return Ok(bound);
        }
        let bound = gpu.bind(pipeline, bindings)?;
        Ok(cell.get_or_init(|| bound))
    }
}
