//! `cedra inspect`: what a model costs, from its configuration alone.
//!
//! What is counted is what the architecture asks for (the command's help says how). Counts are `u128`, because a valid
//! configuration can name sizes whose products overflow 64 bits.

use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args};
use serde::Serialize;
use serde_json::Value;

use crate::config::{Candidates, Config, DsparkConfig, LayerPlan, Role};
use crate::formats::CacheFormat;
use crate::model::{MemoryPlan, Options};
use crate::{Error, Result};

/// Says what a model is and what it costs: roles, parameters, bytes, FLOPs.
///
/// A parameter is active for a token that reads it. A prompt token is one whose logits nobody asks for: the architecture
/// needs the encoder's layers and the last Full layer's projections into the global cache for it (this version runs
/// every layer). A generated token needs every layer and the head. FLOPs are two per multiply-add of matrix products, index scores and attention, for a token that sees
/// the whole context; element-wise work is not counted.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("source").required(true).args(["model", "config"])))]
pub(super) struct Inspect {
    /// Folder with a config.json.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// A config.json.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Tokens of context for the cache and the FLOPs; by default as many as the model was made for.
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Prints one JSON object.
    #[arg(long)]
    json: bool,
}

impl Inspect {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let source = self.model.or(self.config).expect("clap asks for one of the two");
        let inspection = Inspection::open(source, self.context)?;
        let mut out = std::io::stdout().lock();
        if self.json {
            serde_json::to_writer_pretty(&mut out, &inspection)?;
            writeln!(out)?;
        } else {
            write!(out, "{inspection}")?;
        }
        Ok(())
    }
}

/// What a model costs at a context.
#[derive(Debug, Clone, Serialize)]
pub struct Inspection {
    /// Tokens of context that cache sizes and FLOPs are for.
    pub context: usize,
    /// Longest context the model was made for.
    pub max_context: usize,
    /// Layers of the encoder: those before the last Full layer.
    pub encoder_layers: usize,
    /// One entry a layer.
    pub layers: Vec<Layer>,
    /// The draft stages, where the model has some.
    pub draft: Option<Draft>,
    /// Parameter counts.
    pub parameters: Parameters,
    /// Bytes of a session's state.
    pub cache: Cache,
    /// FLOPs a token.
    pub flops: PerToken,
    /// Device memory by kind, weights as the release stores them; none for sizes that no machine can address.
    pub memory: Option<MemoryPlan>,
}

/// One layer's part.
#[derive(Debug, Clone, Serialize)]
pub struct Layer {
    /// Index of the layer.
    pub index: usize,
    /// `window`, `full`, `reindex` or `reuse`.
    pub role: &'static str,
    /// Tokens per global entry; 0 for window-only layers.
    pub ratio: usize,
    /// The layer whose entries it attends to.
    pub kv_source: Option<usize>,
    /// The layer whose selection it attends to.
    pub index_source: Option<usize>,
    /// `source` or `restricted` for layers that publish or obey candidate blocks.
    pub candidates: Option<&'static str>,
    /// Whether it opens with an Engram.
    pub engram: bool,
}

/// The draft stages, which propose tokens that the model verifies.
#[derive(Debug, Clone, Serialize)]
pub struct Draft {
    /// Number of stages.
    pub stages: usize,
    /// Tokens of a drafted block.
    pub block_size: usize,
    /// Layers whose attention inputs they see.
    pub target_layers: Vec<usize>,
    /// Routed experts of a stage.
    pub experts: usize,
    /// Of them, those that a token uses.
    pub experts_per_token: usize,
    /// Rank of the Markov head.
    pub markov_rank: usize,
    /// Bytes of their window rings, whatever the context.
    pub ring_bytes: u128,
}

/// Parameters, scales of packed formats not counted.
#[derive(Debug, Clone, Serialize)]
pub struct Parameters {
    /// All of them: the sum of the next four.
    pub total: u128,
    /// The language model without Engram rows.
    pub backbone: u128,
    /// Rows of the Engram tables.
    pub engram_rows: u128,
    /// The draft stages.
    pub draft: u128,
    /// The vision tower and its aligner, which Cedra does not run.
    pub vision: u128,
    /// Of `backbone`, what a token reads.
    pub active: PerToken,
    /// Of `engram_rows`, what a token reads.
    pub active_engram_rows: PerToken,
}

