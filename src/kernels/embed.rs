//! Kernel `embed`: the embedding row of each token, copied to all residual streams (`numerics.md` §1).

use super::linear::{Pack, Slice};
use crate::gpu::{Binding, Bound, Buffer, Gpu, Layout, Recording, Traffic};
use crate::{layout, Result};
use bytemuck::{Pod, Zeroable};

/// Uniforms of `embed`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    format: u32,
    data: u32,
    scales: u32,
    first_row: u32,
    rows: u32,
    h: u32,
    streams: u32,
    p0: u32,
}

/// The host's view of [`Params`], to be held against the shader's.
pub fn layout() -> Layout {
    layout!("embed", Params { format, data, scales, first_row, rows, h, streams, p0 })
}

/// Looks tokens up.
#[derive(Debug)]
pub struct Embed {
    slices: Vec<Bound>,
    h: u32,
    row_bytes: u64,
}

impl Embed {
    /// `table` holds one matrix (V, h); `tokens` (T) ids below V; `streams` (T, `n`, stride4(h)).
    ///
    /// One dispatch a slice of the table: each writes the rows of the tokens that it has.
    pub fn new(gpu: &Gpu, table: &Pack, step: &Buffer, tokens: &Buffer, streams: &Buffer, n: u32) -> Result<Self> {
        let bind = |slice: &Slice| {
            let [segment] = slice.segments[..] else { panic!("an embedding pack holds one matrix a slice") };
            let params = Params {
                format: segment.format,
                data: segment.data,
                scales: segment.scales,
                first_row: segment.first_row,
                rows: segment.rows,
                h: table.k,
                streams: n,
                p0: 0,
            };
            let params = gpu.uniform("embed params", &params)?;
            let pipeline = gpu.pipeline("embed", "plain", &[])?;
            gpu.bind(&pipeline, &[&params, step, &slice.weights, tokens, streams].map(Binding::Whole))
        };
        let rows: u64 = table.slices.iter().flat_map(|slice| &slice.segments).map(|s| s.rows as u64).sum();
        let bytes: u64 = table.slices.iter().map(|slice| slice.weights.bytes()).sum();
        Ok(Self {
            slices: table.slices.iter().map(bind).collect::<Result<_>>()?,
            h: table.k,
            row_bytes: bytes / rows.max(1),
        })
    }

    /// Records the lookup of `rows` tokens. Weights read: a row each, counted with the first slice.
    pub fn record(&self, recording: &mut Recording, rows: u32) {
        for (i, slice) in self.slices.iter().enumerate() {
            let weights = if i == 0 { self.row_bytes * rows as u64 } else { 0 };
            recording.dispatch(slice, [self.h.div_ceil(4 * 64), rows, 1], Traffic { weights, ..Traffic::NONE });
        }
    }
}
