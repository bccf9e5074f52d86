//! The whole model on the device: held against the CPU model layer by layer, against the recorded reference, and against
//! itself in every chunking. Everything that can start as NaN does.

mod common;
#[path = "kernels/common.rs"]
mod device;

use cedra::checkpoint::Checkpoint;
use cedra::gpu::{DeviceOptions, FeatureUse, Gpu, MemoryKind};
use cedra::model::{Finish, Model, Options, Sequence};
use cedra::reading::Prefill;
use cedra::reference::model::{Model as Twin, Options as TwinOptions};
use cedra::reference::trace::{Recorded, Trace, Values};
use cedra::sampling::{Request, Sampling};
use cedra::text::NgramTables;
use cedra::Error;
use common::golden::{self, floats, Golden};
use common::random_model::{random_checkpoint, Shape, Storage};
use common::Random;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// The device of this run, shared: pipelines are made once.
fn gpu() -> Option<Arc<Gpu>> {
    static GPU: OnceLock<Option<Arc<Gpu>>> = OnceLock::new();
    GPU.get_or_init(|| {
        device::gpu()?;
        let options = DeviceOptions { software: true, ..DeviceOptions::default() };
        Some(Arc::new(Gpu::new_blocking(&options).expect("there was a device a moment ago")))
    })
    .clone()
}

/// A device of one's own, for tests that count.
fn own_gpu() -> Option<Arc<Gpu>> {
    gpu()?;
    let options = DeviceOptions { software: true, ..DeviceOptions::default() };
    Some(Arc::new(Gpu::new_blocking(&options).expect("there was a device a moment ago")))
}

fn options(context: usize, chunk: usize) -> Options {
    Options { context, chunk, poison: true, ..Options::default() }
}

fn sequence(gpu: &Arc<Gpu>, checkpoint: &Checkpoint, tables: &NgramTables, options: Options) -> Sequence {
    let model = Model::load_blocking(gpu.clone(), checkpoint, tables, &options, &mut |_, _| {}).unwrap();
    Sequence::new(Arc::new(model)).unwrap()
}

fn text(vocabulary: usize, seed: u64, len: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.below(vocabulary) as u32).collect()
}

fn greedy(max_tokens: usize) -> Request {
    Request { max_tokens, sampling: Sampling::default(), stop_ids: vec![] }
}

/// A trace as a record that the CPU model can be run from.
fn record(trace: &Trace) -> Golden {
    Golden(trace.iter().map(|(name, tensor)| (name.to_string(), tensor.clone())).collect())
}

fn largest(tensor: &Recorded) -> f32 {
    match &tensor.values {
        Values::F32(values) => values.iter().filter(|v| v.is_finite()).fold(0.0, |max, v| max.max(v.abs())),
        _ => 1.0,
    }
}

/// Every chosen set and every route equal, and every tensor of every layer within 1e-4 of its largest value. The one exception is a cache
/// code that lay on the edge between two values: a key moves by half a step, and the rows that see it follow within the layer. A window key
/// is seen by `window` rows; a global entry by those that select it, a quarter of them at most.
fn assert_twin(trace: &Trace, twin: &Trace, window: usize, what: &str) {
    let errors = golden::compare(twin, &record(trace));
    assert!(errors.floats.len() > 20, "{what}: only {:?} were compared", errors.floats.keys());
    let far = |layer: &str, name: &str| errors.far_rows.get(&format!("{layer}.{name}")).map_or(0, |&(far, _)| far);
    let mut faults = vec![];
    for (name, &error) in &errors.floats {
        let allowed = 1e-4 * largest(trace.get(name).unwrap()).max(1.0);
        if error <= allowed {
            continue;
        }
        let (layer, tensor) = name.split_once('.').unwrap();
        let (rows_far, rows) = errors.far_rows.get(name).copied().unwrap_or((usize::MAX, 1));
        let quantised = ["swa_kv", "comp_kv", "index_k", "index_q"];
        let few = if quantised.contains(&tensor) {
            rows / 40 + 1
        } else {
            let global: usize = quantised[1..].iter().map(|name| far(layer, name)).sum();
            far(layer, "swa_kv") * window + global * rows / 4
        };
        if rows_far > few || error.is_infinite() {
            faults
                .push(format!("{name}: off by {error:.1e} of {allowed:.1e}, {rows_far} of {rows} rows, {few} allowed"));
        }
    }
    let wrong = errors.wrong_rows();
    faults.extend(wrong.iter().map(|(name, wrong)| format!("{name}: {wrong} rows differ")));
    assert!(faults.is_empty(), "{what}:\n{}", faults.join("\n"));
}

