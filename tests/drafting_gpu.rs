//! Drafting on the device: whatever is drafted, and wherever it ends, text and state are those of plain decoding, to the byte; and
//! what is drafted, accepted and drawn is what the CPU drafts, accepts and draws.

mod common;
#[path = "common/device_state.rs"]
mod device_state;

use cedra::checkpoint::Checkpoint;
use cedra::gpu::Gpu;
use cedra::model::{Model, Options, Sequence};
use cedra::reading::{Prefill, Replay};
use cedra::reference::model::{Model as Twin, Options as TwinOptions};
use cedra::reference::sequence::Sequence as TwinSequence;
use cedra::sampling::{Request, Sampling};
use cedra::session::{Append, Rings};
use cedra::spec::Draft;
use cedra::store::{MemoryStore, Store};
use cedra::text::{NgramTables, Tokenizer};
use cedra::Error;
use common::random_model::{random_checkpoint, DraftShape, RandomModel, Shape, Storage};
use common::Random;
use device_state::{engine, gpu, greedy, options, visible};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

/// Cases of each randomised test; CEDRA_CASES asks for more.
fn cases(default: u64) -> u64 {
    let more = std::env::var("CEDRA_CASES").ok().and_then(|n| n.parse().ok());
    more.map_or(default, |n: u64| n.max(default))
}

/// A small model that drafts, and is right now and then: there are few tokens.
fn shape(seed: u64) -> Shape {
    let layers = ["w2r1ir", "w1r", "wwww", "2w1i"][seed as usize % 4];
    let draft = DraftShape { block: [3, 5, 1, 2][seed as usize % 4], ..DraftShape::random(seed, layers.len()) };
    Shape { layers: layers.into(), vocab: 5 + seed as usize % 4, draft: Some(draft), ..Shape::odd(Storage::Mixed) }
}

fn load(gpu: &Arc<Gpu>, random: &RandomModel, options: Options) -> Arc<Model> {
    device_state::load(gpu, random, Options { draft: true, ..options })
}

fn text(random: &mut Random, vocabulary: usize, count: usize) -> Vec<u32> {
    (0..count).map(|_| random.below(vocabulary) as u32).collect()
}

fn read(model: &Arc<Model>, tokens: &[u32]) -> Sequence {
    let mut sequence = Sequence::new(model.clone()).unwrap();
    sequence.append(tokens, &mut |_| {}).unwrap();
    sequence
}

fn make(sequence: &mut Sequence, request: &Request) -> Vec<u32> {
    sequence.generate(request).unwrap().map(Result::unwrap).collect()
}

/// What can be seen of a text but for what only drafts see: the device does not listen where nothing is drafted.
fn backbone(sequence: &Sequence) -> BTreeMap<String, Vec<u8>> {
    let mut state = visible(sequence);
    state.retain(|name, _| !name.starts_with("draft key"));
    state
}

#[test]
fn greedy_text_and_state_are_those_of_plain_decoding() {
    let Some(gpu) = gpu() else { return };
    let (mut accepted, mut refused) = (0, 0);
    for seed in 0..cases(2) {
        let random = random_checkpoint(seed, &shape(seed));
        let model = load(&gpu, &random, options(400, 4));
        let prompt = text(&mut Random::new(seed), shape(seed).vocab, 20 + seed as usize);
        let mut origin = read(&model, &prompt);
        // Through the end of a page.
        let request = greedy(130);
        let mut plain = origin.fork().unwrap();
        let expected = make(&mut plain, &request);
        let mut told = origin.fork().unwrap();
        told.set_draft(Draft::Tokens(0)).unwrap();
        assert_eq!(make(&mut told, &request), expected, "seed {seed}");
        assert_eq!(backbone(&told), backbone(&plain), "seed {seed}");
        for draft in (1..=model.block_size()).map(Draft::Tokens).chain([Draft::Auto]) {
            let mut drafted = origin.fork().unwrap();
            drafted.set_draft(draft).unwrap();
            assert_eq!(make(&mut drafted, &request), expected, "seed {seed}, {draft:?}");
            assert_eq!(drafted.tokens(), plain.tokens());
            assert_eq!(drafted.standing(), plain.standing());
            assert_eq!(visible(&drafted), visible(&told), "seed {seed}, {draft:?}");
            let counters = drafted.draft_counters();
            let stood: u64 = counters.accepted.iter().sum();
            assert_eq!(counters.rounds + stood, 130, "{counters:?}");
            accepted += stood;
            refused += counters.verified.iter().sum::<u64>() - stood;
        }
    }
    println!("{accepted} accepted, {refused} refused");
    assert!(accepted > 50 && refused > 100);
}

