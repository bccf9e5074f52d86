//! Drafting on the CPU: the draft against its record, and the laws of verification. Whatever is drafted, a text and its state are
//! those of plain decoding, to the bit; and sampled text has the model's distribution.

mod common;

use cedra::checkpoint::Checkpoint;
use cedra::reading::{Prefill, Replay};
use cedra::reference::draft::Drafting;
use cedra::reference::math::Matrix;
use cedra::reference::model::{LogitRows, Model, Options, State};
use cedra::reference::replay::{Definition, Event};
use cedra::reference::sample;
use cedra::reference::sequence::Sequence;
use cedra::reference::trace::{Recorded, Trace};
use cedra::reference::verify::{acceptance, residual, verify, Drafted, Verdict};
use cedra::sampling::{Request, Sampling};
use cedra::spec::{Draft, Round, Scheduler};
use cedra::text::{NgramTables, Tokenizer};
use cedra::Error;
use common::cpu_state::{bits, defined, visible};
use common::golden::{self, cosine, floats, max_difference, whole, Golden};
use common::random_model::{random_checkpoint, DraftShape, Shape, Storage};
use common::support::{fixture, shared};
use common::Random;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// Cases of each randomised test; CEDRA_CASES asks for more.
fn cases(default: u64) -> u64 {
    let more = std::env::var("CEDRA_CASES").ok().and_then(|n| n.parse().ok());
    more.map_or(default, |n: u64| n.max(default))
}

/// Recorded tensors of a drafted block, under the names of a trace.
fn record(path: &Path) -> Golden {
    let renamed = |name: &str| {
        let Some((stage, what)) = name.strip_prefix("stage").and_then(|name| name.split_once('_')) else {
            return format!("dspark.{name}");
        };
        let what = match what {
            "streams" | "pre_mix" => format!("{what}_out"),
            _ => what.into(),
        };
        format!("dspark.stage{stage}.{what}")
    };
    Golden(golden::read(path).into_iter().map(|(name, tensor)| (renamed(&name), tensor)).collect())
}

fn matrix(tensor: &Recorded) -> Matrix {
    let cols = *tensor.shape.last().unwrap();
    Matrix::new(floats(tensor).len() / cols, cols, floats(tensor).to_vec())
}

/// Takes the best token of every place: tokens, logits, confidences.
fn greedy_block(mut drafting: Drafting<'_>) -> (Vec<i64>, Vec<f32>, Vec<f32>) {
    let (mut tokens, mut logits, mut confidences) = (vec![], vec![], vec![]);
    while !drafting.is_done() {
        confidences.push(drafting.confidence());
        logits.push(drafting.logits());
        let token = sample::greedy(logits.last().unwrap()).unwrap();
        drafting.take(token);
        tokens.push(token.into());
    }
    (tokens, logits.concat(), confidences)
}

/// A block drafted from what the draft saw in a record. Returns how far logits and confidences are from it.
fn check_block(what: &str, model: &Model, golden: &Golden) -> (f32, f32) {
    let get = |name: &str| &golden.0[&format!("dspark.{name}")];
    let (mut state, mut trace) = (model.state(), Trace::new());
    let features = matrix(get("context_features"));
    let first = whole(get("block_positions"))[0] as usize;
    state.position = first - features.rows;
    model.remember_features(&mut state, &features, &mut trace);
    state.position = first;
    let drafting = model.draft(&state, whole(get("anchor_token"))[0] as u32, &mut trace);
    let (tokens, logits, confidences) = greedy_block(drafting);
    assert_eq!(tokens, whole(get("draft_tokens")), "{what}");
    let errors = golden::compare(&trace, golden);
    assert_eq!(errors.wrong_rows(), vec![], "{what}");
    let (worst, name) = errors.worst(|_| true);
    let logits = max_difference(&logits, floats(get("final_logits")));
    let confidence = max_difference(&confidences, floats(get("confidence_from_raw_residual")));
    println!("{what}: logits within {logits:.1e}, confidences {confidence:.1e}, all within {worst:.1e} ({name})");
    // Streams, mixes, outputs and experts of every stage, and what comes of the last one.
    let stages = model.weights.draft.as_ref().unwrap().stages.len();
    assert!(errors.floats.len() >= 3 * stages + 3 && errors.integers.len() == stages + 1, "{errors:?}");
    (logits, confidence)
}

#[test]
fn the_fixture_drafts_as_recorded() {
    for (name, quant) in [("draft_noquant", false), ("draft_quant", true)] {
        let (model, _) = golden::model(&fixture("golden/ckpt_fp8fp4"), &fixture("golden/inputs.safetensors"), quant);
        let golden = record(&fixture(&format!("golden/{name}.safetensors")));
        let (logits, confidence) = check_block(name, &model, &golden);
        assert!(logits < 2e-4 && confidence < 1e-4, "{name}");
    }
}

