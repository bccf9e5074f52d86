//! Saving beside whatever a session does: while it makes tokens, is cut, forked, closed; into stores that are full or shared.

mod common;
#[path = "common/device_state.rs"]
mod device_state;

use cedra::model::Sequence;
use cedra::reading::{Prefill, Replay};
use cedra::sampling::{Request, Sampling};
use cedra::session::{Append, Engine, Rings, Session, Snapshot};
use cedra::store::{Listed, MemoryContents, MemoryStore, Record, RecordId, RedbStore, Store, Usage};
use cedra::{Error, Result};
use common::random_model::{random_checkpoint, Shape, Storage};
use common::Random;
use device_state::{engine, gpu, greedy, load, made, options, own_gpu, text, visible};
use futures::future::LocalBoxFuture;
use pollster::block_on;
use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;
use std::rc::Rc;

fn memory() -> Rc<dyn Store> {
    Rc::new(MemoryStore::new())
}

fn read(session: &mut Session, tokens: &[u32], prefill: Prefill) {
    session.append_as(tokens, Append { prefill, reuse: false }, &mut |_| ControlFlow::Continue(())).unwrap();
}

fn finished(session: &mut Session, tokens: usize) -> Vec<u32> {
    session.generate(&greedy(tokens)).unwrap().map(Result::unwrap).collect()
}

/// A store that does something of its own around the calls of another.
struct Between<F> {
    store: Rc<dyn Store>,
    /// Before records are put, or before a commit.
    before: F,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Call {
    /// Of so many bytes.
    Put(usize, Vec<RecordId>),
    Commit,
}

impl<F> std::fmt::Debug for Between<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "around {:?}", self.store)
    }
}

impl<F: Fn(Call) -> LocalBoxFuture<'static, Result<()>>> Store for Between<F> {
    fn name(&self) -> &str {
        self.store.name()
    }
    fn put<'a>(&'a self, records: &'a [Record]) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let bytes = records.iter().map(|record| record.bytes().len()).sum();
            (self.before)(Call::Put(bytes, records.iter().map(Record::id).collect())).await?;
            self.store.put(records).await
        })
    }
    fn release<'a>(&'a self, records: &'a [RecordId]) -> LocalBoxFuture<'a, Result<()>> {
        self.store.release(records)
    }
    fn commit<'a>(
        &'a self,
        session: &'a str,
        manifest: &'a [u8],
        records: &'a [RecordId],
    ) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(async move {
            (self.before)(Call::Commit).await?;
            self.store.commit(session, manifest, records).await
        })
    }
    fn open<'a>(&'a self, session: &'a str) -> LocalBoxFuture<'a, Result<Option<Vec<u8>>>> {
        self.store.open(session)
    }
    fn get(&self, id: RecordId) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>>> {
        self.store.get(id)
    }
    fn list(&self) -> LocalBoxFuture<'_, Result<Vec<Listed>>> {
        self.store.list()
    }
    fn delete<'a>(&'a self, session: &'a str) -> LocalBoxFuture<'a, Result<bool>> {
        self.store.delete(session)
    }
    fn usage(&self) -> LocalBoxFuture<'_, Result<Usage>> {
        self.store.usage()
    }
}

/// Lets the thread's other futures have a turn.
fn turn() -> impl std::future::Future<Output = ()> {
    let mut had = false;
    std::future::poll_fn(move |context| match std::mem::replace(&mut had, true) {
        true => std::task::Poll::Ready(()),
        false => {
            context.waker().wake_by_ref();
            std::task::Poll::Pending
        }
    })
}

