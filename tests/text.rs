//! Tokenizer, streaming detokenizer, Engram constants.

mod support;

use cedra::config::Config;
use cedra::text::{NgramTables, Tokenizer};
use serde_json::Value;
use support::shared;

fn json(path: std::path::PathBuf) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn pocket_constants() {
    let Some(folder) = shared("pocket/export") else { return };
    let tables = NgramTables::new(&Config::open(&folder).unwrap(), &Tokenizer::open(&folder).unwrap()).unwrap();
    let expected = json(folder.join("engram_constants.json"));
    assert_eq!(serde_json::json!(tables.token_map), expected["token_map"]);
    assert_eq!(tables.pad, expected["pad_compressed_id"]);
    for (i, layer) in tables.layers.iter().enumerate() {
        assert_eq!(serde_json::json!(layer.multipliers), expected["multipliers"][i]);
        assert_eq!(serde_json::json!(layer.primes), expected["primes"][i]);
        assert_eq!(serde_json::json!(layer.offsets), expected["offsets"][i]);
    }
}

#[test]
fn released_constants() {
    let (Some(config), Some(constants)) =
        (shared("reference/released-config.json"), shared("reference/real_engram_constants.json"))
    else {
        return;
    };
    let Some(tokenizer) = std::env::var_os("CEDRA_TOKENIZER") else { return };
    let tables = NgramTables::new(&Config::open(&config).unwrap(), &Tokenizer::open(tokenizer).unwrap()).unwrap();
    let expected = json(constants);
    for (i, layer) in tables.layers.iter().enumerate() {
        assert_eq!(serde_json::json!(layer.multipliers), expected["multipliers"][i]);
        assert_eq!(serde_json::json!(layer.primes), expected["primes"][i]);
    }
}