#[test]
fn recorded_drafts() {
    let Some(root) = shared("golden") else { return };
    for (checkpoint, folder, quant) in [
        ("ckpt_f32", "f32_noquant", false),
        ("ckpt_f32", "f32_quant", true),
        ("ckpt_fp8fp4", "fp8fp4_f32compute_noquant", false),
        ("ckpt_fp8fp4", "fp8fp4_f32compute_quant", true),
    ] {
        let (model, _) = golden::model(&root.join(checkpoint), &root.join("inputs.safetensors"), quant);
        let golden = record(&root.join(folder).join("dspark.safetensors"));
        let (logits, confidence) = check_block(folder, &model, &golden);
        assert!(logits < 2e-4 && confidence < 1e-4, "{folder}");
    }
}

/// The record rounds activations to BF16, this model does not.
#[test]
fn a_bf16_draft_points_the_same_way() {
    let Some(root) = shared("golden") else { return };
    let (model, _) = golden::model(&root.join("ckpt_bf16"), &root.join("inputs.safetensors"), true);
    let golden = record(&root.join("bf16_quant/dspark.safetensors"));
    let get = |name: &str| &golden.0[&format!("dspark.{name}")];
    let mut state = model.state();
    let features = matrix(get("context_features"));
    model.remember_features(&mut state, &features, &mut Trace::off());
    state.position = features.rows;
    let drafting = model.draft(&state, whole(get("anchor_token"))[0] as u32, &mut Trace::off());
    let base = cosine(&drafting.base.data, floats(get("base_logits")));
    let (tokens, ..) = greedy_block(drafting);
    let same = tokens.iter().zip(whole(get("draft_tokens"))).filter(|(a, b)| **a == *b).count();
    println!("bf16: base logits cosine {base:.5}, {same} of {} tokens", tokens.len());
    assert!(base > 0.99);
}

/// From tokens to drafted tokens, without cache quantisation.
#[test]
fn a_draft_after_a_whole_text() {
    let Some(root) = shared("golden") else { return };
    for (checkpoint, folder) in [("ckpt_f32", "f32_noquant"), ("ckpt_fp8fp4", "fp8fp4_f32compute_noquant")] {
        let (model, tokens) = golden::model(&root.join(checkpoint), &root.join("inputs.safetensors"), false);
        let golden = record(&root.join(folder).join("dspark.safetensors"));
        let (mut state, mut trace) = (model.state(), Trace::new());
        let logits = model.forward(&mut state, &tokens, LogitRows::Last, Some(&mut trace)).unwrap();
        let anchor = sample::greedy(&logits[0]).unwrap();
        assert_eq!(i64::from(anchor), whole(&golden.0["dspark.anchor_token"])[0]);
        let (drafted, logits, _) = greedy_block(model.draft(&state, anchor, &mut trace));
        assert_eq!(drafted, whole(&golden.0["dspark.draft_tokens"]));
        let errors = golden::compare(&trace, &golden);
        assert!(errors.floats.contains_key("dspark.context_features") && errors.floats.contains_key("dspark.main_x"));
        assert_eq!(errors.wrong_rows(), vec![]);
        let logits = max_difference(&logits, floats(&golden.0["dspark.final_logits"]));
        println!("{folder}, from tokens: logits within {logits:.1e}, all {:?}", errors.worst(|_| true));
        assert!(logits < 2e-4 && errors.worst(|_| true).0 < 2e-4);
    }
}

/// Slips that a draft can make and still propose something: each is told from the record.
#[test]
fn slips_of_the_draft_are_noticed() {
    type Slip = (&'static str, fn(&mut Model, &mut Vec<f32>));
    let slips: [Slip; 9] = [
        ("YaRN and another theta", |m, _| m.config.rope_theta = m.config.compress_rope_theta),
        ("window one short", |m, _| m.config.sliding_window -= 1),
        ("another noise token", |m, _| m.config.dspark.as_mut().unwrap().noise_token_id -= 1),
        ("a block one short", |m, _| m.config.dspark.as_mut().unwrap().block_size -= 1),
        ("one expert fewer", |m, _| m.config.dspark.as_mut().unwrap().num_experts_per_tok -= 1),
        ("expert weights not normalised", |m, _| m.config.dspark.as_mut().unwrap().norm_topk_prob = false),
        ("no norm of what is seen", |m, _| m.weights.draft.as_mut().unwrap().main_norm.fill(1.0)),
        ("no norm before the head", |m, _| m.weights.draft.as_mut().unwrap().norm.fill(1.0)),
        ("target layers in another order", |_, features| features.rotate_left(64)),
    ];
    let golden = record(&fixture("golden/draft_noquant.safetensors"));
    let get = |name: &str| &golden.0[&format!("dspark.{name}")];
    for (what, slip) in slips {
        let (mut model, _) =
            golden::model(&fixture("golden/ckpt_fp8fp4"), &fixture("golden/inputs.safetensors"), false);
        let mut features = matrix(get("context_features"));
        slip(&mut model, &mut features.data);
        let (mut state, off) = (model.state(), &mut Trace::off());
        let first = whole(get("block_positions"))[0] as usize;
        state.position = first - features.rows;
        model.remember_features(&mut state, &features, off);
        state.position = first;
        let (_, logits, _) = greedy_block(model.draft(&state, whole(get("anchor_token"))[0] as u32, off));
        let off = max_difference(&logits, floats(get("final_logits")));
        assert!(off > 2e-3, "{what}: only {off:.1e}");
    }
}

/// The pocket model, and its recorded texts.
fn pocket() -> (Model, serde_json::Value) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/pocket");
    let checkpoint = Checkpoint::open(&root).unwrap();
    let tables = NgramTables::new(checkpoint.config(), &Tokenizer::open(&root).unwrap()).unwrap();
    let model = Model::load(&checkpoint, &tables, Options::default()).unwrap();
    let expected = std::fs::read_to_string(fixture("pocket/expected.json")).unwrap();
    (model, serde_json::from_str(&expected).unwrap())
}

