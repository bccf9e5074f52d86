//! The released tensor layout (`numerics.md` §14): every name with its shape and the formats it may be stored in.

use safetensors::tensor::Dtype;

use super::Format;
use crate::config::{Config, LayerPlan, Role};

/// Unquantised tensors: any of the three floats.
const PLAIN: &[Format] = &[Format::F32, Format::Bf16, Format::F16];
/// Weights of linear layers that the release quantises in 32×32 blocks.
const LINEAR: &[Format] = &[Format::F32, Format::Bf16, Format::F16, Format::Fp8Block];
/// Weights of routed experts.
const EXPERT: &[Format] = &[Format::F32, Format::Bf16, Format::F16, Format::Fp8Block, Format::Fp4];
/// Engram tables.
const TABLE: &[Format] = &[Format::F32, Format::Bf16, Format::F16, Format::Fp8Row];

/// A tensor that a checkpoint of a config has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Full name.
    pub name: String,
    /// Logical shape: rows and channels, however they are packed.
    pub shape: Vec<usize>,
    /// Formats that it may be stored in.
    pub formats: &'static [Format],
    /// Whether it must be there. Draft tensors are all there or none of them is.
    pub required: bool,
}

impl TensorSpec {
    /// Number type and shape of the stored tensor in `format`, and the shape of its `.scale`.
    pub fn stored(&self, format: Format) -> (Dtype, Vec<usize>, Option<[usize; 2]>) {
        let (rows, columns) = match self.shape[..] {
            [columns] => (1, columns),
            [rows, columns] => (rows, columns),
            _ => unreachable!("specs have one or two axes"),
        };
        let chunks = columns.div_ceil(32);
        match format {
            Format::F32 => (Dtype::F32, self.shape.clone(), None),
            Format::Bf16 => (Dtype::BF16, self.shape.clone(), None),
            Format::F16 => (Dtype::F16, self.shape.clone(), None),
            Format::Fp8Block => (Dtype::F8_E4M3, self.shape.clone(), Some([rows.div_ceil(32), chunks])),
            Format::Fp8Row => (Dtype::F8_E4M3, self.shape.clone(), Some([rows, chunks])),
            Format::Fp4 => (Dtype::I8, vec![rows, columns.div_ceil(2)], Some([rows, chunks])),
        }
    }

    /// Name of the scale tensor: `X.scale` beside `X.weight`.
    pub fn scale_name(&self) -> Option<String> {
        self.name.strip_suffix(".weight").map(|stem| format!("{stem}.scale"))
    }
}

/// Tensors of draft stages, by name.
pub fn is_draft(name: &str) -> bool {
    name.starts_with("mtp.")
}

/// Tensors that a checkpoint may have although its config asks for none: draft stages, vision tower and its aligner. The last
/// two are left alone, and so are draft stages where the config has none.
pub fn is_deferred(name: &str) -> bool {
    is_draft(name)
        || ["vision.", "aligner."].iter().any(|prefix| name.starts_with(prefix))
        || ["image_start", "image_end", "image_newline"].contains(&name)
}

/// Every tensor of the backbone (required) and of the draft stages (all or none).
pub fn expected(config: &Config) -> Vec<TensorSpec> {
    let mut list = List { config, specs: Vec::new(), required: true };
    let (v, h) = (config.vocab_size, config.hidden_size);
    list.add("embed.weight", &[v, h], PLAIN);
    list.add("norm.weight", &[h], PLAIN);
    list.add("head.weight", &[v, h], PLAIN);
    for plan in &config.layers {
        let prefix = format!("layers.{}", plan.index);
        list.block(&prefix, config.n_routed_experts);
        list.global_cache(&prefix, plan);
        if let Some(slot) = plan.engram {
            list.engram(&prefix, slot);
        }
    }
    list.required = false;
    list.draft();
    list.specs
}

struct List<'a> {
    config: &'a Config,
    specs: Vec<TensorSpec>,
    required: bool,
}

