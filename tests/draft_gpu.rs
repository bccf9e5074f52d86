//! A drafted block on the device: against its record, and against the CPU's on random shapes, windows and floors. What no row may
//! see is NaN.

mod common;
#[path = "kernels/common.rs"]
mod device;

use cedra::checkpoint::Checkpoint;
use cedra::formats::CacheFormat;
use cedra::gpu::{DeviceOptions, Gpu};
use cedra::model::{Block, Model, Options, Sequence};
use cedra::reading::Prefill;
use cedra::reference::math::{sigmoid, Matrix};
use cedra::reference::model::{Model as Twin, Options as TwinOptions, State};
use cedra::reference::trace::Trace;
use cedra::text::NgramTables;
use common::golden::{self, floats, max_difference, whole};
use common::random_model::{random_checkpoint, DraftShape, Shape, Storage};
use common::support::{fixture, shared};
use common::Random;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// The device of this run, shared: pipelines are made once.
fn gpu() -> Option<Arc<Gpu>> {
    static GPU: OnceLock<Option<Arc<Gpu>>> = OnceLock::new();
    GPU.get_or_init(own_gpu).clone()
}

/// A device of one's own, for tests that count.
fn own_gpu() -> Option<Arc<Gpu>> {
    device::gpu()?;
    let options = DeviceOptions { software: true, ..DeviceOptions::default() };
    Some(Arc::new(Gpu::new_blocking(&options).expect("there was a device a moment ago")))
}

fn load(gpu: &Arc<Gpu>, checkpoint: &Checkpoint, tables: &NgramTables, draft: bool) -> Arc<Model> {
    // Fewer rows than a block has: the block makes room for itself.
    let options = Options { context: 64, chunk: 2, draft, poison: true, ..Options::default() };
    Arc::new(Model::load_blocking(gpu.clone(), checkpoint, tables, &options, &mut |_, _| {}).unwrap())
}

/// The window of each stage, packed.
fn window(twin: &Twin, state: &State) -> Vec<Vec<Vec<u32>>> {
    let draft = state.draft.as_ref().unwrap();
    let first = state.position.saturating_sub(twin.config.sliding_window).max(draft.floor);
    let keys = |ring: &Matrix| {
        (first..state.position).map(|s| CacheFormat::Fp8.pack(ring.row(s % ring.rows))).collect::<Vec<_>>()
    };
    draft.rings.iter().map(keys).collect()
}

fn block(sequence: &Sequence, anchor: u32, position: usize, keys: &[Vec<Vec<u32>>]) -> Block {
    pollster::block_on(sequence.trace_draft(anchor, position, keys)).unwrap()
}

/// A block drafted from what the draft saw in a record: tokens equal, logits within 2e-4, confidences within 1e-4.
fn check_record(gpu: &Arc<Gpu>, what: &str, folder: &Path, inputs: &Path, record: &Path) {
    let checkpoint = Checkpoint::open(folder).unwrap();
    let (_, tables) = golden::inputs(inputs);
    let twin = Twin::load(&checkpoint, &tables, TwinOptions::default()).unwrap();
    let record = golden::read(record);
    let features = &record["context_features"];
    let width = *features.shape.last().unwrap();
    let features = Matrix::new(floats(features).len() / width, width, floats(features).to_vec());
    let position = whole(&record["block_positions"])[0] as usize;
    let mut state = twin.state();
    state.position = position - features.rows;
    twin.remember_features(&mut state, &features, &mut Trace::off());
    state.position = position;

    let sequence = Sequence::new(load(gpu, &checkpoint, &tables, true)).unwrap();
    let anchor = whole(&record["anchor_token"])[0] as u32;
    let found = block(&sequence, anchor, position, &window(&twin, &state));
    let tokens: Vec<i64> = found.tokens.iter().map(|&token| token.into()).collect();
    assert_eq!(tokens, whole(&record["draft_tokens"]), "{what}");
    let confidences = floats(&record["confidence_from_raw_residual"]);
    let accepts: Vec<f32> = confidences.iter().map(|&logit| sigmoid(logit)).collect();
    let off = [
        max_difference(&found.base, floats(&record["base_logits"])),
        max_difference(&found.logits, floats(&record["final_logits"])),
        max_difference(&found.residuals, floats(&record["collapsed"])),
        max_difference(&found.accepts, &accepts),
    ];
    println!(
        "{what}: logits within {:.1e} and {:.1e}, residuals {:.1e}, probabilities {:.1e}",
        off[0], off[1], off[2], off[3]
    );
    assert!(off[0] < 2e-4 && off[1] < 2e-4 && off[2] < 1e-4 && off[3] < 1e-4, "{what}: {off:?}");
}

