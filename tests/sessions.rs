//! Sessions on the device: readings of every mode, cuts, forks, prefixes. Everything that can start as NaN does, and windows are
//! NaN again before every replay.

mod common;
#[path = "common/device_state.rs"]
mod device_state;

use cedra::model::{LayerRows, Options, Sequence};
use cedra::reading::{Prefill, Replay};
use cedra::session::{Append, Session};
use cedra::Error;
use common::random_model::{random_checkpoint, Shape, Storage};
use common::Random;
use device_state::{engine, gpu, greedy, load, made, options, own_gpu, text, visible};
use std::ops::ControlFlow;

const MODES: [Prefill; 3] = [Prefill::Bounded, Prefill::Exact, Prefill::Full];

fn read(sequence: &mut Sequence, tokens: &[u32], prefill: Prefill) {
    sequence.append_as(tokens, prefill, &mut |_| ControlFlow::Continue(())).unwrap();
}

/// For N tokens, the pending one included once it is read, every layer of the encoder runs N rows, and in the bounded mode every
/// layer of the decoder min(N, window); the decoder's first layer adds the entries of the rest, and nothing else.
#[test]
fn bounded_reading_runs_half_the_layers() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let (window, decoder) = (shape.window, 4);
    let random = random_checkpoint(21, &shape);
    for n in [1, 2, window - 1, window, window + 1, 3 * window, 60] {
        for chunk in [3, 64] {
            let model = load(&gpu, &random, options(128, chunk));
            let mut sequence = Sequence::new(model).unwrap();
            read(&mut sequence, &text(shape.vocab, 1, n), Prefill::Bounded);
            assert_eq!(made(&mut sequence, 1).len(), 1);
            let tail = n.min(window) as u64;
            for (index, rows) in sequence.layer_rows().into_iter().enumerate() {
                let rest = if index == decoder { n as u64 - tail } else { 0 };
                let whole = if index < decoder { n as u64 } else { tail };
                assert_eq!(rows, LayerRows { whole, part: rest }, "layer {index}, {n} tokens in chunks of {chunk}");
            }
        }
    }
}

/// Law 3 in every mode: appends cut into chunks of any size leave the same bytes and the same next tokens. Law 8: all starts as NaN.
#[test]
fn chunks_make_no_difference_in_any_mode() {
    let Some(gpu) = gpu() else { return };
    for (seed, shape) in [(1, Shape::odd(Storage::Mixed)), (2, Shape::random(2)), (5, Shape::random(5))] {
        let random = random_checkpoint(seed, &shape);
        let appends = [text(shape.vocab, seed, 61), text(shape.vocab, seed + 50, 5), text(shape.vocab, seed + 70, 29)];
        for prefill in MODES {
            let mut expected = None;
            for chunk in [128, 64, 7, 1] {
                let mut sequence = Sequence::new(load(&gpu, &random, options(256, chunk))).unwrap();
                let mut next = vec![];
                for tokens in &appends {
                    read(&mut sequence, tokens, prefill);
                    next.extend(made(&mut sequence, 3));
                }
                let found = (visible(&sequence), next);
                let expected = expected.get_or_insert_with(|| found.clone());
                assert_eq!(&found, expected, "seed {seed}, {prefill:?}, chunks of {chunk}");
            }
        }
    }
}

/// An exact reading leaves what a full one leaves, to the byte, and runs fewer rows.
#[test]
fn exact_is_full() {
    let Some(gpu) = gpu() else { return };
    for (seed, shape) in
        [(1, Shape::odd(Storage::Fp4)), (3, Shape::random(3)), (8, Shape::random(8)), (12, Shape::random(12))]
    {
        let random = random_checkpoint(seed, &shape);
        let model = load(&gpu, &random, options(256, 16));
        let appends = [text(shape.vocab, seed, 90), text(shape.vocab, seed + 50, 4), text(shape.vocab, seed + 9, 40)];
        let run = |prefill| {
            let mut sequence = Sequence::new(model.clone()).unwrap();
            let mut next = vec![];
            for tokens in &appends {
                read(&mut sequence, tokens, prefill);
                next.extend(made(&mut sequence, 2));
            }
            let rows: u64 = sequence.layer_rows().iter().map(|rows| rows.whole).sum();
            (visible(&sequence), next, rows)
        };
        let (exact, full) = (run(Prefill::Exact), run(Prefill::Full));
        assert_eq!((&exact.0, &exact.1), (&full.0, &full.1), "seed {seed}");
        let config = model.config();
        let cone = (config.layers.len() - config.decoder().min(config.layers.len())) * config.sliding_window;
        if cone > 0 && cone < 60 {
            assert!(exact.2 < full.2, "seed {seed}: {} rows, {} in full", exact.2, full.2);
        }
    }
}

