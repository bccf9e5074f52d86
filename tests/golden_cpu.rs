//! The CPU model against the recorded intermediates of the independent reference (`numerics.md` §19), and the cache
//! formats against its quantisers, bit for bit. The fixture's part runs everywhere; the rest where the whole record is.

mod common;

use std::path::Path;
use std::time::Instant;

use cedra::checkpoint::Checkpoint;
use cedra::formats::CacheFormat;
use cedra::reading::{Depth, Prefill, Reading};
use cedra::reference::math::Matrix;
use cedra::reference::model::{LogitRows, Model, Options};
use cedra::reference::sample::greedy;
use cedra::reference::trace::Recorded;
use cedra::text::{NgramTables, Tokenizer};
use common::golden::{self, cosine, floats, whole, Errors, Golden};
use common::support::{fixture, shared};

/// The model and tokens of a checkpoint of the record, with and without cache quantisation.
fn recorded(root: &Path, checkpoint: &str, quant: bool) -> (Model, Vec<u32>) {
    golden::model(&root.join(checkpoint), &root.join("inputs.safetensors"), quant)
}

fn rows(tensor: &Recorded) -> Matrix {
    let cols = *tensor.shape.last().unwrap();
    Matrix::new(floats(tensor).len() / cols, cols, floats(tensor).to_vec())
}

/// The largest differences, for those who watch.
fn report(what: &str, errors: &Errors) {
    let worst = |wanted: &dyn Fn(&str) -> bool| {
        let (error, name) = errors.worst(wanted);
        format!("{error:.1e} ({name})")
    };
    let (all, streams, logits) = (worst(&|_| true), worst(&|n| n.starts_with("streams")), worst(&|n| n == "logits"));
    let far: usize = errors.far_rows.values().map(|&(far, _)| far).sum();
    let wrong: usize = errors.wrong_rows().iter().map(|&(_, n)| n).sum();
    println!(
        "{what}: worst {all}, streams {streams}, logits {logits}; rows beyond 1e-4: {far}, wrong choices: {wrong}"
    );
}

/// With quantised caches a value within float noise of a bin edge may fall into the next bin, and its row differs.
fn assert_nearly_all_rows(what: &str, errors: &Errors) {
    report(what, errors);
    for (name, &(wrong, rows)) in errors.far_rows.iter().chain(&errors.integers) {
        assert!(wrong * 50 <= rows, "{what}: {name}: {wrong} of {rows} rows");
    }
    let hashes = &errors.integers["top.engram_hash_ids"];
    assert_eq!(hashes.0, 0, "{what}: hash ids");
}

#[test]
fn the_fixture_end_to_end() {
    let (model, tokens) = recorded(&fixture("golden"), "ckpt_fp8fp4", false);
    let golden = Golden::file(&fixture("golden/record_noquant.safetensors"));
    let (errors, trace) = golden::end_to_end(&model, &tokens[..40], &golden);
    report("fixture, without cache quantisation", &errors);
    assert_eq!(golden::faults(&errors), Vec::<String>::new());
    assert_eq!(errors.floats.len() + errors.integers.len(), golden.0.len(), "everything recorded was compared");

    // A trace on disk is the trace.
    let folder = tempfile::tempdir().unwrap();
    trace.write(folder.path().join("trace.safetensors")).unwrap();
    let read = golden::read(&folder.path().join("trace.safetensors"));
    assert_eq!(read.len(), trace.iter().count());
    assert!(trace.iter().all(|(name, tensor)| read[name] == *tensor));
}

#[test]
fn the_fixture_layer_by_layer() {
    let (model, tokens) = recorded(&fixture("golden"), "ckpt_fp8fp4", true);
    let golden = Golden::file(&fixture("golden/record_quant.safetensors"));
    let (errors, _) = golden::layer_by_layer(&model, &tokens[..40], &golden);
    assert_nearly_all_rows("fixture, with cache quantisation", &errors);
    assert_eq!(errors.floats.len() + errors.integers.len(), golden.0.len(), "everything recorded was compared");
}

/// Every recorded quantisation, bit for bit.
fn check_quantisers(golden: &Golden) -> usize {
    let mut checked = 0;
    for (name, before) in golden.0.iter().filter(|(name, _)| name.ends_with("_prequant")) {
        let format = match name {
            _ if name.contains("swa_kv") => CacheFormat::Fp8,
            _ if name.contains("comp_kv") => CacheFormat::Nvfp4,
            _ => CacheFormat::Mxfp4,
        };
        let after = rows(&golden.0[name.strip_suffix("_prequant").unwrap()]);
        for (before, after) in rows(before).iter().zip(after.iter()) {
            let ours = format.round_trip(before);
            assert!(ours.iter().zip(after).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}");
            checked += 1;
        }
    }
    checked
}

