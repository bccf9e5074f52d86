//! Checkpoints: what opens, what is refused and with which words, what the numbers are.

mod support;

use std::collections::{BTreeMap, BTreeSet};

use cedra::checkpoint::layout::{expected, is_deferred, TensorSpec};
use cedra::checkpoint::{Checkpoint, Format};
use cedra::config::Config;
use cedra::formats::{e2m1_to_f32, e4m3_to_f32};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::SafeTensors;
use serde_json::{json, Value};
use support::{fixture, shared};

/// A checkpoint in pieces, to be changed and put together again.
struct Parts {
    config: Value,
    tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
}

impl Parts {
    /// The packed golden checkpoint.
    fn golden() -> Self {
        let file = std::fs::read(fixture("golden/ckpt_fp8fp4/model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap().tensors().into_iter();
        let tensors = tensors.map(|(name, t)| (name, (t.dtype(), t.shape().to_vec(), t.data().to_vec()))).collect();
        let config = std::fs::read_to_string(fixture("golden/ckpt_fp8fp4/config.json")).unwrap();
        Self { config: serde_json::from_str(&config).unwrap(), tensors }
    }

    /// Every tensor of a config, of ones, in the format that `choose` picks.
    fn synthetic(config: Value, choose: impl Fn(&TensorSpec) -> Format) -> Self {
        let mut tensors = BTreeMap::new();
        for spec in expected(&Config::from_json(&config.to_string()).unwrap()) {
            let format = choose(&spec);
            let (dtype, shape, scale) = spec.stored(format);
            let one: &[u8] = match format {
                Format::F32 => &[0, 0, 128, 63],
                Format::Bf16 => &[128, 63],
                Format::F16 => &[0, 60],
                Format::Fp8Block | Format::Fp8Row => &[0x38],
                Format::Fp4 => &[0x22],
            };
            let count = shape.iter().product();
            if let Some(scale) = scale {
                let ones = vec![127; scale.iter().product()];
                tensors.insert(spec.scale_name().unwrap(), (Dtype::F8_E8M0, scale.to_vec(), ones));
            }
            tensors.insert(spec.name, (dtype, shape, one.repeat(count)));
        }
        Self { config, tensors }
    }

    fn file(&self) -> Vec<u8> {
        let views = self.tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (name, TensorView::new(*dtype, shape.clone(), bytes).expect("the shape holds the bytes"))
        });
        safetensors::serialize(views, None).unwrap()
    }

    fn open(&self) -> cedra::Result<Checkpoint> {
        Checkpoint::from_files(&self.config.to_string(), vec![("model.safetensors".into(), self.file())])
    }

    fn get(&mut self, name: &str) -> &mut (Dtype, Vec<usize>, Vec<u8>) {
        self.tensors.get_mut(name).unwrap()
    }
}

/// Sizes that divide by nothing: 3 streams, heads of 44 channels, candidate blocks of 3, an Engram of 20 channels a row.
fn odd_config() -> Value {
    json!({
        "vocab_size": 301, "hidden_size": 52, "num_hidden_layers": 4, "num_attention_heads": 6, "head_dim": 44,
        "qk_rope_head_dim": 10, "q_lora_rank": 26, "o_lora_rank": 14, "o_groups": 3, "sliding_window": 7,
        "max_position_embeddings": 1000, "compress_rope_theta": 160000, "moe_intermediate_size": 22,
        "rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 77},
        "n_routed_experts": 5, "num_experts_per_tok": 2, "index_n_heads": 3, "index_head_dim": 20, "index_topk": 5,
        "compress_ratios": [0, 4, 4, 1], "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 2, 3],
        "candidate_source_layer_id": 1, "candidate_topk_blocks": 3, "candidate_block_size": 3, "hc_mult": 3,
        "engram_layer_ids": [2], "engram_num_embeddings": [77], "engram_max_ngram_size": 3, "engram_vocab_size": 11,
        "engram_n_heads": 2, "engram_head_dim": 20, "engram_pad_token_id": 2, "engram_compressed_vocab_size": 300
    })
}