/// Every number of drafted tokens, every number of them that stands, at every phase of groups, windows and pages: what is left is what
/// reading one token after the other leaves, and a refused token leaves nothing.
#[test]
fn refused_tokens_leave_no_trace() {
    let Some(gpu) = gpu() else { return };
    let mut refusals = 0;
    for seed in 0..cases(2) {
        let shape = Shape { vocab: 31, ..shape(seed) };
        let random = random_checkpoint(seed, &shape);
        let model = load(&gpu, &random, options(200, 64));
        let block = model.block_size();
        // The window has 7 tokens, groups 2, pages 128.
        let lengths = if std::env::var("CEDRA_CASES").is_ok() { 100..140 } else { 120..132 };
        let mut origin = read(&model, &text(&mut Random::new(seed), shape.vocab, lengths.start));
        origin.set_draft(Draft::Tokens(0)).unwrap();
        let mut plain = origin.fork().unwrap();
        let (mut states, mut all) = (vec![visible(&plain)], origin.tokens().to_vec());
        for _ in 0..lengths.len() + block + 1 {
            all.extend(make(&mut plain, &greedy(1)));
            states.push(visible(&plain));
        }
        for length in lengths.clone() {
            let at = length - lengths.start;
            for drafted in 1..=block {
                for stands in 0..=drafted {
                    let mut text = origin.fork().unwrap();
                    let mut tokens = all[length..length + drafted].to_vec();
                    for token in &mut tokens[stands..] {
                        *token = (*token + 1) % shape.vocab as u32;
                    }
                    let made = pollster::block_on(text.trace_verify(&tokens)).unwrap();
                    assert_eq!(made, all[length..length + stands + 1], "seed {seed}, {length}, {stands} of {drafted}");
                    assert!(
                        visible(&text) == states[at + stands + 1],
                        "seed {seed}, length {length}: {stands} of {drafted} tokens stand"
                    );
                    refusals += usize::from(stands < drafted);
                }
            }
            make(&mut origin, &greedy(1));
        }
    }
    println!("{refusals} refusals");
    assert!(refusals > 50);
}

