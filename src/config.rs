//! What a model is: `config.json`, parsed, validated, resolved into a [`LayerPlan`] per layer (`numerics.md` §0).

/// YaRN settings of the layers with a ratio (`numerics.md` §4).
#[derive(Debug, Clone, PartialEq)]
pub struct Yarn {
    /// Context extension factor.
    pub factor: f64,
    /// Rotations above which a frequency stays as it is.
    pub beta_fast: f64,
    /// Rotations below which a frequency is divided by the factor.
    pub beta_slow: f64,
    /// Context the unscaled frequencies were made for.
    pub original_max_position_embeddings: usize,
}

/// Engram settings (`numerics.md` §8).
#[derive(Debug, Clone, PartialEq)]
pub struct EngramConfig {
    /// Layers that open with an Engram.
    pub layer_ids: Vec<usize>,
    /// Rows of each layer's table.
    pub num_embeddings: Vec<usize>,
    /// Longest n-gram, N.
    pub max_ngram_size: usize,
    /// Lower bound of the prime search, plus one.
    pub vocab_size: usize,
    /// Hash heads of each n-gram size.
    pub n_heads: usize,
    /// Channels of a row.
    pub head_dim: usize,
    /// Token that stands for what lies before the text.
    pub pad_token_id: u32,
    /// Number of distinct compressed token ids.
    pub compressed_vocab_size: usize,
}

impl EngramConfig {
    /// Rows looked up per token and layer: (N - 1) · heads.
    pub fn rows_per_token(&self) -> usize {
        (self.max_ngram_size - 1) * self.n_heads
    }
    /// Channels of all rows of a token: the input width of `engram.wkv`.
    pub fn width(&self) -> usize {
        self.rows_per_token() * self.head_dim
    }
}

/// Draft settings (`numerics.md` §13).
#[derive(Debug, Clone, PartialEq)]
pub struct DsparkConfig {
    /// Draft stages.
    pub stages: usize,
    /// Tokens of a drafted block.
    pub block_size: usize,
    /// Token that fills the block's unknown places.
    pub noise_token_id: u32,
    /// Layers whose attention inputs the draft sees.
    pub target_layer_ids: Vec<usize>,
    /// Rank of the Markov head.
    pub markov_rank: usize,
    /// Routed experts of a stage.
    pub n_routed_experts: usize,
    /// Experts chosen per token.
    pub num_experts_per_tok: usize,
}

/// What a layer does for the global cache (`numerics.md` §0).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Window attention only (ratio 0).
    Window,
    /// Writes latents and index keys, selects anew.
    Full,
    /// Selects anew among the last Full layer's entries.
    Reindex,
    /// Attends to what was last selected.
    Reuse,
}

/// What candidates mean to a layer that selects (`numerics.md` §6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Candidates {
    /// The layer scores every visible entry.
    Ignored,
    /// The layer scores every visible entry and publishes the candidate blocks.
    Source,
    /// The layer scores candidate entries only.
    Restricted,
}

/// One layer, resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerPlan {
    /// Index of the layer.
    pub index: usize,
    /// Its role.
    pub role: Role,
    /// Tokens per global entry; 0 for window-only layers.
    pub ratio: usize,
    /// The Full layer whose entries it attends to.
    pub kv_source: Option<usize>,
    /// The layer whose selection it attends to.
    pub index_source: Option<usize>,
    /// Its part in the candidate pool (meaningful for Full and Reindex layers).
    pub candidates: Candidates,
    /// Index among the Engram layers, when it opens with an Engram.
    pub engram: Option<usize>,
}

/// A model of the family. Field names are those of `config.json`.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // the names and meanings are those of `config.json`, listed in `numerics.md` §0
pub struct Config {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub head_dim: usize,
    pub qk_rope_head_dim: usize,
    pub q_lora_rank: usize,
    pub o_lora_rank: usize,
    pub o_groups: usize,
    pub sliding_window: usize,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f32,
    pub rope_theta: f64,
    pub compress_rope_theta: f64,
    pub yarn: Yarn,
    pub moe_intermediate_size: usize,
    pub n_routed_experts: usize,
    pub num_experts_per_tok: usize,
    pub norm_topk_prob: bool,
    pub routed_scaling_factor: f32,
    pub swiglu_limit: f32,
    pub index_n_heads: usize,
    pub index_head_dim: usize,
    pub index_topk: usize,
    pub candidate_topk_blocks: usize,
    pub candidate_block_size: usize,
    pub hc_mult: usize,
    pub hc_sinkhorn_iters: usize,
    pub hc_eps: f32,
    pub engram: Option<EngramConfig>,
    pub dspark: Option<DsparkConfig>,
    pub bos_token_id: u32,
    pub eos_token_id: u32,
    pub pad_token_id: u32,
    pub image_token_id: Option<u32>,
    /// One entry a backbone layer.
    pub layers: Vec<LayerPlan>,
}
