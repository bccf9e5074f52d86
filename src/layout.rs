//! Widths, offsets and sizes of everything that lies on the device besides weights: one place, from the config alone.
//!
//! All widths are in 32-bit words. `(T, n)` reads: T rows of n words.

use crate::config::{Candidates, Config, DsparkConfig, LayerPlan, Role};
use crate::formats::CacheFormat;
use crate::kernels::cache_append::{PageLayout, Remainder, SLAB_HEADER, TABLE_PAGES};
use crate::kernels::tiling::{CandidateDims, Tiling, TilingDims};
use crate::kernels::{boundary, group_rows};
use crate::{Error, Result};

pub use crate::kernels::cache_append::PAGE_TOKENS;

/// Bytes of a slab of pages unless told otherwise: what every WebGPU device can bind.
const SLAB_BYTES: u64 = 128 << 20;

/// `n` rounded up to whole 16-byte loads.
pub fn stride4(n: usize) -> usize {
    n.next_multiple_of(4)
}

/// What the caller chooses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// Tokens that the caches hold.
    pub context: usize,
    /// Most rows in flight: the longest prefill chunk.
    pub chunk: usize,
    /// Keep the logits of every row of a step, not of its last only (tracing).
    pub all_logits: bool,
    /// Most bytes of a slice of weights; the device's binding limit where there is none, or where it is lower.
    pub slice_bytes: Option<u64>,
    /// Most bytes of a slab of pages; what every WebGPU device can bind where there is none.
    pub slab_bytes: Option<u64>,
    /// Load the draft stages, where the checkpoint has them.
    pub draft: bool,
    /// Fill caches and scratch with NaN before use, so that a read of something unwritten shows.
    pub poison: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            context: 4096,
            chunk: 128,
            all_logits: false,
            slice_bytes: None,
            slab_bytes: None,
            draft: false,
            poison: cfg!(debug_assertions),
        }
    }
}

/// Where the parts of a layer's `down` row begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DownRow {
    /// Query latent, `q_lora_rank` words at 0; then the window key, `head_dim` words.
    pub window: usize,
    /// `compressor.wkv` output, `head_dim` words.
    pub latent: usize,
    /// `compressor.wgate` output, `head_dim` words (ratio above 1).
    pub gate: usize,
    /// `indexer.weights_proj` output, `index_n_heads` words.
    pub index_weights: usize,
    /// Width of the row.
    pub width: usize,
}

impl DownRow {
    /// The row of a layer.
    pub fn new(config: &Config, layer: &LayerPlan) -> Self {
        let mut at = 0;
        let mut take = |wanted: bool, n: usize| {
            let here = at;
            at += if wanted { stride4(n) } else { 0 };
            here
        };
        take(true, config.q_lora_rank);
        let window = take(true, config.head_dim);
        let full = layer.role == Role::Full;
        let latent = take(full, config.head_dim);
        let gate = take(full && layer.ratio > 1, config.head_dim);
        let index_weights = take(selects(layer), config.index_n_heads);
        Self { window, latent, gate, index_weights, width: at }
    }
}

/// Whether a layer runs the indexer.
pub fn selects(layer: &LayerPlan) -> bool {
    matches!(layer.role, Role::Full | Role::Reindex)
}

/// What the mixes of a config's layers have in common.
pub fn boundary_dims(config: &Config) -> boundary::Dims {
    boundary::Dims {
        hidden: config.hidden_size as u32,
        streams: config.hc_mult as u32,
        sinkhorn_iterations: config.hc_sinkhorn_iters as u32,
        norm_eps: config.rms_norm_eps,
        eps: config.hc_eps,
    }
}

/// The candidate pool's sizes.
pub fn candidate_dims(config: &Config) -> CandidateDims {
    CandidateDims { block_size: config.candidate_block_size as u32, blocks: config.candidate_topk_blocks as u32 }
}

/// Sizes of a pool of pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolLayout {
    /// Words of a page.
    pub page_words: usize,
    /// Pages of a slab.
    pub slab_pages: usize,
}

impl PoolLayout {
    /// Words of a slab.
    pub fn slab_words(&self) -> usize {
        SLAB_HEADER + self.slab_pages * self.page_words
    }
    /// Slabs that hold `pages` pages; there is always one.
    pub fn slabs(&self, pages: usize) -> usize {
        pages.div_ceil(self.slab_pages).max(1)
    }
    /// First byte of a page in its slab.
    pub fn offset(&self, index: usize) -> u64 {
        4 * (SLAB_HEADER + index * self.page_words) as u64
    }
}

