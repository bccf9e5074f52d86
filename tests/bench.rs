//! What grows with the context and what does not, counted on caches of random codes. Nothing here looks at a clock.

mod common;
#[path = "common/device_state.rs"]
mod device_state;

use cedra::config::Config;
use cedra::gpu::{Counters, Gpu};
use cedra::kernels::tiling::SCORE_BUDGET;
use cedra::layout::Layout;
use cedra::model::{MemoryPlan, Model, Options, Sequence};
use cedra::reading::Replay;
use common::random_model::{random_checkpoint, Shape, Storage};
use device_state::{load, made, options, own_gpu, text};
use serde_json::Value;
use std::process::Command;
use std::sync::Arc;

const LONG: usize = 65_536;
const MILLION: usize = 1_048_576;

/// A small model that may be as long as the release's. Blocks of four entries: a million slots are one tile.
fn shape(layers: &str) -> Shape {
    Shape { max_positions: MILLION, candidate_block: 4, layers: layers.into(), ..Shape::odd(Storage::Fp4) }
}

/// What a token costs after `length` random tokens, and the model that made it.
fn token(gpu: &Arc<Gpu>, shape: &Shape, length: usize, slab_bytes: Option<u64>) -> (Counters, Arc<Model>) {
    let random = random_checkpoint(41, shape);
    let model = load(gpu, &random, Options { slab_bytes, ..options(length + 2, 8) });
    let mut sequence = Sequence::new(model.clone()).unwrap();
    sequence.synthesize(length, 41).unwrap();
    let before = gpu.counters();
    assert_eq!(made(&mut sequence, 1).len(), 1);
    (gpu.counters() - before, model)
}

/// Of a model whose encoder and decoder each have one Full layer, a token at a million tokens reads more than one at 65,536: the
/// index keys of the two Full layers, once, and not a byte more. It is one submission, of as many dispatches.
#[test]
fn only_the_scan_of_full_layers_grows() {
    let Some(gpu) = own_gpu() else { return };
    let (with, without) = (shape("w2r1rir"), shape("w2r1rrr"));
    let at = |shape: &Shape, length: usize| token(&gpu, shape, length, None);
    let ((long, model), (million, _)) = (at(&with, LONG - 2), at(&with, MILLION - 2));
    let key = 4 * model.layout().key_row as u64;
    let more = (MILLION - LONG) as u64;
    assert_eq!(million.cache_bytes - long.cache_bytes, more / 2 * key + more * key);
    assert_eq!(million.weight_bytes, long.weight_bytes);

    // The Reindex layer by itself: what it adds to a layer that reuses does not depend on the length.
    let plain = [LONG - 2, MILLION - 2].map(|length| at(&without, length).0);
    let reindex = long.cache_bytes - plain[0].cache_bytes;
    assert_eq!(reindex, million.cache_bytes - plain[1].cache_bytes);
    let (config, layout) = (model.config(), model.layout());
    let slots = (config.candidate_topk_blocks * config.candidate_block_size) as u64;
    assert_eq!(reindex, slots * key + 4 * layout.latents as u64, "candidates' keys and the latents that are gathered");

    // Twelve a layer, two an Engram and one its lookup; score, select and gather where a layer selects, and a merge where it sees
    // more than a segment; embedding, the last boundary, head, sample.
    let layers = 7 * 12 + 2 * 3 + 3 * 3 + 2;
    assert_eq!((long.submissions, long.dispatches), (1, layers + 4), "{:?}", long.dispatches_by_kernel);
    assert_eq!((million.submissions, million.dispatches), (1, layers + 4), "{:?}", million.dispatches_by_kernel);
    assert_eq!((long.blocking_readbacks, million.blocking_readbacks), (0, 0));
}

