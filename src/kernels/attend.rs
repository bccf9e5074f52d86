//! `attend`: attention of the rows in flight over window keys, selected entries and the sink (`numerics.md` §4).

use crate::formats::CacheFormat;
use crate::gpu::{Binding, Bound, Buffer, Gpu, Layout, Recording, Traffic};
use crate::{Error, Result};
use bytemuck::{Pod, Zeroable};

/// Twin of `Params` in `attend.wgsl`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct Params {
    heads: u32,
    window: u32,
    slots: u32,
    block: u32,
    scale: f32,
    up_stride: u32,
    query_at: u32,
    group_heads: u32,
    group_stride: u32,
    out_stride: u32,
    topk: u32,
    decoder: u32,
}

/// The uniform struct, to be held against the shader.
pub fn layout() -> Layout {
    crate::layout!(
        "attend",
        Params {
            heads,
            window,
            slots,
            block,
            scale,
            up_stride,
            query_at,
            group_heads,
            group_stride,
            out_stride,
            topk,
            decoder
        }
    )
}

/// Largest head size: an invocation of a workgroup owns a pair of channels.
const MAX_HEAD_DIM: usize = 512;

/// Heads that a workgroup takes when there are enough rows to fill the device, and when there are not.
const HEADS: [u32; 2] = [4, 1];

/// Workgroups of [`HEADS`]`[0]` heads that fill a device.
const ENOUGH: u32 = 128;

/// What every layer attends to: its window.
#[derive(Debug, Clone, Copy)]
pub struct Window<'a> {
    /// H.
    pub heads: usize,
    /// D, even, at most 512.
    pub head_dim: usize,
    /// d_r, even.
    pub rotary: usize,
    /// W.
    pub window: usize,
    /// Slots of the ring, W at least.
    pub slots: usize,
    /// Whether the rows are a drafted block: all see the W positions before the step, and each other.
    pub block: bool,
    /// Whether the step's floor for the decoder holds, not that for the encoder.
    pub decoder: bool,
    /// G, a divisor of H.
    pub groups: usize,
    /// Words of a row of `up`.
    pub up_stride: usize,
    /// Where the raw queries (H, D) stand in it.
    pub query_at: usize,
    /// (T, up_stride) f32.
    pub up: &'a Buffer,
    /// (slots, row words): packed FP8 window keys, slot `position % slots`.
    pub ring: &'a Buffer,
    /// (T, row words): those of a step of several rows, or of a block.
    pub chunk: &'a Buffer,
    /// f32: frequencies (d_r / 2), then sink logits (H).
    pub constants: &'a Buffer,
    /// (T, G, H / G * D, each group padded to a multiple of 4) f32.
    pub attended: &'a Buffer,
}

/// What a layer with a ratio attends to besides: entries of the global cache.
#[derive(Debug, Clone, Copy)]
pub struct Selected<'a> {
    /// Tokens an entry.
    pub ratio: usize,
    /// Most entries a row selects.
    pub topk: usize,
    /// (T, topk, row words): packed NVFP4 latents of the selected entries, as `latent_gather` left them.
    pub latents: &'a Buffer,
    /// (T, 1 + topk): count, ascending entries.
    pub selection: &'a Buffer,
}

/// The kernel on one layer's buffers.
#[derive(Debug)]
pub struct Attend {
    /// By [`HEADS`].
    bound: [Bound; 2],
    heads: u32,
    window: u32,
    ring_row: u64,
    ratio: u32,
    topk: u32,
    latent_row: u64,
}

impl Attend {
    /// On these buffers; `selected` for layers with a ratio.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a head size that is odd or above 512; those of [`Gpu::pipeline`] and [`Gpu::uniform`].
    pub fn new(gpu: &Gpu, step: &Buffer, window: &Window<'_>, selected: Option<&Selected<'_>>) -> Result<Self> {
        let (heads, head_dim) = (window.heads, window.head_dim);
        if head_dim % 2 != 0 || head_dim > MAX_HEAD_DIM {
            return Err(Error::Unsupported {
                what: format!("heads of {head_dim} channels: an even number up to {MAX_HEAD_DIM} is needed"),
            });
        }
        let group_heads = heads / window.groups;
        let group_stride = (group_heads * head_dim).next_multiple_of(4);
        let params = Params {
            heads: heads as u32,
            window: window.window as u32,
            slots: window.slots as u32,
            block: window.block.into(),
            scale: (head_dim as f64).powf(-0.5) as f32,
            up_stride: window.up_stride as u32,
            query_at: window.query_at as u32,
            group_heads: group_heads as u32,
            group_stride: group_stride as u32,
            out_stride: (window.groups * group_stride) as u32,
            topk: selected.map_or(0, |s| s.topk) as u32,
            decoder: window.decoder.into(),
        };
        let params = gpu.uniform("attend params", &params)?;
        let overrides = [
            ("D", head_dim as f64),
            ("PAIRS", (head_dim / 2) as f64),
            ("QUADS", (2 * head_dim.div_ceil(8)) as f64),
            ("ROTATED", (window.rotary / 2) as f64),
        ];
        let mut bindings: Vec<Binding<'_>> =
            [&params, step, window.up, window.ring, window.chunk, window.constants, window.attended]
                .map(Binding::Whole)
                .into();
        if let Some(selected) = selected {
            bindings.extend([selected.latents, selected.selection].map(Binding::Whole));
        }
        let kind = if selected.is_some() { "global" } else { "window" };
        let bind = |heads| gpu.bind(&gpu.pipeline("attend", &format!("{kind}{heads}"), &overrides)?, &bindings);
        Ok(Self {
            bound: [bind(HEADS[0])?, bind(HEADS[1])?],
            heads: heads as u32,
            window: window.window as u32,
            ring_row: 4 * CacheFormat::Fp8.row_words(head_dim) as u64,
            ratio: selected.map_or(1, |s| s.ratio) as u32,
            topk: selected.map_or(0, |s| s.topk) as u32,
            latent_row: 4 * CacheFormat::Nvfp4.row_words(head_dim) as u64,
        })
    }

    /// For the `rows` rows from `position` on; `floor` is the step's floor that holds here, for the counters. The same bits
    /// whichever variant runs.
    pub fn record(&self, recording: &mut Recording, position: u32, rows: u32, floor: u32) {
        let few = rows * self.heads.div_ceil(HEADS[0]) < ENOUGH;
        let groups = self.heads.div_ceil(HEADS[few as usize]);
        let row_bytes = |row: u32| {
            let tokens = position + row + 1;
            u64::from(self.window.min(tokens.saturating_sub(floor))) * self.ring_row
                + u64::from((tokens / self.ratio).min(self.topk)) * self.latent_row
        };
        let cache = (0..rows).map(row_bytes).sum();
        recording.dispatch(&self.bound[few as usize], [rows, groups, 1], Traffic { weights: 0, cache });
    }
}
