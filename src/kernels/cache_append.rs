//! `cache_append`: what the rows in flight add to a layer's caches (`numerics.md` §4 to §7).
//!
//! Which of the three variants runs follows from what the layer has: every layer writes window keys, layers that select
//! pack index queries too, Full layers also write the latents and index keys of the groups that the step completes. Those go
//! to the pages that the session's table names, all of a step in one slab.

use super::linear::Segment;
use crate::formats::CacheFormat;
use crate::gpu::{Binding, Bound, Buffer, Gpu, Layout, MemoryKind, Pipeline, Recording, Traffic};
use crate::Result;
use bytemuck::{Pod, Zeroable};
use std::sync::Arc;

/// Twin of `Params` in `cache_append.wgsl`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct Params {
    eps: f32,
    rotary: u32,
    slots: u32,
    block: u32,
    ratio: u32,
    cycle: u32,
    held: u32,
    down_stride: u32,
    key_at: u32,
    latent_at: u32,
    gate_at: u32,
    up_stride: u32,
    query_at: u32,
    heads: u32,
    freqs_at: u32,
    kv_norm_at: u32,
    comp_norm_at: u32,
    k_norm_at: u32,
    wk_format: u32,
    wk_data: u32,
    wk_scales: u32,
    entries: u32,
    part_at: u32,
    page_words: u32,
}

/// The uniform struct, to be held against the shader.
pub fn layout() -> Layout {
    crate::layout!(
        "cache_append",
        Params {
            eps,
            rotary,
            slots,
            block,
            ratio,
            cycle,
            held,
            down_stride,
            key_at,
            latent_at,
            gate_at,
            up_stride,
            query_at,
            heads,
            freqs_at,
            kv_norm_at,
            comp_norm_at,
            k_norm_at,
            wk_format,
            wk_data,
            wk_scales,
            entries,
            part_at,
            page_words
        }
    )
}

/// Tokens of a page.
pub const PAGE_TOKENS: usize = 128;

/// Words at the head of a slab; the first of them is the slab's number.
pub const SLAB_HEADER: usize = 64;
/// Pages that a table can hold: a million tokens, 32 KiB.
pub const TABLE_PAGES: usize = 8192;

/// Where a page lies: the slab's number and the page's place in it, as a table entry (`shared/pages.wgsl`).
pub fn page_place(slab: usize, index: usize) -> u32 {
    debug_assert!(slab < 1 << 16 && index < 1 << 16);
    (slab << 16 | index) as u32
}

/// Where the entries of a Full layer lie in a page. A page holds 128 tokens of all Full layers, one part a layer: its packed
/// latents, then its packed index keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageLayout {
    /// Entries a page.
    pub entries: usize,
    /// Words of a packed latent.
    pub latent_words: usize,
    /// Words of a packed index key.
    pub key_words: usize,
    /// Word of the page at which the layer's part begins.
    pub at: usize,
    /// Words of a page: the parts of all layers.
    pub page_words: usize,
}

impl PageLayout {
    /// Of the only layer with pages: an entry per `ratio` tokens, latents of `head_dim` and index keys of `index_dim` channels.
    pub fn new(ratio: usize, head_dim: usize, index_dim: usize) -> Self {
        let (latent_words, key_words) =
            (CacheFormat::Nvfp4.row_words(head_dim), CacheFormat::Mxfp4.row_words(index_dim));
        let entries = PAGE_TOKENS / ratio;
        Self { entries, latent_words, key_words, at: 0, page_words: entries * (latent_words + key_words) }
    }
    /// The same part at another place of a larger page.
    pub fn within(self, at: usize, page_words: usize) -> Self {
        Self { at, page_words, ..self }
    }
    /// Words of the layer's part.
    pub fn words(&self) -> usize {
        self.entries * (self.latent_words + self.key_words)
    }
    /// First word of the latent of an entry, pages lying one after the other.
    pub fn latent(&self, entry: usize) -> usize {
        entry / self.entries * self.page_words + self.at + entry % self.entries * self.latent_words
    }
    /// First word of the index key of an entry, pages lying one after the other.
    pub fn key(&self, entry: usize) -> usize {
        let keys = entry / self.entries * self.page_words + self.at + self.entries * self.latent_words;
        keys + entry % self.entries * self.key_words
    }
}

