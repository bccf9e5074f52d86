//! Tokenizer, streaming detokenizer, Engram constants.

mod support;

use std::path::PathBuf;
use std::sync::LazyLock;

use cedra::config::Config;
use cedra::text::{NgramTables, Tokenizer};
use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::{json, Value};
use support::fixture;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/pocket");

/// The released pre-tokenizer over a small trained vocabulary.
static POCKET: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::open(MODEL).unwrap());

fn read_json(path: PathBuf) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn prompts_and_answers_have_the_recorded_ids() {
    let expected = read_json(fixture("pocket/expected.json"));
    for (i, case) in expected["cases"].as_array().unwrap().iter().enumerate() {
        let ids: Vec<u32> = serde_json::from_value(case["prompt_ids"].clone()).unwrap();
        assert_eq!(POCKET.decode(&ids).unwrap(), case["prompt"]);
        // The last prompt was put together from two texts encoded apart.
        if i < 6 {
            assert_eq!(POCKET.encode_with_special(case["prompt"].as_str().unwrap()).unwrap(), ids);
        }
        let answer: Vec<u32> = serde_json::from_value(case["generated_ids"].clone()).unwrap();
        assert_eq!(POCKET.decode(&answer).unwrap(), case["text"]);
    }
}

#[test]
fn control_tokens_in_user_text_stay_text() {
    let tokens = read_json(PathBuf::from(MODEL).join("tokenizer.json"));
    let added: Vec<&Value> = tokens["added_tokens"].as_array().unwrap().iter().collect();
    let control: Vec<u32> = added.iter().map(|token| token["id"].as_u64().unwrap() as u32).collect();
    for token in &added {
        let content = token["content"].as_str().unwrap();
        for text in [content.to_string(), format!("a{content}b"), format!(" {content}\n"), content.repeat(3)] {
            let ids = POCKET.encode(&text).unwrap();
            assert!(ids.iter().all(|id| !control.contains(id)), "{text:?}: {ids:?}");
            assert_eq!(POCKET.decode(&ids).unwrap(), text);
        }
        assert_eq!(json!(POCKET.encode_with_special(content).unwrap()), json!([token["id"]]));
        assert_eq!(json!(POCKET.token_to_id(content)), token["id"]);
    }
    let (user, end) = (POCKET.token_to_id("<｜User｜>").unwrap(), POCKET.token_to_id("</think>").unwrap());
    let ids = POCKET.encode_with_special("x<｜User｜><｜User</think>").unwrap();
    let middle = POCKET.encode("<｜User").unwrap();
    assert_eq!(ids, [POCKET.encode("x").unwrap(), vec![user], middle, vec![end]].concat());
}

#[test]
fn empty_text_and_ids_beyond_the_vocabulary() {
    assert!(POCKET.encode("").unwrap().is_empty() && POCKET.encode_with_special("").unwrap().is_empty());
    assert_eq!(POCKET.decode(&[]).unwrap(), "");
    assert_eq!(POCKET.vocab_size(), 4096);
    let error = "token id 4096 is outside the vocabulary of 4096 tokens";
    assert_eq!(POCKET.decode(&[5, 4096]).unwrap_err().to_string(), error);
    assert_eq!(POCKET.stream().push(4096).unwrap_err().to_string(), error);
}

#[test]
fn characters_split_over_tokens_stream_whole() {
    let text = "日本語 🦀👩‍👩‍👧‍👦 naïve Ω≈ç ẞ 한국어 العربية";
    let ids = POCKET.encode(text).unwrap();
    assert!(ids.len() > 40, "the vocabulary is too small for these: most characters are split");
    let mut stream = POCKET.stream();
    let pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')), "{pieces:?}");
    assert_eq!(pieces.concat() + &stream.finish(), text);
}

