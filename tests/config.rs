//! Configs: the release resolves as published, odd sizes are fine, and what no model can have is refused by name.

mod support;

use cedra::config::{Candidates, Config, Role};
use serde_json::{json, Value};
use support::{fixture, shared};

fn released() -> Value {
    serde_json::from_str(&std::fs::read_to_string(fixture("reference/released-config.json")).unwrap()).unwrap()
}

#[test]
fn released_config_resolves_to_the_published_roles() {
    let config = Config::from_json(&released().to_string()).unwrap();
    assert_eq!((config.hidden_size, config.head_dim, config.rms_norm_eps), (5120, 512, 1e-20));
    assert_eq!((config.rope_theta, config.compress_rope_theta, config.yarn.factor), (1e4, 1.6e5, 16.0));
    assert_eq!(config.image_token_id, Some(129264));
    assert_eq!(config.layers.len(), 40);
    for (i, plan) in config.layers.iter().enumerate() {
        let (role, ratio) = match i {
            0 | 1 => (Role::Window, 0),
            2 | 8 | 14 => (Role::Full, 2),
            20 => (Role::Full, 1),
            24 | 28 | 32 | 36 => (Role::Reindex, 1),
            _ => (Role::Reuse, if i < 20 { 2 } else { 1 }),
        };
        let kv_source = [2, 8, 14, 20].into_iter().rfind(|&source| source <= i);
        let index_source = [2, 8, 14, 20, 24, 28, 32, 36].into_iter().rfind(|&source| source <= i);
        let candidates = match i {
            20 => Candidates::Source,
            24 | 28 | 32 | 36 => Candidates::Restricted,
            _ => Candidates::Ignored,
        };
        let engram = [1, 14].iter().position(|&layer| layer == i);
        assert_eq!((plan.index, plan.role, plan.ratio), (i, role, ratio));
        assert_eq!((plan.kv_source, plan.index_source), (kv_source, index_source), "layer {i}");
        assert_eq!((plan.candidates, plan.engram), (candidates, engram), "layer {i}");
    }
    let (engram, dspark) = (config.engram.unwrap(), config.dspark.unwrap());
    assert_eq!((engram.rows_per_token(), engram.width()), (24, 6144));
    assert_eq!((dspark.stages, dspark.block_size, dspark.noise_token_id), (3, 5, 128799));
}

#[test]
fn flat_and_nested_configs_are_the_same() {
    let nested = released();
    let mut flat = nested["text_config"].clone();
    flat["image_token_id"] = nested["image_token_id"].clone();
    assert_eq!(Config::from_json(&nested.to_string()).unwrap(), Config::from_json(&flat.to_string()).unwrap());
}

#[test]
fn rope_parameters_serve_as_rope_scaling() {
    let mut config = released();
    let text = config["text_config"].as_object_mut().unwrap();
    let mut rope = text.remove("rope_scaling").unwrap();
    text.remove("rope_theta");
    rope["rope_theta"] = json!(10000.0); // the copy that transformers 5 makes
    text.insert("rope_parameters".into(), rope);
    assert_eq!(Config::from_json(&config.to_string()).unwrap(), Config::from_json(&released().to_string()).unwrap());
}

#[test]
fn optional_numbers_have_the_released_defaults() {
    let mut config = released();
    let optional = [
        "rms_norm_eps",
        "rope_theta",
        "hc_eps",
        "hc_sinkhorn_iters",
        "swiglu_limit",
        "routed_scaling_factor",
        "norm_topk_prob",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "num_key_value_heads",
        "n_shared_experts",
        "hidden_act",
        "scoring_func",
        "topk_method",
        "model_type",
    ];
    for name in optional {
        config["text_config"].as_object_mut().unwrap().remove(name).unwrap_or_else(|| panic!("no {name}"));
    }
    assert_eq!(Config::from_json(&config.to_string()).unwrap(), Config::from_json(&released().to_string()).unwrap());
}