/// Whatever moment of a generation is saved, about every phase of groups, windows and pages: what opens has the tokens that the
/// answer had then or was about to give, and goes on as the answer did; without rings, as a replay of those tokens does. Draws
/// at random go on, too.
#[test]
fn any_moment_of_an_answer_can_be_saved() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(61, &shape);
    let engine = engine(load(&gpu, &random, options(512, 64)));
    let all = text(shape.vocab, 61, 300);
    let drawn = |max_tokens| Request {
        sampling: Sampling { temperature: 1.0, top_p: 0.95, top_k: 50, seed: 9 },
        ..greedy(max_tokens)
    };
    // CEDRA_CASES asks for more phases.
    let more = std::env::var("CEDRA_CASES").is_ok();
    let lengths = [(1, false), (120, true), (5, true), (118, false), (244, false)];
    for (length, draws) in lengths.into_iter().take(if more { 5 } else { 2 }) {
        let request = |tokens| if draws { drawn(tokens) } else { greedy(tokens) };
        let (saved, replayed) = (memory(), memory());
        let mut session = engine.session().unwrap();
        read(&mut session, &all[..length], Prefill::Bounded);
        let mut writing = session.generate(&request(24)).unwrap();
        let mut known = vec![];
        for step in 0..=24 {
            for (store, rings) in [(&saved, Rings::Saved), (&replayed, Rings::Replay)] {
                let written = writing.snapshot(rings).unwrap().write(store, &format!("{step}")).unwrap();
                assert!((length + step..=length + 24).contains(&written.tokens), "{} after {step}", written.tokens);
            }
            known.extend(writing.next().transpose().unwrap());
        }
        assert!(writing.next().is_none());
        drop(writing);
        assert_eq!(session.tokens(), [&all[..length], &known].concat());
        known.extend(session.generate(&request(6)).unwrap().map(Result::unwrap));
        for step in 0..=24 {
            let name = format!("{step}");
            let mut opened = engine.open(&saved, &name).unwrap();
            let ahead = opened.len() - length;
            assert_eq!(opened.tokens()[length..], known[..ahead], "{length} tokens, step {step}");
            let next: Vec<u32> = opened.generate(&request(6)).unwrap().map(Result::unwrap).collect();
            assert_eq!(next, known[ahead..ahead + 6], "{length} tokens, step {step}");
            assert_eq!(opened.replayed(), 0);

            let mut opened = engine.open(&replayed, &name).unwrap();
            assert_eq!(opened.tokens()[length..], known[..opened.len() - length]);
            let pages = session.state().unwrap().pages().prefix(opened.len() - 1);
            let mut control = Sequence::new(engine.model().clone()).unwrap();
            control.resume(opened.tokens().to_vec(), pages, opened.len() - 1, Default::default());
            control.ready(Replay::Bounded).unwrap();
            assert_eq!(made(&mut control, 3), finished(&mut opened, 3), "{length} tokens, step {step}");
            assert_eq!(visible(opened.state().unwrap()), visible(&control), "{length} tokens, step {step}");
        }
    }
}

/// A text that ends while steps are under way is saved as it ended, be it just before a page was complete.
#[test]
fn an_answer_that_ends_is_saved_as_it_ended() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(62, &shape);
    let engine = engine(load(&gpu, &random, options(512, 64)));
    let all = text(shape.vocab, 62, 130);
    for length in [20, 122, 124, 125, 126, 128] {
        let mut free = engine.session().unwrap();
        read(&mut free, &all[..length], Prefill::Exact);
        let known = finished(&mut free, 12);
        for stop in [known[1], known[4]] {
            let at = known.iter().position(|&id| id == stop).unwrap() + 1;
            let store = memory();
            let mut session = engine.session().unwrap();
            read(&mut session, &all[..length], Prefill::Exact);
            let request = Request { stop_ids: vec![stop], ..greedy(12) };
            // Before the first token is asked for nothing is under way; after it, the steps of a few more are.
            let mut writing = session.generate(&request).unwrap();
            let first = writing.next();
            writing.snapshot(Rings::Saved).unwrap().write(&store, "a").unwrap();
            let rest: Vec<u32> = first.into_iter().chain(writing).map(Result::unwrap).collect();
            assert_eq!(rest, known[..at - 1]);
            session.save(&store, "b", Rings::Saved).unwrap();
            for name in ["a", "b"] {
                let mut opened = engine.open(&store, name).unwrap();
                assert_eq!(opened.tokens(), session.tokens(), "{length} tokens, {name}");
                assert_eq!(visible(opened.state().unwrap()), visible(session.state().unwrap()), "{length}, {name}");
                assert_eq!(finished(&mut opened, 5), finished(&mut session.fork().unwrap(), 5), "{length}, {name}");
            }
        }
    }
}