/// The trained draft makes the trained model's text in fewer rounds than it has tokens.
#[test]
fn the_pocket_model_makes_its_text_in_fewer_rounds() {
    let (model, expected) = pocket();
    let model = Arc::new(model);
    let (mut rounds, mut tokens, mut verified, mut accepted) = (0, 0, [0; 5], [0; 5]);
    for case in expected["cases"].as_array().unwrap() {
        let prompt: Vec<u32> = serde_json::from_value(case["prompt_ids"].clone()).unwrap();
        let origin = read(&model, Prefill::Exact, &prompt);
        let request = Request { stop_ids: vec![model.config.eos_token_id], ..greedy(48) };
        let (mut plain, mut drafted) = (origin.fork(), origin.fork());
        drafted.set_draft(Draft::Tokens(5)).unwrap();
        assert_eq!(make(&mut drafted, &request), make(&mut plain, &request));
        assert_eq!(visible(&model, drafted.state()), visible(&model, plain.state()));
        let counters = drafted.draft_counters();
        (rounds, tokens) = (rounds + counters.rounds, tokens + (drafted.len() - origin.len()) as u64);
        (0..5).for_each(|place| {
            verified[place] += counters.verified[place];
            accepted[place] += counters.accepted[place];
        });
    }
    println!("pocket: {tokens} tokens in {rounds} rounds; accepted {accepted:?} of {verified:?}");
    assert!(5 * rounds < 4 * tokens, "{tokens} tokens in {rounds} rounds");
}

/// The trained draft, after each recorded prompt. Confidences are recorded in two orders of summation, because a value of a key may lie
/// on the edge between two codes.
#[test]
fn the_pocket_model_drafts_as_recorded() {
    let (model, expected) = pocket();
    let mut worst = 0f32;
    for case in expected["cases"].as_array().unwrap() {
        let ids = |name: &str| -> Vec<u32> { serde_json::from_value(case[name].clone()).unwrap() };
        let mut state = model.state();
        model.forward(&mut state, &ids("prompt_ids"), LogitRows::None, None).unwrap();
        let anchor = case["draft_anchor"].as_u64().unwrap() as u32;
        let (tokens, _, confidences) = greedy_block(model.draft(&state, anchor, &mut Trace::off()));
        assert_eq!(tokens, ids("draft_ids").into_iter().map(i64::from).collect::<Vec<_>>());
        let recorded: [Vec<f32>; 2] = serde_json::from_value(case["draft_confidences"].clone()).unwrap();
        let [one, other] = recorded.map(|recorded| max_difference(&confidences, &recorded));
        worst = worst.max(one.min(other));
    }
    println!("pocket: confidences within {worst:.1e}");
    assert!(worst < 1e-4);
}

/// Layers with decoders of every ratio, long and short ones, one that is the whole model, and none.
const LAYERS: [&str; 8] = ["w2ri1rir", "ww2r2i", "2iri", "1r2", "2r4ri", "1ir", "www", "w1"];

/// A random model with a draft. Few tokens, so that random drafts are right at times.
fn shape(seed: u64) -> Shape {
    let random = &mut Random::new(seed);
    let layers = random.pick(&LAYERS);
    Shape {
        layers: layers.into(),
        window: random.pick(&[1, 2, 3, 5, 8]),
        vocab: 5 + random.below(5),
        draft: Some(DraftShape::random(seed, layers.len())),
        ..Shape::random(seed)
    }
}

fn load(seed: u64, shape: &Shape) -> Arc<Model> {
    let random = random_checkpoint(seed, shape);
    let options = Options { cache_quant: !seed.is_multiple_of(4), mutation: None };
    Arc::new(Model::load(&random.checkpoint(), &random.tables, options).unwrap())
}

fn text(model: &Model, random: &mut Random, len: usize) -> Vec<u32> {
    (0..len).map(|_| random.below(model.config.vocab_size) as u32).collect()
}

fn read(model: &Arc<Model>, prefill: Prefill, tokens: &[u32]) -> Sequence {
    let mut sequence = Sequence::new(model.clone());
    sequence.set_prefill(prefill);
    sequence.append(tokens, &mut |_| {}).unwrap();
    sequence
}

fn greedy(max_tokens: usize) -> Request {
    Request { max_tokens, sampling: Sampling::default(), stop_ids: vec![] }
}

fn make(sequence: &mut Sequence, request: &Request) -> Vec<u32> {
    sequence.generate(request).unwrap().map(|token| token.unwrap()).collect()
}

