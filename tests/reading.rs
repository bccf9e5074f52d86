//! Texts that are read, made, cut and forked on the CPU, in every mode, against the definition of what they are then. All of it
//! to the bit.

mod common;

use cedra::config::Role;
use cedra::reading::{Depth, Part, Prefill, Reading, Replay, Span};
use cedra::reference::math::Matrix;
use cedra::reference::model::{LogitRows, Model, Options, Ran, State};
use cedra::reference::replay::{Definition, Event};
use cedra::reference::sample;
use cedra::reference::sequence::Sequence;
use cedra::sampling::{Generator, Request, Sampling};
use common::cpu_state::{bits, defined, visible};
use common::random_model::{random_checkpoint, Shape, Storage};
use common::Random;
use proptest::prelude::*;
use std::sync::Arc;

/// Cases of each property; CEDRA_CASES asks for more.
fn cases(default: u32) -> ProptestConfig {
    let cases = std::env::var("CEDRA_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(default);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// A random model; one seed in four does without cache quantisation.
fn load(seed: u64, shape: &Shape) -> Arc<Model> {
    let random = random_checkpoint(seed, shape);
    let options = Options { cache_quant: !seed.is_multiple_of(4), mutation: None };
    Arc::new(Model::load(&random.checkpoint(), &random.tables, options).unwrap())
}

/// Layers with decoders of every ratio, long and short ones, one that is the whole model, and none.
const LAYERS: [&str; 8] = ["w2ri1rir", "ww2r2i", "2iri", "1r2", "2r4ri", "1ir", "www", "w1"];

fn shape(seed: u64) -> Shape {
    let random = &mut Random::new(seed);
    Shape { layers: random.pick(&LAYERS).into(), window: random.pick(&[1, 2, 3, 5, 8]), ..Shape::random(seed) }
}

fn text(model: &Model, random: &mut Random, len: usize) -> Vec<u32> {
    (0..len).map(|_| random.below(model.config.vocab_size) as u32).collect()
}

fn sequence(model: &Arc<Model>, prefill: Prefill) -> Sequence {
    let mut sequence = Sequence::new(model.clone());
    sequence.set_prefill(prefill);
    sequence
}

fn read(model: &Arc<Model>, prefill: Prefill, tokens: &[u32]) -> Sequence {
    let mut sequence = sequence(model, prefill);
    sequence.append(tokens, &mut |_| {}).unwrap();
    sequence
}

/// Makes `count` tokens.
fn make(sequence: &mut Sequence, count: usize, sampling: Sampling) -> Vec<u32> {
    let request = Request { max_tokens: count, sampling, stop_ids: vec![] };
    sequence.generate(&request).unwrap().map(|token| token.unwrap()).collect()
}

/// Logits of the row that waits.
fn next(model: &Model, state: &State, tokens: &[u32]) -> Vec<u32> {
    let waiting = &tokens[state.position..];
    bits(&model.forward(&mut state.clone(), waiting, LogitRows::Last, None).unwrap()[0])
}

/// Something to do to a text, drawn so that all lengths and phases around a window and a group occur.
fn random_event(model: &Model, random: &mut Random, len: usize, waiting: bool) -> Option<Event> {
    let w = model.config.sliding_window;
    let prefill = random.pick(&[Prefill::Bounded, Prefill::Exact, Prefill::Full]);
    let replay = random.pick(&[Replay::Bounded, Replay::Exact]);
    match random.below(8) {
        0..3 => {
            let count = random.pick(&[1, 2, 3, w, w + 1, (w - 1).max(1), 2 * w + 1, 11, 24]);
            Some(Event::Append { tokens: text(model, random, count), prefill })
        }
        3..5 => waiting.then_some(Event::Make { token: 0 }),
        5 => Some(Event::Rebuild { replay }),
        _ => {
            let length = if random.below(3) == 0 { random.below(len + 1) } else { len.saturating_sub(random.below(9)) };
            Some(Event::Truncate { length, replay })
        }
    }
}

proptest! {
    #![proptest_config(cases(24))]

    /// Law 7: whatever is done to a text, its state is what the definition says, and so are the logits of every token made.
    #[test]
    fn a_text_is_what_the_definition_says(seed in any::<u64>()) {
        let model = load(seed, &shape(seed));
        let random = &mut Random::new(seed);
        let (mut sequence, mut definition) = (Sequence::new(model.clone()), Definition::new(&model));
        let mut done = vec![];
        for _ in 0..12 {
            let waiting = !sequence.is_empty();
            let Some(mut event) = random_event(&model, random, sequence.len(), waiting) else { continue };
            match &mut event {
                Event::Append { tokens, prefill } => {
                    sequence.set_prefill(*prefill);
                    sequence.append(tokens, &mut |_| {}).unwrap();
                }
                Event::Make { token } => {
                    let logits = next(&model, sequence.state(), sequence.tokens());
                    *token = make(&mut sequence, 1, Sampling::default())[0];
                    prop_assert_eq!(sample::greedy(&logits.iter().map(|&l| f32::from_bits(l)).collect::<Vec<_>>()), Some(*token));
                    definition.after(&event);
                    prop_assert_eq!(&logits, &bits(definition.logits.last().unwrap()), "{:?}, then {:?}", done, event);
                }
                Event::Rebuild { replay } => sequence.rebuild(*replay).unwrap(),
                Event::Truncate { length, replay } => sequence.truncate(*length, *replay).unwrap(),
            }
            if !matches!(event, Event::Make { .. }) {
                definition.after(&event);
            }
            prop_assert_eq!(sequence.tokens(), definition.text());
            let (ours, theirs) = (visible(&model, sequence.state()), defined(&model, &definition));
            prop_assert!(ours == theirs, "{} {:?}, then {event:?}", model.config.sliding_window, done);
            prop_assert!(ours[1..].iter().all(|&x| !f32::from_bits(x).is_nan() || x == u32::MAX), "{event:?}");
            done.push(event);
        }
    }

    /// Exact readings leave what full ones leave, in one append or in several, and never touch what they do not need.
    #[test]
    fn an_exact_reading_is_a_full_one(seed in any::<u64>()) {
        let model = load(seed, &shape(seed));
        let random = &mut Random::new(seed);
        let (mut exact, mut full) = (sequence(&model, Prefill::Exact), sequence(&model, Prefill::Full));
        let mut poisoned = exact.state().clone();
        for _ in 0..4 {
            let count = random.pick(&[1, 2, 7, 40]);
            let tokens = text(&model, random, count);
            let unread = [&exact.tokens()[exact.state().position..], &tokens].concat();
            poison(&model, &mut poisoned);
            model.append(&mut poisoned, &unread, Prefill::Exact, &mut |_| {}).unwrap();
            for sequence in [&mut exact, &mut full] {
                sequence.append(&tokens, &mut |_| {}).unwrap();
            }
            for state in [exact.state(), &poisoned] {
                prop_assert!(visible(&model, state) == visible(&model, full.state()));
                let logits = next(&model, state, exact.tokens());
                prop_assert_eq!(&logits, &next(&model, full.state(), full.tokens()));
                prop_assert!(logits.iter().all(|&l| f32::from_bits(l).is_finite()));
            }
        }
        // What is made afterwards is the same for as long as anybody looks.
        let count = 2 * model.config.sliding_window + 3;
        prop_assert_eq!(make(&mut exact, count, Sampling::default()), make(&mut full, count, Sampling::default()));
        prop_assert!(visible(&model, exact.state()) == visible(&model, full.state()));
    }

    /// Law 6: a text that was cut and rebuilt exactly is the shorter text, exactly read; kept entries stay in either mode.
    #[test]
    fn a_cut_text_is_the_shorter_text(seed in any::<u64>(), longer in 1usize..60, made in 0usize..4) {
        let model = load(seed, &shape(seed));
        let random = &mut Random::new(seed);
        let prefill = random.pick(&[Prefill::Bounded, Prefill::Exact, Prefill::Full]);
        let count = random.below(40) + longer;
        let mut long = read(&model, prefill, &text(&model, random, count));
        if made > 0 {
            make(&mut long, made, Sampling::default());
        }
        let length = random.below(long.len());
        let (mut exact, mut bounded) = (long.fork(), long.fork());
        exact.truncate(length, Replay::Exact).unwrap();
        bounded.truncate(length, Replay::Bounded).unwrap();
        let mut fresh = sequence(&model, Prefill::Exact);
        if length > 0 {
            fresh.append(&long.tokens()[..length], &mut |_| {}).unwrap();
        }
        // The entry of a group that the waiting token ends is there already; a fresh text gets it with the next step.
        let compared = |sequence: &Sequence| {
            let mut state = sequence.state().clone();
            if length > 0 {
                model.forward(&mut state, &sequence.tokens()[length - 1..], LogitRows::None, None).unwrap();
            }
            visible(&model, &state)
        };
        prop_assert!(compared(&exact) == compared(&fresh), "{} of {}", length, long.len());
        for (plan, (long, bounded)) in model.config.layers.iter().zip(long.state().globals.iter().zip(&bounded.state().globals)) {
            if let (Some(long), Some(bounded)) = (long, bounded) {
                let entries = length / plan.ratio;
                prop_assert_eq!(bounded.entries.rows, entries);
                prop_assert_eq!(bits(&bounded.entries.data), bits(&long.entries.data[..entries * long.entries.cols]));
                prop_assert_eq!(bits(&bounded.keys.data), bits(&long.keys.data[..entries * long.keys.cols]));
            }
        }
        let before = (visible(&model, long.state()), long.state().ran.clone());
        long.truncate(long.len(), Replay::Bounded).unwrap();
        prop_assert!((visible(&model, long.state()), long.state().ran.clone()) == before, "nothing was cut");
    }

    /// An exact plan has no row too many: let its rows' ends be one layer lower, or its first row be left out, and what follows
    /// is another text. Without quantisation, which could hide it.
    #[test]
    fn an_exact_plan_is_the_least(seed in any::<u64>(), len in 2usize..80) {
        let model = load(seed & !3, &shape(seed));
        let c = &model.config;
        let tokens = text(&model, &mut Random::new(seed), len);
        let append = Reading::append(c, Prefill::Exact, Default::default(), 0, len);
        let replay = Reading::replay(c, Replay::Exact, len, len);
        let whole = read(&model, Prefill::Full, &tokens);
        for (reading, kept) in [(append, 0), (replay, len)] {
            let run = |spans: &[Span]| {
                let mut state = model.state();
                if kept > 0 {
                    state.globals = whole_entries(&model, &whole, &tokens);
                    state.kept = kept;
                }
                state.position = spans.first().map_or(len - 1, |span| span.start);
                let history = tokens[..state.position].iter().rev().copied().chain(std::iter::repeat(u32::MAX));
                state.history = history.take(state.history.len()).collect();
                for span in spans {
                    model.read(&mut state, &tokens[span.start..span.end], span.depth).unwrap();
                }
                // Exactly what the next rows see.
                let mut logits = vec![];
                for &token in &[&tokens[len - 1..], &[1, 2, 3]].concat() {
                    logits.extend(model.forward(&mut state, &[token], LogitRows::Last, None).unwrap().concat());
                }
                bits(&logits).into_iter().chain(visible(&model, &state)).collect::<Vec<_>>()
            };
            let expected = run(&reading.spans);
            prop_assert!(expected.iter().all(|&x| x == u32::MAX || !f32::from_bits(x).is_nan()));
            for (i, span) in reading.spans.iter().enumerate() {
                let mut spans = reading.spans.clone();
                spans[i].start += 1;
                match i.checked_sub(1).map(|before| reading.spans[before].depth) {
                    Some(depth) => spans.insert(i, Span { start: span.start, end: span.start + 1, depth }),
                    None if span.start == 0 || kept == 0 => continue,
                    None => {}
                }
                spans.retain(|span| span.start < span.end);
                prop_assert!(run(&spans) != expected, "span {} of {:?}", i, reading);
            }
        }
    }

    /// Each layer runs the rows that its mode names and no other.
    #[test]
    fn rows_are_those_of_the_mode(seed in any::<u64>(), n in 1usize..100) {
        let model = load(seed, &shape(seed));
        let (c, layers, decoder, w) = (&model.config, model.config.layers.len(), model.config.decoder(), model.config.sliding_window);
        let tokens = text(&model, &mut Random::new(seed), n);
        let rows = |prefill| {
            let mut sequence = read(&model, prefill, &tokens);
            make(&mut sequence, 1, Sampling::default());
            sequence.state().ran.clone()
        };
        prop_assert_eq!(rows(Prefill::Full), vec![Ran { whole: n, part: 0 }; layers]);

        let bounded = |layer: usize| match () {
            _ if layer < decoder => Ran { whole: n, part: 0 },
            _ if layer == decoder => Ran { whole: n.min(w), part: n - n.min(w) },
            _ => Ran { whole: n.min(w), part: 0 },
        };
        prop_assert_eq!(rows(Prefill::Bounded), (0..layers).map(bounded).collect::<Vec<_>>());

        // Rows below the last one, W - 1 more from layer to layer downwards; those of a layer's rows that end above it add keys.
        let cone = |layer: usize| n.min(1 + (layers - 1 - layer) * (w - 1));
        let exact = |layer: usize| match () {
            _ if layer < decoder => Ran { whole: n, part: 0 },
            _ if layer == decoder => Ran { whole: cone(layer), part: n - cone(layer) },
            _ => Ran { whole: cone(layer), part: cone(layer - 1) - cone(layer) },
        };
        prop_assert_eq!(rows(Prefill::Exact), (0..layers).map(exact).collect::<Vec<_>>());

        // A bounded replay: the window and the open group, whatever the length.
        let mut sequence = read(&model, Prefill::Bounded, &tokens);
        let before = sequence.state().ran.clone();
        let length = n - 1;
        sequence.truncate(length, Replay::Bounded).unwrap();
        let open = c.layers.iter().filter(|plan| plan.role == Role::Full).map(|plan| length % plan.ratio).max().unwrap_or(0);
        let most = length.min(w.max(open)).saturating_sub(1);
        for (before, after) in before.iter().zip(&sequence.state().ran) {
            prop_assert_eq!((after.whole - before.whole, after.part - before.part), (most, 0));
        }
    }

    /// Pieces of a text in one reading, or as many readings as pieces: full and exact modes do not tell them apart.
    #[test]
    fn appends_add_up(seed in any::<u64>(), cut in 1usize..70) {
        let model = load(seed, &shape(seed));
        let tokens = text(&model, &mut Random::new(seed), 70);
        for prefill in [Prefill::Exact, Prefill::Full] {
            let whole = read(&model, prefill, &tokens);
            let mut parts = read(&model, prefill, &tokens[..cut]);
            if cut < tokens.len() {
                parts.append(&tokens[cut..], &mut |_| {}).unwrap();
            }
            prop_assert!(visible(&model, parts.state()) == visible(&model, whole.state()));
        }
    }
}

/// NaN wherever nothing lies that the next row can see.
fn poison(model: &Model, state: &mut State) {
    let w = model.config.sliding_window;
    let seen = (state.position + 1).saturating_sub(w)..state.position;
    for ring in &mut state.rings {
        let slots: Vec<usize> = seen.clone().map(|s| s % w).collect();
        (0..w).filter(|slot| !slots.contains(slot)).for_each(|slot| ring.row_mut(slot).fill(f32::NAN));
    }
    for (plan, global) in model.config.layers.iter().zip(&mut state.globals) {
        if let Some(global) = global {
            (state.position % plan.ratio..plan.ratio - 1)
                .for_each(|slot| global.remainder.row_mut(slot).fill(f32::NAN));
        }
    }
}

/// The global cache of a whole text, without remainders.
fn whole_entries(model: &Model, sequence: &Sequence, tokens: &[u32]) -> Vec<Option<cedra::reference::model::Global>> {
    let mut state = sequence.state().clone();
    model.forward(&mut state, &tokens[tokens.len() - 1..], LogitRows::None, None).unwrap();
    for global in state.globals.iter_mut().flatten() {
        let Matrix { rows, cols, .. } = global.remainder;
        global.remainder = Matrix::new(rows, cols, vec![f32::NAN; rows * cols]);
    }
    state.globals
}

/// Cuts at the edges of pages and groups, from a text that goes on for long.
#[test]
fn cuts_at_page_edges() {
    for (seed, layers, window) in [(1, "w2ri1rir", 5), (2, "2r4ri", 3), (3, "2iri", 1)] {
        let model = load(seed, &Shape { layers: layers.into(), window, ..Shape::odd(Storage::F32) });
        let tokens = text(&model, &mut Random::new(seed), 262);
        let long = read(&model, Prefill::Bounded, &tokens);
        let mut read = Definition::new(&model);
        read.after(&Event::Append { tokens, prefill: Prefill::Bounded });
        for length in [127, 128, 129, 130, 255, 256, 257] {
            for replay in [Replay::Bounded, Replay::Exact] {
                let (mut sequence, mut definition) = (long.fork(), read.clone());
                sequence.truncate(length, replay).unwrap();
                definition.after(&Event::Truncate { length, replay });
                let tokens = vec![5; window + 3];
                for prefill in [Prefill::Bounded, Prefill::Exact] {
                    sequence.set_prefill(prefill);
                    sequence.append(&tokens, &mut |_| {}).unwrap();
                    definition.after(&Event::Append { tokens: tokens.clone(), prefill });
                    let same = visible(&model, sequence.state()) == defined(&model, &definition);
                    assert!(same, "{layers}, {length} tokens, {replay:?}, {prefill:?}");
                }
            }
        }
    }
}

/// Bounded modes are approximate: a test that cannot tell them from the exact ones would be blind.
#[test]
fn bounded_is_not_exact() {
    let model = load(1, &Shape { window: 3, ..Shape::odd(Storage::F32) });
    let tokens = text(&model, &mut Random::new(1), 60);
    let (exact, bounded) = (read(&model, Prefill::Exact, &tokens), read(&model, Prefill::Bounded, &tokens));
    assert_ne!(next(&model, exact.state(), &tokens), next(&model, bounded.state(), &tokens));
    let mut replayed = exact.fork();
    replayed.truncate(40, Replay::Bounded).unwrap();
    let fresh = read(&model, Prefill::Exact, &tokens[..40]);
    assert_ne!(next(&model, replayed.state(), &tokens[..40]), next(&model, fresh.state(), &tokens[..40]));
}

/// A fork and its origin do not know of each other.
#[test]
fn a_fork_goes_its_own_way() {
    let model = load(5, &Shape::odd(Storage::Bf16));
    let tokens = text(&model, &mut Random::new(5), 30);
    let mut origin = read(&model, Prefill::Bounded, &tokens);
    let before = visible(&model, origin.state());
    let mut fork = origin.fork();
    fork.append(&[1, 2, 3], &mut |_| {}).unwrap();
    fork.truncate(9, Replay::Bounded).unwrap();
    assert_eq!((origin.tokens(), visible(&model, origin.state())), (&tokens[..], before));
    assert_eq!(fork.tokens(), &tokens[..9]);
    let mut second = origin.fork();
    assert_eq!(make(&mut origin, 12, Sampling::default()), make(&mut second, 12, Sampling::default()));
}

#[test]
fn an_empty_text_is_empty_again() {
    let model = load(6, &Shape::odd(Storage::F32));
    let tokens = text(&model, &mut Random::new(6), 30);
    for replay in [Replay::Bounded, Replay::Exact] {
        let mut sequence = read(&model, Prefill::Bounded, &tokens);
        assert_eq!((sequence.len(), sequence.remaining()), (30, 4096 - 30));
        sequence.truncate(0, replay).unwrap();
        assert!(sequence.is_empty());
        assert_eq!(visible(&model, sequence.state()), visible(&model, &model.state()));
        let request = Request { max_tokens: 1, sampling: Sampling::default(), stop_ids: vec![] };
        assert!(matches!(sequence.generate(&request).err(), Some(cedra::Error::EmptyPrompt)));
        sequence.append(&tokens, &mut |_| {}).unwrap();
        let fresh = read(&model, Prefill::Bounded, &tokens);
        assert_eq!(visible(&model, sequence.state()), visible(&model, fresh.state()));
    }
}

/// The generator goes on with the same seed, starts again with another, and is part of what a fork takes along.
#[test]
fn draws_go_on_with_their_seed() {
    let model = load(7, &Shape::odd(Storage::F32));
    let tokens = text(&model, &mut Random::new(7), 10);
    let sampling = |seed| Sampling { temperature: 1.0, seed, ..Sampling::default() };
    let mut once = read(&model, Prefill::Bounded, &tokens);
    let mut twice = once.clone();
    let whole = make(&mut once, 12, sampling(3));
    let mut parts = make(&mut twice, 5, sampling(3));
    assert_eq!(twice.generator(), Generator { seed: 3, drawn: 5 });
    let mut fork = twice.fork();
    parts.extend(make(&mut twice, 7, sampling(3)));
    assert_eq!(parts, whole);
    assert_eq!(make(&mut fork, 7, sampling(3)), whole[5..]);
    make(&mut fork, 2, sampling(4));
    assert_eq!(fork.generator(), Generator { seed: 4, drawn: 2 });
    let before = fork.generator();
    fork.truncate(4, Replay::Bounded).unwrap();
    assert_eq!(fork.generator(), before, "a cut takes no draw back");
}

/// The plans of a model as large as the released ones: what they cost at a million tokens.
#[test]
fn plans_at_the_released_size() {
    let path = common::support::fixture("reference/released-config.json");
    let config = cedra::config::Config::open(path).unwrap();
    assert_eq!((config.decoder(), config.layers.len(), config.sliding_window), (20, 40, 128));
    let end = 1_000_000;
    let exact = Reading::append(&config, Prefill::Exact, Default::default(), 0, end);
    let entries = Depth { whole: 20, part: Some(Part::Entries) };
    assert_eq!(exact.spans[0], Span { start: 0, end: end - 1 - 20 * 127, depth: entries });
    assert_eq!((exact.spans.len(), exact.rows()), (21, end - 1));
    let last = Span { start: end - 128, end: end - 1, depth: Depth { whole: 39, part: Some(Part::Keys) } };
    assert_eq!(exact.spans[20], last);
    assert_eq!(Reading::replay(&config, Replay::Bounded, end, end).rows(), 127);
    assert_eq!(Reading::replay(&config, Replay::Exact, end, end).rows(), 40 * 127);
    // An odd text has half a group: where the cone of the layers above reaches further back, it costs nothing.
    assert_eq!(Reading::replay(&config, Replay::Bounded, end + 1, end + 1).rows(), 127);
}