/// A count for a prompt token and for a generated one.
#[derive(Debug, Clone, Serialize, PartialEq, Eq)]
pub struct PerToken {
    /// A prompt token whose logits are not needed.
    pub prefill: u128,
    /// A generated token.
    pub decode: u128,
}

/// Bytes of a session's state, packed.
#[derive(Debug, Clone, Serialize)]
pub struct Cache {
    /// Global entries (latents and index keys), averaged over a group's tokens.
    pub bytes_per_token: f64,
    /// Global entries of the context.
    pub global_bytes: u128,
    /// Window rings of all layers, whatever the context.
    pub ring_bytes: u128,
    /// Incomplete groups of Full layers with a ratio above 1.
    pub remainder_bytes: u128,
    /// The sum of the last three.
    pub total_bytes: u128,
}

impl Inspection {
    /// Reads a `config.json`, or that of a model's folder.
    ///
    /// `context` in tokens; the model's maximum when `None`.
    ///
    /// # Errors
    /// What [`Config::open`] reports; [`Error::Context`] for a context beyond the model's maximum; [`Error::Setting`]
    /// for an empty one; [`Error::Config`] for sizes of a vision tower that are none.
    pub fn open(path: impl AsRef<Path>, context: Option<usize>) -> Result<Self> {
        let path = path.as_ref();
        let config = Config::open(path)?;
        let file = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
        let text = std::fs::read_to_string(&file).map_err(|e| Error::io(&file, e))?;
        let root = serde_json::from_str(&text).map_err(|e| Error::malformed(&file, format!("not JSON: {e}")))?;
        Self::new(&config, vision_parameters(&root, config.hidden_size)?, context)
    }

    /// Counts for a configuration whose vision tower has `vision` parameters; the rest as in [`Inspection::open`].
    ///
    /// # Errors
    /// [`Error::Context`], [`Error::Setting`] as above.
    pub fn new(config: &Config, vision: u128, context: Option<usize>) -> Result<Self> {
        let max_context = config.max_position_embeddings;
        let context = context.unwrap_or(max_context);
        if context > max_context {
            return Err(Error::Context { needed: context, allowed: max_context });
        }
        if context == 0 {
            return Err(Error::Setting {
                setting: "context",
                found: "0".into(),
                allowed: format!("1..={max_context}"),
            });
        }
        let encoder_layers =
            config.layers.iter().rposition(|plan| plan.role == Role::Full).unwrap_or(config.num_hidden_layers);
        let draft = draft_parameters(config);
        let (backbone, active) = backbone_parameters(config, encoder_layers);
        let engram_rows = config
            .engram
            .as_ref()
            .map_or(0, |e| e.num_embeddings.iter().map(|&rows| rows as u128).sum::<u128>() * e.head_dim as u128);
        let total = backbone + engram_rows + draft + vision;
        let memory = match total < 1 << 48 {
            true => Some(MemoryPlan::of_config(config, &Options { context, ..Options::default() })?),
            false => None,
        };
        Ok(Self {
            context,
            max_context,
            encoder_layers,
            layers: config.layers.iter().map(Layer::new).collect(),
            draft: config.dspark.as_ref().map(|draft| Draft::new(config, draft)),
            parameters: Parameters {
                total,
                backbone,
                engram_rows,
                draft,
                vision,
                active,
                active_engram_rows: active_engram_rows(config, encoder_layers),
            },
            cache: Cache::new(config, context),
            flops: flops(config, encoder_layers, context),
            memory,
        })
    }
}

impl Layer {
    fn new(plan: &LayerPlan) -> Self {
        Self {
            index: plan.index,
            role: match plan.role {
                Role::Window => "window",
                Role::Full => "full",
                Role::Reindex => "reindex",
                Role::Reuse => "reuse",
            },
            ratio: plan.ratio,
            kv_source: plan.kv_source,
            index_source: plan.index_source,
            candidates: match plan.candidates {
                Candidates::Ignored => None,
                Candidates::Source => Some("source"),
                Candidates::Restricted => Some("restricted"),
            },
            engram: plan.engram.is_some(),
        }
    }
}