#[test]
fn quantisers_are_bit_exact() {
    assert_eq!(check_quantisers(&Golden::file(&fixture("golden/quantisers.safetensors"))), 4 * 8 + 7 * 8);
    let Some(root) = shared("golden") else { return };
    let checked = check_quantisers(&Golden::folder(&root.join("f32_quant")));
    println!("f32_quant: {checked} rows quantised, all bit-exact");
    // 12 window keys, and per row or entry of 3 Full and 2 Reindex layers: entries, index keys, index queries of 8 heads.
    assert_eq!(checked, 12 * 160 + 2 * (80 + 80 + 160) + 5 * 160 * 8);
}

#[test]
fn f32_end_to_end() {
    let Some(root) = shared("golden") else { return };
    let (model, tokens) = recorded(&root, "ckpt_f32", false);
    let golden = Golden::folder(&root.join("f32_noquant"));
    let (errors, _) = golden::end_to_end(&model, &tokens, &golden);
    report("f32_noquant end to end", &errors);
    assert_eq!(golden::faults(&errors), Vec::<String>::new());
    // Of the draft, a forward makes what the stages will see.
    let draft = ["dspark.context_features", "dspark.main_x"];
    let wanted = |name: &str| name.starts_with("layer_") || name.starts_with("top.") || draft.contains(&name);
    let wanted = golden.0.keys().filter(|name| wanted(name));
    assert_eq!(errors.floats.len() + errors.integers.len(), wanted.count(), "everything recorded was compared");
}

#[test]
fn packed_weights_end_to_end() {
    let Some(root) = shared("golden") else { return };
    let (model, tokens) = recorded(&root, "ckpt_fp8fp4", false);
    let golden = Golden::folder(&root.join("fp8fp4_f32compute_noquant"));
    let (errors, _) = golden::end_to_end(&model, &tokens, &golden);
    report("fp8fp4_f32compute_noquant end to end", &errors);
    assert_eq!(golden::faults(&errors), Vec::<String>::new());
}

#[test]
fn recorded_greedy_text() {
    let Some(root) = shared("golden") else { return };
    let (model, _) = recorded(&root, "ckpt_f32", false);
    let record = golden::read(&root.join("f32_noquant/generate.safetensors"));
    let prompt: Vec<u32> = whole(&record["prompt"]).iter().map(|&id| id as u32).collect();
    let mut state = model.state();
    let mut logits = model.forward(&mut state, &prompt, LogitRows::Last, None).unwrap();
    for (step, expected) in whole(&record["generated"]).into_iter().enumerate() {
        let recorded = rows(&record["step_logits"]);
        assert!(golden::max_difference(&logits[0], recorded.row(step)) < 2e-4, "step {step}");
        let token = greedy(&logits[0]).unwrap();
        assert_eq!(token as i64, expected, "step {step}");
        logits = model.forward(&mut state, &[token], LogitRows::Last, None).unwrap();
    }
}

/// Logits of the rows that a bounded reading runs through all layers, the waiting last one among them, and their floor.
fn bounded_rows(model: &Model, tokens: &[u32]) -> (usize, Matrix) {
    let (c, mut state, mut logits) = (&model.config, model.state(), vec![]);
    let reading = Reading::append(c, Prefill::Bounded, state.floors, 0, tokens.len());
    state.floors = reading.floors;
    for span in &reading.spans {
        let part = &tokens[span.start..span.end];
        match span.depth == Depth::all(c) {
            true => logits.extend(model.forward(&mut state, part, LogitRows::All, None).unwrap()),
            false => model.read(&mut state, part, span.depth).unwrap(),
        }
    }
    logits.extend(model.forward(&mut state, &tokens[tokens.len() - 1..], LogitRows::All, None).unwrap());
    (state.floors.decoder, Matrix::stack(c.vocab_size, logits))
}

/// A bounded reading against the record of one in which the decoder's window keys before the floor were hidden.
fn check_bounded(what: &str, model: &Model, tokens: &[u32], record: &Path) -> (Matrix, Matrix) {
    let record = golden::read(record);
    let (floor, ours) = bounded_rows(model, tokens);
    assert_eq!(floor as i64, whole(&record["floor"])[0]);
    let theirs = rows(&record["logits_tail"]);
    assert_eq!((ours.rows, ours.cols), (theirs.rows, theirs.cols));
    println!("{what}, bounded: logits within {:.1e}", golden::max_difference(&ours.data, &theirs.data));
    (ours, theirs)
}

