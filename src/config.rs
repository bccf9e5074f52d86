//! What a model is: `config.json`, parsed, validated, resolved into a [`LayerPlan`] per layer (`numerics.md` §0).

use std::path::Path;

use serde_json::{json, Map, Value};

use crate::{Error, Result};

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
    /// Whether the chosen experts' scores are normalised; with one expert a token they never are.
    pub norm_topk_prob: bool,
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
    /// Whether the chosen experts' scores are normalised; with one expert a token they never are.
    pub norm_topk_prob: bool,
    pub routed_scaling_factor: f32,
    pub swiglu_limit: f32,
    pub index_n_heads: usize,
    pub index_head_dim: usize,
    pub index_topk: usize,
    /// 0 when the file has none and no layer is the candidate source; so is the next.
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

/// Sizes beyond this are refused: no product of two of them overflows, and no list made from them exhausts memory.
const MAX_SIZE: usize = 1 << 24;

impl Config {
    /// Reads `config.json`, or the `config.json` of a folder.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
        let text = std::fs::read_to_string(&file).map_err(|e| Error::io(&file, e))?;
        Self::parse(&text, &file)
    }

    /// Parses the text of a `config.json`: text fields nested under `text_config` or flat.
    pub fn from_json(text: &str) -> Result<Self> {
        Self::parse(text, Path::new("config.json"))
    }

    /// The first layer of the decoder: the last Full layer, whose entries are the decoder's only global cache. The number of
    /// layers when none is Full.
    pub fn decoder(&self) -> usize {
        self.layers.iter().rposition(|layer| layer.role == Role::Full).unwrap_or(self.layers.len())
    }

    fn parse(text: &str, path: &Path) -> Result<Self> {
        let root: Value = serde_json::from_str(text).map_err(|e| Error::malformed(path, format!("not JSON: {e}")))?;
        let outer = root.as_object().ok_or_else(|| Error::malformed(path, "not a JSON object"))?;
        let inner = match outer.get("text_config") {
            None | Some(Value::Null) => outer,
            Some(Value::Object(map)) => map,
            Some(other) => return Err(Error::config("text_config", other, "an object")),
        };
        Self::resolve(&Fields { inner, outer })
    }

    fn resolve(f: &Fields) -> Result<Self> {
        // What the family never varies: a file that says otherwise is another model.
        f.one_of("model_type", &["deepseek_v41", "deepseek_v41_text"])?;
        f.one_of("hidden_act", &["silu"])?;
        f.one_of("scoring_func", &["sqrtsoftplus"])?;
        f.one_of("topk_method", &["noaux_tc"])?;
        f.flag("attention_bias", false, Some(false))?;
        f.flag("tie_word_embeddings", false, Some(false))?;
        f.exactly_one("num_key_value_heads")?;
        f.exactly_one("n_shared_experts")?;
        f.quantization()?;

        let vocab_size = f.size("vocab_size")?;
        let num_hidden_layers = f.size("num_hidden_layers")?;
        let head_dim = f.size("head_dim")?;
        let index_head_dim = f.size("index_head_dim")?;
        let qk_rope_head_dim = f.size("qk_rope_head_dim")?;
        let num_attention_heads = f.size("num_attention_heads")?;
        let o_groups = f.size("o_groups")?;
        if head_dim % 2 != 0 {
            return Err(Error::config("head_dim", head_dim, "an even number"));
        }
        let rope_limit = head_dim.min(index_head_dim);
        if qk_rope_head_dim % 2 != 0 || qk_rope_head_dim > rope_limit {
            let allowed =
                format!("an even number up to {rope_limit} (head_dim {head_dim}, index_head_dim {index_head_dim})");
            return Err(Error::config("qk_rope_head_dim", qk_rope_head_dim, allowed));
        }
        if num_attention_heads % o_groups != 0 {
            let allowed = format!("a divisor of num_attention_heads {num_attention_heads}");
            return Err(Error::config("o_groups", o_groups, allowed));
        }
        let (n_routed_experts, num_experts_per_tok) = f.experts("n_routed_experts", "num_experts_per_tok")?;

        let stages = f.whole_or("num_nextn_predict_layers", 0, MAX_SIZE, 0)?;
        let engram = f.engram(num_hidden_layers, vocab_size)?;
        let dspark = f.dspark(stages, num_hidden_layers, vocab_size)?;
        let (layers, candidate_source) = f.schedule(num_hidden_layers, stages, engram.as_ref())?;
        let candidate_size = |name| if candidate_source { f.size(name) } else { f.whole_or(name, 0, MAX_SIZE, 0) };

        let config = Self {
            vocab_size,
            hidden_size: f.size("hidden_size")?,
            num_hidden_layers,
            num_attention_heads,
            head_dim,
            qk_rope_head_dim,
            q_lora_rank: f.size("q_lora_rank")?,
            o_lora_rank: f.size("o_lora_rank")?,
            o_groups,
            sliding_window: f.size("sliding_window")?,
            max_position_embeddings: f.size("max_position_embeddings")?,
            rms_norm_eps: f.positive_or("rms_norm_eps", 1e-20)? as f32,
            rope_theta: f.rope_theta()?,
            compress_rope_theta: f.positive("compress_rope_theta")?,
            yarn: f.yarn()?,
            moe_intermediate_size: f.size("moe_intermediate_size")?,
            n_routed_experts,
            num_experts_per_tok,
            norm_topk_prob: f.flag("norm_topk_prob", true, None)? && num_experts_per_tok > 1,
            routed_scaling_factor: f.positive_or("routed_scaling_factor", 1.5)? as f32,
            swiglu_limit: f.positive_or("swiglu_limit", 10.0)? as f32,
            index_n_heads: f.size("index_n_heads")?,
            index_head_dim,
            index_topk: f.size("index_topk")?,
            candidate_topk_blocks: candidate_size("candidate_topk_blocks")?,
            candidate_block_size: candidate_size("candidate_block_size")?,
            hc_mult: f.size("hc_mult")?,
            hc_sinkhorn_iters: f.whole_or("hc_sinkhorn_iters", 1, MAX_SIZE, 20)?,
            hc_eps: f.positive_or("hc_eps", 1e-6)? as f32,
            engram,
            dspark,
            bos_token_id: f.token_or("bos_token_id", vocab_size, 0)?,
            eos_token_id: f.token_or("eos_token_id", vocab_size, 1)?,
            pad_token_id: f.token_or("pad_token_id", vocab_size, 2)?,
            image_token_id: f.get("image_token_id").map(|_| f.token("image_token_id", vocab_size)).transpose()?,
            layers,
        };
        config.check_products()?;
        Ok(config)
    }

    /// Widths that are products of two fields stay within the bound of a single one.
    fn check_products(&self) -> Result<()> {
        let (engram, draft) = (self.engram.as_ref(), self.dspark.as_ref());
        let products = [
            ("num_attention_heads", self.num_attention_heads, "head_dim", self.head_dim),
            ("o_groups", self.o_groups, "o_lora_rank", self.o_lora_rank),
            ("index_n_heads", self.index_n_heads, "index_head_dim", self.index_head_dim),
            ("hc_mult", self.hc_mult, "hc_mult + 2", self.hc_mult + 2),
            ("hc_mult", self.hc_mult + 1, "hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers, "n_routed_experts", self.n_routed_experts),
            (
                "engram_max_ngram_size",
                engram.map_or(0, |e| e.max_ngram_size),
                "engram_n_heads",
                engram.map_or(0, |e| e.n_heads),
            ),
            (
                "num_nextn_predict_layers",
                draft.map_or(0, |d| d.stages),
                "dspark_n_routed_experts",
                draft.map_or(1, |d| d.n_routed_experts),
            ),
            ("dspark_block_size", draft.map_or(0, |d| d.block_size), "hidden_size", self.hidden_size),
            ("dspark_markov_rank", draft.map_or(0, |d| d.markov_rank), "hidden_size", self.hidden_size),
        ];
        for (field, a, other, b) in products {
            if a as u64 * b as u64 > MAX_SIZE as u64 {
                return Err(Error::config(field, a, format!("at most {} with {other} {b}", MAX_SIZE / b)));
            }
        }
        if let Some(e) = engram.filter(|e| e.rows_per_token() as u64 * e.head_dim as u64 > MAX_SIZE as u64) {
            let allowed = format!("at most {} with {} rows a token", MAX_SIZE / e.rows_per_token(), e.rows_per_token());
            return Err(Error::config("engram_head_dim", e.head_dim, allowed));
        }
        Ok(())
    }
}