impl Draft {
    fn new(config: &Config, draft: &DsparkConfig) -> Self {
        // A block lies beside the window until it is known what is accepted.
        let rows = (config.sliding_window + draft.block_size) as u128;
        Self {
            stages: draft.stages,
            block_size: draft.block_size,
            target_layers: draft.target_layer_ids.clone(),
            experts: draft.n_routed_experts,
            experts_per_token: draft.num_experts_per_tok,
            markov_rank: draft.markov_rank,
            ring_bytes: draft.stages as u128 * rows * 4 * CacheFormat::Fp8.row_words(config.head_dim) as u128,
        }
    }
}

impl Cache {
    fn new(config: &Config, context: usize) -> Self {
        let row_bytes = |format: CacheFormat, channels| 4 * format.row_words(channels) as u128;
        let entry =
            row_bytes(CacheFormat::Nvfp4, config.head_dim) + row_bytes(CacheFormat::Mxfp4, config.index_head_dim);
        let ring = config.sliding_window as u128 * row_bytes(CacheFormat::Fp8, config.head_dim);
        let sources = || config.layers.iter().filter(|plan| plan.role == Role::Full);
        let global_bytes = sources().map(|plan| (context / plan.ratio) as u128 * entry).sum();
        let ring_bytes = config.layers.len() as u128 * ring;
        let remainder_bytes = sources().map(|plan| (plan.ratio as u128 - 1) * 2 * config.head_dim as u128 * 4).sum();
        Self {
            bytes_per_token: sources().map(|plan| entry as f64 / plan.ratio as f64).sum(),
            global_bytes,
            ring_bytes,
            remainder_bytes,
            total_bytes: global_bytes + ring_bytes + remainder_bytes,
        }
    }
}

/// Parameters of a block, by what a token does with them.
#[derive(Clone, Copy, Default)]
struct Block {
    /// Elements of matrices that every token is multiplied with.
    matrices: u128,
    /// Norms, biases, sinks, scales and bases.
    vectors: u128,
    /// Elements of one routed expert.
    expert: u128,
    /// Of `matrices`, those that a Full layer's global entries need: its projections into the cache, and its Engram.
    global: u128,
    /// Of `vectors`, those that go with `global`.
    global_vectors: u128,
}

impl Block {
    /// A backbone layer, or a draft stage (`plan` is `None`), with `experts` to choose from.
    fn new(config: &Config, plan: Option<&LayerPlan>, experts: usize) -> Self {
        let n = |value: usize| value as u128;
        let (h, streams, head) = (n(config.hidden_size), n(config.hc_mult), n(config.head_dim));
        let (q_rank, o_rank) = (n(config.q_lora_rank), n(config.o_groups) * n(config.o_lora_rank));
        let heads = n(config.num_attention_heads);
        let mixes = streams * (streams + 2);

        let expert = 3 * n(config.moe_intermediate_size) * h;
        let attention = q_rank * h + heads * head * (q_rank + n(config.o_lora_rank)) + head * h + h * o_rank;
        let mut block = Self {
            matrices: 2 * mixes * streams * h + attention + n(experts) * h + expert,
            vectors: 2 * (mixes + 3) + 2 * h + q_rank + head + heads + 2 * n(experts),
            expert,
            ..Self::default()
        };
        let Some(plan) = plan else { return block };
        let (index_heads, index_head) = (n(config.index_n_heads), n(config.index_head_dim));
        let (mut global, mut global_vectors) = (0, 0);
        if let (Some(_), Some(engram)) = (plan.engram, &config.engram) {
            global += (streams + 1) * h * n(engram.width());
            global_vectors += 2 * streams * h;
        }
        if plan.role == Role::Full {
            global += head * h * if plan.ratio > 1 { 2 } else { 1 } + index_head * head;
            global_vectors += head + index_head;
            (block.global, block.global_vectors) = (global, global_vectors + h);
            // with the norm of the layer's input
        }
        block.matrices += global;
        block.vectors += global_vectors;
        if matches!(plan.role, Role::Full | Role::Reindex) {
            block.matrices += index_heads * index_head * q_rank + index_heads * h;
        }
        block
    }
}

fn blocks(config: &Config) -> impl Iterator<Item = Block> + '_ {
    config.layers.iter().map(|plan| Block::new(config, Some(plan), config.n_routed_experts))
}