/// A cache in several slabs costs two dispatches a further slab where a layer selects, and reads the same bytes. Memory is what
/// the plan said.
#[test]
fn slabs_cost_dispatches_and_no_bytes() {
    let Some(gpu) = own_gpu() else { return };
    let shape = shape("w2r1rir");
    let empty = gpu.counters().allocated;
    let (one, model) = token(&gpu, &shape, MILLION - 2, None);
    let held = |spent: &Counters, model: &Model| {
        for (kind, planned) in model.plan().by_kind() {
            assert_eq!(spent.allocated[&kind] - empty[&kind], planned, "{kind:?}");
        }
        model.pool().slabs(0).len() as u64
    };
    assert_eq!(held(&one, &model), 1);
    drop(model);
    let (several, model) = token(&gpu, &shape, MILLION - 2, Some(16 << 20));
    let slabs = held(&several, &model);
    assert!(slabs > 4, "{slabs} slabs");
    assert_eq!(several.dispatches - one.dispatches, 2 * 3 * (slabs - 1));
    assert_eq!(several.cache_bytes, one.cache_bytes);
}

/// Scratch for a million tokens is that for 65,536 when chunks have 128 rows, and never more than the budget of scores above that
/// for 4,096.
#[test]
fn scratch_does_not_grow_with_the_context() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/reference/released-config.json");
    let config = Config::open(path).unwrap();
    let plan = |context| MemoryPlan::of_config(&config, &Options { context, ..Options::default() }).unwrap();
    let [short, long, million] = [4096, LONG, MILLION].map(plan);
    assert_eq!(long.scratch, million.scratch);
    // With the scores go their maxima by block, and the lists of segments.
    let words = SCORE_BUDGET as u64 * 5 / 4;
    assert!(million.scratch - short.scratch <= 4 * words, "{} bytes more", million.scratch - short.scratch);
    assert_eq!((million.weights, million.cache), (short.weights, short.cache));

    // Pages of 890 bytes a token, in slabs of which the last is not full.
    let layout = Layout::new(&config, &Options { context: MILLION, ..Options::default() }).unwrap();
    assert_eq!(4 * layout.pool.page_words, 890 * 128);
    let pages = 890 * MILLION as u64;
    assert!(million.pages >= pages && million.pages < pages + million.slab, "{} bytes of pages", million.pages);
    assert_eq!(million.pages, 7 * million.slab);
}

/// A cache of random codes costs what a cache costs that was read, and can be gone on with in every way.
#[test]
fn a_synthetic_cache_stands_for_one_that_was_read() {
    let Some(gpu) = own_gpu() else { return };
    let shape = shape("w2ri1rir");
    let model = load(&gpu, &random_checkpoint(42, &shape), options(1024, 64));
    for length in [1, 2, 7, 128, 129, 300] {
        let mut read = Sequence::new(model.clone()).unwrap();
        read.append_as(&text(shape.vocab, 42, length), cedra::reading::Prefill::Full, &mut |_| {
            std::ops::ControlFlow::Continue(())
        })
        .unwrap();
        let mut synthetic = Sequence::new(model.clone()).unwrap();
        synthetic.synthesize(length, 7).unwrap();
        assert_eq!((synthetic.len(), synthetic.standing()), (length, read.standing()));
        let mut spent = [&mut read, &mut synthetic].map(|sequence| {
            let before = gpu.counters();
            assert_eq!(made(sequence, 3).len(), 3);
            gpu.counters() - before
        });
        // How often the host waited depends on the clock.
        spent.iter_mut().for_each(|spent| spent.waits = 0);
        assert_eq!(spent[0], spent[1], "{length} tokens");
        synthetic.append(&text(shape.vocab, 43, 150), &mut |_| {}).unwrap();
        synthetic.truncate(length, Replay::Bounded).unwrap();
        assert_eq!(made(&mut synthetic, 3).len(), 3);
    }
    let mut sequence = Sequence::new(model).unwrap();
    assert!(matches!(sequence.synthesize(0, 1), Err(cedra::Error::EmptyPrompt)));
    assert!(matches!(sequence.synthesize(1025, 1), Err(cedra::Error::Context { needed: 1025, allowed: 1024 })));
    assert!(sequence.is_empty());
}

fn bench(arguments: &[&str]) -> Result<String, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cedra"));
    let output = command.current_dir(env!("CARGO_MANIFEST_DIR")).arg("bench").args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    if output.status.success() {
        Ok(text(output.stdout))
    } else {
        Err(text(output.stderr))
    }
}