/// Greedy text is the plain one with every number of drafted tokens, and so is what it leaves.
#[test]
fn greedy_text_is_the_plain_one() {
    let (mut verified, mut accepted) = (0, 0);
    for seed in 0..cases(24) {
        let model = load(seed, &shape(seed));
        let random = &mut Random::new(seed);
        let length = 1 + random.below(30);
        let origin = read(&model, random.pick(&[Prefill::Bounded, Prefill::Exact]), &text(&model, random, length));
        let mut plain = origin.fork();
        let expected = make(&mut plain, &greedy(40));
        let numbers = (0..=model.block_size()).map(Draft::Tokens);
        for draft in numbers.chain([Draft::Auto]) {
            let mut drafted = origin.fork();
            drafted.set_draft(draft).unwrap();
            assert_eq!(make(&mut drafted, &greedy(40)), expected, "seed {seed}, {draft:?}");
            assert_eq!(drafted.generator(), plain.generator());
            assert_eq!(visible(&model, drafted.state()), visible(&model, plain.state()), "seed {seed}, {draft:?}");
            let counters = drafted.draft_counters();
            assert_eq!(counters.rounds + counters.accepted.iter().sum::<u64>(), 40);
            assert!(counters.accepted.iter().zip(&counters.verified).all(|(a, v)| a <= v));
            if let Draft::Tokens(tokens) = draft {
                assert_eq!(counters.drafted, counters.rounds);
                assert!(counters.verified[tokens..].iter().all(|&n| n == 0));
            }
            verified += counters.verified.iter().sum::<u64>();
            accepted += counters.accepted.iter().sum::<u64>();
        }
    }
    println!("{accepted} of {verified} drafted tokens accepted");
    assert!(accepted > 100 && verified - accepted > 100, "{accepted} of {verified}");
}

/// A state after a forward over the waiting token and drafted ones, of which `accepted` stand.
fn after_verification(
    model: &Model,
    before: &State,
    text: &[u32],
    plain: &[u32],
    depth: usize,
    accepted: usize,
) -> State {
    let mut state = before.clone();
    let wrong = |token: u32| (token + 1) % model.config.vocab_size as u32;
    let mut rows = vec![text[text.len() - 1]];
    rows.extend(plain[..depth].iter().enumerate().map(|(i, &token)| if i < accepted { token } else { wrong(token) }));
    let logits = model.forward(&mut state, &rows, LogitRows::All, None).unwrap();
    let drafted = |&token: &u32| Drafted { token, probabilities: vec![] };
    let drafted: Vec<Drafted> = rows[1..].iter().map(drafted).collect();
    let verdict = verify(&logits, &drafted, &Sampling::default(), 0);
    assert_eq!(verdict, Verdict { accepted, next: Some(plain[accepted]) });
    model.take_back(&mut state, &[text, &plain[..accepted]].concat());
    state
}

/// What is rejected leaves no trace: every depth, every accepted length, every phase of groups, window and pages.
#[test]
fn a_rejection_leaves_no_trace() {
    let draft = |target_layers: &[usize]| {
        let target_layers = target_layers.to_vec();
        Some(DraftShape { stages: 2, block: 5, target_layers, markov_rank: 4, experts: 3, experts_per_token: 2 })
    };
    let mut checked = 0;
    for (seed, layers, window, targets) in
        [(1, "w2ri1rir", 5, &[5, 7][..]), (2, "2r4ri", 3, &[1, 4]), (3, "2iri", 1, &[0]), (5, "w4r1", 7, &[3])]
    {
        let shape =
            Shape { layers: layers.into(), window, draft: draft(targets), vocab: 7, ..Shape::odd(Storage::F32) };
        let model = load(seed, &shape);
        let tokens = text(&model, &mut Random::new(seed), 140);
        let (mut state, depths) = (model.state(), model.block_size());
        for length in 1..=132 {
            // The last token of each text waits.
            let text = &tokens[..length];
            if (1..=4 * window.max(4)).contains(&length) || (122..=132).contains(&length) {
                let (mut plain, mut states, mut logits) = (vec![], vec![], vec![]);
                let mut after = state.clone();
                for i in 0..=depths + 1 {
                    let waiting = [text, &plain[..]].concat()[length - 1 + i];
                    logits = model.forward(&mut after, &[waiting], LogitRows::Last, None).unwrap();
                    plain.push(sample::greedy(&logits[0]).unwrap());
                    states.push(after.clone());
                }
                assert!(logits[0].iter().all(|l| l.is_finite()));
                for depth in 0..=depths {
                    for accepted in 0..=depth {
                        let mut state = after_verification(&model, &state, text, &plain, depth, accepted);
                        let what = format!("{layers}, {length} tokens, {accepted} of {depth}");
                        assert_eq!(visible(&model, &state), visible(&model, &states[accepted]), "{what}");
                        // And what it leads to: the next row, and the next block.
                        let waiting = plain[accepted];
                        let off = &mut Trace::off();
                        let (a, b) = (model.draft(&state, waiting, off), model.draft(&states[accepted], waiting, off));
                        assert_eq!(
                            (bits(&a.base.data), bits(&a.raw.data)),
                            (bits(&b.base.data), bits(&b.raw.data)),
                            "{what}"
                        );
                        model.forward(&mut state, &[waiting], LogitRows::Last, None).unwrap();
                        assert_eq!(visible(&model, &state), visible(&model, &states[accepted + 1]), "{what}");
                        checked += 1;
                    }
                }
            }
            model.forward(&mut state, &tokens[length - 1..length], LogitRows::None, None).unwrap();
        }
    }
    println!("{checked} rejections");
    assert!(checked > 2000);
}