#[test]
fn the_fixture_read_bounded() {
    let (model, tokens) = recorded(&fixture("golden"), "ckpt_fp8fp4", false);
    let (ours, theirs) = check_bounded("fixture", &model, &tokens, &fixture("golden/bounded.safetensors"));
    assert!(golden::max_difference(&ours.data, &theirs.data) < 2e-4);
    // The record tells a floor from none.
    let logits = model.forward(&mut model.state(), &tokens, LogitRows::All, None).unwrap();
    let full = Matrix::stack(theirs.cols, logits[tokens.len() - theirs.rows..].to_vec());
    assert!(golden::max_difference(&full.data, &theirs.data) > 0.1);
}

#[test]
fn recorded_bounded_readings() {
    let Some(root) = shared("golden") else { return };
    let (model, tokens) = recorded(&root, "ckpt_f32", false);
    let (ours, theirs) =
        check_bounded("f32_noquant", &model, &tokens, &root.join("f32_noquant/bounded_replay.safetensors"));
    assert!(golden::max_difference(&ours.data, &theirs.data) < 2e-4);
    let full = rows(&golden::read(&root.join("f32_noquant/bounded_replay.safetensors"))["logits_tail_full_prefill"]);
    assert!(golden::max_difference(&full.data, &theirs.data) > 0.1, "the record tells a floor from none");

    // With quantised caches the end is a statistic, as in `quantised_end_to_end_statistics`.
    let (model, tokens) = recorded(&root, "ckpt_f32", true);
    let (ours, theirs) =
        check_bounded("f32_quant", &model, &tokens, &root.join("f32_quant/bounded_replay.safetensors"));
    let share = |same: &dyn Fn(&[f32], &[f32]) -> bool| {
        ours.iter().zip(theirs.iter()).filter(|(a, b)| same(a, b)).count() as f64 / ours.rows as f64
    };
    let within = share(&|a, b| golden::max_difference(a, b) < 0.1);
    let (argmax, cosine) = (share(&|a, b| greedy(a) == greedy(b)), cosine(&ours.data, &theirs.data));
    println!("f32_quant, bounded: {within:.3} of rows within 0.1, argmax {argmax:.3}, cosine {cosine:.4}");
    assert!(within >= 0.6 && argmax >= 0.95 && cosine >= 0.99);
}

#[test]
fn layers_from_recorded_inputs() {
    let Some(root) = shared("golden") else { return };
    for (checkpoint, folder) in [("ckpt_f32", "f32_quant"), ("ckpt_fp8fp4", "fp8fp4_f32compute_quant")] {
        let (model, tokens) = recorded(&root, checkpoint, true);
        let (errors, _) = golden::layer_by_layer(&model, &tokens, &Golden::folder(&root.join(folder)));
        assert_nearly_all_rows(&format!("{folder} layer by layer"), &errors);
    }
    for (checkpoint, folder) in [("ckpt_f32", "f32_noquant"), ("ckpt_fp8fp4", "fp8fp4_f32compute_noquant")] {
        let (model, tokens) = recorded(&root, checkpoint, false);
        let (errors, _) = golden::layer_by_layer(&model, &tokens, &Golden::folder(&root.join(folder)));
        report(&format!("{folder} layer by layer"), &errors);
        assert_eq!(golden::faults(&errors), Vec::<String>::new(), "{folder}");
    }
}

/// The record rounds activations to BF16, this model does not: rows that choose the same entries and experts point the
/// same way, and most rows choose the same.
#[test]
fn bf16_layers_from_recorded_inputs() {
    let Some(root) = shared("golden") else { return };
    let (model, tokens) = recorded(&root, "ckpt_bf16", true);
    let golden = Golden::folder(&root.join("bf16_quant"));
    let (_, trace) = golden::layer_by_layer(&model, &tokens, &golden);
    for layer in golden.layers() {
        let both = |name: &str| {
            let name = format!("layer_{layer:02}.{name}");
            trace.get(&name).zip(golden.0.get(&name))
        };
        let same = |name: &str| -> Vec<bool> {
            let Some((ours, theirs)) = both(name) else { return vec![true; tokens.len()] };
            let sets = |t: &Recorded| -> Vec<Vec<i64>> {
                let (ids, k) = (whole(t), *t.shape.last().unwrap());
                let sorted = |row: &[i64]| {
                    let mut row = row.to_vec();
                    row.sort_unstable();
                    row
                };
                ids.chunks(k).map(sorted).collect()
            };
            sets(ours).iter().zip(&sets(theirs)).map(|(a, b)| a == b).collect()
        };
        let agree: Vec<bool> = same("topk").iter().zip(same("moe_indices")).map(|(&a, b)| a && b).collect();
        let agreeing = agree.iter().filter(|&&a| a).count();
        assert!(agreeing * 10 >= tokens.len() * 6, "layer {layer}: {agreeing} rows choose the same");
        for name in ["attn_out", "ffn_out", "streams_out"] {
            let (ours, theirs) = both(name).map(|(a, b)| (floats(a), floats(b))).unwrap();
            let width = ours.len() / tokens.len();
            let pairs = ours.chunks(width).zip(theirs.chunks(width)).zip(&agree);
            let mut cosines: Vec<f64> = pairs.filter(|(_, &agree)| agree).map(|((a, b), _)| cosine(a, b)).collect();
            cosines.sort_by(f64::total_cmp);
            let median = cosines[cosines.len() / 2];
            assert!(median > 0.999, "layer {layer} {name}: median cosine {median} of {agreeing} rows");
            if name == "streams_out" {
                assert!(cosine(ours, theirs) > 0.999, "layer {layer}: {}", cosine(ours, theirs));
            }
        }
    }
}