/// Law 1 for the whole model: each layer equals the CPU model's layer from the same inputs, whatever sizes and formats.
#[test]
fn layers_equal_their_twins() {
    let Some(gpu) = gpu() else { return };
    for (i, storage) in Storage::ALL.into_iter().enumerate() {
        let shape = Shape::odd(storage);
        let random = random_checkpoint(i as u64, &shape);
        let checkpoint = random.checkpoint();
        let tokens = text(shape.vocab, i as u64, 45);
        let mut sequence = sequence(&gpu, &checkpoint, &random.tables, Options { all_logits: true, ..options(64, 64) });
        let trace = sequence.trace(&tokens, 0..shape.layers.len()).unwrap();
        let twin = Twin::load(&checkpoint, &random.tables, TwinOptions::default()).unwrap();
        let (_, expected) = golden::layer_by_layer(&twin, &tokens, &record(&trace));
        assert_twin(&trace, &expected, shape.window, &format!("{storage:?}"));
    }
}

fn state(sequence: &Sequence) -> Vec<(String, Vec<u8>)> {
    let gpu = sequence.gpu();
    sequence.cache().state().map(|buffer| (buffer.label().into(), gpu.read_blocking(buffer).unwrap())).collect()
}

/// Laws 3 and 4: however a text is cut, down to single tokens, it leaves the same bytes and the same next tokens; law 8: all of
/// it starts as NaN.
#[test]
fn chunks_make_no_difference() {
    let Some(gpu) = gpu() else { return };
    for (seed, shape) in [(1, Shape::odd(Storage::Mixed)), (2, Shape::random(2)), (3, Shape::random(5))] {
        let random = random_checkpoint(seed, &shape);
        let checkpoint = random.checkpoint();
        let tokens = text(shape.vocab, seed, 80);
        let mut expected = None;
        for chunk in [128, 64, 7, 3, 2, 1] {
            let mut sequence = sequence(&gpu, &checkpoint, &random.tables, options(128, chunk));
            sequence.append(&tokens, &mut |_| {}).unwrap();
            let caches: Vec<(String, Vec<u8>)> = state(&sequence);
            let next: Vec<u32> = sequence.generate(&greedy(6)).unwrap().collect::<Result<_, _>>().unwrap();
            let (expected_caches, expected_next) = expected.get_or_insert_with(|| (caches.clone(), next.clone()));
            for ((name, bytes), (_, expected)) in caches.iter().zip(expected_caches.iter()) {
                assert_eq!(bytes, expected, "{name} of seed {seed} in chunks of {chunk}");
            }
            assert_eq!(&next, expected_next, "seed {seed} in chunks of {chunk}");
        }
    }
}