#[test]
#[should_panic(expected = "more than 5 rows")]
fn more_than_a_block_is_not_taken_back() {
    let draft =
        DraftShape { stages: 1, block: 5, target_layers: vec![1], markov_rank: 4, experts: 3, experts_per_token: 2 };
    let model = load(1, &Shape { draft: Some(draft), ..Shape::odd(Storage::F32) });
    let mut state = model.state();
    let tokens = text(&model, &mut Random::new(1), 9);
    model.forward(&mut state, &tokens, LogitRows::None, None).unwrap();
    model.take_back(&mut state, &tokens[..3]);
}

/// A generation that may end anywhere.
fn random_request(model: &Model, random: &mut Random) -> Request {
    let sampling = match random.below(3) {
        0 => Sampling::default(),
        _ => Sampling {
            temperature: random.pick(&[0.3, 1.0, 2.0]),
            top_p: random.pick(&[1.0, 0.8]),
            top_k: random.pick(&[0, 3]),
            seed: random.bits() % 3,
        },
    };
    let stop = random.below(4) == 0;
    let stop_ids = if stop { vec![random.below(model.config.vocab_size) as u32] } else { vec![] };
    Request { max_tokens: 1 + random.below(12), sampling, stop_ids }
}

/// Texts that are read, made with drafts, left in the middle of a round, cut, forked and rebuilt are what the definition says,
/// the draft's window with them.
#[test]
fn drafted_texts_are_what_the_definition_says() {
    let mut made_in_all = 0;
    for seed in 0..cases(40) {
        let model = load(seed, &shape(seed));
        let random = &mut Random::new(seed ^ 0x5eed);
        let (mut sequence, mut definition) = (Sequence::new(model.clone()), Definition::new(&model));
        let mut done = vec![];
        for _ in 0..14 {
            let replay = random.pick(&[Replay::Bounded, Replay::Exact]);
            match random.below(9) {
                0..3 => {
                    let (count, prefill) =
                        (1 + random.below(20), random.pick(&[Prefill::Bounded, Prefill::Exact, Prefill::Full]));
                    let tokens = text(&model, random, count);
                    sequence.set_prefill(prefill);
                    sequence.append(&tokens, &mut |_| {}).unwrap();
                    definition.after(&Event::Append { tokens, prefill });
                }
                3..7 if !sequence.is_empty() => {
                    let draft = match random.below(3) {
                        0 => Draft::Auto,
                        _ => Draft::Tokens(random.below(model.block_size() + 1)),
                    };
                    let request = random_request(&model, random);
                    // Listens to all of it, or only to the beginning.
                    let heard = if random.below(2) == 0 { usize::MAX } else { random.below(request.max_tokens) };
                    sequence = sequence.fork();
                    sequence.set_draft(draft).unwrap();
                    let (before, drawn) = (sequence.len(), sequence.generator().with_seed(request.sampling.seed).drawn);
                    let tokens: Vec<u32> =
                        sequence.generate(&request).unwrap().take(heard).map(|token| token.unwrap()).collect();
                    let made = sequence.tokens()[before..].to_vec();
                    let stopped = made.last().is_some_and(|last| request.stop_ids.contains(last));
                    assert_eq!(tokens, made[..made.len() - stopped as usize]);
                    assert!(stopped || made.len() == heard.min(request.max_tokens));
                    assert_eq!(sequence.generator().drawn, drawn + made.len() as u32);
                    made_in_all += made.len();
                    made.into_iter().for_each(|token| definition.after(&Event::Make { token }));
                    done.push(format!("{draft:?} {request:?} {heard}"));
                }
                7 => {
                    sequence.rebuild(replay).unwrap();
                    definition.after(&Event::Rebuild { replay });
                }
                8 => {
                    let length = sequence.len().saturating_sub(random.below(9));
                    sequence.truncate(length, replay).unwrap();
                    definition.after(&Event::Truncate { length, replay });
                }
                _ => continue,
            }
            assert_eq!(sequence.tokens(), definition.text(), "seed {seed}: {done:?}");
            let (ours, theirs) = (visible(&model, sequence.state()), defined(&model, &definition));
            assert!(ours == theirs, "seed {seed}: {done:?}");
            assert!(ours[1..].iter().all(|&x| !f32::from_bits(x).is_nan() || x == u32::MAX), "seed {seed}: {done:?}");
        }
    }
    assert!(made_in_all > 10 * cases(40) as usize, "{made_in_all}");
}