/// Sizes of the draft stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftLayout {
    /// Tokens of a block.
    pub block: usize,
    /// Vectors that the output of a stage's experts consists of.
    pub parts: usize,
    /// Words of a row of router logits.
    pub gate: usize,
    /// Words of the tiles of (row, expert) pairs.
    pub tiles: usize,
    /// Words of a row of the Markov head's embeddings.
    pub markov: usize,
    /// Words of a row of what the stages are told of the text: `hidden_size` channels a target layer.
    pub features: usize,
}

impl DraftLayout {
    fn new(config: &Config, dspark: &DsparkConfig) -> Self {
        let (block, parts) = (dspark.block_size, dspark.num_experts_per_tok + 1);
        let experts = dspark.n_routed_experts as u32 + 1;
        Self {
            block,
            parts,
            gate: stride4(dspark.n_routed_experts),
            tiles: group_rows::tiles_words(block as u32, parts as u32, experts) as usize,
            markov: stride4(dspark.markov_rank),
            features: stride4(dspark.target_layer_ids.len() * config.hidden_size),
        }
    }
}

/// Sizes of the device's state and scratch for a config and [`Options`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Most rows in flight.
    pub rows: usize,
    /// Tokens that the caches hold.
    pub context: usize,
    /// Words of one residual stream.
    pub hidden: usize,
    /// Words of all streams of a row.
    pub streams: usize,
    /// Words of a row's mix partials.
    pub partials: usize,
    /// Words of the widest `down` row.
    pub down: usize,
    /// Words of a `up` row, and where the index queries begin in it.
    pub up: usize,
    /// Offset of the index queries in an `up` row.
    pub up_index: usize,
    /// Words of one output group's heads.
    pub group: usize,
    /// Words of an `attended` row.
    pub attended: usize,
    /// Words of a `wo_a` output row.
    pub attention_latent: usize,
    /// Vectors that a MoE output consists of: chosen experts and the shared one.
    pub parts: usize,
    /// Words of a row of router logits.
    pub gate: usize,
    /// Words of an expert's hidden row.
    pub expert_hidden: usize,
    /// Words of the tiles of (row, expert) pairs.
    pub tiles: usize,
    /// Words of a packed window key.
    pub window_row: usize,
    /// Tokens that a round of drafting may take back: those of a block, or none.
    pub spare: usize,
    /// Rows of a window ring, of a layer or a draft stage: the window, and the tokens that may be taken back.
    pub ring_rows: usize,
    /// Words of a packed latent.
    pub latent_row: usize,
    /// Words of a packed index key.
    pub key_row: usize,
    /// Words of a selection: a count and the entries.
    pub selection: usize,
    /// Words of a candidate list: a count and the blocks.
    pub candidates: usize,
    /// How scores are cut into tiles, and the words of scratch that takes.
    pub tiling: Tiling,
    /// Words of a row's gathered latents.
    pub latents: usize,
    /// Full layers: their part of a page.
    pub page_parts: Vec<Option<PageLayout>>,
    /// Pages and slabs.
    pub pool: PoolLayout,
    /// Words of all Engram rows of a token and layer.
    pub engram: usize,
    /// Words of the rows of one Engram for all rows in flight: a range that can be bound by itself.
    pub engram_region: usize,
    /// Words of an Engram's keys and value.
    pub engram_kv: usize,
    /// Words of a row of logits.
    pub logits: usize,
    /// Rows of logits kept.
    pub logit_rows: usize,
    /// The draft stages, where they are loaded.
    pub draft: Option<DraftLayout>,
}