proptest! {
    #[test]
    fn text_survives_a_round_trip(text in ".{0,40}|[ \t\r\n]{0,9}|[一-龥🦀-🧿é<｜>User]{0,20}") {
        prop_assert_eq!(POCKET.decode(&POCKET.encode(&text).unwrap()).unwrap(), text);
    }

    /// Any ids at all, mostly broken UTF-8: the first 300 are single bytes and short merges.
    #[test]
    fn stream_pieces_concatenate_to_the_whole(ids in prop::collection::vec(prop_oneof![0u32..300, 0u32..4096], 0..60)) {
        let mut stream = POCKET.stream();
        let mut text = String::new();
        for &id in &ids {
            text += &stream.push(id).unwrap();
        }
        prop_assert_eq!(text + &stream.finish(), POCKET.decode(&ids).unwrap());
    }

    #[test]
    fn a_cut_anywhere_loses_nothing(text in "[🦀-🧿一-龥éß a]{1,20}", keep in 0.0..1.0f64) {
        let ids = POCKET.encode(&text).unwrap();
        let ids = &ids[..(ids.len() as f64 * keep) as usize];
        let mut stream = POCKET.stream();
        let pieces: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        prop_assert!(text.starts_with(&pieces));
        prop_assert_eq!(pieces + &stream.finish(), POCKET.decode(ids).unwrap());
    }
}

#[test]
fn constants_of_the_golden_model() {
    let folder = fixture("golden/ckpt_fp8fp4");
    let tables = NgramTables::new(&Config::open(&folder).unwrap(), &Tokenizer::open(&folder).unwrap()).unwrap();
    let file = std::fs::read(fixture("golden/inputs.safetensors")).unwrap();
    let inputs = SafeTensors::deserialize(&file).unwrap();
    let recorded = |name: &str| -> Vec<u64> {
        let data = inputs.tensor(name).unwrap().data();
        data.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap())).collect()
    };
    let wide = |values: &[u32]| -> Vec<u64> { values.iter().map(|&v| v as u64).collect() };
    assert_eq!(wide(&tables.token_map), recorded("engram_token_map"));
    let layers = &tables.layers;
    assert_eq!(layers.iter().flat_map(|l| l.multipliers.clone()).collect::<Vec<_>>(), recorded("engram_multipliers"));
    assert_eq!(layers.iter().flat_map(|l| wide(&l.primes)).collect::<Vec<_>>(), recorded("engram_primes"));
    assert_eq!(layers.iter().flat_map(|l| wide(&l.offsets)).collect::<Vec<_>>(), recorded("engram_offsets"));
}

#[test]
fn constants_of_the_pocket_model() {
    let config = Config::open(fixture("pocket/config.json")).unwrap();
    let tables = NgramTables::new(&config, &POCKET).unwrap();
    let expected = read_json(fixture("pocket/engram_constants.json"));
    assert_eq!(json!(tables.token_map), expected["token_map"]);
    assert_eq!(tables.pad, expected["pad_compressed_id"]);
    assert_eq!(json!(tables.layers.iter().map(|l| &l.multipliers).collect::<Vec<_>>()), expected["multipliers"]);
    assert_eq!(json!(tables.layers.iter().map(|l| &l.primes).collect::<Vec<_>>()), expected["primes"]);
    assert_eq!(json!(tables.layers.iter().map(|l| &l.offsets).collect::<Vec<_>>()), expected["offsets"]);
}