/// What every layer writes: its window key.
#[derive(Debug, Clone, Copy)]
pub struct WindowKeys<'a> {
    /// D, even.
    pub head_dim: usize,
    /// d_r, even, at most D and D_i.
    pub rotary: usize,
    /// Slots of the ring.
    pub slots: usize,
    /// Whether the rows are a drafted block: no later row sees them, and all go to the chunk.
    pub block: bool,
    /// Of all norms.
    pub eps: f32,
    /// Words of a row of `down`.
    pub down_stride: usize,
    /// Where `wkv x` (D) stands in it.
    pub key_at: usize,
    /// (T, down_stride) f32.
    pub down: &'a Buffer,
    /// What [`constants`] made.
    pub constants: &'a Buffer,
    /// (slots, row words): slot `position % slots`; written by steps of one row.
    pub ring: &'a Buffer,
    /// (T, row words): by row of the step; written by steps of several, and of a block.
    pub chunk: &'a Buffer,
}

/// What a layer that selects packs: its index queries.
#[derive(Debug, Clone, Copy)]
pub struct IndexQueries<'a> {
    /// H_i.
    pub heads: usize,
    /// D_i, even.
    pub head_dim: usize,
    /// Words of a row of `up`.
    pub up_stride: usize,
    /// Where the raw index queries (H_i, D_i) stand in it.
    pub query_at: usize,
    /// (T, up_stride) f32.
    pub up: &'a Buffer,
    /// (T, H_i, row words): packed MXFP4.
    pub queries: &'a Buffer,
}

/// What a Full layer writes: latents and index keys.
#[derive(Debug, Clone, Copy)]
pub struct GlobalEntries<'a> {
    /// Tokens an entry.
    pub ratio: usize,
    /// Where `compressor.wkv x` (D) stands in a row of `down`.
    pub latent_at: usize,
    /// Where `compressor.wgate x` (D) stands in it; unused with ratio 1.
    pub gate_at: usize,
    /// `indexer.wk` (D_i, D): its format, and where it stands in the pack given to [`full_constants`].
    pub wk: Segment,
    /// Where they lie in a page, made for the same `ratio` and sizes.
    pub page: PageLayout,
    /// The session's [`TABLE_PAGES`] places, a uniform.
    pub table: &'a Buffer,
    /// [`Remainder::rows`] times (2, D) f32: `wkv x` and `wgate x`. None with ratio 1.
    pub remainder: Option<&'a Buffer>,
    /// Tokens that may be taken back.
    pub spare: usize,
}

/// Where the parts of [`constants`] start, in words.
struct Places {
    freqs: usize,
    comp_norm: usize,
    k_norm: usize,
    wk: usize,
}

impl Places {
    fn new(head_dim: usize, rotary: usize, index_dim: usize) -> Self {
        let comp_norm = head_dim + rotary / 2;
        let k_norm = comp_norm + head_dim;
        Self { freqs: head_dim, comp_norm, k_norm, wk: (k_norm + index_dim).next_multiple_of(4) }
    }
}

/// The constants of a layer that writes window keys only, or those and index queries: `kv_norm` (D), `freqs` (d_r / 2).
pub fn constants(kv_norm: &[f32], freqs: &[f32]) -> Vec<u32> {
    kv_norm.iter().chain(freqs).map(|x| x.to_bits()).collect()
}

/// The constants of a Full layer: further `comp_norm` (D), `k_norm` (D_i) and the pack of `indexer.wk` (D_i, D).
pub fn full_constants(kv_norm: &[f32], freqs: &[f32], comp_norm: &[f32], k_norm: &[f32], wk: &[u32]) -> Vec<u32> {
    let mut words = constants(kv_norm, freqs);
    words.extend(comp_norm.iter().chain(k_norm).map(|x| x.to_bits()));
    words.resize(Places::new(kv_norm.len(), 2 * freqs.len(), k_norm.len()).wk, 0);
    words.extend(wk);
    words
}

