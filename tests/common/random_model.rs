//! Small models with random weights and sizes that divide by nothing, in every number format that a checkpoint may use.

use std::path::Path;

use cedra::checkpoint::layout::{self, TensorSpec};
use cedra::checkpoint::{Checkpoint, Format};
use cedra::config::Config;
use cedra::formats::{f32_to_e2m1, f32_to_e4m3, ue8m0_ceil, ue8m0_to_f32};
use cedra::text::{NgramLayer, NgramTables};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

use super::Random;

/// Which formats the weights are stored in. A tensor that may not be stored so is BF16, or FP8 where FP4 needs an even
/// width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    F32,
    Bf16,
    F16,
    /// Linear layers and experts FP8 in blocks, tables FP8 by rows.
    Fp8,
    /// The release: as FP8, with routed experts in FP4.
    Fp4,
    /// Each tensor another one of those that it may have.
    Mixed,
}

impl Storage {
    pub const ALL: [Storage; 6] =
        [Storage::F32, Storage::Bf16, Storage::F16, Storage::Fp8, Storage::Fp4, Storage::Mixed];
}

/// Sizes of a model. The layer lists follow from [`Shape::layers`].
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    pub vocab: usize,
    pub hidden: usize,
    pub streams: usize,
    pub heads: usize,
    pub head_dim: usize,
    pub rope_dim: usize,
    pub q_rank: usize,
    pub o_rank: usize,
    pub o_groups: usize,
    pub window: usize,
    pub expert_width: usize,
    pub experts: usize,
    pub experts_per_token: usize,
    pub index_heads: usize,
    pub index_dim: usize,
    pub index_topk: usize,
    pub candidate_blocks: usize,
    pub candidate_block: usize,
    pub engram_heads: usize,
    pub engram_dim: usize,
    pub ngram: usize,
    pub max_positions: usize,
    /// One letter a layer: `w` window, `2` Full of ratio 2, `1` Full of ratio 1, `i` Reindex, `r` Reuse. The last Full
    /// layer is the candidate source. Layers 1 and 3 have Engrams.
    pub layers: String,
    pub storage: Storage,
    pub draft: Option<DraftShape>,
}

/// Sizes of the draft stages.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftShape {
    pub stages: usize,
    pub block: usize,
    pub target_layers: Vec<usize>,
    pub markov_rank: usize,
    pub experts: usize,
    pub experts_per_token: usize,
}

impl DraftShape {
    /// Sizes drawn at random, for a model of so many layers.
    pub fn random(seed: u64, layers: usize) -> Self {
        let r = &mut Random::new(seed ^ 0xd5a7);
        let all: Vec<usize> = (0..layers).filter(|_| r.below(2) == 0).collect();
        Self {
            stages: r.pick(&[1, 2, 3]),
            block: r.pick(&[1, 2, 3, 5]),
            target_layers: if all.is_empty() { vec![layers - 1] } else { all },
            markov_rank: r.pick(&[1, 7, 16]),
            experts: r.pick(&[3, 5]),
            experts_per_token: r.pick(&[1, 2, 3]),
        }
    }
}

impl Shape {
    /// Every role once, every size odd in its own way, pruning at every stage within 40 tokens.
    pub fn odd(storage: Storage) -> Self {
        Self {
            vocab: 101,
            hidden: 50,
            streams: 3,
            heads: 6,
            head_dim: 44,
            rope_dim: 12,
            q_rank: 36,
            o_rank: 10,
            o_groups: 3,
            window: 7,
            expert_width: 34,
            experts: 11,
            experts_per_token: 3,
            index_heads: 5,
            index_dim: 36,
            index_topk: 5,
            candidate_blocks: 4,
            candidate_block: 3,
            engram_heads: 3,
            engram_dim: 20,
            ngram: 3,
            max_positions: 4096,
            layers: "w2ri1rir".into(),
            storage,
            draft: None,
        }
    }