/// Rounds of all sizes, one after the other, on texts that are forked, cut and read further: the text is that of plain decoding,
/// and so is all that is left. CEDRA_ROUNDS asks for more.
#[test]
fn random_rounds_are_plain_decoding() {
    let Some(gpu) = gpu() else { return };
    let wanted = std::env::var("CEDRA_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(150u64);
    let (mut rounds, mut seed) = (0, 0);
    while rounds < wanted {
        let shape = shape(seed);
        let random = random_checkpoint(seed, &shape);
        let model = load(&gpu, &random, options(700, 16));
        let numbers = &mut Random::new(seed);
        let start = 1 + numbers.below(150);
        let (mut drafted, mut plain) = {
            let prompt = text(numbers, shape.vocab, start);
            (read(&model, &prompt), read(&model, &prompt))
        };
        plain.set_draft(Draft::Tokens(0)).unwrap();
        let mut done = vec![];
        while drafted.len() < 600 && rounds < wanted {
            match numbers.below(8) {
                0 => {
                    let length = drafted.len() - numbers.below(drafted.len().min(20));
                    let replay = numbers.pick(&[Replay::Bounded, Replay::Exact]);
                    drafted.truncate(length, replay).unwrap();
                    plain.truncate(length, replay).unwrap();
                    done.push(format!("cut to {length}"));
                }
                1 => {
                    let count = 1 + numbers.below(30);
                    let tokens = text(numbers, shape.vocab, count);
                    let prefill = numbers.pick(&[Prefill::Bounded, Prefill::Exact]);
                    for sequence in [&mut drafted, &mut plain] {
                        sequence.append_as(&tokens, prefill, &mut |_| ControlFlow::Continue(())).unwrap();
                    }
                    done.push(format!("read {count}"));
                }
                2 => {
                    drafted = drafted.fork().unwrap();
                    done.push("fork".into());
                }
                _ => {
                    let draft = match numbers.below(4) {
                        0 => Draft::Auto,
                        _ => Draft::Tokens(numbers.below(model.block_size() + 1)),
                    };
                    drafted.set_draft(draft).unwrap();
                    let before = drafted.draft_counters().rounds;
                    let stop = numbers.below(4) == 0;
                    let stop_ids = if stop { vec![numbers.below(shape.vocab) as u32] } else { vec![] };
                    let request = Request { stop_ids, ..greedy(1 + numbers.below(40)) };
                    // Some texts are left in the middle: then it is for the device how much it has made.
                    let heard = if numbers.below(3) == 0 { 1 + numbers.below(5) } else { usize::MAX };
                    let length = drafted.len();
                    let tokens: Vec<u32> =
                        drafted.generate(&request).unwrap().take(heard).map(Result::unwrap).collect();
                    pollster::block_on(drafted.settle_async()).unwrap();
                    let made = drafted.tokens()[length..].to_vec();
                    assert!(made.starts_with(&tokens) && made.len() <= request.max_tokens);
                    let again = Request { max_tokens: made.len(), ..request };
                    make(&mut plain, &again);
                    assert_eq!(plain.tokens()[length..], made, "seed {seed}, {draft:?}: {done:?}");
                    rounds += drafted.draft_counters().rounds - before;
                    done.push(format!("{draft:?} {}", made.len()));
                }
            }
            assert_eq!(drafted.standing(), plain.standing(), "seed {seed}: {done:?}");
            assert!(visible(&drafted) == visible(&plain), "seed {seed}: {done:?}");
        }
        seed += 1;
    }
    println!("{rounds} rounds");
}

/// The same prompt on the CPU and on the device: tokens, and what was verified and accepted at each place.
fn both(model: &Arc<Model>, twin: &Arc<Twin>, prompt: &[u32], draft: Draft, request: &Request) -> [u64; 2] {
    let mut ours = read(model, prompt);
    let mut theirs = TwinSequence::new(twin.clone());
    theirs.append(prompt, &mut |_| {}).unwrap();
    ours.set_draft(draft).unwrap();
    theirs.set_draft(draft).unwrap();
    let made = make(&mut ours, request);
    let expected: Vec<u32> = theirs.generate(request).unwrap().map(Result::unwrap).collect();
    assert_eq!(made, expected, "{draft:?}, {request:?}");
    let (ours, theirs) = (ours.draft_counters(), theirs.draft_counters());
    assert_eq!((&ours.verified, &ours.accepted), (&theirs.verified, &theirs.accepted), "{draft:?}, {request:?}");
    assert_eq!((ours.rounds, ours.drafted), (theirs.rounds, theirs.drafted));
    [ours.verified.iter().sum(), ours.accepted.iter().sum()]
}

/// What is drafted, accepted and drawn in place of what is refused is what the CPU's draft, rule and draws give; at temperatures,
/// too, with what top-k and top-p leave.
#[test]
fn drafts_and_draws_are_the_cpus() {
    let Some(gpu) = gpu() else { return };
    let mut sums = [0, 0];
    for seed in 0..cases(2) {
        let shape = Shape { storage: Storage::F32, ..shape(seed) };
        let random = random_checkpoint(seed, &shape);
        let checkpoint = random.checkpoint();
        let twin = Arc::new(Twin::load(&checkpoint, &random.tables, TwinOptions::default()).unwrap());
        let model = load(&gpu, &random, options(120, 16));
        let prompt = text(&mut Random::new(seed), shape.vocab, 21);
        for (temperature, top_p, top_k) in [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.7, 0.8, 0), (1.5, 1.0, 3), (2.0, 0.9, 4)] {
            let sampling = Sampling { temperature, top_p, top_k, seed: 17 + seed };
            let request = Request { max_tokens: 40, sampling, stop_ids: vec![] };
            for tokens in [1, model.block_size()] {
                let [verified, accepted] = both(&model, &twin, &prompt, Draft::Tokens(tokens), &request);
                sums = [sums[0] + verified, sums[1] + accepted];
            }
        }
    }
    println!("{} of {} drafted tokens accepted", sums[1], sums[0]);
    assert!(sums[1] > 50 && sums[0] - sums[1] > 100);
}

