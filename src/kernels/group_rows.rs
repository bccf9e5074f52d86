//! Kernel `group_rows`: pairs (row, slot) by expert, in tiles (`numerics.md` §9). Also how large the tiles are.

use super::linear::ROW_TILES;
use crate::gpu::{Binding, Bound, Buffer, Gpu, Layout, Recording, Traffic};
use crate::{layout, Result};
use bytemuck::{Pod, Zeroable};

/// Uniforms of `group_rows`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    slots: u32,
    tile_pairs: u32,
    p0: u32,
    p1: u32,
}

/// The host's view of [`Params`], to be held against the shader's.
pub fn layout() -> Layout {
    layout!("group_rows", Params { slots, tile_pairs, p0, p1 })
}

/// The tile of `rows` rows in flight, as an index into the variants of the expert kernels: one pair in decode; few pairs
/// while most experts have one or two; eight in prefill.
pub(super) fn tile(rows: u32) -> usize {
    match rows {
        0..=1 => 0,
        2..=32 => 1,
        _ => 2,
    }
}

/// Pairs that a tile holds at most when `rows` rows are in flight.
pub fn tile_pairs(rows: u32) -> u32 {
    ROW_TILES[tile(rows)]
}

/// Most tiles of `rows` rows with `slots` pairs each over `experts` experts (the shared one among them): every expert
/// that has pairs may leave one tile short of full.
pub fn max_tiles(rows: u32, slots: u32, experts: u32) -> u32 {
    let (pairs, size) = (rows * slots, tile_pairs(rows));
    (pairs + (size - 1) * experts.min(pairs)) / size
}

/// Words of a buffer for the tiles of up to `max_rows` rows.
pub fn tiles_words(max_rows: u32, slots: u32, experts: u32) -> u64 {
    // More rows may mean larger tiles, and fewer of them: the bound is taken over the three sizes.
    let most = [1, max_rows.min(32), max_rows].map(|rows| max_tiles(rows, slots, experts));
    1 + 3 * most.into_iter().max().unwrap_or(0) as u64
}

/// Groups the pairs of more than one row by expert.
#[derive(Debug)]
pub struct GroupRows {
    /// By [`tile`]; a single row is grouped by `route`.
    tiles: [Bound; 2],
}

impl GroupRows {
    /// `ids` (T, slots), `pairs` (T · slots), `tiles` ([`tiles_words`]). `experts` counts the shared one.
    pub fn new(
        gpu: &Gpu,
        step: &Buffer,
        ids: &Buffer,
        pairs: &Buffer,
        tiles: &Buffer,
        slots: u32,
        experts: u32,
    ) -> Result<Self> {
        let pipeline = gpu.pipeline("group_rows", "plain", &[("EXPERTS", experts as f64)])?;
        let bind = |tile_pairs| {
            let params = gpu.uniform("group_rows params", &Params { slots, tile_pairs, p0: 0, p1: 0 })?;
            gpu.bind(&pipeline, &[&params, step, ids, pairs, tiles].map(Binding::Whole))
        };
        Ok(Self { tiles: [bind(ROW_TILES[1])?, bind(ROW_TILES[2])?] })
    }

    /// Records the grouping of `rows` rows; nothing for a single row.
    pub fn record(&self, recording: &mut Recording, rows: u32) {
        if rows > 1 {
            recording.dispatch(&self.tiles[tile(rows) - 1], [1, 1, 1], Traffic::NONE);
        }
    }
}