impl List<'_> {
    fn add(&mut self, name: impl Into<String>, shape: &[usize], formats: &'static [Format]) {
        self.specs.push(TensorSpec { name: name.into(), shape: shape.into(), formats, required: self.required });
    }

    /// What every block has: norms, mHC, attention, experts.
    fn block(&mut self, prefix: &str, experts: usize) {
        let c = self.config;
        let (h, n, d) = (c.hidden_size, c.hc_mult, c.head_dim);
        let (heads, q, groups, o) = (c.num_attention_heads, c.q_lora_rank, c.o_groups, c.o_lora_rank);
        for sublayer in ["attn", "ffn"] {
            self.add(format!("{prefix}.{sublayer}_norm.weight"), &[h], PLAIN);
            self.add(format!("{prefix}.hc_{sublayer}_fn"), &[n * (n + 2), n * h], PLAIN);
            self.add(format!("{prefix}.hc_{sublayer}_base"), &[n * (n + 2)], PLAIN);
            self.add(format!("{prefix}.hc_{sublayer}_scale"), &[3], PLAIN);
        }
        self.add(format!("{prefix}.attn.wq_a.weight"), &[q, h], LINEAR);
        self.add(format!("{prefix}.attn.wq_b.weight"), &[heads * d, q], LINEAR);
        self.add(format!("{prefix}.attn.wkv.weight"), &[d, h], LINEAR);
        self.add(format!("{prefix}.attn.wo_a.weight"), &[groups * o, heads / groups * d], LINEAR);
        self.add(format!("{prefix}.attn.wo_b.weight"), &[h, groups * o], LINEAR);
        self.add(format!("{prefix}.attn.q_norm.weight"), &[q], PLAIN);
        self.add(format!("{prefix}.attn.kv_norm.weight"), &[d], PLAIN);
        self.add(format!("{prefix}.attn.attn_sink"), &[heads], PLAIN);
        self.add(format!("{prefix}.ffn.gate.weight"), &[experts, h], PLAIN);
        self.add(format!("{prefix}.ffn.gate.bias"), &[experts], PLAIN);
        self.add(format!("{prefix}.ffn.gate.bias_vl"), &[experts], PLAIN);
        for expert in 0..experts {
            self.expert(&format!("{prefix}.ffn.experts.{expert}"), EXPERT);
        }
        self.expert(&format!("{prefix}.ffn.shared_experts"), LINEAR);
    }

    fn expert(&mut self, prefix: &str, formats: &'static [Format]) {
        let (h, inner) = (self.config.hidden_size, self.config.moe_intermediate_size);
        self.add(format!("{prefix}.w1.weight"), &[inner, h], formats);
        self.add(format!("{prefix}.w2.weight"), &[h, inner], formats);
        self.add(format!("{prefix}.w3.weight"), &[inner, h], formats);
    }

    /// What a layer that writes or selects from the global cache has besides.
    fn global_cache(&mut self, prefix: &str, plan: &LayerPlan) {
        let c = self.config;
        let (h, d, heads, key) = (c.hidden_size, c.head_dim, c.index_n_heads, c.index_head_dim);
        if plan.role == Role::Full {
            self.add(format!("{prefix}.attn.compressor.wkv.weight"), &[d, h], PLAIN);
            if plan.ratio > 1 {
                self.add(format!("{prefix}.attn.compressor.wgate.weight"), &[d, h], PLAIN);
            }
            self.add(format!("{prefix}.attn.compressor.norm.weight"), &[d], PLAIN);
            self.add(format!("{prefix}.attn.indexer.wk.weight"), &[key, d], PLAIN);
            self.add(format!("{prefix}.attn.indexer.k_norm.weight"), &[key], PLAIN);
        }
        if matches!(plan.role, Role::Full | Role::Reindex) {
            self.add(format!("{prefix}.attn.indexer.wq_b.weight"), &[heads * key, c.q_lora_rank], LINEAR);
            self.add(format!("{prefix}.attn.indexer.weights_proj.weight"), &[heads, h], PLAIN);
        }
    }

    fn engram(&mut self, prefix: &str, slot: usize) {
        let (h, n) = (self.config.hidden_size, self.config.hc_mult);
        let Some(engram) = &self.config.engram else { return };
        self.add(format!("{prefix}.engram.embed.weight"), &[engram.num_embeddings[slot], engram.head_dim], TABLE);
        self.add(format!("{prefix}.engram.wkv.weight"), &[(n + 1) * h, engram.width()], LINEAR);
        self.add(format!("{prefix}.engram.q_weight"), &[n, h], PLAIN);
        self.add(format!("{prefix}.engram.k_weight"), &[n, h], PLAIN);
    }

    /// The draft stages (`numerics.md` §13).
    fn draft(&mut self) {
        let (v, h) = (self.config.vocab_size, self.config.hidden_size);
        let Some(draft) = &self.config.dspark else { return };
        for stage in 0..draft.stages {
            self.block(&format!("mtp.{stage}"), draft.n_routed_experts);
        }
        let (last, rank) = (draft.stages - 1, draft.markov_rank);
        self.add("mtp.0.main_proj.weight", &[h, draft.target_layer_ids.len() * h], LINEAR);
        self.add("mtp.0.main_norm.weight", &[h], PLAIN);
        self.add(format!("mtp.{last}.norm.weight"), &[h], PLAIN);
        self.add(format!("mtp.{last}.markov_head.embed.weight"), &[v, rank], PLAIN);
        self.add(format!("mtp.{last}.markov_head.head.weight"), &[v, rank], PLAIN);
        self.add(format!("mtp.{last}.confidence_head.proj.weight"), &[1, h + rank], PLAIN);
    }
}