/// The command's figures: one submission a token, memory as planned, and a note where the model's limit was raised.
#[test]
fn the_command_measures_long_contexts() {
    if own_gpu().is_none() {
        return;
    }
    let model = ["--synthetic-cache", "--model", "tests/fixtures/golden/ckpt_fp8fp4"];
    let run = |more: &[&str]| bench(&[&model, more].concat());
    let text = run(&["--context", "8192", "--generate", "2", "--json"]).unwrap();
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((&report["raised_from"], &report["generated"]), (&Value::from(4096), &Value::from(2)));
    let contexts = report["contexts"].as_array().unwrap();
    assert_eq!(contexts.iter().map(|at| at["context"].as_u64().unwrap()).collect::<Vec<_>>(), [4096, 8192]);
    for at in contexts {
        assert_eq!(at["submissions"], 1.0);
        assert!(at["cache_bytes"].as_f64().unwrap() > 0.0 && at["seconds"].as_f64().unwrap() > 0.0, "{at}");
        let memory = at["memory"].as_object().unwrap();
        assert_eq!(memory.len(), 5);
        for (kind, bytes) in memory {
            assert_eq!(bytes["planned"], bytes["held"], "{kind}");
        }
    }
    let of = |at: usize, what: &str| contexts[at][what].as_f64().unwrap();
    assert!(of(1, "index_flops") > of(0, "index_flops"));
    assert_eq!(of(1, "flops") - of(0, "flops"), of(1, "index_flops") - of(0, "index_flops"));

    let text = run(&["--context", "4096", "--generate", "1"]).unwrap();
    assert!(!text.contains("made for") && text.contains("over the first"), "{text}");
    let refused = run(&["--context", "2000000"]).unwrap_err();
    assert!(refused.contains("setting `context`: found 2000000, allowed: 1 to 1048576"), "{refused}");
    let refused = run(&["--context", "5"]).unwrap_err();
    assert!(refused.contains("setting `context`: found 5, allowed: at least 7"), "{refused}");
    let refused = run(&["--generate", "0"]).unwrap_err();
    assert!(refused.contains("setting `generate`: found 0, allowed: 1 or more"), "{refused}");
    let refused = run(&["--device", "cpu"]).unwrap_err();
    assert!(refused.contains("not supported: a synthetic cache on the CPU"), "{refused}");
}

/// A restore replays a window of rows at most, whatever the length, and reads what was saved from either store.
#[test]
fn the_command_measures_restores() {
    if own_gpu().is_none() {
        return;
    }
    let model = "tests/fixtures/golden/ckpt_fp8fp4";
    let text = bench(&["--restore", "1,9,300,4200", "--model", model, "--json"]).unwrap();
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["raised_from"], 4096);
    let lengths = report["lengths"].as_array().unwrap();
    let mut bytes = 0;
    // The window has 16 rows: those before the last token, and an open group of two.
    for (at, (tokens, replayed)) in lengths.iter().zip([(1, 0), (9, 8), (300, 15), (4200, 15)]) {
        assert_eq!((&at["tokens"], &at["read_anew_tokens"]), (&Value::from(tokens), &Value::from(tokens)));
        assert!(at["read_anew_seconds"].as_f64().unwrap() > 0.0);
        let restores = at["restores"].as_array().unwrap();
        assert_eq!(restores.len(), 2);
        assert_eq!(restores[0]["bytes"], restores[1]["bytes"]);
        let grown = restores[0]["bytes"].as_u64().unwrap();
        assert!(grown > bytes, "{grown} bytes after {bytes}");
        bytes = grown;
        for restore in restores {
            assert_eq!(restore["replayed"], replayed, "{tokens} tokens: {restore}");
        }
    }
    let refused = bench(&["--restore", "9", "--model", model, "--device", "cpu"]).unwrap_err();
    assert!(refused.contains("not supported: sessions on the CPU"), "{refused}");
    let refused = bench(&["--restore", "0", "--model", model]).unwrap_err();
    assert!(refused.contains("the prompt is empty"), "{refused}");
}