#[test]
fn recorded_drafts_are_drafted() {
    let Some(gpu) = gpu() else { return };
    let (folder, inputs) = (fixture("golden/ckpt_fp8fp4"), fixture("golden/inputs.safetensors"));
    check_record(&gpu, "the fixture", &folder, &inputs, &fixture("golden/draft_quant.safetensors"));
    let Some(root) = shared("golden") else { return };
    for (checkpoint, record) in [("ckpt_f32", "f32_quant"), ("ckpt_fp8fp4", "fp8fp4_f32compute_quant")] {
        let record = root.join(record).join("dspark.safetensors");
        if record.exists() {
            check_record(&gpu, checkpoint, &root.join(checkpoint), &root.join("inputs.safetensors"), &record);
        }
    }
}

#[test]
fn random_drafts_equal_their_twins() {
    let Some(gpu) = gpu() else { return };
    let sizes = |stages, block, experts, experts_per_token| {
        Some(DraftShape { stages, block, target_layers: vec![0], markov_rank: 3, experts, experts_per_token })
    };
    for (seed, window_size, draft, storage) in [
        (1, 7, sizes(2, 5, 3, 2), Storage::Fp4),
        // More experts a token and more of them than the layers have; and a block of one.
        (2, 3, sizes(1, 1, 13, 4), Storage::Bf16),
        (3, 5, sizes(3, 3, 5, 1), Storage::Mixed),
    ] {
        let shape = Shape { layers: "w1".into(), window: window_size, draft, ..Shape::odd(storage) };
        let random = random_checkpoint(seed, &shape);
        let checkpoint = random.checkpoint();
        let twin = Twin::load(&checkpoint, &random.tables, TwinOptions::default()).unwrap();
        let sequence = Sequence::new(load(&gpu, &checkpoint, &random.tables, true)).unwrap();
        for (position, floor) in [(0, 0), (1, 0), (window_size, 0), (40, 0), (40, 40 - window_size / 2), (9, 9)] {
            let mut state = twin.state();
            let features = shape.hidden;
            let numbers = Random::new(seed + position as u64).normals(position * features, 1.0);
            twin.remember_features(&mut state, &Matrix::new(position, features, numbers), &mut Trace::off());
            state.position = position;
            state.draft.as_mut().unwrap().floor = floor;
            let anchor = (position % shape.vocab) as u32;
            let drafting = twin.draft(&state, anchor, &mut Trace::off());
            let Block { base: logits, residuals, .. } = block(&sequence, anchor, position, &window(&twin, &state));
            let off = max_difference(&logits, &drafting.base.data);
            // A key of the block may lie on the edge between two codes.
            let largest = drafting.base.data.iter().fold(1f32, |m, x| m.max(x.abs()));
            println!("seed {seed}, position {position}, floor {floor}: logits within {off:.1e} of {largest:.1}");
            assert!(off < 1e-4 * largest, "seed {seed}, position {position}, floor {floor}");
            assert!(max_difference(&residuals, &drafting.raw.data) < 1e-3, "seed {seed}, position {position}");
        }
    }
}