/// The model that the project carries drafts on the device what it drafts on the CPU.
#[test]
fn pocket_drafts_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/pocket");
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let tokenizer = Tokenizer::open(&folder).unwrap();
    let tables = NgramTables::new(checkpoint.config(), &tokenizer).unwrap();
    let twin = Arc::new(Twin::load(&checkpoint, &tables, TwinOptions::default()).unwrap());
    let options = Options { context: 200, draft: true, ..Options::default() };
    let model = Arc::new(Model::load_blocking(gpu, &checkpoint, &tables, &options, &mut |_, _| {}).unwrap());
    let mut prompt = vec![checkpoint.config().bos_token_id];
    prompt.extend(
        tokenizer.encode("The `Vec` type has a method that removes the last element and returns it. ").unwrap(),
    );
    let [verified, accepted] = both(&model, &twin, &prompt, Draft::Tokens(5), &greedy(60));
    println!("pocket: {accepted} of {verified} drafted tokens accepted");
    assert!(accepted > 5);
}

/// Numbers of tokens, stop tokens and the end of the context, wherever they fall in a round.
#[test]
fn texts_end_where_plain_ones_end() {
    let Some(gpu) = gpu() else { return };
    let (mut stopped, mut inside) = (0, 0);
    for seed in 0..cases(2) {
        let shape = shape(seed);
        let random = random_checkpoint(seed, &shape);
        let model = load(&gpu, &random, options(50, 16));
        let mut origin = read(&model, &text(&mut Random::new(seed), shape.vocab, 25));
        let mut ends: Vec<Request> = [1, 2, 3, 5, 24, 25].map(greedy).to_vec();
        ends.extend((0..shape.vocab as u32).map(|id| Request { stop_ids: vec![id], ..greedy(25) }));
        for request in ends {
            let mut plain = origin.fork().unwrap();
            plain.set_draft(Draft::Tokens(0)).unwrap();
            let expected = make(&mut plain, &request);
            for draft in [Draft::Tokens(model.block_size()), Draft::Auto] {
                let mut drafted = origin.fork().unwrap();
                drafted.set_draft(draft).unwrap();
                assert_eq!(make(&mut drafted, &request), expected, "seed {seed}, {draft:?}, {request:?}");
                assert_eq!((drafted.tokens(), drafted.standing()), (plain.tokens(), plain.standing()));
                assert!(visible(&drafted) == visible(&plain), "seed {seed}, {draft:?}, {request:?}");
                inside += drafted.draft_counters().accepted.iter().sum::<u64>();
            }
            stopped += usize::from(expected.len() < request.max_tokens);
        }
        let mut full = origin.fork().unwrap();
        full.set_draft(Draft::Tokens(1)).unwrap();
        make(&mut full, &greedy(25));
        assert_eq!(full.remaining(), 0);
        let error = full.generate(&greedy(1)).err();
        assert!(matches!(error, Some(Error::Context { needed: 51, allowed: 50 })), "{error:?}");
    }
    println!("{stopped} texts stopped, {inside} drafted tokens accepted");
    assert!(stopped > 3 && inside > 20);
}