    /// Sizes drawn at random around those of [`Shape::odd`].
    pub fn random(seed: u64) -> Self {
        let r = &mut Random::new(seed);
        let (groups, rope_dim) = (r.pick(&[1, 2, 3]), r.pick(&[4, 6, 12, 16]));
        Self {
            vocab: 64 + r.below(80),
            hidden: r.pick(&[33, 50, 64, 70]),
            streams: r.pick(&[1, 2, 3, 4]),
            heads: groups * r.pick(&[1, 2, 3]),
            head_dim: r.pick(&[16, 20, 44, 64]),
            rope_dim,
            q_rank: r.pick(&[17, 32, 36, 40]),
            o_rank: r.pick(&[5, 10, 16]),
            o_groups: groups,
            window: r.pick(&[1, 5, 7, 16]),
            expert_width: r.pick(&[31, 32, 34]),
            experts: r.pick(&[4, 9, 11]),
            experts_per_token: r.pick(&[1, 2, 3]),
            index_heads: r.pick(&[1, 3, 5]),
            index_dim: r.pick(&[16, 32, 36]),
            index_topk: r.pick(&[1, 4, 5, 9]),
            candidate_blocks: r.pick(&[1, 3, 4]),
            candidate_block: r.pick(&[1, 3, 4]),
            engram_heads: r.pick(&[1, 3]),
            engram_dim: r.pick(&[20, 32]),
            ngram: r.pick(&[2, 3, 4]),
            max_positions: 4096,
            layers: r.pick(&["w2ri1rir", "ww2r2i1ii", "1i1r", "2r4ri1i", "www", "w1"]).into(),
            storage: r.pick(&Storage::ALL),
            draft: None,
        }
    }

    fn ratios(&self) -> Vec<usize> {
        let mut ratio = 0;
        let next = |layer: char| {
            ratio = layer.to_digit(10).map_or(ratio, |r| r as usize);
            ratio
        };
        self.layers.chars().map(next).collect()
    }

    fn places(&self, wanted: impl Fn(char) -> bool) -> Vec<usize> {
        self.layers.chars().enumerate().filter(|&(_, c)| wanted(c)).map(|(i, _)| i).collect()
    }

    fn engram_layers(&self) -> Vec<usize> {
        [1, 3].into_iter().filter(|&i| i < self.layers.len()).collect()
    }

    /// The text of its `config.json`.
    fn config_json(&self, engram_rows: &[u32]) -> String {
        let sources = self.places(|c| c.is_ascii_digit());
        let mut config = json!({
            "model_type": "deepseek_v41",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers.len(),
            "num_attention_heads": self.heads,
            "head_dim": self.head_dim,
            "qk_rope_head_dim": self.rope_dim,
            "q_lora_rank": self.q_rank,
            "o_lora_rank": self.o_rank,
            "o_groups": self.o_groups,
            "sliding_window": self.window,
            "max_position_embeddings": self.max_positions,
            "compress_rope_theta": 160000.0,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 256,
            },
            "moe_intermediate_size": self.expert_width,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "swiglu_limit": 1.5,
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_dim,
            "index_topk": self.index_topk,
            "candidate_source_layer_id": sources.last().map_or(-1, |&i| i as i64),
            "candidate_topk_blocks": self.candidate_blocks,
            "candidate_block_size": self.candidate_block,
            "hc_mult": self.streams,
            "compress_ratios": self.ratios(),
            "kv_source_layer_ids": sources,
            "index_source_layer_ids": self.places(|c| c.is_ascii_digit() || c == 'i'),
            "engram_layer_ids": self.engram_layers(),
            "engram_num_embeddings": engram_rows,
            "engram_max_ngram_size": self.ngram,
            "engram_vocab_size": 16,
            "engram_n_heads": self.engram_heads,
            "engram_head_dim": self.engram_dim,
            "engram_pad_token_id": 2,
            "engram_compressed_vocab_size": self.vocab - 1,
        });
        if let Some(draft) = &self.draft {
            let draft = json!({
                "num_nextn_predict_layers": draft.stages,
                "dspark_block_size": draft.block,
                "dspark_noise_token_id": self.vocab - 1,
                "dspark_target_layer_ids": draft.target_layers,
                "dspark_markov_rank": draft.markov_rank,
                "dspark_n_routed_experts": draft.experts,
                "dspark_num_experts_per_tok": draft.experts_per_token,
            });
            config.as_object_mut().unwrap().extend(draft.as_object().unwrap().clone());
        }
        config.to_string()
    }
}