/// A value that falls into the next bin moves every later row: with quantised caches the end is a statistic.
#[test]
fn quantised_end_to_end_statistics() {
    let Some(root) = shared("golden") else { return };
    for (checkpoint, folder, near, agreement, direction) in [
        ("ckpt_f32", "f32_quant", 0.6, 0.95, 0.99),
        ("ckpt_fp8fp4", "fp8fp4_f32compute_quant", 0.6, 0.95, 0.99),
        ("ckpt_bf16", "bf16_quant", 0.0, 0.5, 0.9),
    ] {
        let (model, tokens) = recorded(&root, checkpoint, true);
        let golden = Golden::folder(&root.join(folder));
        let (errors, trace) = golden::end_to_end(&model, &tokens, &golden);
        assert_eq!(errors.integers["top.engram_hash_ids"].0, 0);
        let (ours, theirs) = (rows(trace.get("top.logits").unwrap()), rows(&golden.0["top.logits"]));
        let share = |same: &dyn Fn(&[f32], &[f32]) -> bool| {
            ours.iter().zip(theirs.iter()).filter(|(a, b)| same(a, b)).count() as f64 / ours.rows as f64
        };
        let within = share(&|a, b| golden::max_difference(a, b) < 0.1);
        let argmax = share(&|a, b| greedy(a) == greedy(b));
        let cosine = cosine(&ours.data, &theirs.data);
        println!("{folder} end to end: {within:.3} of rows within 0.1, argmax {argmax:.3}, cosine {cosine:.4}");
        assert!(within >= near && argmax >= agreement && cosine >= direction, "{folder}");
    }
}

/// The trained model: wherever the recorded choice is clear, ours is the same. The next token is the recorded one either
/// way, so that one close call does not end the comparison.
#[test]
fn pocket_greedy_text() {
    let Some(root) = shared("pocket/export") else { return };
    let checkpoint = Checkpoint::open(&root).unwrap();
    let tables = NgramTables::new(checkpoint.config(), &Tokenizer::open(&root).unwrap()).unwrap();
    let model = Model::load(&checkpoint, &tables, Options::default()).unwrap();
    let expected: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(root.join("expected.json")).unwrap()).unwrap();
    let (mut steps, mut close, mut differing, mut seconds) = (0, 0, 0, 0.0);
    for (i, case) in expected["cases"].as_array().unwrap().iter().enumerate() {
        let ids = |name: &str| -> Vec<u32> {
            case[name].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        let mut state = model.state();
        let mut logits = model.forward(&mut state, &ids("prompt_ids"), LogitRows::Last, None).unwrap();
        for (step, (&token, margin)) in ids("generated_ids").iter().zip(case["margins"].as_array().unwrap()).enumerate()
        {
            let same = greedy(&logits[0]) == Some(token);
            let clear = margin.as_f64().unwrap() > 0.05;
            assert!(same || !clear, "case {i}, step {step}, margin {margin}");
            steps += 1;
            close += !clear as usize;
            differing += !same as usize;
            let start = Instant::now();
            logits = model.forward(&mut state, &[token], LogitRows::Last, None).unwrap();
            seconds += start.elapsed().as_secs_f64();
        }
    }
    println!("pocket: {steps} steps, {close} close calls, {differing} of them decided otherwise");
    println!("pocket: {:.0} tokens/s decode on one core", steps as f64 / seconds);
    assert!(steps > 100 && close * 5 < steps);
}