/// A save that is written while tokens are made: it waits for nothing that the token loop would notice, takes one submission and
/// one for each batch of pages, and both get on at the same time.
#[test]
fn a_save_costs_the_token_loop_nothing() {
    let Some(gpu) = own_gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(63, &shape);
    let engine = engine(load(&gpu, &random, options(2048, 128)));
    let all = text(shape.vocab, 63, 1500);
    let (tokens, batch) = (33, 2 << 20);
    let mut trunk = engine.session().unwrap();
    read(&mut trunk, &all, Prefill::Bounded);
    let page_bytes = 4 * engine.model().layout().pool.page_words;

    let mut plain = trunk.fork().unwrap();
    let before = gpu.counters();
    let expected = finished(&mut plain, tokens);
    let alone = gpu.counters() - before;

    let mut session = trunk.fork().unwrap();
    let events = Rc::new(RefCell::new(vec![]));
    let heard = events.clone();
    let between = move |call: Call| -> LocalBoxFuture<'static, Result<()>> {
        heard.borrow_mut().push(Some(call));
        Box::pin(async {
            turn().await;
            Ok(())
        })
    };
    let store: Rc<dyn Store> = Rc::new(Between { store: memory(), before: between });
    let before = gpu.counters();
    let mut writing = session.generate(&greedy(tokens)).unwrap();
    let mut ids = vec![writing.next().unwrap().unwrap()];
    let snapshot = writing.snapshot(Rings::Saved).unwrap();
    let (written, ()) = block_on(async {
        let save = snapshot.write_async(&store, "a");
        let make = async {
            while let Some(id) = writing.next_token().await.unwrap() {
                ids.push(id);
                events.borrow_mut().push(None);
                turn().await;
            }
        };
        futures::join!(save, make)
    });
    drop(writing);
    let written = written.unwrap();
    let beside = gpu.counters() - before;
    assert_eq!(ids, expected);
    assert_eq!(beside.blocking_readbacks, 0);
    assert_eq!(written.pages, 11);
    let batches = (written.pages * page_bytes).div_ceil(batch) as u64;
    assert_eq!(beside.submissions, alone.submissions + 1 + batches);
    // Tokens come back in batches: the first, and one for every 4. The loop waits for each at most once, as it does alone.
    assert_eq!(beside.readbacks, alone.readbacks + 1 + batches);
    assert!(beside.waits <= alone.readbacks, "{} waits", beside.waits);
    assert_eq!(beside.dispatches, alone.dispatches);
    let events = events.borrow();
    let commit = events.iter().position(|event| *event == Some(Call::Commit)).unwrap();
    let first = events.iter().position(Option::is_some).unwrap();
    let during = events[first..commit].iter().filter(|event| event.is_none()).count();
    assert!(during > 1 && commit + 1 < events.len(), "{during} tokens while it wrote: {events:?}");
    assert_eq!(finished(&mut engine.open(&store, "a").unwrap(), 5), expected[written.tokens - 1500..][..5]);
}

/// What is under way is kept whole by the save alone: the session may be cut, forked, gone on with, and closed. What the next
/// save takes for written is right all the same, also where the same tokens come again with other pages.
#[test]
fn a_cut_while_a_save_is_written_is_not_forgotten() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(64, &shape);
    let engine = engine(load(&gpu, &random, options(768, 64)));
    let all = text(shape.vocab, 64, 520);
    for closed in [false, true] {
        let store = memory();
        let mut session = engine.session().unwrap();
        read(&mut session, &all[..500], Prefill::Full);
        let expected = visible(session.state().unwrap());
        let under_way = session.snapshot(Rings::Saved).unwrap();
        session.truncate(140, Replay::Bounded).unwrap();
        // The same text once more, read otherwise: most of its entries are others.
        read(&mut session, &all[140..500], Prefill::Bounded);
        let other = visible(session.state().unwrap());
        assert_ne!(expected, other);
        let mut fork = session.fork().unwrap();
        if closed {
            session.close();
        }
        assert_eq!(under_way.write(&store, "a").unwrap().pages, 3);
        assert_eq!(visible(engine.open(&store, "a").unwrap().state().unwrap()), expected);
        if !closed {
            assert_eq!(
                session.save(&store, "b", Rings::Saved).unwrap().pages,
                2,
                "of pages 0 to 2 the first is the same"
            );
            assert_eq!(visible(engine.open(&store, "b").unwrap().state().unwrap()), other);
            assert_eq!(session.save(&store, "b", Rings::Saved).unwrap().pages, 0);
        }
        assert_eq!(
            fork.save(&store, "c", Rings::Saved).unwrap().pages,
            3,
            "the fork was made before the save was done"
        );
        assert_eq!(visible(engine.open(&store, "c").unwrap().state().unwrap()), other);
    }
}