/// A stop token, the number of tokens asked for and the end of the context, wherever they fall in an accepted run.
#[test]
fn texts_end_where_plain_ones_end() {
    let (mut inside, mut stopped) = (0, 0);
    for seed in 0..cases(8) {
        let model = load(seed, &Shape { max_positions: 60, ..shape(seed) });
        let origin = read(&model, Prefill::Bounded, &text(&model, &mut Random::new(seed), 25));
        let all = make(&mut origin.fork(), &greedy(35));
        for draft in (1..=model.block_size()).map(Draft::Tokens) {
            let mut ends: Vec<Request> = (1..=8).chain([33, 34, 35]).map(greedy).collect();
            ends.extend((0..model.config.vocab_size as u32).map(|id| Request { stop_ids: vec![id], ..greedy(35) }));
            for request in ends {
                let (mut plain, mut drafted) = (origin.fork(), origin.fork());
                drafted.set_draft(draft).unwrap();
                let expected = make(&mut plain, &request);
                assert_eq!(make(&mut drafted, &request), expected, "seed {seed}, {draft:?}, {request:?}");
                assert_eq!(drafted.tokens(), plain.tokens());
                assert_eq!((drafted.remaining(), drafted.generator()), (plain.remaining(), plain.generator()));
                assert_eq!(visible(&model, drafted.state()), visible(&model, plain.state()));
                let counters = drafted.draft_counters();
                inside +=
                    (counters.rounds + counters.accepted.iter().sum::<u64>() > drafted.len() as u64 - 25) as usize;
                stopped += (expected.len() < request.max_tokens) as usize;
            }
            // Heard in part.
            for heard in 1..8 {
                let (mut plain, mut drafted) = (origin.fork(), origin.fork());
                drafted.set_draft(draft).unwrap();
                let tokens: Vec<u32> = drafted.generate(&greedy(30)).unwrap().take(heard).map(Result::unwrap).collect();
                assert_eq!(tokens, all[..heard]);
                make(&mut plain, &greedy(heard));
                assert_eq!((drafted.tokens(), drafted.generator()), (plain.tokens(), plain.generator()));
                assert_eq!(visible(&model, drafted.state()), visible(&model, plain.state()));
            }
        }
        let mut full = origin.fork();
        full.set_draft(Draft::Tokens(1)).unwrap();
        make(&mut full, &greedy(35));
        assert_eq!(full.remaining(), 0);
        let error = full.generate(&greedy(1)).err();
        assert!(matches!(error, Some(Error::Context { needed: 61, allowed: 60 })), "{error:?}");
    }
    assert!(inside > 5 && stopped > 20, "{inside} {stopped}");
}

/// A logit that is NaN after an accepted token is the same error at the same place, behind the same tokens.
#[test]
fn a_non_finite_logit_ends_both_texts() {
    let mut behind = 0;
    for seed in 0..cases(24) {
        let model = load(seed, &shape(seed));
        let tokens = text(&model, &mut Random::new(seed), 9);
        let expected = make(&mut read(&model, Prefill::Bounded, &tokens), &greedy(12));
        // A token whose embedding is broken, made for the first time at some place, and read after it.
        let Some(&broken) = expected[1..11].iter().find(|id| !tokens.contains(id) && expected[0] != **id) else {
            continue;
        };
        let mut model = (*model).clone();
        model.weights.embed.row_mut(broken as usize).fill(f32::NAN);
        let noise = &mut model.config.dspark.as_mut().unwrap().noise_token_id;
        *noise = tokens[0];
        let model = Arc::new(model);
        let origin = read(&model, Prefill::Bounded, &tokens);
        let run = |draft: Draft| {
            let mut sequence = origin.fork();
            sequence.set_draft(draft).unwrap();
            let made: Vec<String> = sequence.generate(&greedy(12)).unwrap().map(|token| format!("{token:?}")).collect();
            let rounds = sequence.draft_counters().clone();
            (made, sequence.tokens().to_vec(), sequence.generator(), sequence.state().position, rounds)
        };
        let plain = run(Draft::Off);
        assert!(plain.0.last().unwrap().contains("NonFinite"), "{:?}", plain.0);
        for tokens in 1..=model.block_size() {
            let drafted = run(Draft::Tokens(tokens));
            assert_eq!((&drafted.0, &drafted.1, drafted.2, drafted.3), (&plain.0, &plain.1, plain.2, plain.3));
            behind += (drafted.4.accepted.iter().sum::<u64>() > 0) as usize;
        }
    }
    assert!(behind > 5, "{behind}");
}