/// Laws 1, 3 and 4 over random sizes, layer lists and formats; CEDRA_CASES asks for more than two models.
#[test]
fn random_models_keep_the_laws() {
    let Some(gpu) = gpu() else { return };
    let cases = std::env::var("CEDRA_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(2);
    for seed in 100..100 + cases {
        let shape = Shape::random(seed);
        let random = random_checkpoint(seed, &shape);
        let checkpoint = random.checkpoint();
        let tokens = text(shape.vocab, seed, 45);
        let mut whole = sequence(&gpu, &checkpoint, &random.tables, Options { all_logits: true, ..options(64, 64) });
        let trace = whole.trace(&tokens, 0..shape.layers.len()).unwrap();
        let twin = Twin::load(&checkpoint, &random.tables, TwinOptions::default()).unwrap();
        let (_, expected) = golden::layer_by_layer(&twin, &tokens, &record(&trace));
        assert_twin(&trace, &expected, shape.window, &format!("seed {seed}: {shape:?}"));

        let caches = state(&whole);
        let chunk = [1, 4, 9][seed as usize % 3];
        let mut cut = sequence(&gpu, &checkpoint, &random.tables, options(64, chunk));
        // The trace ran every layer on every row. The last token is read by the step that makes the next one.
        cut.append_as(&tokens, Prefill::Full, &mut |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(cut.generate(&greedy(1)).unwrap().filter(Result::is_ok).count(), 1);
        for ((name, bytes), (_, expected)) in state(&cut).iter().zip(&caches) {
            assert_eq!(bytes, expected, "{name} of seed {seed} in chunks of {chunk}: {shape:?}");
        }
    }
}

/// WebGPU's default limits and no feature at all are enough, and give the same bytes.
#[test]
fn the_least_device_gives_the_same_bytes() {
    let Some(gpu) = gpu() else { return };
    let least = DeviceOptions { software: true, features: FeatureUse::NONE, default_limits: true };
    let least = Arc::new(Gpu::new_blocking(&least).unwrap());
    for variant in [("index_score", "dot4"), ("linear", "r1_sub"), ("boundary", "r1_sub"), ("boundary", "r4_sub")] {
        assert!(!least.supports(variant.0, variant.1));
    }
    let shape = Shape { streams: 4, ..Shape::odd(Storage::Fp4) };
    let random = random_checkpoint(13, &shape);
    let checkpoint = random.checkpoint();
    let tokens = text(shape.vocab, 13, 40);
    let run = |gpu: &Arc<Gpu>| {
        let mut sequence = sequence(gpu, &checkpoint, &random.tables, options(64, 16));
        sequence.append(&tokens, &mut |_| {}).unwrap();
        let next: Vec<u32> = sequence.generate(&greedy(5)).unwrap().collect::<Result<_, _>>().unwrap();
        (state(&sequence), next)
    };
    assert_eq!(run(&least), run(&gpu));
    // And the other device has run what this one cannot.
    let ran = gpu.counters().dispatches_by_kernel;
    for variant in ["linear/r1_sub", "experts_up/r1_sub", "experts_down/r1_sub", "boundary/r1_sub", "boundary/r4_sub"] {
        assert_eq!(ran.contains_key(variant), gpu.features().subgroups, "{variant}");
    }
    let plain = least.counters().dispatches_by_kernel;
    assert!(plain.keys().all(|variant| !variant.ends_with("_sub")), "{plain:?}");
}

/// Weights in many small slices, as a device with a low binding limit needs them, give the same bytes; memory is planned for
/// them too.
#[test]
fn slices_make_no_difference() {
    let Some(gpu) = own_gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(11, &shape);
    let checkpoint = random.checkpoint();
    let tokens = text(shape.vocab, 11, 30);
    let run = |slice_bytes: Option<u64>| {
        let before = gpu.counters();
        let mut sequence = sequence(&gpu, &checkpoint, &random.tables, Options { slice_bytes, ..options(64, 16) });
        let held = gpu.counters().allocated_bytes() - before.allocated_bytes();
        assert_eq!(held, sequence.model().plan().total());
        sequence.append(&tokens, &mut |_| {}).unwrap();
        let next: Vec<u32> = sequence.generate(&greedy(5)).unwrap().collect::<Result<_, _>>().unwrap();
        let buffers = gpu.counters().buffers - before.buffers;
        (state(&sequence), next, buffers)
    };
    let (whole, sliced) = (run(None), run(Some(9000)));
    assert!(sliced.2 > whole.2 + 20, "{} buffers whole, {} in slices", whole.2, sliced.2);
    assert_eq!(sliced.0, whole.0);
    assert_eq!(sliced.1, whole.1);
}

/// Law 5: a later token changes no byte that was written before it.
#[test]
fn a_later_token_changes_nothing_before() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(4, &shape);
    let checkpoint = random.checkpoint();
    let tokens = text(shape.vocab, 4, 40);
    let mut other = tokens.clone();
    other[31] = (other[31] + 1) % shape.vocab as u32;
    let traced = |tokens: &[u32]| {
        let options = Options { all_logits: true, ..options(64, 64) };
        let mut sequence = sequence(&gpu, &checkpoint, &random.tables, options);
        sequence.trace(tokens, 0..1).unwrap()
    };
    let (a, b) = (traced(&tokens), traced(&other));
    let (a, b) = (floats(a.get("top.logits").unwrap()).to_vec(), floats(b.get("top.logits").unwrap()).to_vec());
    let before = 31 * shape.vocab;
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&a[..before]), bits(&b[..before]));
    assert_ne!(bits(&a[before..]), bits(&b[before..]));
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/golden")
}