/// Law 6: whatever is cut, what is kept is byte for byte what it was; with an exact rebuild everything is what an exact reading
/// leaves.
#[test]
fn cuts_keep_what_they_keep() {
    let Some(gpu) = gpu() else { return };
    for (seed, shape) in [(1, Shape::odd(Storage::Fp4)), (7, Shape::random(7))] {
        let random = random_checkpoint(seed, &shape);
        let model = load(&gpu, &random, options(512, 64));
        let tokens = text(shape.vocab, seed, 300);
        let mut whole = Sequence::new(model.clone()).unwrap();
        read(&mut whole, &tokens, Prefill::Exact);
        made(&mut whole, 4);
        let all = visible(&whole);
        // Every length about windows, groups and page edges; CEDRA_CASES asks for all there are.
        let every = std::env::var("CEDRA_CASES").is_ok();
        let lengths: Vec<usize> = match shape.window {
            _ if every => (1..304).collect(),
            7 => (1..16).chain(124..134).chain(254..259).chain([200, 303]).collect(),
            _ => vec![1, 9, 128, 129, 257],
        };
        for length in lengths {
            let mut fresh = Sequence::new(model.clone()).unwrap();
            let kept = whole.tokens()[..length].to_vec();
            read(&mut fresh, &kept, Prefill::Exact);
            let mut cut = whole.fork().unwrap();
            cut.truncate(length, Replay::Exact).unwrap();
            assert_eq!(cut.tokens(), kept);
            let (mut found, expected) = (visible(&cut), visible(&fresh));
            // The cut text has the entry of its last token already.
            found.retain(|name, _| expected.contains_key(name));
            assert_eq!(found, expected, "seed {seed}, cut exactly to {length}");
            for other in [false, true] {
                let more = if other { text(shape.vocab, 77, 40) } else { tokens[length.min(260)..][..40].to_vec() };
                let mut cut = cut.fork().unwrap();
                let mut fresh = fresh.fork().unwrap();
                read(&mut cut, &more, Prefill::Exact);
                read(&mut fresh, &more, Prefill::Exact);
                assert_eq!(made(&mut cut, 4), made(&mut fresh, 4), "seed {seed}, after a cut to {length}");
                assert_eq!(visible(&cut), visible(&fresh), "seed {seed}, after a cut to {length}");
            }

            let mut bounded = whole.fork().unwrap();
            bounded.truncate(length, Replay::Bounded).unwrap();
            assert!(bounded.replayed() <= shape.window, "{} rows replayed", bounded.replayed());
            for (name, bytes) in visible(&bounded).iter().filter(|(name, _)| name.starts_with("entry")) {
                assert_eq!(bytes, &all[name], "{name} after a cut to {length}");
            }
        }
        assert_eq!(visible(&whole), all, "forks leave the original alone");
    }
}

/// A cut, a resumed prefix and a restore of the same tokens are the same replay.
#[test]
fn a_replay_is_a_replay() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(31, &shape);
    let engine = engine(load(&gpu, &random, options(512, 16)));
    let tokens = text(shape.vocab, 31, 320);
    for n in [17, 60, 127, 128, 129, 200, 257] {
        let mut a = engine.session().unwrap();
        a.append(&tokens).unwrap();
        let rest = text(shape.vocab, n as u64, 30);
        let mut prompt = tokens[..n].to_vec();
        prompt.extend(&rest);
        let mut b = engine.session().unwrap();
        let appended = b.append(&prompt).unwrap();
        assert_eq!(appended.reused, n);
        assert!(appended.replayed <= shape.window);
        a.truncate(n, Replay::Bounded).unwrap();
        a.append(&rest).unwrap();
        assert_eq!(visible(a.state().unwrap()), visible(b.state().unwrap()), "{n} tokens");
        let (a, b): (Vec<u32>, Vec<u32>) = (
            a.generate(&greedy(8)).unwrap().map(Result::unwrap).collect(),
            b.generate(&greedy(8)).unwrap().map(Result::unwrap).collect(),
        );
        assert_eq!(a, b, "{n} tokens");
    }
}

