//! Kernel `engram_gather`: the table rows that a token's n-grams hash to (`numerics.md` §8).

use super::linear::Pack;
use crate::gpu::{Binding, Bound, Gpu, Layout, Recording, Traffic};
use crate::{layout, Result};
use bytemuck::{Pod, Zeroable};

/// Stands in a history for a token before the text.
pub const BEFORE_TEXT: u32 = u32::MAX;

/// Uniforms of `engram_gather`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
pub struct Params {
    ngram: u32,
    heads: u32,
    head_dim: u32,
    stride: u32,
    image_token: u32,
    pad_token: u32,
    pad_compressed: u32,
    format: u32,
    data: u32,
    scales: u32,
    first_row: u32,
    row_count: u32,
}

/// The host's view of [`Params`], to be held against the shader's.
pub fn layout() -> Layout {
    layout!(
        "engram_gather",
        Params {
            ngram,
            heads,
            head_dim,
            stride,
            image_token,
            pad_token,
            pad_compressed,
            format,
            data,
            scales,
            first_row,
            row_count
        }
    )
}

/// Sizes and special tokens of an Engram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// Longest n-gram, N.
    pub ngram: u32,
    /// Hashes of each n-gram.
    pub heads: u32,
    /// Channels of a table row.
    pub head_dim: u32,
    /// Image tokens cut an n-gram short.
    pub image_token: Option<u32>,
    /// Padding tokens do too.
    pub pad_token: Option<u32>,
    /// Compressed id that stands for what is cut off.
    pub pad_compressed: u32,
}

impl Dims {
    /// Table rows of a token, (N - 1) heads.
    pub fn lookups(&self) -> u32 {
        (self.ngram - 1) * self.heads
    }
    /// Words of a row of the output.
    pub fn stride(&self) -> u32 {
        (self.lookups() * self.head_dim).next_multiple_of(4)
    }
    /// The buffer `hash`: `multipliers` (N), then `primes`, then the rows where each one's part of the table starts; the
    /// latter two ((N - 1) heads) in the order (n-gram size, head). Primes are below 2^31.
    pub fn hash(&self, multipliers: &[u64], primes: &[u32]) -> Vec<u32> {
        let mut words: Vec<u32> = multipliers.iter().flat_map(|&m| [m as u32, (m >> 32) as u32]).collect();
        words.extend(primes);
        words.extend(primes.iter().scan(0, |row, prime| Some(std::mem::replace(row, *row + prime))));
        words
    }
}

/// Inputs and output.
#[derive(Debug, Clone, Copy)]
pub struct Buffers<'a> {
    /// The [`Step`](super::Step).
    pub step: Binding<'a>,
    /// Ids of the step (T).
    pub tokens: Binding<'a>,
    /// Raw ids before the step (N - 1), newest first; [`BEFORE_TEXT`] where there is none.
    pub history: Binding<'a>,
    /// Compressed ids (V).
    pub token_map: Binding<'a>,
    /// [`Dims::hash`].
    pub hash: Binding<'a>,
    /// f32 (T, [`Dims::stride`]): the rows of a token one after the other.
    pub rows_out: Binding<'a>,
}

/// The lookup of one Engram: a dispatch for each slice of its table.
#[derive(Debug, Clone)]
pub struct EngramGather {
    slices: Vec<Bound>,
    lookups: u32,
    row_bytes: u64,
}

impl EngramGather {
    /// Makes pipeline and bind groups. `table` is (rows, head_dim), each segment some of its rows.
    ///
    /// # Errors
    /// As [`Gpu::pipeline`], [`Gpu::buffer`] and [`Gpu::bind`].
    pub fn new(gpu: &Gpu, dims: &Dims, table: &Pack, buffers: &Buffers<'_>) -> Result<Self> {
        let pipeline = gpu.pipeline("engram_gather", "plain", &[])?;
        let mut slices = Vec::new();
        for slice in &table.slices {
            for segment in &slice.segments {
                let params = Params {
                    ngram: dims.ngram,
                    heads: dims.heads,
                    head_dim: dims.head_dim,
                    stride: dims.stride(),
                    image_token: dims.image_token.unwrap_or(BEFORE_TEXT),
                    pad_token: dims.pad_token.unwrap_or(BEFORE_TEXT),
                    pad_compressed: dims.pad_compressed,
                    format: segment.format,
                    data: segment.data,
                    scales: segment.scales,
                    first_row: segment.first_row,
                    row_count: segment.rows,
                };
                let params = gpu.uniform("engram_gather params", &params)?;
                slices.push(gpu.bind(
                    &pipeline,
                    &[
                        Binding::Whole(&params),
                        buffers.step,
                        buffers.tokens,
                        buffers.history,
                        buffers.token_map,
                        buffers.hash,
                        Binding::Whole(&slice.weights),
                        buffers.rows_out,
                    ],
                )?);
            }
        }
        let bytes: u64 = table.slices.iter().map(|slice| slice.weights.bytes()).sum();
        let rows: u64 = table.slices.iter().flat_map(|slice| &slice.segments).map(|s| u64::from(s.rows)).sum();
        let row_bytes = bytes / rows.max(1);
        Ok(Self { slices, lookups: dims.lookups(), row_bytes })
    }

    /// Records the lookups for up to `rows` rows.
    pub fn record(&self, recording: &mut Recording, rows: u32) {
        for (i, slice) in self.slices.iter().enumerate() {
            // Every row is read from one of the slices.
            let weights = if i == 0 { self.row_bytes * (rows * self.lookups) as u64 } else { 0 };
            recording.dispatch(slice, [self.lookups, rows, 1], Traffic { weights, ..Traffic::NONE });
        }
    }
}