/// Matrix elements that a token is multiplied with.
fn active_matrices(config: &Config, encoder_layers: usize) -> PerToken {
    let chosen = config.num_experts_per_tok as u128;
    let work = |block: Block| block.matrices + chosen * block.expert;
    let encoder: u128 = blocks(config).take(encoder_layers).map(work).sum();
    let decoder: u128 = blocks(config).skip(encoder_layers).map(work).sum();
    let global = blocks(config).nth(encoder_layers).map_or(0, |block| block.global);
    let head = config.vocab_size as u128 * config.hidden_size as u128;
    PerToken { prefill: encoder + global, decode: encoder + decoder + head }
}

/// All parameters of the backbone without Engram rows, and those that a token reads.
fn backbone_parameters(config: &Config, encoder_layers: usize) -> (u128, PerToken) {
    let (h, experts) = (config.hidden_size as u128, config.n_routed_experts as u128);
    let total = blocks(config).map(|block| block.matrices + block.vectors + experts * block.expert).sum::<u128>()
        + 2 * config.vocab_size as u128 * h
        + h;
    let vectors = |layers| blocks(config).take(layers).map(|block| block.vectors).sum::<u128>();
    let global = blocks(config).nth(encoder_layers).map_or(0, |block| block.global_vectors);
    let matrices = active_matrices(config, encoder_layers);
    let active = PerToken {
        prefill: h + matrices.prefill + vectors(encoder_layers) + global,
        decode: h + matrices.decode + vectors(config.num_hidden_layers) + h,
    };
    (total, active)
}

/// Values of Engram rows that a token looks up.
fn active_engram_rows(config: &Config, encoder_layers: usize) -> PerToken {
    let width = config.engram.as_ref().map_or(0, |engram| engram.width() as u128);
    let layers = |count| config.layers.iter().take(count).filter(|plan| plan.engram.is_some()).count() as u128;
    PerToken { prefill: width * layers(encoder_layers + 1), decode: width * layers(config.num_hidden_layers) }
}

fn draft_parameters(config: &Config) -> u128 {
    let Some(draft) = &config.dspark else { return 0 };
    let (h, rank) = (config.hidden_size as u128, draft.markov_rank as u128);
    let stage = Block::new(config, None, draft.n_routed_experts);
    let stages =
        draft.stages as u128 * (stage.matrices + stage.vectors + draft.n_routed_experts as u128 * stage.expert);
    let main = draft.target_layer_ids.len() as u128 * h * h + h;
    let markov = 2 * config.vocab_size as u128 * rank;
    stages + main + h + markov + h + rank
}

/// Parameters of `vision_config`'s tower and aligner and the three image vectors; 0 without a tower.
///
/// # Errors
/// [`Error::Config`] for a size that is no whole number or beyond 2^24.
pub fn vision_parameters(root: &Value, hidden_size: usize) -> Result<u128> {
    let Some(vision) = root.get("vision_config").filter(|v| !v.is_null()) else { return Ok(0) };
    let size = |name: &str| {
        let found = vision.get(name).unwrap_or(&Value::Null);
        found.as_u64().filter(|&v| v <= 1 << 24).map(u128::from).ok_or_else(|| {
            Error::config(format!("vision_config.{name}"), found, format!("a whole number 0..={}", 1 << 24))
        })
    };
    let layers = size("num_hidden_layers")?;
    if layers == 0 {
        return Ok(0);
    }
    let (v, inner, patch, down) =
        (size("hidden_size")?, size("intermediate_size")?, size("patch_size")?, size("downsample_ratio")?);
    let h = hidden_size as u128;
    let embed = v * 3 * patch * patch + v;
    let block = 2 * v + 3 * v * v + 3 * v + v * v + v + 3 * inner * v;
    let aligner = h * v * down * down + h + h * h + h;
    Ok(embed + layers * block + v + aligner + 3 * h)
}

/// Multiply-adds of the index scores of a layer, for the last of `context` tokens.
fn index_work(config: &Config, plan: &LayerPlan, context: usize) -> u128 {
    let entries = context.checked_div(plan.ratio).unwrap_or(0);
    let selects = matches!(plan.role, Role::Full | Role::Reindex);
    let scored = match plan.candidates {
        _ if !selects => 0,
        Candidates::Restricted => entries.min(config.candidate_topk_blocks * config.candidate_block_size),
        Candidates::Ignored | Candidates::Source => entries,
    };
    scored as u128 * config.index_n_heads as u128 * config.index_head_dim as u128
}

/// FLOPs of the index scores of all layers, a part of [`Inspection::flops`].
pub(super) fn index_flops(config: &Config, context: usize) -> u128 {
    2 * config.layers.iter().map(|plan| index_work(config, plan, context)).sum::<u128>()
}