#[test]
fn golden_and_pocket_checkpoints_open() {
    Checkpoint::open(fixture("golden/ckpt_fp8fp4")).unwrap();
    for folder in
        ["golden/ckpt_f32", "golden/ckpt_bf16", "golden/ckpt_fp8fp4", "pocket/export", "pocket/export/quantised"]
    {
        let Some(folder) = shared(folder) else { continue };
        let checkpoint = Checkpoint::open(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        for name in checkpoint.names() {
            let tensor = checkpoint.tensor(name).unwrap();
            let values = tensor.to_f32();
            assert_eq!(values.len(), tensor.shape.iter().product::<usize>(), "{tensor:?}");
            assert!(values.iter().all(|v| v.is_finite()), "{tensor:?}");
        }
    }
}

#[test]
fn packed_checkpoints_are_what_they_were_packed_from() {
    let (Some(packed), Some(plain)) = (shared("golden/ckpt_fp8fp4"), shared("golden/ckpt_f32")) else { return };
    let (packed, plain) = (Checkpoint::open(packed).unwrap(), Checkpoint::open(plain).unwrap());
    assert!(packed.names().eq(plain.names()));
    for name in packed.names() {
        let (p, q) = (packed.tensor(name).unwrap(), plain.tensor(name).unwrap());
        assert_eq!(p.shape, q.shape, "{name}");
        // Half a step of the format, relative to the largest value.
        let tolerance = match p.format {
            Format::F32 => 0.0,
            Format::Bf16 | Format::F16 => 1.0 / 256.0,
            Format::Fp8Block | Format::Fp8Row => 1.0 / 16.0,
            Format::Fp4 => 1.0 / 5.0 + 1.0 / 256.0, // 5 becomes 4 or 6, after BF16
        };
        let (p, q) = (p.to_f32(), q.to_f32());
        let largest = q.iter().fold(0f32, |m, v| m.max(v.abs()));
        let off = p.iter().zip(&q).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(off <= tolerance * largest, "{name}: off by {off}, largest value {largest}");
    }
}

/// Against the definition, byte by byte: value = code · 2^(scale - 127).
#[test]
fn dequantisation_follows_the_definition() {
    let parts = Parts::golden();
    let checkpoint = parts.open().unwrap();
    let mut seen = BTreeSet::new();
    for name in checkpoint.names() {
        let tensor = checkpoint.tensor(name).unwrap();
        let (_, _, codes) = &parts.tensors[name];
        let channels = tensor.channels();
        let scale = |r: usize, c: usize| {
            let (bytes, [_, columns]) = tensor.scales.unwrap();
            2f64.powi(bytes[r * columns + c] as i32 - 127)
        };
        let value = |r: usize, c: usize| match tensor.format {
            Format::F32 => f32::from_le_bytes(codes[(r * channels + c) * 4..][..4].try_into().unwrap()) as f64,
            Format::Bf16 => {
                let i = (r * channels + c) * 2;
                f32::from_le_bytes([0, 0, codes[i], codes[i + 1]]) as f64
            }
            Format::Fp8Block => e4m3_to_f32(codes[r * channels + c]) as f64 * scale(r / 32, c / 32),
            Format::Fp8Row => e4m3_to_f32(codes[r * channels + c]) as f64 * scale(r, c / 32),
            Format::Fp4 => {
                let byte = codes[r * channels / 2 + c / 2];
                e2m1_to_f32(if c.is_multiple_of(2) { byte & 15 } else { byte >> 4 }) as f64 * scale(r, c / 32)
            }
            Format::F16 => unreachable!("the golden checkpoint has none"),
        };
        let (all, mut row) = (tensor.to_f32(), Vec::new());
        for r in 0..tensor.rows() {
            tensor.row_f32(r, &mut row);
            assert_eq!(row, all[r * channels..][..channels], "{name} row {r}");
            assert!((0..channels).all(|c| row[c] as f64 == value(r, c)), "{name} row {r}");
        }
        seen.insert(tensor.format as u32);
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [0, 1, 3, 4, 5]);
}

#[test]
fn odd_sizes_open_in_every_format() {
    for nth in 0..5 {
        let parts = Parts::synthetic(odd_config(), |spec| spec.formats[nth.min(spec.formats.len() - 1)]);
        let checkpoint = parts.open().unwrap();
        for name in checkpoint.names() {
            assert!(checkpoint.tensor(name).unwrap().to_f32().iter().all(|&v| v == 1.0), "{name}");
        }
        let wo_a = checkpoint.tensor("layers.0.attn.wo_a.weight").unwrap();
        assert_eq!((wo_a.shape, wo_a.rows(), wo_a.channels()), (&[42, 88][..], 42, 88));
        assert!(checkpoint.tensor("layers.3.attn.compressor.wgate.weight").is_err(), "ratio 1 has no gate");
        assert!(checkpoint.tensor("layers.1.attn.compressor.wgate.weight").is_ok());
        assert!(checkpoint.tensor("layers.2.attn.indexer.wk.weight").is_err(), "a Reindex layer has no keys");
    }
}

/// Names, shapes and formats of the release, from another implementation's module tree.
#[test]
fn layout_of_the_release() {
    let config = Config::open(fixture("reference/released-config.json")).unwrap();
    let table: Value =
        serde_json::from_str(&std::fs::read_to_string(fixture("reference/full_size_tensors.json")).unwrap()).unwrap();
    let mut published = BTreeMap::new();
    for group in table["groups"].as_array().unwrap() {
        let name = group["name"].as_str().unwrap();
        let shape: Vec<usize> = serde_json::from_value(group["shape"].clone()).unwrap();
        let dtype = match group["dtype"].as_str().unwrap() {
            "float32" => Dtype::F32,
            "bfloat16" => Dtype::BF16,
            "float8_e4m3fn" => Dtype::F8_E4M3,
            "float8_e8m0fnu" => Dtype::F8_E8M0,
            int8 if int8.starts_with("int8") => Dtype::I8,
            other => panic!("{other}"),
        };
        let layers: Vec<usize> = serde_json::from_value(group["layers"].clone()).unwrap();
        let experts = if name.starts_with("mtp") { 128 } else { 384 };
        for i in layers.iter().copied().chain(layers.is_empty().then_some(0)) {
            for e in 0..if name.contains("{e}") { experts } else { 1 } {
                let name = name.replace("{i}", &i.to_string()).replace("{e}", &e.to_string());
                published.insert(name, (dtype, shape.clone()));
            }
        }
    }
    assert_eq!(json!(published.len()), table["tensor_count"]);
    for spec in expected(&config) {
        assert_eq!(spec.required, !is_deferred(&spec.name), "{}", spec.name);
        let (dtype, shape) = published.remove(&spec.name).unwrap_or_else(|| panic!("{} is not published", spec.name));
        let format = spec.formats.iter().find(|&&format| spec.stored(format).0 == dtype).unwrap();
        let (_, stored, scale) = spec.stored(*format);
        assert_eq!(stored, shape, "{}", spec.name);
        if let Some(scale) = scale {
            assert_eq!(published.remove(&spec.scale_name().unwrap()), Some((Dtype::F8_E8M0, scale.to_vec())));
        }
    }
    // What is left is the vision part, which this crate only recognises.
    assert!(published.keys().all(|name| is_deferred(name) && !name.starts_with("mtp")), "{:?}", published.keys());
    assert!(!published.is_empty());
}

#[test]
fn draft_and_vision_tensors_may_be_there_or_not() {
    let mut parts = Parts::golden();
    for name in ["vision.norm.weight", "aligner.w1.bias", "image_start"] {
        parts.tensors.insert(name.into(), (Dtype::F32, vec![2], vec![0; 8]));
    }
    let checkpoint = parts.open().unwrap();
    assert!(checkpoint.has_draft() && checkpoint.tensor("mtp.0.main_proj.weight").is_ok());
    let error = checkpoint.tensor("vision.norm.weight").unwrap_err().to_string();
    assert_eq!(error, "tensor `vision.norm.weight`: found nothing, allowed: a tensor of this checkpoint");

    parts.tensors.retain(|name, _| !is_deferred(name));
    let checkpoint = parts.open().unwrap();
    assert!(!checkpoint.has_draft() && checkpoint.tensor("mtp.0.main_proj.weight").is_err());

    // Draft stages that the config does not know are left alone.
    let mut parts = Parts::golden();
    let text = parts.config["text_config"].as_object_mut().unwrap();
    text.insert("num_nextn_predict_layers".into(), json!(0));
    text["compress_ratios"].as_array_mut().unwrap().truncate(12);
    assert!(!parts.open().unwrap().has_draft());
}

/// Of any number of stages, each tensor is asked for and none is too many.
#[test]
fn draft_tensors_are_all_there_or_none() {
    let parts = Parts::golden();
    let draft: Vec<String> = parts.tensors.keys().filter(|name| name.starts_with("mtp.")).cloned().collect();
    for name in draft.iter().filter(|name| !name.ends_with(".scale")) {
        let mut parts = Parts::golden();
        parts.tensors.remove(name);
        let error = parts.open().unwrap_err().to_string();
        assert!(error.starts_with(&format!("tensor `{name}`: found nothing, allowed: ")), "{error}");
    }
    let refused = |stages: usize| {
        let mut parts = Parts::golden();
        parts.config["text_config"]["num_nextn_predict_layers"] = json!(stages);
        parts.config["text_config"]["compress_ratios"] = json!([0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1]);
        parts.open().unwrap_err().to_string()
    };
    // The last stage has the heads.
    assert!(refused(2).starts_with("tensor `mtp.1.norm.weight`: found nothing, "), "{}", refused(2));
    assert!(refused(4).starts_with("tensor `mtp.3.attn_norm.weight`: found nothing, "), "{}", refused(4));
    for stages in [1, 2, 5] {
        let mut parts = Parts::golden();
        parts.config["text_config"]["num_nextn_predict_layers"] = json!(stages);
        parts.config["text_config"]["compress_ratios"] = json!([0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1]);
        let all = std::mem::take(&mut parts.tensors);
        for (name, tensor) in all {
            let Some((stage, rest)) = name.strip_prefix("mtp.").and_then(|name| name.split_once('.')) else {
                parts.tensors.insert(name, tensor);
                continue;
            };
            let only_last = ["norm.", "markov_head.", "confidence_head."].iter().any(|part| rest.starts_with(part));
            match stage {
                "0" if rest.starts_with("main_") => drop(parts.tensors.insert(name, tensor)),
                "0" => (0..stages)
                    .for_each(|stage| drop(parts.tensors.insert(format!("mtp.{stage}.{rest}"), tensor.clone()))),
                "2" if only_last => drop(parts.tensors.insert(format!("mtp.{}.{rest}", stages - 1), tensor)),
                _ => {}
            }
        }
        assert!(parts.open().unwrap().has_draft(), "{stages} stages");
    }
}

const WQ_A: &str = "layers.0.attn.wq_a.weight";
const WQ_A_ALLOWED: &str = "F32 [32, 64] or BF16 [32, 64] or F16 [32, 64] or F8_E4M3 [32, 64] with scale [1, 2]";

type Change = fn(&mut Parts);

#[test]
fn bad_tensors_are_refused_by_name() {
    let cases: [(Change, String); 23] = [
        (|p| drop(p.tensors.remove("norm.weight")), "norm.weight`: found nothing, allowed: F32 [64] or BF16 [64] or F16 [64]".into()),
        (|p| drop(p.tensors.remove(WQ_A)), format!("{WQ_A}`: found nothing, allowed: {WQ_A_ALLOWED}")),
        (
            |p| drop(p.tensors.remove("layers.11.ffn.experts.7.w2.weight")),
            "layers.11.ffn.experts.7.w2.weight`: found nothing, allowed: F32 [64, 32] or BF16 [64, 32] or F16 [64, 32] \
             or F8_E4M3 [64, 32] with scale [2, 1] or I8 [64, 16] with scale [64, 1]"
                .into(),
        ),
        (
            |p| drop(p.tensors.insert("layers.0.attn.q_head_norm.weight".into(), (Dtype::F32, vec![64], vec![0; 256]))),
            "layers.0.attn.q_head_norm.weight`: found F32 [64], allowed: no tensor of this name in a model of this config".into(),
        ),
        (
            |p| drop(p.tensors.insert("layers.12.attn_norm.weight".into(), (Dtype::F32, vec![64], vec![0; 256]))),
            "layers.12.attn_norm.weight`: found F32 [64], allowed: no tensor of this name in a model of this config".into(),
        ),
        (
            // An indexer on a layer that reuses a selection.
            |p| drop(p.tensors.insert("layers.3.attn.indexer.weights_proj.weight".into(), (Dtype::BF16, vec![8, 64], vec![0; 1024]))),
            "layers.3.attn.indexer.weights_proj.weight`: found BF16 [8, 64], allowed: no tensor of this name in a model of this config".into(),
        ),
        (|p| p.get(WQ_A).1 = vec![64, 32], format!("{WQ_A}`: found F8_E4M3 [64, 32], allowed: {WQ_A_ALLOWED}")),
        (|p| p.get(WQ_A).1 = vec![2048], format!("{WQ_A}`: found F8_E4M3 [2048], allowed: {WQ_A_ALLOWED}")),
        (|p| p.get(WQ_A).0 = Dtype::F8_E5M2, format!("{WQ_A}`: found F8_E5M2 [32, 64], allowed: {WQ_A_ALLOWED}")),
        (|p| p.get(WQ_A).0 = Dtype::I8, format!("{WQ_A}`: found I8 [32, 64], allowed: {WQ_A_ALLOWED}")),
        (
            |p| p.get("embed.weight").0 = Dtype::I16,
            "embed.weight`: found I16 [320, 64], allowed: F32 [320, 64] or BF16 [320, 64] or F16 [320, 64]".into(),
        ),
        (
            |p| *p.get("norm.weight") = (Dtype::F8_E4M3, vec![64], vec![0; 64]),
            "norm.weight`: found F8_E4M3 [64], allowed: F32 [64] or BF16 [64] or F16 [64]".into(),
        ),
        (
            |p| drop(p.tensors.remove("layers.0.attn.wq_a.scale")),
            format!("{WQ_A}`: found F8_E4M3 [32, 64] without `layers.0.attn.wq_a.scale`, allowed: {WQ_A_ALLOWED}"),
        ),
        (
            |p| p.get("layers.0.attn.wq_a.scale").1 = vec![2, 1],
            "layers.0.attn.wq_a.scale`: found F8_E8M0 [2, 1], allowed: F8_E8M0 [1, 2]".into(),
        ),
        (
            |p| p.get("layers.0.attn.wq_a.scale").0 = Dtype::U8,
            "layers.0.attn.wq_a.scale`: found U8 [1, 2], allowed: F8_E8M0 [1, 2]".into(),
        ),
        (
            |p| p.get("layers.1.engram.embed.scale").2[713] = 255,
            "layers.1.engram.embed.scale`: found byte 255 (NaN) at [713, 0], allowed: bytes 0..=254, the powers of two 2^-127..=2^127".into(),
        ),
        (
            // Scales of 128x128 blocks, as the family before had them.
            |p| *p.get("layers.0.attn.wq_b.scale") = (Dtype::F8_E8M0, vec![2, 1], vec![127; 2]),
            "layers.0.attn.wq_b.scale`: found F8_E8M0 [2, 1], allowed: F8_E8M0 [8, 1]".into(),
        ),
        (
            |p| *p.get(WQ_A) = (Dtype::F32, vec![32, 64], vec![0; 8192]),
            format!("layers.0.attn.wq_a.scale`: found F8_E8M0 [1, 2], allowed: no scale without a packed `{WQ_A}`"),
        ),
        (
            |p| drop(p.tensors.insert("mtp.0.extra.scale".into(), (Dtype::F8_E8M0, vec![1, 1], vec![127]))),
            "mtp.0.extra.scale`: found F8_E8M0 [1, 1], allowed: no scale without a packed `mtp.0.extra.weight`".into(),
        ),
        (
            |p| drop(p.tensors.insert("mtp.3.attn_norm.weight".into(), (Dtype::F32, vec![64], vec![0; 256]))),
            "mtp.3.attn_norm.weight`: found F32 [64], allowed: no tensor of this name in a model of this config".into(),
        ),
        (
            |p| p.get("mtp.2.markov_head.embed.weight").1 = vec![160, 32],
            "mtp.2.markov_head.embed.weight`: found BF16 [160, 32], allowed: F32 [320, 16] or BF16 [320, 16] or F16 [320, 16]".into(),
        ),
        (
            |p| *p.get("mtp.2.confidence_head.proj.weight") = (Dtype::F32, vec![1, 64], vec![0; 256]),
            "mtp.2.confidence_head.proj.weight`: found F32 [1, 64], allowed: F32 [1, 80] or BF16 [1, 80] or F16 [1, 80]".into(),
        ),
        (
            |p| p.get("mtp.0.main_proj.weight").1 = vec![192, 64],
            "mtp.0.main_proj.weight`: found F8_E4M3 [192, 64], allowed: F32 [64, 192] or BF16 [64, 192] or F16 [64, 192] \
             or F8_E4M3 [64, 192] with scale [2, 6]"
                .into(),
        ),
    ];
    for (change, expected) in cases {
        let mut parts = Parts::golden();
        change(&mut parts);
        let error = parts.open().unwrap_err().to_string();
        assert_eq!(error, format!("tensor `{expected}"));
    }
}

#[test]
fn a_config_of_another_model_is_refused() {
    let refused = |name: &str, value: Value| {
        let mut parts = Parts::golden();
        parts.config["text_config"][name] = value;
        parts.open().unwrap_err().to_string()
    };
    let error = refused("n_routed_experts", json!(9));
    assert!(
        error.starts_with("tensor `layers.0.ffn.gate.weight`: found BF16 [8, 64], allowed: F32 [9, 64]"),
        "{error}"
    );
    let error = refused("compress_ratios", json!([0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 0, 0, 0]));
    assert!(error.starts_with("tensor `layers.6.attn.compressor.wgate.weight`: found nothing, "), "{error}");
    let error = refused("index_source_layer_ids", json!([2, 4, 6, 8]));
    assert!(error.starts_with("tensor `layers.10.attn.indexer.weights_proj.weight`: found BF16 [8, 64], "), "{error}");
}

/// A file of one F32 vector of two, with the header as given.
fn lie(header: &str, data: usize) -> String {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + data, 0);
    refused_file(file)
}