#[test]
fn every_structural_field_is_required() {
    let structural = [
        "vocab_size",
        "hidden_size",
        "moe_intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
        "qk_rope_head_dim",
        "q_lora_rank",
        "o_lora_rank",
        "o_groups",
        "max_position_embeddings",
        "rope_scaling",
        "n_routed_experts",
        "num_experts_per_tok",
        "sliding_window",
        "compress_ratios",
        "compress_rope_theta",
        "kv_source_layer_ids",
        "index_source_layer_ids",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "candidate_topk_blocks",
        "candidate_block_size",
        "hc_mult",
        "engram_num_embeddings",
        "engram_max_ngram_size",
        "engram_vocab_size",
        "engram_n_heads",
        "engram_head_dim",
        "engram_pad_token_id",
        "engram_compressed_vocab_size",
        "dspark_block_size",
        "dspark_noise_token_id",
        "dspark_target_layer_ids",
        "dspark_markov_rank",
        "dspark_n_routed_experts",
        "dspark_num_experts_per_tok",
    ];
    for name in structural {
        let mut config = released();
        config["text_config"].as_object_mut().unwrap().remove(name).unwrap();
        let error = Config::from_json(&config.to_string()).unwrap_err().to_string();
        assert!(error.starts_with(&format!("config field `{name}`: found nothing, allowed: ")), "{error}");
        config["text_config"][name] = json!(null);
        assert_eq!(Config::from_json(&config.to_string()).unwrap_err().to_string(), error);
    }
}

#[test]
fn models_may_lack_engram_draft_and_candidates() {
    let mut config = released();
    let text = config["text_config"].as_object_mut().unwrap();
    text.retain(|name, _| {
        !["engram", "dspark", "candidate"].iter().any(|part| name.starts_with(part))
            && name != "num_nextn_predict_layers"
    });
    text["compress_ratios"].as_array_mut().unwrap().truncate(40);
    let config = Config::from_json(&config.to_string()).unwrap();
    assert_eq!((config.engram, config.dspark), (None, None));
    assert!(config.layers.iter().all(|plan| plan.candidates == Candidates::Ignored && plan.engram.is_none()));
}

/// Sizes that divide by nothing: 3 streams, heads of 44 channels, candidate blocks of 3.
#[test]
fn odd_sizes_are_accepted() {
    let config = json!({
        "vocab_size": 301, "hidden_size": 52, "num_hidden_layers": 5, "num_attention_heads": 6, "head_dim": 44,
        "qk_rope_head_dim": 10, "q_lora_rank": 27, "o_lora_rank": 13, "o_groups": 3, "sliding_window": 7,
        "max_position_embeddings": 1000, "compress_rope_theta": 160000, "moe_intermediate_size": 21,
        "rope_scaling": {"type": "yarn", "factor": 1, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 77},
        "n_routed_experts": 5, "num_experts_per_tok": 1, "index_n_heads": 3, "index_head_dim": 20, "index_topk": 5,
        "compress_ratios": [0, 4, 4, 1, 1], "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 2, 3, 4],
        "candidate_source_layer_id": 2, "candidate_topk_blocks": 3, "candidate_block_size": 3, "hc_mult": 3
    });
    let config = Config::from_json(&config.to_string()).unwrap();
    assert!(!config.norm_topk_prob, "with one expert a token nothing is normalised");
    let candidates: Vec<_> = config.layers.iter().map(|plan| plan.candidates).collect();
    // A new Full layer clears the pool: nothing after it is restricted.
    use Candidates::{Ignored, Source};
    assert_eq!(candidates, [Ignored, Ignored, Source, Ignored, Ignored]);
    assert_eq!(config.layers[2].role, Role::Reindex);
}

#[test]
fn golden_and_pocket_configs_open() {
    for folder in ["golden/ckpt_f32", "golden/ckpt_bf16", "pocket/export/quantised"] {
        if let Some(folder) = shared(folder) {
            Config::open(&folder).unwrap();
        }
    }
    let pocket = Config::open(fixture("pocket/config.json")).unwrap();
    assert_eq!((pocket.num_hidden_layers, pocket.layers[6].role), (8, Role::Reindex));
}