/// A snapshot whose write is put off, and what it must turn out to be.
struct Pending {
    snapshot: Snapshot,
    /// How many events there were then.
    events: usize,
    /// Of the event that was going on, tokens known to be made.
    made: usize,
}

#[derive(Debug, Clone)]
enum Event {
    Read(Vec<u32>, Prefill),
    Make(usize),
    Cut(usize, Replay),
}

/// The text that events leave, the last generation cut to `made` tokens.
fn replayed(engine: &Rc<Engine>, events: &[Event], made: Option<usize>) -> Session {
    let mut session = engine.session().unwrap();
    for (at, event) in events.iter().enumerate() {
        match event {
            Event::Read(tokens, prefill) => read(&mut session, tokens, *prefill),
            Event::Make(tokens) => {
                let tokens = made.filter(|_| at + 1 == events.len()).unwrap_or(*tokens);
                if tokens > 0 {
                    finished(&mut session, tokens);
                }
            }
            Event::Cut(length, replay) => session.truncate(*length, *replay).unwrap(),
        }
    }
    session
}

/// Random readings, answers, cuts, forks and saves, whose writing is put off past some of what follows: every commit is, byte for
/// byte, what the same events lead to without a save among them.
#[test]
fn saves_do_not_interfere() {
    const ROUNDS: u64 = 18;
    let Some(gpu) = gpu() else { return };
    let cases = std::env::var("CEDRA_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(2);
    for case in 0..cases {
        let shape = if case % 2 == 0 { Shape::odd(Storage::Fp4) } else { Shape::random(70 + case) };
        let random = random_checkpoint(70 + case, &shape);
        let engine = engine(load(&gpu, &random, options(512, 64)));
        let mut random = Random::new(700 + case);
        let store = memory();
        let mut session = engine.session().unwrap();
        let mut events = vec![];
        let mut pending: Vec<Pending> = vec![];
        let mut saves = 0;
        let prefills = [Prefill::Bounded, Prefill::Exact, Prefill::Full];
        for round in 0..ROUNDS {
            match random.below(8) {
                0 | 1 if session.len() < 400 => {
                    let tokens = text(shape.vocab, 1000 * case + round, 1 + random.below(60));
                    let prefill = prefills[random.below(3)];
                    read(&mut session, &tokens, prefill);
                    events.push(Event::Read(tokens, prefill));
                }
                2..=4 if !session.is_empty() && session.len() < 480 => {
                    let (before, most) = (session.len(), 1 + random.below(20));
                    let mut writing = session.generate(&greedy(most)).unwrap();
                    events.push(Event::Make(most));
                    let (leave, snap) = (random.below(most + 1), random.below(most + 1));
                    for step in 0..=leave {
                        if step == snap {
                            let snapshot = writing.snapshot(Rings::Saved).unwrap();
                            pending.push(Pending { snapshot, events: events.len(), made: step });
                        }
                        if writing.next().is_none() {
                            break;
                        }
                    }
                    drop(writing);
                    block_on(session.settle_async()).unwrap();
                    *events.last_mut().unwrap() = Event::Make(session.len() - before);
                }
                5 if session.len() > 1 => {
                    let length = 1 + random.below(session.len());
                    let replay = if random.below(2) == 0 { Replay::Bounded } else { Replay::Exact };
                    session.truncate(length, replay).unwrap();
                    events.push(Event::Cut(length, replay));
                }
                6 => {
                    // The fork takes the session's place, which goes.
                    let fork = session.fork().unwrap();
                    session = fork;
                }
                _ => {
                    let snapshot = session.snapshot(Rings::Saved).unwrap();
                    pending.push(Pending { snapshot, events: events.len(), made: usize::MAX });
                }
            }
            while !pending.is_empty() && (random.below(3) == 0 || round + 1 == ROUNDS) {
                let Pending { snapshot, events: then, made } = pending.remove(random.below(pending.len()));
                let written = snapshot.write(&store, "a").unwrap();
                let opened = engine.open(&store, "a").unwrap();
                assert_eq!(opened.len(), written.tokens);
                let made = (made != usize::MAX).then(|| {
                    let before = replayed(&engine, &events[..then - 1], None).len();
                    assert!(opened.len() >= before + made);
                    opened.len() - before
                });
                let control = replayed(&engine, &events[..then], made);
                assert_eq!(opened.tokens(), control.tokens(), "case {case}, round {round}");
                assert_eq!(
                    visible(opened.state().unwrap()),
                    visible(control.state().unwrap()),
                    "case {case}, round {round}: {:?}",
                    &events[..then]
                );
                saves += 1;
            }
        }
        assert!(saves > 2, "case {case} saved {saves} times");
    }
}

/// A store without room refuses a save and says how much is missing; the answer goes on, what was written of the save is given
/// back, the session in the store is what it was, and with room the next save succeeds.
#[test]
fn a_full_store_refuses_and_harms_nothing() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(65, &shape);
    let engine = engine(load(&gpu, &random, options(512, 64)));
    let all = text(shape.vocab, 65, 400);
    let (room, kept) = (Rc::new(Cell::new(usize::MAX)), memory());
    let (left, full) = (room.clone(), kept.clone());
    let before = move |call: Call| -> LocalBoxFuture<'static, Result<()>> {
        let Call::Put(bytes, _) = call else { return Box::pin(async { Ok(()) }) };
        let refusal =
            || Error::StoreFull { store: full.name().into(), needed: None, available: Some(left.get() as u64) };
        let answer = left.get().checked_sub(bytes).map(|rest| left.set(rest)).ok_or_else(refusal);
        Box::pin(async move { answer })
    };
    let store: Rc<dyn Store> = Rc::new(Between { store: kept.clone(), before });
    let mut session = engine.session().unwrap();
    read(&mut session, &all[..150], Prefill::Bounded);
    session.save(&store, "a", Rings::Saved).unwrap();
    let usage = block_on(kept.usage()).unwrap();
    read(&mut session, &all[150..], Prefill::Bounded);
    let expected = finished(&mut session.fork().unwrap(), 20);

    let whole = memory();
    let whole_bytes = session.fork().unwrap().save(&whole, "a", Rings::Saved).unwrap().bytes;
    let mut writing = session.generate(&greedy(20)).unwrap();
    let mut ids = vec![writing.next().unwrap().unwrap()];
    for allowed in [0, 5_000, 30_000] {
        room.set(allowed);
        match writing.snapshot(Rings::Saved).unwrap().write(&store, "a") {
            Err(Error::StoreFull { needed: Some(needed), available: Some(available), .. }) => {
                assert!(available <= allowed as u64 && needed > available, "{needed} of {available}");
                // The manifest is beside the records.
                assert!(needed < whole_bytes + 1000, "{needed} of a session of {whole_bytes}");
            }
            other => panic!("{allowed} bytes: {other:?}"),
        }
        assert_eq!(block_on(kept.usage()).unwrap(), usage, "what was written of it is gone");
        assert_eq!(engine.open(&kept, "a").unwrap().tokens(), &all[..150]);
        ids.extend(writing.next().transpose().unwrap());
    }
    room.set(usize::MAX);
    let written = writing.snapshot(Rings::Saved).unwrap().write(&store, "a").unwrap();
    ids.extend(writing.map(Result::unwrap));
    assert_eq!(ids, expected);
    let mut opened = engine.open(&store, "a").unwrap();
    assert_eq!(opened.len(), written.tokens);
    assert_eq!(finished(&mut opened, 3), {
        let more = finished(&mut session, 3);
        [&expected[written.tokens - 400..], &more].concat()[..3].to_vec()
    });
}