/// What a Full layer holds of tokens whose group is not complete: of the newest token at each place of a group but the last, or,
/// with room for tokens that are taken back, of the newest tokens. The token at a position lies in row `position % cycle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remainder {
    /// Tokens after which a row is used again.
    pub cycle: usize,
    /// Rows.
    pub rows: usize,
}

impl Remainder {
    /// Of groups of `ratio` tokens; the newest `spare` tokens may be taken back.
    pub fn new(ratio: usize, spare: usize) -> Self {
        match spare {
            _ if ratio < 2 => Self { cycle: 1, rows: 0 },
            0 => Self { cycle: ratio, rows: ratio - 1 },
            _ => Self { cycle: ratio + spare, rows: ratio + spare },
        }
    }
}

/// What a step does for a layer; a layer that has less of it does what it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Jobs {
    /// Global entries, window keys and index queries.
    All,
    /// Global entries and window keys: of rows whose output nobody needs.
    Keys,
    /// Global entries: of rows whose window keys nobody sees either.
    Entries,
}

/// The kernel on one layer's buffers.
#[derive(Debug)]
pub struct CacheAppend {
    pipeline: Arc<Pipeline>,
    /// All that is bound, but for the slab.
    buffers: Vec<Buffer>,
    /// Of a Full layer by slab; of others the only one.
    bound: Vec<Bound>,
    full: bool,
    jobs: u32,
    constants: u64,
    ratio: u32,
    remainder: u64,
}

impl CacheAppend {
    /// On these buffers; `queries` for layers that select, `entries` (with `queries`) for Full layers, which need
    /// [`CacheAppend::add_slab`] too.
    ///
    /// # Errors
    /// Those of [`Gpu::pipeline`] and [`Gpu::uniform`].
    ///
    /// # Panics
    /// When a size is odd, `entries` comes without `queries`, or its page is made for other sizes.
    pub fn new(
        gpu: &Gpu,
        step: &Buffer,
        keys: &WindowKeys<'_>,
        queries: Option<&IndexQueries<'_>>,
        entries: Option<&GlobalEntries<'_>>,
    ) -> Result<Self> {
        let index_dim = queries.map_or(0, |q| q.head_dim);
        assert!([keys.head_dim, keys.rotary, index_dim].iter().all(|n| n % 2 == 0), "sizes of pairs");
        assert!(entries.is_none() || queries.is_some(), "a Full layer selects");
        if let Some(GlobalEntries { ratio, page, .. }) = entries {
            let part = PageLayout::new(*ratio, keys.head_dim, index_dim);
            assert_eq!(*page, part.within(page.at, page.page_words), "a page of other sizes");
        }
        let places = Places::new(keys.head_dim, keys.rotary, index_dim);
        let remainder = entries.map_or(Remainder::new(1, 0), |e| Remainder::new(e.ratio, e.spare));
        let params = Params {
            eps: keys.eps,
            rotary: keys.rotary as u32,
            slots: keys.slots as u32,
            block: keys.block.into(),
            ratio: entries.map_or(1, |e| e.ratio) as u32,
            cycle: remainder.cycle as u32,
            held: remainder.rows as u32,
            down_stride: keys.down_stride as u32,
            key_at: keys.key_at as u32,
            latent_at: entries.map_or(0, |e| e.latent_at) as u32,
            gate_at: entries.map_or(0, |e| e.gate_at) as u32,
            up_stride: queries.map_or(0, |q| q.up_stride) as u32,
            query_at: queries.map_or(0, |q| q.query_at) as u32,
            heads: queries.map_or(0, |q| q.heads) as u32,
            freqs_at: places.freqs as u32,
            kv_norm_at: 0,
            comp_norm_at: places.comp_norm as u32,
            k_norm_at: places.k_norm as u32,
            wk_format: entries.map_or(0, |e| e.wk.format),
            wk_data: entries.map_or(0, |e| places.wk as u32 + e.wk.data),
            wk_scales: entries.map_or(0, |e| places.wk as u32 + e.wk.scales),
            entries: entries.map_or(0, |e| e.page.entries) as u32,
            part_at: entries.map_or(0, |e| e.page.at) as u32,
            page_words: entries.map_or(0, |e| e.page.page_words) as u32,
        };
        let params = gpu.uniform("cache_append params", &params)?;
        // A workgroup packs as many heads' queries as fill the room of a window key.
        let (latent, padded) = (keys.head_dim.next_multiple_of(32), index_dim.next_multiple_of(32).max(32));
        let query_heads = (latent / padded).max(1);
        let values = latent.max(query_heads * padded);
        let mut overrides = vec![("D", keys.head_dim as f64), ("VALUES", values as f64)];
        let mut buffers = [&params, step, keys.constants, keys.down, keys.ring, keys.chunk].map(Buffer::clone).to_vec();
        let (mut variant, mut jobs) = ("window", 1);
        if let Some(queries) = queries {
            variant = "reindex";
            jobs += queries.heads.div_ceil(query_heads);
            overrides.extend([("D_I", index_dim as f64), ("QUERY_HEADS", query_heads as f64)]);
            buffers.extend([queries.up, queries.queries].map(Buffer::clone));
        }
        let none = gpu.buffer(MemoryKind::Params, "no remainder", 0)?;
        let remainder = entries.and_then(|e| e.remainder).unwrap_or(&none);
        if let Some(entries) = entries {
            variant = "full";
            jobs += 1;
            overrides.push(("LATENT", latent as f64));
            buffers.extend([remainder, entries.table].map(Buffer::clone));
        }
        let mut kernel = Self {
            pipeline: gpu.pipeline("cache_append", variant, &overrides)?,
            buffers,
            bound: vec![],
            full: entries.is_some(),
            jobs: jobs as u32,
            constants: keys.constants.bytes(),
            ratio: entries.map_or(1, |e| e.ratio) as u32,
            remainder: remainder.bytes(),
        };
        if !kernel.full {
            kernel.bind(gpu, None)?;
        }
        Ok(kernel)
    }