#[test]
fn a_model_without_a_draft_does_not_draft() {
    let model = load(1, &Shape::odd(Storage::F32));
    let mut sequence = read(&model, Prefill::Bounded, &[1, 2, 3]);
    let error = sequence.set_draft(Draft::Tokens(1)).unwrap_err().to_string();
    assert_eq!(error, "setting `draft`: found 1, allowed: auto or off: the model has no draft stages");
    sequence.set_draft(Draft::Auto).unwrap();
    make(&mut sequence, &greedy(9));
    assert_eq!((sequence.draft_counters().rounds, sequence.draft_counters().drafted), (9, 0));

    // The same checkpoint without its draft tensors is the same model.
    let draft = DraftShape::random(1, 8);
    let mut with = load(1, &Shape { draft: Some(draft), ..Shape::odd(Storage::F32) });
    let tokens = text(&with, &mut Random::new(3), 40);
    let expected = make(&mut read(&with, Prefill::Bounded, &tokens), &greedy(20));
    Arc::get_mut(&mut with).unwrap().weights.draft = None;
    let mut without = read(&with, Prefill::Bounded, &tokens);
    assert!(without.set_draft(Draft::Tokens(0)).is_err());
    assert_eq!(make(&mut without, &greedy(20)), expected);
}

/// `p` comes out, in whole numbers: for all distributions over three tokens with weights up to 3.
#[test]
fn the_rule_of_acceptance_is_exact() {
    let all: Vec<[u32; 3]> = (1..64).map(|i| [i % 4, i / 4 % 4, i / 16]).collect();
    let mut checked = 0;
    for p in &all {
        for q in &all {
            let (p_sum, q_sum): (u64, u64) = (p.iter().map(|&x| x as u64).sum(), q.iter().map(|&x| x as u64).sum());
            let rest = residual(p, q);
            let rest_sum: u64 = rest.iter().sum();
            // Shares in units of 1 / (sum of p · sum of q).
            let (mut stands, mut refused) = ([0u64; 3], 0);
            for d in (0..3).filter(|&d| q[d] > 0) {
                let (numerator, denominator) = acceptance(p, q, d as u32);
                assert_eq!(denominator, q[d] as u64 * p_sum, "a token is drafted that often");
                stands[d] = numerator.min(denominator);
                refused += denominator - stands[d];
                // The numbers of 2^32 that accept are that share of them, rounded up.
                if (1..denominator).contains(&numerator) {
                    let first = (numerator << 32).div_ceil(denominator);
                    assert!(sample::mulhi(first as u32, denominator) >= numerator);
                    assert!(sample::mulhi((first - 1) as u32, denominator) < numerator);
                }
            }
            assert_eq!(rest_sum == 0, refused == 0, "{p:?} {q:?}");
            for x in 0..3 {
                let total = stands[x] * rest_sum.max(1) + refused * rest[x];
                assert_eq!(total, p[x] as u64 * q_sum * rest_sum.max(1), "{p:?} {q:?} {x}");
            }
            checked += 1;
        }
    }
    assert_eq!(checked, 63 * 63);
}

/// Twice the log-likelihood ratio of counts to a distribution, and its degrees of freedom.
fn deviance(counts: &BTreeMap<Vec<u32>, usize>, expected: &BTreeMap<Vec<u32>, f64>) -> (f64, usize) {
    let n: usize = counts.values().sum();
    assert!(counts.keys().all(|token| expected.contains_key(token)), "a token that the model cannot make");
    let sum: f64 =
        counts.iter().map(|(id, &count)| count as f64 * (count as f64 / (n as f64 * expected[id])).ln()).sum();
    (2.0 * sum, expected.len() - 1)
}

/// Sampled text has the model's distribution, whatever is drafted: three tokens, each setting, against the exact probabilities.
#[test]
fn sampled_text_has_the_models_distribution() {
    let n = cases(3000);
    let draft =
        DraftShape { stages: 1, block: 3, target_layers: vec![1], markov_rank: 4, experts: 3, experts_per_token: 2 };
    let shape = Shape {
        layers: "w1".into(),
        vocab: 4,
        hidden: 33,
        streams: 2,
        heads: 3,
        head_dim: 16,
        q_rank: 17,
        experts: 4,
        draft: Some(draft),
        ..Shape::odd(Storage::F32)
    };
    let model = load(2, &shape);
    let origin = read(&model, Prefill::Full, &text(&model, &mut Random::new(2), 9));
    for (temperature, top_p, top_k) in [(1.0, 1.0, 0), (1.7, 1.0, 0), (1.0, 0.8, 0), (1.3, 1.0, 3)] {
        let sampling = |seed| Sampling { temperature, top_p, top_k, seed };
        // Exactly, through the tree of all texts.
        let mut expected = BTreeMap::from([(vec![], (1.0, origin.state().clone()))]);
        for _ in 0..3 {
            let mut longer = BTreeMap::new();
            for (made, (share, state)) in expected {
                let mut state = state.clone();
                let waiting = *made.last().unwrap_or(&origin.tokens()[8]);
                let logits = model.forward(&mut state, &[waiting], LogitRows::Last, None).unwrap();
                let p = sample::distribution(&logits[0], &sampling(0)).unwrap();
                let sum = p.iter().map(|&w| w as f64).sum::<f64>();
                for (id, &weight) in p.iter().enumerate().filter(|(_, &weight)| weight > 0) {
                    longer.insert([&made[..], &[id as u32]].concat(), (share * weight as f64 / sum, state.clone()));
                }
            }
            expected = longer;
        }
        let expected: BTreeMap<Vec<u32>, f64> = expected.into_iter().map(|(made, (share, _))| (made, share)).collect();
        let limit = |freedom: usize| freedom as f64 + 4.0 * (2.0 * freedom as f64).sqrt();
        for tokens in 1..=2 {
            let (mut counts, mut accepted) = (BTreeMap::<Vec<u32>, usize>::new(), 0);
            for seed in 0..n {
                let mut sequence = origin.fork();
                sequence.set_draft(Draft::Tokens(tokens)).unwrap();
                let request = Request { max_tokens: 3, sampling: sampling(seed), stop_ids: vec![] };
                *counts.entry(make(&mut sequence, &request)).or_default() += 1;
                accepted += sequence.draft_counters().accepted.iter().sum::<u64>();
            }
            let (off, freedom) = deviance(&counts, &expected);
            println!("temperature {temperature}, top-p {top_p}, top-k {top_k}, {tokens} drafted: {off:.1} of {freedom}, {accepted} accepted");
            assert!(off < limit(freedom), "{off} of {freedom}");
            assert!(accepted > n / 4, "{accepted}");
        }
        // The draft itself has another one: a rule that accepts too much would be seen.
        let mut counts = BTreeMap::<Vec<u32>, usize>::new();
        let mut first = BTreeMap::<Vec<u32>, f64>::new();
        expected.iter().for_each(|(made, share)| *first.entry(made[..1].to_vec()).or_default() += share);
        let drafting = model.draft(origin.state(), origin.tokens()[8], &mut Trace::off());
        for seed in 0..n {
            let drafted = Drafted::draw(&drafting.logits(), &sampling(seed), 0).unwrap();
            *counts.entry(vec![drafted.token]).or_default() += 1;
        }
        let known = counts.keys().all(|token| first.contains_key(token));
        assert!(!known || deviance(&counts, &first).0 > 10.0 * limit(first.len() - 1));
    }
}