/// Two views of one database, as two tabs have them: the other lets go of records that both have put, before this one's commit. The
/// save is tried again, and gives up only when that goes on and on.
#[test]
fn records_that_another_lets_go_of_are_written_again() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(66, &shape);
    let engine = engine(load(&gpu, &random, options(512, 64)));
    let contents = MemoryContents::default();
    let [theirs, ours] = [0, 1].map(|_| -> Rc<dyn Store> { Rc::new(MemoryStore::open(&contents)) });
    let mut session = engine.session().unwrap();
    read(&mut session, &text(shape.vocab, 66, 300), Prefill::Bounded);
    for losses in [0, 1, 3, 100] {
        let (left, other, put) = (Cell::new(losses), theirs.clone(), Rc::new(RefCell::new(vec![])));
        let before = move |call: Call| -> LocalBoxFuture<'static, Result<()>> {
            let (other, put, commits) = (other.clone(), put.clone(), call == Call::Commit);
            if let Call::Put(_, ids) = call {
                put.borrow_mut().extend(ids);
            }
            let meddles = commits && left.replace(left.get().max(1) - 1) > 0;
            Box::pin(async move {
                let records = if meddles { put.borrow().clone() } else { vec![] };
                other.release(&records).await
            })
        };
        let store: Rc<dyn Store> = Rc::new(Between { store: ours.clone(), before });
        let saved = session.fork().unwrap().save(&store, "ours", Rings::Saved);
        if losses < 100 {
            assert_eq!(saved.unwrap().pages, 2);
            let opened = engine.open(&ours, "ours").unwrap();
            assert_eq!(visible(opened.state().unwrap()), visible(session.state().unwrap()), "{losses} losses");
            assert!(block_on(ours.delete("ours")).unwrap());
        } else {
            assert!(matches!(saved, Err(Error::Session { .. })), "{saved:?}");
        }
        assert_eq!(block_on(ours.usage()).unwrap(), Usage::default(), "{losses} losses");
    }
}