/// The FP8/FP4 checkpoint of the recorded reference, layer by layer from the device's own inputs, and its logits.
#[test]
fn golden_checkpoint_on_the_device() {
    let Some(gpu) = gpu() else { return };
    let (tokens, tables) = golden::inputs(&fixtures().join("inputs.safetensors"));
    let tokens = &tokens[..40];
    let checkpoint = Checkpoint::open(fixtures().join("ckpt_fp8fp4")).unwrap();
    let mut sequence = sequence(&gpu, &checkpoint, &tables, Options { all_logits: true, ..options(64, 64) });
    let layers = checkpoint.config().num_hidden_layers;
    let trace = sequence.trace(tokens, 0..layers).unwrap();
    let twin = Twin::load(&checkpoint, &tables, TwinOptions::default()).unwrap();
    let (_, expected) = golden::layer_by_layer(&twin, tokens, &record(&trace));
    assert_twin(&trace, &expected, checkpoint.config().sliding_window, "ckpt_fp8fp4");
    // End to end the two part where a code lies on an edge; the best token stays the same in nearly every row.
    let (_, whole) = golden::end_to_end(&twin, tokens, &record(&trace));
    let best = |trace: &Trace| -> Vec<usize> {
        let logits = floats(trace.get("top.logits").unwrap()).chunks(checkpoint.config().vocab_size);
        logits.map(|row| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap()).collect()
    };
    let agree = best(&trace).iter().zip(best(&whole)).filter(|(a, b)| **a == *b).count();
    assert!(agree * 100 >= tokens.len() * 95, "{agree} of {} best tokens agree", tokens.len());
}

/// The recorded reference itself, each layer from recorded inputs, where the whole of it is at hand.
#[test]
fn golden_layers_from_recorded_inputs() {
    let Some(gpu) = gpu() else { return };
    let Some(folder) = common::support::shared("golden") else { return };
    let (tokens, tables) = golden::inputs(&folder.join("inputs.safetensors"));
    for (name, record) in [("ckpt_f32", "f32_quant"), ("ckpt_fp8fp4", "fp8fp4_f32compute_quant")] {
        let golden = Golden::folder(&folder.join(record));
        let checkpoint = Checkpoint::open(folder.join(name)).unwrap();
        let rows = golden.get(0, "streams_out").unwrap().shape[1].min(tokens.len());
        let tokens = &tokens[..rows];
        let mut sequence = sequence(&gpu, &checkpoint, &tables, options(256, 256));
        let mut faults = vec![];
        for layer in golden.layers() {
            // A layer's input is what came out of the one before; every stream starts as the embedding, the first carries it.
            let (streams, pre) = match layer {
                0 => {
                    let h = checkpoint.config().hidden_size;
                    let embeddings = floats(&golden.0["top.embeddings"])[..rows * h].chunks(h);
                    (embeddings.flat_map(|row| row.repeat(4)).collect(), [1.0, 0.0, 0.0, 0.0].repeat(rows))
                }
                _ => {
                    let before = |name| floats(golden.get(layer - 1, name).expect("recorded output")).to_vec();
                    (before("streams_out"), before("pre_mix_out"))
                }
            };
            let trace = sequence.trace_layer(layer, tokens, &streams, &pre).unwrap();
            let errors = golden::compare(&trace, &golden);
            assert!(errors.floats.len() > 3, "layer {layer}: only {:?} were compared", errors.floats.keys());
            for (name, &error) in &errors.floats {
                let allowed = 1e-4 * largest(&golden.0[name]).max(1.0);
                let (far, of) = errors.far_rows.get(name).copied().unwrap_or((usize::MAX, 1));
                // One window key on the edge between two codes, seen by as many rows as the window holds.
                if error > allowed && (far > checkpoint.config().sliding_window || error > 10.0 * allowed) {
                    faults.push(format!("{record} {name}: off by {error:.1e} of {allowed:.1e}, {far} of {of} rows"));
                }
            }
            let wrong = errors.wrong_rows();
            faults.extend(wrong.iter().map(|(name, wrong)| format!("{record} {name}: {wrong} rows differ")));
        }
        assert!(faults.is_empty(), "{}", faults.join("\n"));
    }
}