fn refused_file(file: Vec<u8>) -> String {
    let config = Parts::golden().config.to_string();
    Checkpoint::from_files(&config, vec![("a.safetensors".into(), file)]).unwrap_err().to_string()
}

#[test]
fn files_that_lie_are_refused() {
    let entry = |name: &str, start: usize, end: usize| {
        format!(r#""{name}":{{"dtype":"F32","shape":[2],"data_offsets":[{start},{end}]}}"#)
    };
    let (a, b) = (entry("a", 0, 8), entry("b", 8, 16));
    let cases = [
        (refused_file(vec![1, 2, 3]), "3 bytes long, a safetensors file begins with 8 bytes of header length"),
        (
            refused_file(b"<!DOCTYPE html>".to_vec()),
            "header of 5789751444030890300 bytes announced, 7 bytes left in the file",
        ),
        (lie("{", 8), "header is not a JSON object: EOF while parsing an object at line 1 column 1"),
        (lie("[]", 8), "header is not a JSON object: invalid type: sequence, expected a map at line 1 column 0"),
        (lie("{}", 8), "8 bytes after the last tensor"),
        (lie(&format!("{{{a},{b}}}"), 12), "tensor `b` ends at byte 16 of the data, the file has 12 bytes of data"),
        (lie(&format!("{{{a},{b}}}"), 17), "1 bytes after the last tensor"),
        (
            lie(&format!("{{{a},{}}}", entry("b", 4, 12)), 12),
            "tensor `b` overlaps the tensor before it: begins at 4, 8 expected",
        ),
        (
            lie(&format!("{{{a},{}}}", entry("b", 0, 8)), 8),
            "tensor `b` overlaps the tensor before it: begins at 0, 8 expected",
        ),
        (
            lie(&format!("{{{a},{}}}", entry("b", 9, 17)), 17),
            "tensor `b` leaves a gap before it: begins at 9, 8 expected",
        ),
        (lie(&format!("{{{}}}", entry("a", 0, 4)), 8), "tensor `a`: F32 [2] needs 8 bytes, offsets 0..4 given"),
        (lie(&format!("{{{}}}", entry("a", 8, 0)), 8), "tensor `a`: F32 [2] needs 8 bytes, offsets 8..0 given"),
        (
            lie(&format!("{{{}}}", a.replace("[2]", "[4294967296,4294967296]")), 8),
            "tensor `a`: F32 [4294967296, 4294967296] needs more than addressable bytes, offsets 0..8 given",
        ),
        (lie(r#"{"a":{"dtype":"F32","shape":[2]}}"#, 8), "header entry `a`: missing field `data_offsets`"),
        (
            lie(&format!("{{{}}}", a.replace("[2]", "[-2]")), 8),
            "header entry `a`: invalid value: integer `-2`, expected usize",
        ),
    ];
    for (error, expected) in cases {
        assert_eq!(error, format!("a.safetensors: {expected}"));
    }
    let unknown = lie(&format!("{{{}}}", a.replace("F32", "F33")), 8);
    assert!(unknown.starts_with("a.safetensors: header entry `a`: unknown variant `F33`"), "{unknown}");
}

/// A file cut anywhere is refused, and so is one with any bit of its header length flipped.
#[test]
fn cut_files_are_refused() {
    let whole = Parts::golden().file();
    for length in (0..whole.len()).step_by(whole.len() / 37).chain([7, 8, whole.len() - 1]) {
        refused_file(whole[..length].to_vec());
    }
    for bit in 0..64 {
        let mut file = whole.clone();
        file[bit / 8] ^= 1 << (bit % 8);
        refused_file(file);
    }
}

#[test]
fn shards_and_their_index() {
    let parts = Parts::golden();
    let mut shards = [Parts::golden(), Parts::golden()];
    // A weight and its scale in different shards.
    shards[0].tensors.retain(|name, _| name.ends_with(".scale"));
    shards[1].tensors.retain(|name, _| !name.ends_with(".scale"));
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    write("config.json", parts.config.to_string().as_bytes());
    write("one.safetensors", &shards[0].file());
    write("two.safetensors", &shards[1].file());
    let shard_of = |name: &str| if name.ends_with(".scale") { "one.safetensors" } else { "two.safetensors" };
    let map: BTreeMap<&String, &str> = parts.tensors.keys().map(|name| (name, shard_of(name))).collect();
    let index = json!({"metadata": {}, "weight_map": map});
    let open = |index: Value| {
        write("model.safetensors.index.json", index.to_string().as_bytes());
        Checkpoint::open(folder.path())
    };
    let whole = parts.open().unwrap();
    let checkpoint = open(index.clone()).unwrap();
    assert!(checkpoint.names().eq(whole.names()));
    for name in whole.names() {
        assert_eq!(checkpoint.tensor(name).unwrap().to_f32(), whole.tensor(name).unwrap().to_f32());
    }

    let refused = |change: fn(&mut Value)| {
        let mut index = index.clone();
        change(&mut index);
        let error = open(index).unwrap_err().to_string();
        error.replace(&format!("{}/", folder.path().display()), "")
    };
    assert_eq!(
        refused(|index| index["weight_map"]["norm.weight"] = json!("one.safetensors")),
        "model.safetensors.index.json: tensor `norm.weight` is said to be in one.safetensors, it is in two.safetensors"
    );
    assert_eq!(
        refused(|index| index["weight_map"]["nothing"] = json!("one.safetensors")),
        "model.safetensors.index.json: tensor `nothing` is said to be in one.safetensors, no shard has it"
    );
    assert_eq!(
        refused(|index| drop(index["weight_map"].as_object_mut().unwrap().remove("norm.weight"))),
        "model.safetensors.index.json: tensor `norm.weight` of two.safetensors is not listed"
    );
    assert_eq!(
        refused(|index| index["weight_map"]["norm.weight"] = json!("../two.safetensors")),
        "model.safetensors.index.json: shard `../two.safetensors` is not a plain file name"
    );
    let missing = refused(|index| index["weight_map"]["norm.weight"] = json!("three.safetensors"));
    assert!(missing.starts_with("three.safetensors: "), "{missing}");
    let no_map = refused(|index| *index = json!({}));
    assert!(no_map.starts_with("model.safetensors.index.json: not an index: missing field `weight_map`"), "{no_map}");
}

#[test]
fn a_tensor_in_two_files_is_refused() {
    let parts = Parts::golden();
    let files = vec![("a".to_string(), parts.file()), ("b".to_string(), parts.file())];
    let error = Checkpoint::from_files(&parts.config.to_string(), files).unwrap_err().to_string();
    assert_eq!(error, "tensor `embed.weight`: found it in a and in b, allowed: it once");
}

#[test]
fn folders_without_a_checkpoint_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let error = |folder: &std::path::Path| Checkpoint::open(folder).unwrap_err().to_string();
    assert!(error(folder.path()).contains("config.json: "));
    std::fs::copy(fixture("golden/ckpt_fp8fp4/config.json"), folder.path().join("config.json")).unwrap();
    assert!(error(folder.path()).contains("model.safetensors: "));
    std::fs::write(folder.path().join("model.safetensors"), b"").unwrap();
    assert!(error(folder.path()).ends_with("0 bytes long, a safetensors file begins with 8 bytes of header length"));
}