/// A checkpoint in memory, with the Engram constants that no file has.
pub struct RandomModel {
    pub config_json: String,
    /// The whole of `model.safetensors`.
    pub safetensors: Vec<u8>,
    pub tables: NgramTables,
}

impl RandomModel {
    pub fn checkpoint(&self) -> Checkpoint {
        let file = ("model.safetensors".to_string(), self.safetensors.clone());
        Checkpoint::from_files(&self.config_json, vec![file]).unwrap()
    }

    /// Writes `config.json` and `model.safetensors` into a folder.
    pub fn write(&self, folder: &Path) {
        std::fs::write(folder.join("config.json"), &self.config_json).unwrap();
        std::fs::write(folder.join("model.safetensors"), &self.safetensors).unwrap();
    }
}

/// A model of a shape, its weights of such sizes that every part matters to the logits.
pub fn random_checkpoint(seed: u64, shape: &Shape) -> RandomModel {
    let random = &mut Random::new(seed);
    let tables = tables(shape, random);
    let rows: Vec<u32> = tables.layers.iter().map(|layer| layer.primes.iter().sum()).collect();
    let config_json = shape.config_json(&rows);
    let config = Config::from_json(&config_json).unwrap();

    let mut stored: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for spec in layout::expected(&config).into_iter().filter(|spec| spec.required || shape.draft.is_some()) {
        let values = values(&spec, shape.streams, random);
        let format = format(&spec, shape.storage, random);
        let (dtype, dims, scales) = spec.stored(format);
        let (bytes, scale_bytes) = encode(format, &values, *spec.shape.last().unwrap());
        if let Some(dims) = scales {
            stored.push((spec.scale_name().unwrap(), Dtype::F8_E8M0, dims.to_vec(), scale_bytes));
        }
        stored.push((spec.name, dtype, dims, bytes));
    }
    let views = stored.iter().map(|(name, dtype, dims, bytes)| {
        (name.as_str(), TensorView::new(*dtype, dims.clone(), bytes).unwrap_or_else(|e| panic!("{name}: {e}")))
    });
    let safetensors = safetensors::serialize(views, None).unwrap();
    RandomModel { config_json, safetensors, tables }
}

fn tables(shape: &Shape, random: &mut Random) -> NgramTables {
    let compressed = shape.vocab - 1;
    let mut primes = (17u32..).filter(|n| (2..*n).take_while(|d| d * d <= *n).all(|d| n % d != 0));
    let layer = |_| {
        let primes: Vec<u32> = primes.by_ref().take((shape.ngram - 1) * shape.engram_heads).collect();
        let offsets = primes.iter().scan(0, |next, prime| Some(std::mem::replace(next, *next + prime))).collect();
        let bound = (i64::MAX as u64 / compressed as u64 / 2).max(1);
        let multipliers = (0..shape.ngram).map(|_| random.bits() % bound * 2 + 1).collect();
        NgramLayer { multipliers, primes, offsets }
    };
    let layers = shape.engram_layers().into_iter().map(layer).collect();
    // Two tokens share a compressed id, as a word and its capital do.
    let token_map = (0..shape.vocab as u32).map(|id| id.min(compressed as u32 - 1)).collect();
    NgramTables { token_map, pad: 2, layers }
}