/// The last keys of a text in each stage's window on the device, packed.
fn remembered(sequence: &Sequence) -> Vec<Vec<Vec<u32>>> {
    let model = sequence.model();
    let (layout, cached) = (model.layout(), sequence.standing().cached);
    let slots = layout.ring_rows;
    let first = (cached + 1).saturating_sub(model.config().sliding_window);
    let rings = &sequence.cache().draft.as_ref().unwrap().rings;
    let ring = |ring| {
        let words: Vec<u32> = device::read(model.gpu(), ring);
        (first..cached).map(|s| words[s % slots * layout.window_row..][..layout.window_row].to_vec()).collect()
    };
    rings.iter().map(ring).collect()
}

/// What the stages remember of a text is what the CPU's remember, and exact readings leave them what full ones leave.
#[test]
fn windows_equal_their_twins() {
    let Some(gpu) = gpu() else { return };
    let sizes = |target_layers: &[usize]| {
        let target_layers = target_layers.to_vec();
        Some(DraftShape { stages: 2, block: 3, target_layers, markov_rank: 3, experts: 3, experts_per_token: 2 })
    };
    for (seed, layers, draft) in [(1, "w2r1r", sizes(&[0, 2, 4])), (2, "w1", sizes(&[1])), (3, "ww", sizes(&[0]))] {
        let shape = Shape { layers: layers.into(), draft, window: 5, ..Shape::odd(Storage::Fp4) };
        let random = random_checkpoint(seed, &shape);
        let checkpoint = random.checkpoint();
        let twin = Arc::new(Twin::load(&checkpoint, &random.tables, TwinOptions::default()).unwrap());
        let model = load(&gpu, &checkpoint, &random.tables, true);
        let mut numbers = Random::new(seed);
        let tokens: Vec<u32> = (0..29).map(|_| numbers.below(shape.vocab) as u32).collect();
        let mut full = vec![];
        for prefill in [Prefill::Full, Prefill::Exact, Prefill::Bounded] {
            let mut sequence = Sequence::new(model.clone()).unwrap();
            let mut expected = cedra::reference::sequence::Sequence::new(twin.clone());
            expected.set_prefill(prefill);
            for part in [&tokens[..21], &tokens[21..]] {
                sequence.append_as(part, prefill, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
                expected.append(part, &mut |_| {}).unwrap();
            }
            let (ours, theirs) = (remembered(&sequence), window(&twin, expected.state()));
            assert_eq!(ours.iter().map(Vec::len).collect::<Vec<_>>(), [4, 4]);
            let unpack = |keys: &Vec<Vec<u32>>| -> Vec<Vec<f32>> {
                keys.iter().map(|key| CacheFormat::Fp8.unpack(key, shape.head_dim)).collect()
            };
            for (ours, theirs) in ours.iter().zip(&theirs) {
                for (ours, theirs) in unpack(ours).iter().zip(&unpack(theirs)) {
                    // A code on the edge between two values, here or before, moves a key by a little.
                    let cosine = golden::cosine(ours, theirs);
                    assert!(cosine > 0.99, "{layers}, {prefill:?}: {cosine}");
                }
            }
            match prefill {
                Prefill::Full => full = ours,
                Prefill::Exact => assert!(ours == full, "{layers}: exact is not full"),
                Prefill::Bounded => {}
            }
        }
    }
}

/// Draft stages are loaded when they are asked for, and memory is what the plan says either way.
#[test]
fn the_plan_holds_with_and_without_a_draft() {
    for (seed, draft) in [(1, true), (1, false)] {
        let Some(gpu) = own_gpu() else { return };
        let shape = Shape { draft: Some(DraftShape::random(seed, 8)), ..Shape::odd(Storage::Fp4) };
        let random = random_checkpoint(seed, &shape);
        let before = gpu.counters().allocated;
        let model = load(&gpu, &random.checkpoint(), &random.tables, draft);
        let sequence = Sequence::new(model.clone()).unwrap();
        let allocated = gpu.counters().allocated;
        for (kind, planned) in model.plan().at(model.layout(), 0).by_kind() {
            let held = allocated.get(&kind).copied().unwrap_or(0) - before.get(&kind).copied().unwrap_or(0);
            assert_eq!(held, planned, "{kind:?}, draft {draft}");
        }
        assert_eq!(sequence.cache().draft.is_some(), draft);
    }
}