/// Multiply-adds of scores and attention of a layer, for the last of `context` tokens.
fn attention_work(config: &Config, plan: &LayerPlan, context: usize) -> u128 {
    let entries = context.checked_div(plan.ratio).unwrap_or(0);
    let keys = context.min(config.sliding_window) + entries.min(config.index_topk);
    let per_key = 2 * config.num_attention_heads as u128 * config.head_dim as u128;
    keys as u128 * per_key + index_work(config, plan, context)
}

fn flops(config: &Config, encoder_layers: usize, context: usize) -> PerToken {
    let attention =
        |layers| config.layers.iter().take(layers).map(|plan| attention_work(config, plan, context)).sum::<u128>();
    let matrices = active_matrices(config, encoder_layers);
    PerToken {
        prefill: 2 * (matrices.prefill + attention(encoder_layers)),
        decode: 2 * (matrices.decode + attention(config.num_hidden_layers)),
    }
}

/// `12345678` as `12.3 M`.
fn short(count: u128) -> String {
    let units = [(1_000_000_000_000u128, "T"), (1_000_000_000, "B"), (1_000_000, "M"), (1_000, "k")];
    match units.iter().find(|(size, _)| count >= *size) {
        Some((size, unit)) => format!("{:.1} {unit}", count as f64 / *size as f64),
        None => count.to_string(),
    }
}