/// A logit that is NaN behind accepted tokens is the same error at the same place, after the same tokens.
#[test]
fn a_non_finite_logit_ends_both_texts() {
    let Some(gpu) = gpu() else { return };
    let mut behind = 0;
    for seed in 0..cases(6) {
        let shape = Shape { storage: Storage::F32, ..shape(seed) };
        let mut random = random_checkpoint(seed, &shape);
        let tokens: Vec<u32> = text(&mut Random::new(seed), 3, 9);
        let expected = make(&mut read(&load(&gpu, &random, options(40, 16)), &tokens), &greedy(12));
        // A token whose embedding is broken: made somewhere, and read after it.
        let noise = serde_json::from_str::<serde_json::Value>(&random.config_json).unwrap()["dspark_noise_token_id"]
            .as_u64()
            .unwrap() as u32;
        let fine = |id: &&u32| !tokens.contains(id) && expected[0] != **id && **id != noise;
        let Some(&broken) = expected[1..11].iter().find(fine) else { continue };
        let length = u64::from_le_bytes(random.safetensors[..8].try_into().unwrap()) as usize;
        let header: serde_json::Value = serde_json::from_slice(&random.safetensors[8..8 + length]).unwrap();
        let row = 4 * shape.hidden;
        let at = 8 + length + header["embed.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
        let at = at + broken as usize * row;
        // A number that FP32 tensors may hold.
        random.safetensors[at..at + row].copy_from_slice(&f32::INFINITY.to_le_bytes().repeat(shape.hidden));
        let model = load(&gpu, &random, options(40, 16));
        let mut origin = read(&model, &tokens);
        let mut run = |draft: Draft| {
            let mut sequence = origin.fork().unwrap();
            sequence.set_draft(draft).unwrap();
            let made: Vec<String> = sequence.generate(&greedy(12)).unwrap().map(|token| format!("{token:?}")).collect();
            let accepted: u64 = sequence.draft_counters().accepted.iter().sum();
            (made, sequence.tokens().to_vec(), sequence.standing(), accepted)
        };
        let plain = run(Draft::Off);
        if !plain.0.last().unwrap().contains("NonFinite") {
            continue;
        }
        for tokens in 1..=model.block_size() {
            let drafted = run(Draft::Tokens(tokens));
            assert_eq!((&drafted.0, &drafted.1, &drafted.2), (&plain.0, &plain.1, &plain.2), "seed {seed}");
            behind += usize::from(drafted.3 > 0);
        }
    }
    println!("{behind} texts with accepted tokens");
    assert!(behind > 0);
}

/// A session that is saved in the middle of an answer, with rounds under way: what opens has what the answer was about to give. With
/// its rings it drafts what the one that never left drafts; without them, what a replay of its text drafts.
#[test]
fn saved_sessions_draft_on() {
    let Some(gpu) = gpu() else { return };
    let shape = shape(0);
    let random = random_checkpoint(8, &shape);
    let engine = engine(load(&gpu, &random, options(300, 64)));
    let store: Rc<dyn Store> = Rc::new(MemoryStore::new());
    let all = text(&mut Random::new(3), shape.vocab, 122);
    for step in [0, 1, 4, 9] {
        let mut session = engine.session().unwrap();
        let how = Append { reuse: false, ..Append::default() };
        session.append_as(&all, how, &mut |_| ControlFlow::Continue(())).unwrap();
        session.set_draft(Draft::Tokens(2)).unwrap();
        let mut writing = session.generate(&greedy(24)).unwrap();
        let mut known: Vec<u32> = writing.by_ref().take(step).map(Result::unwrap).collect();
        writing.snapshot(Rings::Saved).unwrap().write(&store, "rings").unwrap();
        writing.snapshot(Rings::Replay).unwrap().write(&store, "replay").unwrap();
        known.extend(writing.by_ref().map(Result::unwrap));
        drop(writing);
        assert_eq!(session.tokens(), [&all[..], &known].concat());
        for name in ["rings", "replay"] {
            let mut opened = engine.open(&store, name).unwrap();
            let ahead = opened.len() - all.len();
            assert!(ahead >= step && known.starts_with(&opened.tokens()[all.len()..]), "{ahead} of {known:?}");
            opened.set_draft(Draft::Tokens(2)).unwrap();
            if name == "rings" {
                let rest: Vec<u32> = opened.generate(&greedy(24 - ahead)).unwrap().map(Result::unwrap).collect();
                assert_eq!(rest, known[ahead..], "step {step}");
                assert!(visible(opened.state().unwrap()) == visible(session.state().unwrap()), "step {step}");
            }
        }
        // Behind the answer: the same proposals, hence the same counts at every place.
        session.save(&store, "whole", Rings::Saved).unwrap();
        session.save(&store, "again", Rings::Replay).unwrap();
        let run = |session: &mut cedra::session::Session| {
            session.set_draft(Draft::Off).unwrap();
            session.set_draft(Draft::Tokens(3)).unwrap();
            let tokens: Vec<u32> = session.generate(&greedy(30)).unwrap().map(Result::unwrap).collect();
            (tokens, session.draft_counters().unwrap().clone(), visible(session.state().unwrap()))
        };
        let mut fork = session.fork().unwrap();
        let expected = run(&mut session);
        let mut opened = engine.open(&store, "whole").unwrap();
        for (text, what) in [(&mut fork, "fork"), (&mut opened, "opened")] {
            let found = run(text);
            assert_eq!((&found.0, &found.1.accepted), (&expected.0, &expected.1.accepted), "{what}, step {step}");
            assert!(found.2 == expected.2, "{what}, step {step}");
        }
        let mut replayed = engine.open(&store, "again").unwrap();
        let mut control = engine.open(&store, "again").unwrap();
        let (a, b) = (run(&mut replayed), run(&mut control));
        assert_eq!((a.0, a.1.accepted, a.2), (b.0, b.1.accepted, b.2));
    }
}

/// A round is one submission, and reads the backbone's weights once, however many rows it has; nothing blocks on it.
#[test]
fn a_round_reads_the_weights_once() {
    let Some(gpu) = device_state::own_gpu() else { return };
    let shape = shape(1);
    let random = random_checkpoint(5, &shape);
    let model = load(&gpu, &random, options(120, 16));
    let mut origin = read(&model, &text(&mut Random::new(3), shape.vocab, 22));
    let mut count = |draft: Draft| {
        let mut sequence = origin.fork().unwrap();
        sequence.set_draft(draft).unwrap();
        let before = gpu.counters();
        make(&mut sequence, &greedy(30));
        let counted = gpu.counters() - before;
        let rounds = sequence.draft_counters().rounds;
        assert!(counted.submissions >= rounds && counted.submissions <= rounds + 4, "{counted:?} in {rounds} rounds");
        (counted, rounds)
    };
    let (plain, steps) = count(Draft::Off);
    let each = plain.weight_bytes / steps;
    let mut round = |draft: usize| {
        let (counted, rounds) = count(Draft::Tokens(draft));
        counted.weight_bytes / rounds
    };
    let block = model.block_size();
    let [two, all] = [round(1), round(block)];
    println!("a step reads {each} bytes, a round {two} for two rows, and {all} for {}", 1 + block);
    // More rows need more of the experts, and the Markov head once each; all else is read once for them all.
    assert!(all > two && all - two < each, "{} rows more take {} bytes more", block - 1, all - two);
}