/// A tokenizer whose distinct keys are as many as the release has: primes and multipliers depend on nothing else.
#[test]
fn constants_of_the_release() {
    let config = Config::open(fixture("reference/released-config.json")).unwrap();
    let keys = config.engram.as_ref().unwrap().compressed_vocab_size;
    // One key for each id below 99092, and the first key again for the rest.
    let vocab: serde_json::Map<String, Value> = (0..config.vocab_size)
        .map(|id| (if id < keys { format!("t{id}") } else { format!("T{}", id - keys) }, json!(id)))
        .collect();
    let file = json!({"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocab, "merges": []}});
    let tokenizer = Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap();
    let tables = NgramTables::new(&config, &tokenizer).unwrap();
    let expected = read_json(fixture("reference/real_engram_constants.json"));
    assert_eq!(tables.pad, expected["pad_compressed_id"]);
    assert_eq!(json!(tables.layers.iter().map(|l| &l.multipliers).collect::<Vec<_>>()), expected["multipliers"]);
    assert_eq!(json!(tables.layers.iter().map(|l| &l.primes).collect::<Vec<_>>()), expected["primes"]);
    let rows = tables.layers.iter().map(|l| *l.offsets.last().unwrap() as u64 + *l.primes.last().unwrap() as u64);
    assert_eq!(json!(rows.collect::<Vec<_>>()), expected["sums"]);
}

#[test]
fn constants_that_disagree_with_the_config_are_refused() {
    let refused = |name: &str, value: Value| {
        let mut config = read_json(fixture("pocket/config.json"));
        config["text_config"][name] = value;
        NgramTables::new(&Config::from_json(&config.to_string()).unwrap(), &POCKET).unwrap_err().to_string()
    };
    assert_eq!(
        refused("engram_compressed_vocab_size", json!(3094)),
        "config field `engram_compressed_vocab_size`: found 3094, allowed: 3093, the distinct keys of the tokenizer"
    );
    assert_eq!(
        refused("engram_num_embeddings", json!([36174, 36453])),
        "config field `engram_num_embeddings[1]`: found 36453, allowed: 36452, the sum of the layer's primes"
    );
    assert_eq!(
        refused("engram_num_embeddings", json!([7000, 36452])),
        "config field `engram_num_embeddings[0]`: found 7000, allowed: the sum of the layer's primes, at least 12018"
    );
    let mut small = read_json(fixture("pocket/config.json"));
    for (name, value) in [("vocab_size", 4095), ("dspark_noise_token_id", 0), ("engram_compressed_vocab_size", 3000)] {
        small["text_config"][name] = json!(value);
    }
    let small = Config::from_json(&small.to_string()).unwrap();
    assert_eq!(
        NgramTables::new(&small, &POCKET).unwrap_err().to_string(),
        "tokenizer: found ids up to 4095, allowed: ids below vocab_size 4095"
    );
}

#[test]
fn models_without_engram_need_no_constants() {
    let mut config = read_json(fixture("pocket/config.json"));
    config["text_config"]["engram_layer_ids"] = json!([]);
    let tables = NgramTables::new(&Config::from_json(&config.to_string()).unwrap(), &POCKET).unwrap();
    assert!(tables.layers.is_empty() && tables.token_map.is_empty());
}

#[test]
fn what_is_no_tokenizer_is_refused() {
    let refused = |change: fn(&mut Value)| {
        let mut file = read_json(fixture("golden/ckpt_fp8fp4/tokenizer.json"));
        change(&mut file);
        Tokenizer::from_bytes(file.to_string().as_bytes()).err().unwrap().to_string()
    };
    assert_eq!(
        Tokenizer::from_bytes(b"<html>").err().unwrap().to_string(),
        "tokenizer: found no JSON (expected value at line 1 column 1), allowed: a tokenizer.json"
    );
    assert_eq!(
        refused(|file| file["model"]["type"] = json!("WordPiece")),
        "tokenizer: found model WordPiece, allowed: model BPE"
    );
    assert_eq!(
        refused(|file| file["decoder"] = json!(null)),
        "tokenizer: found decoder nothing, allowed: decoder ByteLevel"
    );
    assert_eq!(
        refused(|file| file["normalizer"] = json!({"type": "NFC"})),
        "tokenizer: found normalizer NFC, allowed: no normalizer"
    );
    assert_eq!(
        refused(|file| file["added_tokens"][3]["id"] = json!(u32::MAX)),
        "tokenizer: found ids up to 4294967295 for 320 tokens, allowed: ids without large gaps"
    );
    assert_eq!(
        refused(|file| file["added_tokens"][3]["id"] = json!(313)),
        "tokenizer: found id 313 for both \"<｜Assistant｜>\" and \"<｜User｜>\", allowed: one token an id"
    );
    assert!(refused(|file| file["pre_tokenizer"] = json!(7)).starts_with("tokenizer: found what the parser refuses: "));
    let error = Tokenizer::open("/nowhere").err().unwrap().to_string();
    assert!(error.starts_with("/nowhere: "), "{error}");
}