/// `2703360` as `2,703,360`.
fn grouped(count: u128) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = |f: &mut fmt::Formatter<'_>, name: &str, value: String| writeln!(f, "  {name:<33}{value}");
        let p = &self.parameters;
        writeln!(f, "layers: {} encoder, {} decoder", self.encoder_layers, self.layers.len() - self.encoder_layers)?;
        for run in self.layers.chunk_by(|a, b| a.to_string() == b.to_string()) {
            let (first, last) = (&run[0], &run[run.len() - 1]);
            let name =
                if run.len() == 1 { first.index.to_string() } else { format!("{}..{}", first.index, last.index) };
            row(f, &name, first.to_string())?;
        }
        if let Some(draft) = &self.draft {
            writeln!(f, "draft: blocks of {} tokens", draft.block_size)?;
            row(f, "stages", draft.stages.to_string())?;
            row(
                f,
                "see the inputs of layers",
                draft.target_layers.iter().map(usize::to_string).collect::<Vec<_>>().join(", "),
            )?;
            row(f, "experts", format!("{} of {}", draft.experts_per_token, draft.experts))?;
            row(f, "Markov rank", draft.markov_rank.to_string())?;
            row(f, "window rings", format!("{} bytes", grouped(draft.ring_bytes)))?;
        }
        writeln!(f, "parameters: {} ({})", short(p.total), grouped(p.total))?;
        row(f, "backbone", short(p.backbone))?;
        row(f, "Engram rows", short(p.engram_rows))?;
        row(f, "draft", short(p.draft))?;
        if p.vision > 0 {
            row(f, "vision (not run by Cedra)", short(p.vision))?;
        }
        row(f, "active a prompt token", short(p.active.prefill))?;
        row(f, "active a generated token", short(p.active.decode))?;
        row(f, "Engram values a prompt token", short(p.active_engram_rows.prefill))?;
        row(f, "Engram values a generated token", short(p.active_engram_rows.decode))?;
        writeln!(f, "at {} of at most {} tokens:", grouped(self.context as u128), grouped(self.max_context as u128))?;
        row(
            f,
            "global cache",
            format!("{} bytes a token, {} bytes", self.cache.bytes_per_token, grouped(self.cache.global_bytes)),
        )?;
        row(f, "window rings", format!("{} bytes", grouped(self.cache.ring_bytes)))?;
        row(f, "group remainders", format!("{} bytes", grouped(self.cache.remainder_bytes)))?;
        row(f, "cache in all", format!("{} bytes", grouped(self.cache.total_bytes)))?;
        row(f, "FLOPs a prompt token", short(self.flops.prefill))?;
        row(f, "FLOPs a generated token", short(self.flops.decode))?;
        let Some(memory) = &self.memory else { return Ok(()) };
        writeln!(f, "device memory: {} bytes", grouped(memory.total() as u128))?;
        for (kind, bytes) in memory.by_kind() {
            row(f, &format!("{kind:?}").to_lowercase(), format!("{} bytes", grouped(bytes as u128)))?;
        }
        Ok(())
    }
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.role)?;
        if self.ratio > 0 {
            write!(f, ", ratio {}", self.ratio)?;
        }
        match (self.role, self.kv_source, self.index_source) {
            ("reindex", Some(kv), _) => write!(f, ", entries of {kv}")?,
            ("reuse", Some(kv), Some(index)) => write!(f, ", entries of {kv}, selection of {index}")?,
            _ => {}
        }
        match self.candidates {
            Some("source") => f.write_str(", publishes candidates")?,
            Some(_) => f.write_str(", candidates only")?,
            None => {}
        }
        f.write_str(if self.engram { ", Engram" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");

    fn released(context: usize) -> Inspection {
        Inspection::open(format!("{FIXTURES}/reference/released-config.json"), Some(context)).unwrap()
    }

    #[test]
    fn released_parameters_are_those_of_its_tensors() {
        let p = released(1).parameters;
        // Sums over the shapes of the release's 96,085 tensors, scales not counted.
        assert_eq!(p.total, 763_205_315_794);
        assert_eq!(p.engram_rows, 196_613_849_600);
        assert_eq!(p.draft, 14_225_362_530);
        assert_eq!(p.vision, 485_268_480);
        assert_eq!(p.active_engram_rows, PerToken { prefill: 2 * 24 * 256, decode: 2 * 24 * 256 });
    }

    /// The plan of a config is that of the checkpoint that the release's formats give, and its cache holds what the counts say.
    #[test]
    fn released_memory() {
        let inspection = released(4096);
        let memory = inspection.memory.unwrap();
        let stored = 476.5 * (1u64 << 30) as f64;
        let draft_and_vision = 14.2e9 * 0.6;
        let weights = memory.weights as f64;
        assert!(weights < stored && weights > stored - 2.0 * draft_and_vision, "{weights:e} of {stored:e}");
        let cache = inspection.cache.total_bytes as u64;
        // Besides, a page is on its way at times.
        let page = 128 * 890;
        let planned = memory.cache + memory.pages;
        assert!(planned >= cache + page && planned < cache + page + 16384, "{planned} and {cache}");
    }

    #[test]
    fn released_cache_bytes() {
        let cache = released(1_048_576).cache;
        assert_eq!(cache.bytes_per_token, 890.0);
        assert_eq!(cache.global_bytes, 890 << 20);
        assert_eq!(cache.ring_bytes, 2_703_360);
        assert_eq!(cache.remainder_bytes, 3 * 2 * 512 * 4);
        // Three Full layers have no entry for an incomplete group of two.
        assert_eq!(released(7).cache.global_bytes, 3 * 3 * 356 + 7 * 356);
    }

    /// A token's work, added up the long way from the released shapes.
    #[test]
    fn released_active_parameters_and_flops() {
        let attention = 1280 * 5120 + 32768 * 1280 + 512 * 5120 + 8192 * 4096 + 5120 * 8192;
        let moe = 384 * 5120 + 7 * 3 * 2304 * 5120;
        let layer: u128 = attention + moe + 2 * 24 * 20480;
        let index: u128 = 4096 * 1280 + 32 * 5120;
        let full = |ratio: u128| index + ratio * 512 * 5120 + 128 * 512;
        let engram: u128 = 25600 * 6144;
        let encoder = 20 * layer + 3 * full(2) + 2 * engram;
        let prefill = encoder + 512 * 5120 + 128 * 512;
        let decode = encoder + 20 * layer + full(1) + 4 * index + 129_280 * 5120;

        let vectors: u128 = 2 * 27 + 2 * 5120 + 1280 + 512 + 64 + 2 * 384;
        let global: u128 = 512 + 128;
        let active = released(1).parameters.active;
        let encoder_vectors = 20 * vectors + 3 * global + 2 * 2 * 4 * 5120;
        assert_eq!(active.prefill, 5120 + prefill + encoder_vectors + global + 5120);
        assert_eq!(active.decode, 5120 + decode + encoder_vectors + 20 * vectors + global + 5120);

        let flops = released(100_000).flops;
        let (pair, score): (u128, u128) = (2 * 64 * 512, 32 * 128);
        let encoder_attention = 2 * 128 * pair + 18 * (128 + 512) * pair + 3 * 50_000 * score;
        assert_eq!(flops.prefill, 2 * (prefill + encoder_attention));
        let decoder_attention = 20 * (128 + 512) * pair + (100_000 + 4 * 16_384) * score;
        assert_eq!(flops.decode, 2 * (decode + encoder_attention + decoder_attention));
    }

    #[test]
    fn pocket_parameters_are_those_of_its_file() {
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/models/pocket");
        let p = Inspection::open(model, Some(64)).unwrap().parameters;
        let bytes = std::fs::read(format!("{model}/model.safetensors")).unwrap();
        let (mut draft, mut rows, mut rest) = (0, 0, 0);
        for (name, tensor) in safetensors::SafeTensors::deserialize(&bytes).unwrap().iter() {
            let elements = tensor.shape().iter().map(|&n| n as u128).product::<u128>();
            let elements = match tensor.dtype() {
                safetensors::Dtype::F8_E8M0 => continue,
                safetensors::Dtype::I8 => 2 * elements, // two FP4 codes a byte
                _ => elements,
            };
            *match name {
                _ if name.starts_with("mtp.") => &mut draft,
                _ if name.ends_with("engram.embed.weight") => &mut rows,
                _ => &mut rest,
            } += elements;
        }
        assert_eq!((p.backbone, p.engram_rows, p.draft, p.vision), (rest, rows, draft, 0));
    }

    /// The pocket model's last Full layer opens with an Engram, which its global entries need.
    #[test]
    fn an_engram_on_the_last_full_layer_is_read_in_prefill() {
        let mut config = Config::open(concat!(env!("CARGO_MANIFEST_DIR"), "/models/pocket")).unwrap();
        let with = Inspection::new(&config, 0, None).unwrap();
        config.layers[4].engram = None;
        let without = Inspection::new(&config, 0, None).unwrap();
        let matrix: u128 = 5 * 128 * 192;
        assert_eq!(with.parameters.active.prefill - without.parameters.active.prefill, matrix + 2 * 4 * 128);
        assert_eq!(with.flops.prefill - without.flops.prefill, 2 * matrix);
        assert_eq!(with.parameters.active_engram_rows.prefill - without.parameters.active_engram_rows.prefill, 192);
    }

    #[test]
    fn text_names_every_layer_and_the_figures() {
        let text = released(1_048_576).to_string();
        for line in [
            "layers: 20 encoder, 20 decoder",
            "  0                                window",
            "  1                                window, Engram",
            "  2                                full, ratio 2",
            "  3..7                             reuse, ratio 2, entries of 2, selection of 2",
            "  14                               full, ratio 2, Engram",
            "  20                               full, ratio 1, publishes candidates",
            "  24                               reindex, ratio 1, entries of 20, candidates only",
            "  37..39                           reuse, ratio 1, entries of 20, selection of 36",
            "draft: blocks of 5 tokens",
            "  stages                           3",
            "  see the inputs of layers         37, 38, 39",
            "  experts                          3 of 128",
            "  Markov rank                      256",
            "  window rings                     210,672 bytes",
            "parameters: 763.2 B (763,205,315,794)",
            "  global cache                     890 bytes a token, 933,232,640 bytes",
            "  window rings                     2,703,360 bytes",
        ] {
            assert!(text.lines().any(|found| found == line), "no line `{line}` in:\n{text}");
        }
    }

    #[test]
    fn json_holds_whole_numbers() {
        let json = serde_json::to_string(&released(1)).unwrap();
        let value: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["parameters"]["total"], 763_205_315_794u64);
        assert_eq!(value["cache"]["ring_bytes"], 2_703_360);
        assert_eq!(value["layers"][20]["candidates"], "source");
        assert_eq!(value["draft"]["target_layers"], serde_json::json!([37, 38, 39]));
    }

    #[test]
    fn contexts_outside_the_model_are_refused() {
        let path = format!("{FIXTURES}/reference/released-config.json");
        let error = Inspection::open(&path, Some(1_048_577)).unwrap_err();
        assert_eq!(error.to_string(), "context overrun: 1048577 tokens needed, 1048576 allowed");
        let error = Inspection::open(&path, Some(0)).unwrap_err();
        assert_eq!(error.to_string(), "setting `context`: found 0, allowed: 1..=1048576");
        assert_eq!(Inspection::open(&path, None).unwrap().context, 1_048_576);
    }
}