/// Shared prefixes of any length are found in live sessions, generated text included; nothing is found where nothing is shared.
#[test]
fn prefixes_are_found() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Fp8);
    let random = random_checkpoint(32, &shape);
    let engine = engine(load(&gpu, &random, options(2304, 128)));
    let mut first = engine.session().unwrap();
    first.append(&text(shape.vocab, 32, 2100)).unwrap();
    assert_eq!(first.generate(&greedy(20)).unwrap().filter(Result::is_ok).count(), 20);
    let seen = first.tokens().to_vec();
    for shared in [100, 500, 2000, 2110] {
        let mut prompt = seen[..shared].to_vec();
        prompt.push((seen[shared] + 1) % shape.vocab as u32);
        let before = engine.model().pool().used();
        let mut second = engine.session().unwrap();
        let appended = second.append(&prompt).unwrap();
        assert_eq!((appended.reused, second.reused()), (shared, shared));
        assert!(appended.replayed <= shape.window, "{} rows replayed", appended.replayed);
        let rows = second.layer_rows();
        assert!(rows[0].whole <= (shape.window + 1) as u64, "{} rows read", rows[0].whole);
        let copied = engine.model().pool().used() - before;
        assert!(copied <= 1, "{copied} pages for one new token");
        drop(second);
        assert_eq!(engine.model().pool().used(), before);
    }
    let mut other = engine.session().unwrap();
    assert_eq!(other.append(&text(shape.vocab, 99, 50)).unwrap().reused, 0);
    let mut alone = engine.session().unwrap();
    let how = Append { reuse: false, ..Append::default() };
    assert_eq!(alone.append_as(&seen[..300], how, &mut |_| ControlFlow::Continue(())).unwrap().reused, 0);
    // The first one goes on as if nobody had shared anything.
    let mut control = engine.session().unwrap();
    control.append_as(&seen[..2100], how, &mut |_| ControlFlow::Continue(())).unwrap();
    let continued: Vec<u32> = control.generate(&greedy(28)).unwrap().map(Result::unwrap).collect();
    let rest: Vec<u32> = first.generate(&greedy(8)).unwrap().map(Result::unwrap).collect();
    assert_eq!(continued[..20], seen[2100..]);
    assert_eq!(continued[20..], rest);
}

/// Three sessions that share prefixes and diverge, in turns, give what three separate runs give.
#[test]
fn interleaved_sessions_do_not_meet() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(33, &shape);
    let model = load(&gpu, &random, options(512, 16));
    let shared = text(shape.vocab, 33, 150);
    let turn = |i: usize, round: usize| text(shape.vocab, (10 * i + round) as u64, 9 + 20 * i + round);
    let step = |session: &mut Session, i: usize, round: usize| -> Vec<u32> {
        session.append(&turn(i, round)).unwrap();
        session.generate(&greedy(5 + i)).unwrap().map(Result::unwrap).collect()
    };
    let fork = |origin: &mut Session, i: usize| match i {
        0 => origin.fork().unwrap(),
        // Through the index, and by a cut: the same text in three ways.
        1 => {
            let mut session = origin.engine().session().unwrap();
            assert_eq!(session.append(origin.tokens()).unwrap().reused, shared.len() - 1);
            session
        }
        _ => {
            let mut session = origin.fork().unwrap();
            session.append(&[3; 20]).unwrap();
            session.truncate(shared.len(), Replay::Bounded).unwrap();
            session
        }
    };
    let mut origin = engine(model.clone()).session().unwrap();
    origin.append(&shared).unwrap();
    let mut separate = vec![];
    for i in 0..3 {
        let mut session = fork(&mut origin, i);
        separate.push((0..3).map(|round| step(&mut session, i, round)).collect::<Vec<_>>());
    }
    let before = visible(origin.state().unwrap());
    let mut sessions: Vec<Session> = (0..3).map(|i| fork(&mut origin, i)).collect();
    let mut interleaved = vec![vec![]; 3];
    for round in 0..3 {
        for (i, session) in sessions.iter_mut().enumerate() {
            interleaved[i].push(step(session, i, round));
        }
    }
    assert_eq!(interleaved, separate);
    assert_eq!(visible(origin.state().unwrap()), before);
}