/// The fields of a `config.json`: those of `text_config` first, then the outer ones. `null` counts as absent.
struct Fields<'a> {
    inner: &'a Map<String, Value>,
    outer: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    fn get(&self, name: &str) -> Option<&'a Value> {
        let present = |map: &'a Map<String, Value>| map.get(name).filter(|v| !v.is_null());
        present(self.inner).or_else(|| present(self.outer))
    }

    fn whole(&self, name: &str, min: usize, max: usize) -> Result<usize> {
        let allowed = || format!("a whole number {min}..={max}");
        let value = self.get(name).ok_or_else(|| Error::config(name, "nothing", allowed()))?;
        whole(value, min, max).ok_or_else(|| Error::config(name, value, allowed()))
    }

    fn whole_or(&self, name: &str, min: usize, max: usize, default: usize) -> Result<usize> {
        self.get(name).map_or(Ok(default), |_| self.whole(name, min, max))
    }

    fn size(&self, name: &str) -> Result<usize> {
        self.whole(name, 1, MAX_SIZE)
    }

    fn token(&self, name: &str, vocab_size: usize) -> Result<u32> {
        Ok(self.whole(name, 0, vocab_size - 1)? as u32)
    }

    fn token_or(&self, name: &str, vocab_size: usize, default: u32) -> Result<u32> {
        self.get(name).map_or(Ok(default), |_| self.token(name, vocab_size))
    }

    fn positive(&self, name: &str) -> Result<f64> {
        positive(name, self.get(name), f32::MIN_POSITIVE as f64)
    }

    fn positive_or(&self, name: &str, default: f64) -> Result<f64> {
        self.get(name).map_or(Ok(default), |_| self.positive(name))
    }

    fn flag(&self, name: &str, default: bool, only: Option<bool>) -> Result<bool> {
        let value = match self.get(name) {
            None => return Ok(default),
            Some(value) => value,
        };
        match (value.as_bool(), only) {
            (Some(b), None) => Ok(b),
            (Some(b), Some(only)) if b == only => Ok(b),
            (_, Some(only)) => Err(Error::config(name, value, only.to_string())),
            (None, None) => Err(Error::config(name, value, "true or false")),
        }
    }

    fn one_of(&self, name: &str, allowed: &[&str]) -> Result<()> {
        match self.inner.get(name) {
            None | Some(Value::Null) => Ok(()),
            Some(Value::String(s)) if allowed.contains(&s.as_str()) => Ok(()),
            Some(other) => Err(Error::config(name, other, allowed.join(" or "))),
        }
    }

    fn exactly_one(&self, name: &str) -> Result<()> {
        match self.get(name) {
            Some(value) if value.as_u64() != Some(1) => Err(Error::config(name, value, "1")),
            _ => Ok(()),
        }
    }

    fn list(&self, name: &str, max: usize) -> Result<Vec<usize>> {
        let allowed = || format!("a list of whole numbers 0..={max}");
        let value = self.get(name).ok_or_else(|| Error::config(name, "nothing", allowed()))?;
        let items = value.as_array().ok_or_else(|| Error::config(name, value, allowed()))?;
        items
            .iter()
            .enumerate()
            .map(|(i, v)| whole(v, 0, max).ok_or_else(|| Error::config(format!("{name}[{i}]"), v, allowed())))
            .collect()
    }

    /// A strictly ascending list of layer indices.
    fn layer_list(&self, name: &str, layers: usize) -> Result<Vec<usize>> {
        let ids = self.list(name, layers - 1)?;
        match ids.windows(2).position(|w| w[0] >= w[1]) {
            Some(i) => Err(Error::config(format!("{name}[{}]", i + 1), ids[i + 1], format!("more than {}", ids[i]))),
            None => Ok(ids),
        }
    }

    /// Routed experts and how many of them a token uses.
    fn experts(&self, all: &str, chosen: &str) -> Result<(usize, usize)> {
        let n = self.size(all)?;
        Ok((n, self.whole(chosen, 1, n)?))
    }

    /// The packed layout of the release, when the file says that it is packed.
    fn quantization(&self) -> Result<()> {
        let Some(quant) = self.get("quantization_config") else { return Ok(()) };
        let expected = [("weight_block_size", json!([32, 32])), ("fmt", json!("e4m3")), ("scale_fmt", json!("ue8m0"))];
        for (key, allowed) in expected {
            match quant.get(key) {
                Some(found) if *found != allowed => {
                    return Err(Error::config(format!("quantization_config.{key}"), found, allowed.to_string()))
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn rope(&self) -> Result<(&'static str, &'a Value)> {
        let found = ["rope_scaling", "rope_parameters"].into_iter().find_map(|name| Some((name, self.get(name)?)));
        found.ok_or_else(|| {
            Error::config("rope_scaling", "nothing", "an object with rope_type yarn (or rope_parameters)")
        })
    }

    /// θ of the window-only layers. What `rope_parameters` repeats of it is the same number.
    fn rope_theta(&self) -> Result<f64> {
        match (self.get("rope_theta"), self.rope()?) {
            (None, (name, rope)) if rope.get("rope_theta").is_some() => {
                positive(&format!("{name}.rope_theta"), rope.get("rope_theta"), f32::MIN_POSITIVE as f64)
            }
            _ => self.positive_or("rope_theta", 10000.0),
        }
    }

    fn yarn(&self) -> Result<Yarn> {
        let (name, rope) = self.rope()?;
        let field = |key: &str| format!("{name}.{key}");
        let kind = rope.get("rope_type").or_else(|| rope.get("type"));
        if kind.and_then(Value::as_str) != Some("yarn") {
            return Err(Error::config(field("rope_type"), found(kind), "yarn"));
        }
        let number = |key: &str, min| positive(&field(key), rope.get(key), min);
        let yarn = Yarn {
            factor: number("factor", 1.0)?,
            beta_fast: number("beta_fast", f32::MIN_POSITIVE as f64)?,
            beta_slow: number("beta_slow", f32::MIN_POSITIVE as f64)?,
            original_max_position_embeddings: {
                let (key, max) = ("original_max_position_embeddings", MAX_SIZE);
                let value = rope.get(key);
                value
                    .and_then(|v| whole(v, 1, max))
                    .ok_or_else(|| Error::config(field(key), found(value), format!("a whole number 1..={max}")))?
            },
        };
        if yarn.beta_fast < yarn.beta_slow {
            return Err(Error::config(
                field("beta_fast"),
                yarn.beta_fast,
                format!("at least beta_slow {}", yarn.beta_slow),
            ));
        }
        Ok(yarn)
    }

    fn engram(&self, layers: usize, vocab_size: usize) -> Result<Option<EngramConfig>> {
        if self.get("engram_layer_ids").is_none() {
            return Ok(None);
        }
        let layer_ids = self.layer_list("engram_layer_ids", layers)?;
        if layer_ids.is_empty() {
            return Ok(None);
        }
        // A row index is a u32 on the device.
        let num_embeddings = self.list("engram_num_embeddings", u32::MAX as usize)?;
        if num_embeddings.len() != layer_ids.len() || num_embeddings.contains(&0) {
            let allowed = format!("{} positive row counts, one for each of engram_layer_ids", layer_ids.len());
            return Err(Error::config("engram_num_embeddings", format!("{num_embeddings:?}"), allowed));
        }
        Ok(Some(EngramConfig {
            layer_ids,
            num_embeddings,
            max_ngram_size: self.whole("engram_max_ngram_size", 2, MAX_SIZE)?,
            vocab_size: self.whole("engram_vocab_size", 2, u32::MAX as usize)?,
            n_heads: self.size("engram_n_heads")?,
            head_dim: self.size("engram_head_dim")?,
            pad_token_id: self.token("engram_pad_token_id", vocab_size)?,
            compressed_vocab_size: self.whole("engram_compressed_vocab_size", 1, vocab_size)?,
        }))
    }

    fn dspark(&self, stages: usize, layers: usize, vocab_size: usize) -> Result<Option<DsparkConfig>> {
        if stages == 0 {
            return Ok(None);
        }
        let target_layer_ids = self.layer_list("dspark_target_layer_ids", layers)?;
        if target_layer_ids.is_empty() {
            return Err(Error::config("dspark_target_layer_ids", "[]", "at least one layer"));
        }
        let (taps, h) = (target_layer_ids.len(), self.size("hidden_size")?);
        if taps > MAX_SIZE / h {
            let allowed = format!("at most {} layers with hidden_size {h}", MAX_SIZE / h);
            return Err(Error::config("dspark_target_layer_ids", format!("{taps} layers"), allowed));
        }
        let (n_routed_experts, num_experts_per_tok) =
            self.experts("dspark_n_routed_experts", "dspark_num_experts_per_tok")?;
        Ok(Some(DsparkConfig {
            stages,
            block_size: self.size("dspark_block_size")?,
            noise_token_id: self.token("dspark_noise_token_id", vocab_size)?,
            target_layer_ids,
            markov_rank: self.size("dspark_markov_rank")?,
            n_routed_experts,
            num_experts_per_tok,
            norm_topk_prob: self.flag("norm_topk_prob", true, None)? && num_experts_per_tok > 1,
        }))
    }

    /// Resolves the lists into one plan a layer (`numerics.md` §0). The flag says whether any layer is the candidate source.
    fn schedule(&self, layers: usize, stages: usize, engram: Option<&EngramConfig>) -> Result<(Vec<LayerPlan>, bool)> {
        let ratios = self.list("compress_ratios", PAGE)?;
        if ratios.len() != layers && ratios.len() != layers + stages {
            let allowed = match stages {
                0 => format!("{layers} entries (num_hidden_layers)"),
                _ => format!(
                    "{layers} or {} entries (num_hidden_layers, with num_nextn_predict_layers)",
                    layers + stages
                ),
            };
            return Err(Error::config("compress_ratios", format!("{} entries", ratios.len()), allowed));
        }
        let ratio_error =
            |i: usize, allowed: String| Error::config(format!("compress_ratios[{i}]"), ratios[i], allowed);
        if let Some(i) = (layers..ratios.len()).find(|&i| ratios[i] != 0) {
            return Err(ratio_error(i, "0 (a draft stage)".into()));
        }
        if let Some(i) = (0..layers).find(|&i| ratios[i] != 0 && !PAGE.is_multiple_of(ratios[i])) {
            return Err(ratio_error(i, format!("0 or a divisor of {PAGE}")));
        }
        let kv_sources = self.layer_list("kv_source_layer_ids", layers)?;
        let index_sources = self.layer_list("index_source_layer_ids", layers)?;
        if let Some(source) = kv_sources.iter().find(|source| !index_sources.contains(source)) {
            let allowed = format!("every KV source, also layer {source}");
            return Err(Error::config("index_source_layer_ids", format!("{index_sources:?}"), allowed));
        }
        let candidate_source = match self.get("candidate_source_layer_id") {
            Some(value) if value.as_i64() != Some(-1) => {
                let source = self.whole("candidate_source_layer_id", 0, layers - 1)?;
                if !index_sources.contains(&source) {
                    let allowed = format!("-1 or one of index_source_layer_ids {index_sources:?}");
                    return Err(Error::config("candidate_source_layer_id", source, allowed));
                }
                Some(source)
            }
            _ => None,
        };

        let (mut kv_source, mut index_source, mut pool) = (None, None, false);
        let mut plans = Vec::with_capacity(layers);
        for index in 0..layers {
            let ratio = ratios[index];
            let (is_kv, is_index) = (kv_sources.contains(&index), index_sources.contains(&index));
            if is_kv {
                if ratio == 0 {
                    return Err(ratio_error(index, "at least 1 (the layer is a KV source)".into()));
                }
                (kv_source, pool) = (Some(index), false);
            }
            if is_index {
                if kv_source.is_none() {
                    let allowed = format!("no layer before the first of kv_source_layer_ids {kv_sources:?}");
                    return Err(Error::config("index_source_layer_ids", index, allowed));
                }
                index_source = Some(index);
            }
            match kv_source {
                None if ratio != 0 => return Err(ratio_error(index, "0 (no KV source comes before)".into())),
                Some(source) if ratio != ratios[source] => {
                    return Err(ratio_error(
                        index,
                        format!("{} (the ratio of its KV source, layer {source})", ratios[source]),
                    ))
                }
                _ => {}
            }
            let role = match (ratio, is_kv, is_index) {
                (0, ..) => Role::Window,
                (_, true, _) => Role::Full,
                (_, _, true) => Role::Reindex,
                _ => Role::Reuse,
            };
            let candidates = match (is_index, pool) {
                _ if candidate_source == Some(index) => {
                    pool = true;
                    Candidates::Source
                }
                (true, true) => Candidates::Restricted,
                _ => Candidates::Ignored,
            };
            let engram = engram.and_then(|e| e.layer_ids.iter().position(|&id| id == index));
            plans.push(LayerPlan { index, role, ratio, kv_source, index_source, candidates, engram });
        }
        Ok((plans, candidate_source.is_some()))
    }
}

/// Tokens of a page of the global cache: a group never crosses a page.
const PAGE: usize = 128;

fn whole(value: &Value, min: usize, max: usize) -> Option<usize> {
    value.as_u64().and_then(|v| usize::try_from(v).ok()).filter(|v| (min..=max).contains(v))
}

fn found(value: Option<&Value>) -> String {
    value.map_or("nothing".into(), Value::to_string)
}

fn positive(name: &str, value: Option<&Value>, min: f64) -> Result<f64> {
    let number = value.and_then(Value::as_f64).filter(|v| (min..=f32::MAX as f64).contains(v));
    let allowed = || if min < 1.0 { "a positive number".to_string() } else { format!("a number of at least {min}") };
    number.ok_or_else(|| Error::config(name, found(value), allowed()))
}