/// A generated token: one submission, no blocking readback, a known number of dispatches. The figures of the tiny model are
/// pinned; more than 17 dispatches in a layer are never allowed.
#[test]
fn the_token_loop_is_pinned() {
    let Some(gpu) = own_gpu() else { return };
    let (tokens, tables) = golden::inputs(&fixtures().join("inputs.safetensors"));
    let checkpoint = Checkpoint::open(fixtures().join("ckpt_fp8fp4")).unwrap();
    let mut sequence = sequence(&gpu, &checkpoint, &tables, options(128, 64));
    sequence.append(&tokens[..20], &mut |_| {}).unwrap();
    let before = gpu.counters();
    let made = sequence.generate(&greedy(16)).unwrap().count();
    let spent = gpu.counters() - before.clone();
    assert_eq!(made, 16);
    assert_eq!(spent.submissions, 16);
    assert_eq!(spent.blocking_readbacks, 0);
    assert_eq!(spent.readbacks, 5, "the first token, then fours");
    // 2 window, 3 Full, 2 Reindex, 5 Reuse layers; Engrams at the second window layer and at a Full one.
    // Twelve dispatches a layer, three more to select and gather, two more for an Engram: seventeen at most.
    let layers = 12 * 12 + 5 * 3 + 2 * 2;
    // Embedding, two lookups, the last boundary, head, sample.
    let frame = 1 + 2 + 1 + 1 + 1;
    assert_eq!(spent.dispatches, 16 * (layers + frame));
    assert_eq!(spent.weight_bytes % 16, 0, "every token reads the same weights");
    assert_eq!(spent.allocated, before.allocated, "nothing is allocated while tokens are made");
    assert_eq!(spent.buffers, before.buffers);
}