/// A file that may grow no further is a full store: the first session in it stays whole, and can be replaced by a small one.
#[test]
fn a_full_disk_is_a_full_store() {
    const CHILD: &str = "CEDRA_TEST_FULL_DISK";
    let Ok(path) = std::env::var(CHILD) else {
        // The limit is a process's own, so a process of its own has it.
        let folder = tempfile::tempdir().unwrap();
        let (path, program) = (folder.path().join("sessions.redb"), std::env::current_exe().unwrap());
        let script = "trap '' XFSZ; ulimit -f 8192; exec \"$0\" --exact a_full_disk_is_a_full_store --nocapture";
        let mut child = std::process::Command::new("bash");
        let child = child.args(["-c", script]).arg(program).env(CHILD, &path).output().unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(
            child.status.success() && said.contains("1 passed"),
            "{said}\n{}",
            String::from_utf8_lossy(&child.stderr)
        );
        return;
    };
    let record = |seed: u64, bytes: usize| Record::new((0..bytes).map(|at| ((at as u64 * seed) >> 3) as u8).collect());
    let store = RedbStore::open(&path).unwrap();
    let small = record(3, 1000);
    block_on(store.put(std::slice::from_ref(&small))).unwrap();
    block_on(store.commit("a", b"one", &[small.id()])).unwrap();
    for seed in [5, 7] {
        let large: Vec<Record> = (0..20).map(|i| record(seed + 100 * i, 1 << 20)).collect();
        let ids: Vec<RecordId> = large.iter().map(Record::id).collect();
        let done = block_on(async {
            for record in &large {
                store.put(std::slice::from_ref(record)).await?;
            }
            store.commit("a", b"two", &ids).await
        });
        assert!(matches!(done, Err(Error::StoreFull { .. })), "{done:?}");
        // Some of the records may never have been put.
        block_on(store.release(&ids)).unwrap();
        assert_eq!(block_on(store.open("a")).unwrap().unwrap(), b"one");
        assert_eq!(block_on(store.get(small.id())).unwrap().unwrap(), small.bytes());
        let usage = block_on(store.usage()).unwrap();
        assert_eq!((usage.sessions, usage.records, usage.bytes), (1, 1, 1000));
        let other = record(seed, 5000);
        block_on(store.put(std::slice::from_ref(&other))).unwrap();
        block_on(store.commit("b", b"three", &[other.id()])).unwrap();
        assert_eq!(block_on(store.get(other.id())).unwrap().unwrap(), other.bytes());
        assert!(block_on(store.delete("b")).unwrap());
    }
}