    /// Takes the next slab into use: its number is how many there were before. Nothing for layers that are not Full.
    ///
    /// # Errors
    /// Those of [`Gpu::bind`].
    pub fn add_slab(&mut self, gpu: &Gpu, slab: &Buffer) -> Result<()> {
        if self.full {
            self.bind(gpu, Some(slab))?;
        }
        Ok(())
    }

    fn bind(&mut self, gpu: &Gpu, slab: Option<&Buffer>) -> Result<()> {
        let bindings: Vec<_> = self.buffers.iter().chain(slab).map(Binding::Whole).collect();
        self.bound.push(gpu.bind(&self.pipeline, &bindings)?);
        Ok(())
    }

    /// For the `rows` rows from `position` on. On a Full layer the groups that end among them, but for those below the step's `kept`,
    /// get their entries where their pages lie in one of `slabs`; other layers need none.
    /// Each of the slabs is a dispatch; rows that may have several are no more than the remainder has room for.
    pub fn record(&self, recording: &mut Recording, position: u32, rows: u32, jobs: Jobs, slabs: &[usize]) {
        let entry = u32::from(self.full);
        let jobs = match jobs {
            Jobs::All => self.jobs,
            Jobs::Keys => entry + 1,
            Jobs::Entries => entry,
        };
        // The remainder is read by the step that completes a group of earlier tokens.
        let begun = position % self.ratio;
        let cache = if begun > 0 && begun + rows >= self.ratio { self.remainder } else { 0 };
        let mut dispatch = |slab: usize, jobs| {
            recording.dispatch(&self.bound[slab], [rows, jobs, 1], Traffic { weights: self.constants, cache });
        };
        match slabs {
            [first, others @ ..] if self.full => {
                dispatch(*first, jobs);
                others.iter().for_each(|&slab| dispatch(slab, entry));
            }
            _ => dispatch(0, jobs),
        }
    }
}