/// The error of the released config with one field of `text_config` changed.
fn refused(path: &str, value: Value) -> String {
    let mut config = released();
    let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
    let pointer = format!("/text_config{}{parent}", if parent.is_empty() { "" } else { "/" });
    match config.pointer_mut(&pointer).unwrap() {
        Value::Array(items) => items[name.parse::<usize>().unwrap()] = value,
        object => object[name] = value,
    }
    match Config::from_json(&config.to_string()) {
        Ok(_) => panic!("{path} was accepted"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn bad_values_are_refused_by_name() {
    let ratios = |from: usize, to: usize, ratio: usize| {
        let mut list = released()["text_config"]["compress_ratios"].as_array().unwrap().clone();
        list[from..to].fill(json!(ratio));
        json!(list)
    };
    let cases = [
        ("vocab_size", json!(0), "`vocab_size`: found 0, allowed: a whole number 1..=16777216"),
        ("hidden_size", json!(-5120), "`hidden_size`: found -5120, allowed: a whole number 1..=16777216"),
        ("hidden_size", json!(5120.5), "`hidden_size`: found 5120.5, allowed: a whole number 1..=16777216"),
        ("hidden_size", json!("5120"), "`hidden_size`: found \"5120\", allowed: a whole number 1..=16777216"),
        ("head_dim", json!(513), "`head_dim`: found 513, allowed: an even number"),
        ("qk_rope_head_dim", json!(63), "`qk_rope_head_dim`: found 63, allowed: an even number up to 128 (head_dim 512, index_head_dim 128)"),
        ("qk_rope_head_dim", json!(130), "`qk_rope_head_dim`: found 130, allowed: an even number up to 128 (head_dim 512, index_head_dim 128)"),
        ("o_groups", json!(7), "`o_groups`: found 7, allowed: a divisor of num_attention_heads 64"),
        ("num_attention_heads", json!(1 << 20), "`num_attention_heads`: found 1048576, allowed: at most 32768 with head_dim 512"),
        ("num_key_value_heads", json!(8), "`num_key_value_heads`: found 8, allowed: 1"),
        ("n_shared_experts", json!(2), "`n_shared_experts`: found 2, allowed: 1"),
        ("num_experts_per_tok", json!(385), "`num_experts_per_tok`: found 385, allowed: a whole number 1..=384"),
        ("norm_topk_prob", json!("yes"), "`norm_topk_prob`: found \"yes\", allowed: true or false"),
        ("scoring_func", json!("softmax"), "`scoring_func`: found \"softmax\", allowed: sqrtsoftplus"),
        ("topk_method", json!("greedy"), "`topk_method`: found \"greedy\", allowed: noaux_tc"),
        ("hidden_act", json!("gelu"), "`hidden_act`: found \"gelu\", allowed: silu"),
        ("attention_bias", json!(true), "`attention_bias`: found true, allowed: false"),
        ("tie_word_embeddings", json!(true), "`tie_word_embeddings`: found true, allowed: false"),
        ("model_type", json!("deepseek_v4"), "`model_type`: found \"deepseek_v4\", allowed: deepseek_v41 or deepseek_v41_text"),
        ("rms_norm_eps", json!(0), "`rms_norm_eps`: found 0, allowed: a positive number"),
        ("swiglu_limit", json!("10"), "`swiglu_limit`: found \"10\", allowed: a positive number"),
        ("hc_sinkhorn_iters", json!(0), "`hc_sinkhorn_iters`: found 0, allowed: a whole number 1..=16777216"),
        ("rope_scaling", json!({"rope_type": "linear"}), "`rope_scaling.rope_type`: found \"linear\", allowed: yarn"),
        ("rope_scaling/factor", json!(0.5), "`rope_scaling.factor`: found 0.5, allowed: a number of at least 1"),
        ("rope_scaling/beta_fast", json!(0.5), "`rope_scaling.beta_fast`: found 0.5, allowed: at least beta_slow 1"),
        ("rope_scaling/original_max_position_embeddings", json!(0), "`rope_scaling.original_max_position_embeddings`: found 0, allowed: a whole number 1..=16777216"),
        ("num_hidden_layers", json!(41), "`compress_ratios`: found 43 entries, allowed: 41 or 44 entries (num_hidden_layers, with num_nextn_predict_layers)"),
        ("compress_ratios", json!([0, 1]), "`compress_ratios`: found 2 entries, allowed: 40 or 43 entries (num_hidden_layers, with num_nextn_predict_layers)"),
        ("compress_ratios/5", json!(3), "`compress_ratios[5]`: found 3, allowed: 0 or a divisor of 128"),
        ("compress_ratios/5", json!(256), "`compress_ratios[5]`: found 256, allowed: a list of whole numbers 0..=128"),
        ("compress_ratios/5", json!(4), "`compress_ratios[5]`: found 4, allowed: 2 (the ratio of its KV source, layer 2)"),
        ("compress_ratios/5", json!(0), "`compress_ratios[5]`: found 0, allowed: 2 (the ratio of its KV source, layer 2)"),
        ("compress_ratios/1", json!(2), "`compress_ratios[1]`: found 2, allowed: 0 (no KV source comes before)"),
        ("compress_ratios/41", json!(1), "`compress_ratios[41]`: found 1, allowed: 0 (a draft stage)"),
        ("compress_ratios", ratios(2, 8, 0), "`compress_ratios[2]`: found 0, allowed: at least 1 (the layer is a KV source)"),
        ("kv_source_layer_ids", json!([2, 8, 14, 21]), "`index_source_layer_ids`: found [2, 8, 14, 20, 24, 28, 32, 36], allowed: every KV source, also layer 21"),
        ("kv_source_layer_ids", json!([8, 2, 14, 20]), "`kv_source_layer_ids[1]`: found 2, allowed: more than 8"),
        ("kv_source_layer_ids", json!([2, 8, 14, 40]), "`kv_source_layer_ids[3]`: found 40, allowed: a list of whole numbers 0..=39"),
        ("index_source_layer_ids", json!([1, 2, 8, 14, 20]), "`index_source_layer_ids`: found 1, allowed: no layer before the first of kv_source_layer_ids [2, 8, 14, 20]"),
        ("candidate_source_layer_id", json!(21), "`candidate_source_layer_id`: found 21, allowed: -1 or one of index_source_layer_ids [2, 8, 14, 20, 24, 28, 32, 36]"),
        ("candidate_block_size", json!(0), "`candidate_block_size`: found 0, allowed: a whole number 1..=16777216"),
        ("engram_layer_ids", json!([1, 1]), "`engram_layer_ids[1]`: found 1, allowed: more than 1"),
        ("engram_num_embeddings", json!([384006168]), "`engram_num_embeddings`: found [384006168], allowed: 2 positive row counts, one for each of engram_layer_ids"),
        ("engram_max_ngram_size", json!(1), "`engram_max_ngram_size`: found 1, allowed: a whole number 2..=16777216"),
        ("engram_compressed_vocab_size", json!(129281), "`engram_compressed_vocab_size`: found 129281, allowed: a whole number 1..=129280"),
        ("dspark_target_layer_ids", json!([]), "`dspark_target_layer_ids`: found [], allowed: at least one layer"),
        ("dspark_target_layer_ids", json!([37, 40]), "`dspark_target_layer_ids[1]`: found 40, allowed: a list of whole numbers 0..=39"),
        ("dspark_target_layer_ids", json!([38, 37]), "`dspark_target_layer_ids[1]`: found 37, allowed: more than 38"),
        ("dspark_block_size", json!(0), "`dspark_block_size`: found 0, allowed: a whole number 1..=16777216"),
        ("dspark_block_size", json!(4000), "`dspark_block_size`: found 4000, allowed: at most 3276 with hidden_size 5120"),
        ("dspark_markov_rank", json!(5000), "`dspark_markov_rank`: found 5000, allowed: at most 3276 with hidden_size 5120"),
        ("dspark_n_routed_experts", json!(1 << 23), "`num_nextn_predict_layers`: found 3, allowed: at most 2 with dspark_n_routed_experts 8388608"),
        ("dspark_num_experts_per_tok", json!(129), "`dspark_num_experts_per_tok`: found 129, allowed: a whole number 1..=128"),
        ("dspark_noise_token_id", json!(129280), "`dspark_noise_token_id`: found 129280, allowed: a whole number 0..=129279"),
        ("eos_token_id", json!([1, 2]), "`eos_token_id`: found [1,2], allowed: a whole number 0..=129279"),
        ("quantization_config", json!({"weight_block_size": [128, 128]}), "`quantization_config.weight_block_size`: found [128,128], allowed: [32,32]"),
    ];
    for (path, value, expected) in cases {
        assert_eq!(refused(path, value), format!("config field {expected}"));
    }
}

#[test]
fn what_is_no_config_is_refused() {
    let error = |text| Config::from_json(text).unwrap_err().to_string();
    assert_eq!(error("weights"), "config.json: not JSON: expected value at line 1 column 1");
    assert_eq!(error("[1]"), "config.json: not a JSON object");
    assert_eq!(error("{\"text_config\": 7}"), "config field `text_config`: found 7, allowed: an object");
    let error = Config::open("/nowhere/at/all").unwrap_err().to_string();
    assert!(error.starts_with("/nowhere/at/all: "), "{error}");
}