/// A reading that is stopped keeps what was read, and what comes after is as if it had been appended in two parts.
#[test]
fn stopping_keeps_what_was_read() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(34, &shape);
    let model = load(&gpu, &random, options(512, 16));
    let tokens = text(shape.vocab, 34, 200);
    let mut whole = Sequence::new(model.clone()).unwrap();
    read(&mut whole, &tokens, Prefill::Bounded);
    for prefill in MODES {
        for after in [1, 40, 100, 170] {
            let mut sequence = Sequence::new(model.clone()).unwrap();
            let mut stop = |done: usize| if done >= after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
            let Err(Error::Stopped { read: kept, of: 200 }) = sequence.append_as(&tokens, prefill, &mut stop) else {
                panic!("the reading was not stopped")
            };
            assert!(kept >= after && kept < after + 48, "{kept} tokens read when {after} were enough");
            assert_eq!(sequence.tokens(), &tokens[..kept]);
            let mut asked = sequence.fork().unwrap();
            assert_eq!(made(&mut asked, 3).len(), 3);
            read(&mut sequence, &tokens[kept..], Prefill::Bounded);
            if prefill != Prefill::Full {
                // Nothing of the decoder was missing that the rest needs: the same bytes as one reading.
                assert_eq!(visible(&sequence), visible(&whole), "{prefill:?} stopped after {kept}");
                assert_eq!(sequence.replayed(), 0);
            }
            assert_eq!(made(&mut sequence, 3).len(), 3);
        }
    }
}

/// An exact reading is exact however often it is stopped, wherever, and whatever bounded readings were stopped before: it leaves
/// what it leaves when it is never stopped. Where the rest reaches far enough, nothing is computed again for that.
#[test]
fn an_exact_reading_that_was_stopped_is_exact() {
    let Some(gpu) = gpu() else { return };
    for (seed, shape) in [(34, Shape::odd(Storage::Fp4)), (8, Shape::random(8))] {
        let random = random_checkpoint(seed, &shape);
        let model = load(&gpu, &random, options(512, 16));
        let tokens = text(shape.vocab, seed, 240);
        let mut whole = Sequence::new(model.clone()).unwrap();
        read(&mut whole, &tokens, Prefill::Exact);
        let expected = visible(&whole);
        let answer = made(&mut whole, 4);
        let layers = model.config().layers.len();
        let cone = 1 + (layers - model.config().decoder()) * (shape.window - 1);
        for first in [Prefill::Exact, Prefill::Bounded] {
            for stops in [vec![1], vec![100], vec![120, 64], vec![40, 50, 10]] {
                let mut sequence = Sequence::new(model.clone()).unwrap();
                let mut free = true;
                for (i, &after) in stops.iter().enumerate() {
                    let prefill = if i == 0 { first } else { Prefill::Exact };
                    let from = sequence.len();
                    free &= i == 0 || from + cone < tokens.len();
                    let mut stop =
                        |done: usize| if done >= after { ControlFlow::Break(()) } else { ControlFlow::Continue(()) };
                    match sequence.append_as(&tokens[from..], prefill, &mut stop) {
                        Err(Error::Stopped { read, .. }) => assert_eq!(sequence.len(), from + read),
                        other => panic!("{stops:?}: the reading was not stopped: {other:?}"),
                    }
                }
                let from = sequence.len();
                free &= from + cone < tokens.len();
                read(&mut sequence, &tokens[from..], Prefill::Exact);
                let told = format!("seed {seed}, {first:?} first, stops {stops:?}, the last after {from}");
                assert_eq!(visible(&sequence), expected, "{told}");
                assert_eq!(made(&mut sequence, 4), answer, "{told}");
                assert!(!free || sequence.replayed() == 0, "{told}: {} rows replayed", sequence.replayed());
            }
        }
    }
}