/// Random values by what a tensor is for.
fn values(spec: &TensorSpec, streams: usize, random: &mut Random) -> Vec<f32> {
    let (name, len) = (spec.name.as_str(), spec.shape.iter().product());
    let fan_in = (*spec.shape.last().unwrap() as f32).sqrt();
    let ends = |endings: &[&str]| endings.iter().any(|e| name.ends_with(e));
    let around = |random: &mut Random, mean: f32, deviation: f32| -> Vec<f32> {
        random.normals(len, deviation).into_iter().map(|x| x + mean).collect()
    };
    if ends(&["_fn"]) {
        return random.normals(len, 1.0 / fan_in);
    }
    if ends(&["_base"]) {
        let mut base = random.normals(len, 0.5);
        (0..streams).for_each(|i| base[2 * streams + i * streams + i] += 1.5);
        return base;
    }
    if ends(&["_scale"]) {
        return around(random, 0.8, 0.1);
    }
    if ends(&["gate.bias", "gate.bias_vl"]) {
        return random.normals(len, 0.15);
    }
    if ends(&["attn_sink", "embed.weight"]) {
        return random.normals(len, 1.0);
    }
    if ends(&["q_weight", "k_weight"]) {
        return around(random, 1.0, 0.3);
    }
    if spec.shape.len() == 1 {
        return around(random, 1.0, 0.2);
    }
    let gain = match () {
        _ if ends(&["w2.weight", "wo_b.weight"]) => 0.45,
        _ if ends(&["engram.wkv.weight"]) => 0.7,
        _ if name == "head.weight" => 2.0,
        _ => 1.3,
    };
    random.normals(len, gain / fan_in)
}

fn format(spec: &TensorSpec, storage: Storage, random: &mut Random) -> Format {
    let fits = |f: &&Format| **f != Format::Fp4 || spec.shape[1].is_multiple_of(2);
    let preferred: &[Format] = match storage {
        Storage::F32 => &[Format::F32],
        Storage::Bf16 => &[Format::Bf16],
        Storage::F16 => &[Format::F16],
        Storage::Fp8 => &[Format::Fp8Block, Format::Fp8Row],
        Storage::Fp4 => &[Format::Fp4, Format::Fp8Block, Format::Fp8Row],
        Storage::Mixed => {
            let able: Vec<Format> = spec.formats.iter().filter(fits).copied().collect();
            // The routed experts of a layer are stored alike, and so are the shared one's matrices.
            let experts = [".ffn.experts.", ".ffn.shared_experts."];
            return match experts.iter().find_map(|part| spec.name.split_once(part)) {
                Some((layer, _)) => able[layer.bytes().map(usize::from).sum::<usize>() % able.len()],
                None => random.pick(&able),
            };
        }
    };
    let able = preferred.iter().find(|f| spec.formats.contains(f) && fits(f));
    able.copied().unwrap_or(Format::Bf16)
}

/// Bytes of a tensor and of its scales.
fn encode(format: Format, values: &[f32], columns: usize) -> (Vec<u8>, Vec<u8>) {
    match format {
        Format::F32 => (values.iter().flat_map(|v| v.to_le_bytes()).collect(), vec![]),
        Format::Bf16 => (values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(), vec![]),
        Format::F16 => (values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(), vec![]),
        Format::Fp8Block | Format::Fp8Row | Format::Fp4 => {
            let (block_rows, largest) = match format {
                Format::Fp8Block => (32, 448.0),
                Format::Fp8Row => (1, 448.0),
                _ => (1, 6.0),
            };
            let chunks = columns.div_ceil(32);
            let mut amax = vec![1e-4f32; (values.len() / columns).div_ceil(block_rows) * chunks];
            let place = |i: usize| i / columns / block_rows * chunks + i % columns / 32;
            values.iter().enumerate().for_each(|(i, v)| amax[place(i)] = amax[place(i)].max(v.abs()));
            let scales: Vec<u8> = amax.iter().map(|a| ue8m0_ceil(a / largest)).collect();
            let scaled: Vec<f32> = values.iter().enumerate().map(|(i, v)| v / ue8m0_to_f32(scales[place(i)])).collect();
            let codes = match format {
                Format::Fp4 => {
                    let pair = |p: &[f32]| f32_to_e2m1(p[0]) | f32_to_e2m1(p[1]) << 4;
                    scaled.chunks_exact(2).map(pair).collect()
                }
                _ => scaled.iter().map(|&v| f32_to_e4m3(v.clamp(-448.0, 448.0))).collect(),
            };
            (codes, scales)
        }
    }
}