/// A scheduler that looks at what was drafted before it says how much to verify bends the text. The device verifies 0, 1, 2 tokens
/// at 1, 0.5, 0.45 rounds a second; the first token is accepted in 0.8 of cases, the second in 0.9 after A and never after B.
#[test]
fn the_scheduler_does_not_look_ahead() {
    let (p, q) = ([0.7f32.ln(), 0.3f32.ln()], [0f32; 2]);
    let rounds = 40_000;
    let cost = |verified: usize| [1.0, 1.0 / 0.5, 1.0 / 0.45][verified];
    let confidence = |first: u32| if first == 0 { 0.9f32 } else { 0.0 };
    let sampling = |seed| Sampling { temperature: 1.0, seed, ..Sampling::default() };
    // The first token of a round that verifies the first drafted one, or that verifies none.
    let outcome = |round: u64, drafted: Option<Drafted>| {
        let drafted: Vec<Drafted> = drafted.into_iter().collect();
        let logits = vec![p.to_vec(); drafted.len() + 1];
        let verdict = verify(&logits, &drafted, &sampling(round), 0);
        (verdict.accepted, if verdict.accepted == 1 { drafted[0].token } else { verdict.next.unwrap() })
    };
    let mut scheduler = Scheduler::new(Draft::Auto, 2);
    let (mut a, mut a_with_hindsight, mut verified) = (0, 0, [0; 3]);
    for round in 0..rounds {
        let first = Drafted::draw(&q, &sampling(round), 0).unwrap();
        let second = confidence(first.token);
        let plan = scheduler.begin();
        let k = plan.as_ref().map_or(0, |plan| {
            let mut outlook = plan.outlook();
            [0.8, second].into_iter().take_while(|&confidence| outlook.more(confidence)).count()
        });
        let (mut accepted, token) = outcome(round, (k > 0).then(|| first.clone()));
        let second_stands = sample::random_of(round, 7, 0) < (second as f64 * 2f64.powi(32)) as u32;
        accepted += (k == 2 && accepted == 1 && second_stands) as usize;
        a += (token == 0) as usize;
        verified[k] += plan.is_some() as usize;
        // Without drafting a round would take long: drafting goes on.
        let seconds = Some(if plan.is_some() { cost(k) } else { 9.0 });
        scheduler.end(plan.as_ref(), Round { tokens: 1 + accepted, verified: k, accepted, seconds });

        let tokens = [1.0, 1.8, 1.8 + 0.8 * second as f64];
        let best = (0..3).max_by(|&i, &j| (tokens[i] / cost(i)).total_cmp(&(tokens[j] / cost(j)))).unwrap();
        a_with_hindsight += (outcome(round, (best > 0).then_some(first)).1 == 0) as usize;
    }
    let (share, bent) = (a as f64 / rounds as f64, a_with_hindsight as f64 / rounds as f64);
    println!("A in {share:.4} of rounds, {verified:?} rounds verified 0, 1, 2 tokens; with hindsight {bent:.4}");
    // Four standard deviations are 0.009.
    assert!((share - 0.70).abs() < 0.009, "{share}");
    assert!((bent - 0.85).abs() < 0.009, "{bent}");
    assert!(verified.iter().all(|&n| n > 100), "{verified:?}");
}