/// Law 11: device memory is what the plan said, to the byte, and stays so.
#[test]
fn memory_is_what_the_plan_said() {
    let Some(gpu) = own_gpu() else { return };
    let held = || gpu.counters().allocated;
    let (tokens, tables) = golden::inputs(&fixtures().join("inputs.safetensors"));
    let checkpoint = Checkpoint::open(fixtures().join("ckpt_fp8fp4")).unwrap();
    let before = held();
    let mut sequence = sequence(&gpu, &checkpoint, &tables, options(300, 32));
    let plan = sequence.model().plan().clone();
    let loaded = held();
    for (kind, planned) in plan.by_kind() {
        let of = |held: &std::collections::BTreeMap<MemoryKind, u64>| held.get(&kind).copied().unwrap_or(0);
        assert_eq!(of(&loaded) - of(&before), planned, "{kind:?}");
    }
    let generations = std::env::var("CEDRA_GENERATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(30);
    for _ in 0..generations {
        sequence.append(&tokens[..9], &mut |_| {}).unwrap();
        assert_eq!(sequence.generate(&greedy(3)).unwrap().count(), 3);
        sequence.clear().unwrap();
        assert_eq!(held(), loaded);
    }
    drop(sequence);
    assert_eq!(held(), before);
}

/// Bad requests are typed errors, and a good one afterwards gives what it always gives.
#[test]
fn bad_requests_lose_nothing() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(6, &shape);
    let checkpoint = random.checkpoint();
    let tokens = text(shape.vocab, 6, 20);
    let mut sequence = sequence(&gpu, &checkpoint, &random.tables, options(32, 16));
    assert!(matches!(sequence.append(&[], &mut |_| {}), Err(Error::EmptyPrompt)));
    assert!(matches!(sequence.generate(&greedy(3)).err(), Some(Error::EmptyPrompt)));
    assert!(matches!(sequence.append(&[5, 101], &mut |_| {}), Err(Error::TokenId { id: 101, vocabulary: 101 })));
    let long = text(shape.vocab, 7, 33);
    assert!(matches!(sequence.append(&long, &mut |_| {}), Err(Error::Context { needed: 33, allowed: 32 })));
    assert!(sequence.is_empty());
    sequence.append(&tokens, &mut |_| {}).unwrap();
    assert!(matches!(sequence.generate(&greedy(0)).err(), Some(Error::Setting { setting: "max-tokens", .. })));
    assert!(matches!(sequence.generate(&greedy(13)).err(), Some(Error::Context { needed: 33, allowed: 32 })));
    for temperature in [-1.0, f32::NAN, f32::INFINITY] {
        let sampling = Sampling { temperature, ..Sampling::default() };
        let request = Request { sampling, ..greedy(1) };
        assert!(matches!(sequence.generate(&request).err(), Some(Error::Setting { setting: "temperature", .. })));
    }
    for top_p in [0.0, -0.5, 1.5, f32::NAN] {
        let sampling = Sampling { top_p, ..Sampling::default() };
        let request = Request { sampling, ..greedy(1) };
        assert!(matches!(sequence.generate(&request).err(), Some(Error::Setting { setting: "top-p", .. })));
    }
    let after: Vec<u32> = sequence.generate(&greedy(12)).unwrap().collect::<Result<_, _>>().unwrap();
    assert_eq!(sequence.remaining(), 0);

    let mut control = self::sequence(&gpu, &checkpoint, &random.tables, options(32, 16));
    control.append(&tokens, &mut |_| {}).unwrap();
    let expected: Vec<u32> = control.generate(&greedy(12)).unwrap().collect::<Result<_, _>>().unwrap();
    assert_eq!(after, expected);
}

/// A stop id ends the text, whatever was already sent; leaving a generation early loses no token; both go on as one text.
#[test]
fn stopping_and_leaving_keep_the_text() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Bf16);
    let random = random_checkpoint(8, &shape);
    let checkpoint = random.checkpoint();
    let tokens = text(shape.vocab, 8, 11);
    let run = || {
        let mut sequence = sequence(&gpu, &checkpoint, &random.tables, options(64, 16));
        sequence.append(&tokens, &mut |_| {}).unwrap();
        sequence
    };
    let mut control = run();
    let expected: Vec<u32> = control.generate(&greedy(24)).unwrap().collect::<Result<_, _>>().unwrap();

    // The first token that is new at its place is the stop id.
    let at = (1..24).find(|&i| !expected[..i].contains(&expected[i])).expect("the text is not one token over and over");
    let mut stopped = run();
    let request = Request { stop_ids: vec![expected[at]], ..greedy(24) };
    let mut generation = stopped.generate(&request).unwrap();
    let made: Vec<u32> = generation.by_ref().collect::<Result<_, _>>().unwrap();
    assert_eq!(generation.finish(), Some(Finish::Stop));
    assert_eq!(made, expected[..at]);
    let rest: Vec<u32> = stopped.generate(&greedy(23 - at)).unwrap().collect::<Result<_, _>>().unwrap();
    assert_eq!(rest, expected[at + 1..], "after the stop id, which is part of the text");

    let mut left = run();
    let taken: Vec<u32> = left.generate(&greedy(24)).unwrap().take(3).collect::<Result<_, _>>().unwrap();
    assert_eq!(taken, expected[..3]);
    left.append(&[7], &mut |_| {}).unwrap();
    let sent = left.len() - tokens.len() - 1;
    assert_eq!(&left.tokens()[tokens.len()..][..sent], &expected[..sent], "what was made is part of the text");
}