/// Misuse is a typed error that loses nothing.
#[test]
fn misuse_is_told() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Bf16);
    let random = random_checkpoint(35, &shape);
    let model = load(&gpu, &random, options(64, 16));
    let (one, two) = (engine(model.clone()), engine(model));
    let mut session = one.session().unwrap();
    session.append(&text(shape.vocab, 35, 30)).unwrap();
    let before = visible(session.state().unwrap());
    assert!(matches!(two.fork(&mut session), Err(Error::OtherEngine)));
    assert!(matches!(session.append(&[1; 40]), Err(Error::Context { needed: 70, allowed: 64 })));
    assert!(matches!(session.append(&[101]), Err(Error::TokenId { id: 101, .. })));
    assert!(matches!(session.append(&[]), Err(Error::EmptyPrompt)));
    assert!(matches!(session.truncate(31, Replay::Bounded), Err(Error::Setting { setting: "length", .. })));
    assert!(matches!(session.generate(&greedy(35)).err(), Some(Error::Context { needed: 65, allowed: 64 })));
    assert_eq!(session.remaining(), 34);
    assert_eq!(visible(session.state().unwrap()), before);
    assert_eq!(session.generate(&greedy(34)).unwrap().filter(Result::is_ok).count(), 34);
    assert_eq!(session.remaining(), 0);
    session.truncate(10, Replay::Bounded).unwrap();
    assert_eq!((session.len(), session.remaining()), (10, 54));
    session.truncate(0, Replay::Bounded).unwrap();
    assert!(matches!(session.generate(&greedy(1)).err(), Some(Error::EmptyPrompt)));
    session.close();
    assert!(matches!(session.append(&[1]), Err(Error::Closed)));
    assert!(matches!(session.truncate(0, Replay::Bounded), Err(Error::Closed)));
    assert!(matches!(session.fork(), Err(Error::Closed)));
    assert!(matches!(session.generate(&greedy(1)).err(), Some(Error::Closed)));
    assert_eq!((session.len(), one.live()), (0, 0));
}

/// Law 11: cycles of everything that a session does leave memory as it was. CEDRA_CYCLES asks for more of them.
#[test]
fn memory_is_flat_over_cycles() {
    let Some(gpu) = own_gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(36, &shape);
    let engine = engine(load(&gpu, &random, options(512, 64)));
    let cycles = std::env::var("CEDRA_CYCLES").ok().and_then(|n| n.parse().ok()).unwrap_or(20);
    let mut base = engine.session().unwrap();
    base.append(&text(shape.vocab, 36, 140)).unwrap();
    let mut random = Random::new(36);
    let mut held = None;
    for cycle in 0..cycles {
        let mut fork = base.fork().unwrap();
        fork.append(&text(shape.vocab, cycle, 1 + random.below(140))).unwrap();
        assert_eq!(fork.generate(&greedy(3)).unwrap().filter(Result::is_ok).count(), 3);
        let mut other = engine.session().unwrap();
        other.append(&fork.tokens()[..150.min(fork.len())]).unwrap();
        fork.truncate(1 + random.below(fork.len()), Replay::Bounded).unwrap();
        drop((fork, other));
        // The pool may have grown by a slab; it keeps it.
        let (counters, slabs) = (gpu.counters(), engine.model().pool().slabs(0).len() as u64);
        let bytes = counters.allocated_bytes() - slabs * engine.model().plan().slab;
        let now = (bytes, counters.buffers - slabs, engine.model().pool().used());
        assert_eq!(now, *held.get_or_insert(now), "cycle {cycle}");
        assert!(slabs <= 3, "{slabs} slabs for eight pages of four a slab");
    }
}

/// The pool grows by whole slabs, pages of one text lie in several of them, and nothing changes but the number of dispatches.
#[test]
fn slabs_make_no_difference() {
    let Some(gpu) = own_gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(37, &shape);
    let tokens = text(shape.vocab, 37, 700);
    let run = |slab_bytes: Option<u64>| {
        let before = gpu.counters().allocated_bytes();
        let model = load(&gpu, &random, Options { slab_bytes, ..options(1024, 64) });
        let held = |tokens: usize| {
            (gpu.counters().allocated_bytes() - before, model.plan().at(model.layout(), tokens).total())
        };
        let mut sequence = Sequence::new(model.clone()).unwrap();
        let (found, planned) = held(0);
        assert_eq!(found, planned);
        read(&mut sequence, &tokens, Prefill::Bounded);
        let mut next = made(&mut sequence, 5);
        let (found, planned) = held(sequence.len());
        assert_eq!(found, planned, "{slab_bytes:?}");
        sequence.truncate(333, Replay::Bounded).unwrap();
        read(&mut sequence, &tokens[..100], Prefill::Bounded);
        next.extend(made(&mut sequence, 5));
        (visible(&sequence), next, model.pool().slabs(0).len())
    };
    let page = run(None);
    let words = load(&gpu, &random, options(1024, 64)).layout().pool.page_words as u64;
    let few = run(Some(4 * (64 + 2 * words)));
    assert_eq!((page.2, few.2), (1, 3), "two pages a slab");
    assert_eq!((&page.0, &page.1), (&few.0, &few.1));
    assert!(matches!(
        cedra::layout::Layout::new(
            load(&gpu, &random, options(64, 8)).config(),
            &Options { slab_bytes: Some(100), ..options(64, 8) }
        ),
        Err(Error::DeviceLimit { .. })
    ));
}