impl Layout {
    /// Resolves the sizes.
    ///
    /// # Errors
    /// [`Error::Setting`] for a context or chunk that no run can have.
    pub fn new(config: &Config, options: &Options) -> Result<Self> {
        let range = |setting, found: usize, most: usize| {
            if (1..=most).contains(&found) {
                return Ok(());
            }
            Err(Error::Setting { setting, found: found.to_string(), allowed: format!("1 to {most}") })
        };
        range("context", options.context, config.max_position_embeddings.min(TABLE_PAGES * PAGE_TOKENS))?;
        range("chunk", options.chunk, 4096)?;
        let (h, n, d) = (config.hidden_size, config.hc_mult, config.head_dim);
        let draft = config.dspark.as_ref().filter(|_| options.draft).map(|dspark| DraftLayout::new(config, dspark));
        let spare = draft.as_ref().map_or(0, |draft| draft.block);
        // A round has a row more than a block has tokens.
        let rows = options.chunk.min(options.context).max(if spare > 0 { spare + 1 } else { 0 });
        let (page_parts, page_words) = page_parts(config);
        let pool = pool_layout(page_words, options)?;
        let tiling = tiling(config, rows, options.context);
        let parts = config.num_experts_per_tok + 1;
        let group = stride4(config.num_attention_heads / config.o_groups * d);
        let up_index = stride4(config.num_attention_heads * d);
        let engram = config.engram.as_ref().map_or(0, |engram| stride4(engram.width()));
        Ok(Self {
            rows,
            context: options.context,
            hidden: stride4(h),
            streams: n * stride4(h),
            partials: boundary_dims(config).partials() as usize,
            down: config.layers.iter().map(|layer| DownRow::new(config, layer).width).max().unwrap_or(0),
            up: up_index + stride4(config.index_n_heads * config.index_head_dim),
            up_index,
            group,
            attended: config.o_groups * group,
            attention_latent: stride4(config.o_groups * config.o_lora_rank),
            parts,
            gate: stride4(config.n_routed_experts),
            expert_hidden: stride4(config.moe_intermediate_size),
            tiles: group_rows::tiles_words(rows as u32, parts as u32, config.n_routed_experts as u32 + 1) as usize,
            window_row: CacheFormat::Fp8.row_words(d),
            spare,
            ring_rows: config.sliding_window + spare,
            latent_row: CacheFormat::Nvfp4.row_words(d),
            key_row: CacheFormat::Mxfp4.row_words(config.index_head_dim),
            selection: 1 + config.index_topk,
            candidates: 1 + config.candidate_topk_blocks,
            latents: config.index_topk * CacheFormat::Nvfp4.row_words(d),
            tiling,
            page_parts,
            pool,
            engram,
            // Ranges begin at multiples of 256 bytes.
            engram_region: (rows * engram).next_multiple_of(64),
            engram_kv: stride4((n + 1) * h),
            logits: stride4(config.vocab_size),
            logit_rows: if options.all_logits { rows } else { 1 + spare },
            draft,
        })
    }

    /// What a Full layer of this ratio holds of tokens whose group is not complete.
    pub fn remainder(&self, ratio: usize) -> Remainder {
        Remainder::new(ratio, self.spare)
    }

    /// Pages that hold `tokens` tokens.
    pub fn pages(&self, tokens: usize) -> usize {
        tokens.div_ceil(PAGE_TOKENS)
    }

    /// Most entries of a layer of this ratio.
    pub fn capacity(&self, ratio: usize) -> usize {
        capacity(self.context, ratio)
    }
}

fn capacity(context: usize, ratio: usize) -> usize {
    context.div_ceil(PAGE_TOKENS) * PAGE_TOKENS / ratio
}

/// Tiles for the layers that select: as many slots as the one with the most has.
fn tiling(config: &Config, rows: usize, context: usize) -> Tiling {
    let selecting = || config.layers.iter().filter(|layer| selects(layer));
    let slots = |layer: &LayerPlan| {
        let entries = capacity(context, layer.ratio) as u32;
        match layer.candidates {
            Candidates::Restricted => candidate_dims(config).slots(entries),
            _ => entries,
        }
    };
    let source = selecting().any(|layer| layer.candidates == Candidates::Source);
    Tiling::new(&TilingDims {
        rows: rows as u32,
        slots: selecting().map(slots).max().unwrap_or(0),
        topk: config.index_topk as u32,
        candidates: source.then(|| candidate_dims(config)),
    })
}

/// Where the parts of all Full layers lie in a page, and how many words it has.
fn page_parts(config: &Config) -> (Vec<Option<PageLayout>>, usize) {
    let part = |layer: &LayerPlan| {
        (layer.role == Role::Full).then(|| PageLayout::new(layer.ratio, config.head_dim, config.index_head_dim))
    };
    let parts: Vec<_> = config.layers.iter().map(part).collect();
    let words = parts.iter().flatten().map(PageLayout::words).sum();
    let mut at = 0;
    let mut place = |part: PageLayout| {
        at += part.words();
        part.within(at - part.words(), words)
    };
    (parts.into_iter().map(|part| part.map(&mut place)).collect(), words)
}

fn pool_layout(page_words: usize, options: &Options) -> Result<PoolLayout> {
    let allowed = options.slab_bytes.unwrap_or(SLAB_BYTES);
    let room = (allowed / 4).saturating_sub(SLAB_HEADER as u64) as usize;
    let pages = options.context.div_ceil(PAGE_TOKENS);
    let most = room.checked_div(page_words).unwrap_or(pages);
    if most == 0 {
        let needed = 4 * (SLAB_HEADER + page_words) as u64;
        return Err(Error::DeviceLimit { what: "a page of the global cache".into(), needed, allowed });
    }
    Ok(PoolLayout { page_words, slab_pages: most.min(pages).min(1 << 16) })
}