/// The same seed gives the same text; another seed another one.
#[test]
fn seeds_decide() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::F16);
    let random = random_checkpoint(9, &shape);
    let checkpoint = random.checkpoint();
    let mut sequence = sequence(&gpu, &checkpoint, &random.tables, options(64, 16));
    let mut draw = |seed| -> Vec<u32> {
        sequence.clear().unwrap();
        sequence.append(&[1, 2, 3], &mut |_| {}).unwrap();
        let sampling = Sampling { temperature: 1.0, top_p: 0.95, top_k: 40, seed };
        let request = Request { sampling, ..greedy(12) };
        sequence.generate(&request).unwrap().collect::<Result<_, _>>().unwrap()
    };
    let (a, b, c) = (draw(1), draw(1), draw(2));
    assert_eq!(a, b);
    assert_ne!(a, c);
}

/// A logit that is not finite ends the generation with a typed error; a cleared sequence is as good as new.
#[test]
fn non_finite_logits_are_an_error() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::F32);
    let mut random = random_checkpoint(10, &shape);
    let tokens = text(shape.vocab, 10, 12);
    let good = random.checkpoint();
    // One weight of the head becomes infinite: a number that FP32 tensors may hold.
    let (start, header) = {
        let length = u64::from_le_bytes(random.safetensors[..8].try_into().unwrap()) as usize;
        let header: serde_json::Value = serde_json::from_slice(&random.safetensors[8..8 + length]).unwrap();
        (8 + length, header)
    };
    let at = start + header["head.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
    random.safetensors[at..at + 4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    let bad = random.checkpoint();
    let mut sequence = sequence(&gpu, &bad, &random.tables, options(64, 16));
    sequence.append(&tokens, &mut |_| {}).unwrap();
    let made: Vec<_> = sequence.generate(&greedy(8)).unwrap().collect();
    assert_eq!(made.len(), 1);
    assert!(matches!(made[0], Err(Error::NonFinite { position: 11 })), "{made:?}");
    assert_eq!(sequence.tokens(), tokens);

    let mut after = self::sequence(&gpu, &good, &random.tables, options(64, 16));
    after.append(&tokens, &mut |_| {}).unwrap();
    assert_eq!(after.generate(&greedy(8)).unwrap().filter(Result::is_ok).count(), 8);
}

/// The model that the project carries says on the device what was recorded of it, up to the first step whose margin is too
/// small to be sure.
#[test]
fn pocket_says_what_was_recorded() {
    let Some(gpu) = gpu() else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = root.join("models/pocket");
    let recorded: serde_json::Value =
        serde_json::from_slice(&std::fs::read(root.join("tests/fixtures/pocket/expected.json")).unwrap()).unwrap();
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let tokenizer = cedra::text::Tokenizer::open(&folder).unwrap();
    let tables = NgramTables::new(checkpoint.config(), &tokenizer).unwrap();
    let mut sequence = sequence(&gpu, &checkpoint, &tables, options(1024, 64));
    let ids = |value: &serde_json::Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let most = std::env::var("CEDRA_TOKENS").ok().and_then(|n| n.parse().ok()).unwrap_or(16);
    let mut compared = 0;
    for case in recorded["cases"].as_array().unwrap().iter().take(3) {
        let expected = ids(&case["generated_ids"]);
        let margins = case["margins"].as_array().unwrap();
        let safe = margins.iter().position(|m| m.as_f64().unwrap() < 0.02).unwrap_or(expected.len()).min(most);
        if safe == 0 {
            continue;
        }
        sequence.clear().unwrap();
        sequence.append(&ids(&case["prompt_ids"]), &mut |_| {}).unwrap();
        let made: Vec<u32> = sequence.generate(&greedy(safe)).unwrap().collect::<Result<_, _>>().unwrap();
        assert_eq!(made, expected[..safe], "{}", case["prompt"]);
        compared += safe;
    }
    assert!(compared >= 16, "only {compared} steps have a safe margin");
}
