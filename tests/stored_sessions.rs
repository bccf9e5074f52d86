//! Sessions that leave the device and come back: saved, opened, damaged, found by their prefixes.

mod common;
#[path = "common/device_state.rs"]
mod device_state;

use cedra::checkpoint::{Checkpoint, Fingerprint};
use cedra::model::{Model, Sequence};
use cedra::reading::{Prefill, Replay};
use cedra::reference;
use cedra::sampling::{Request, Sampling};
use cedra::session::{Append, Engine, Rings, Session};
use cedra::snapshot::Manifest;
use cedra::store::{Listed, MemoryStore, Record, RecordId, RedbStore, Store, Usage};
use cedra::text::NgramTables;
use cedra::Error;
use common::random_model::{random_checkpoint, Shape, Storage};
use common::Random;
use device_state::{engine, gpu, greedy, load, options, text, visible};
use futures::future::LocalBoxFuture;
use pollster::block_on;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

fn tokens(session: &mut Session, request: &Request) -> Vec<u32> {
    session.generate(request).unwrap().map(Result::unwrap).collect()
}

fn memory() -> Rc<dyn Store> {
    Rc::new(MemoryStore::new())
}

/// With saved rings an opened session is the one that was saved, byte for byte, whatever its length; and saving left that one as
/// it was.
#[test]
fn saved_rings_make_no_difference() {
    let Some(gpu) = gpu() else { return };
    for (seed, shape) in [(41, Shape::odd(Storage::Fp4)), (2, Shape::random(2)), (6, Shape::random(6))] {
        let random = random_checkpoint(seed, &shape);
        let model = load(&gpu, &random, options(768, 64));
        let engine = engine(model);
        let lengths: &[usize] = match seed {
            41 => &[1, 2, 7, 8, 63, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513],
            _ => &[1, 17, 128, 131, 257],
        };
        let all = text(shape.vocab, seed, 520);
        for &length in lengths {
            let store = memory();
            let mut never_left = engine.session().unwrap();
            let how = Append { reuse: false, ..Default::default() };
            never_left.append_as(&all[..length], how, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
            if length % 2 == 1 {
                tokens(&mut never_left, &greedy(3));
            }
            never_left.save(&store, "a", Rings::Saved).unwrap();
            let mut opened = engine.open(&store, "a").unwrap();
            assert_eq!(
                visible(opened.state().unwrap()),
                visible(never_left.state().unwrap()),
                "seed {seed}, {length} tokens"
            );
            let (a, b) = (tokens(&mut never_left, &greedy(64)), tokens(&mut opened, &greedy(64)));
            assert_eq!(a, b, "seed {seed}, {length} tokens");
            assert_eq!(opened.replayed(), 0);
            opened.append(&all[length..length + 7]).unwrap();
            never_left.append(&all[length..length + 7]).unwrap();
            assert_eq!(
                visible(opened.state().unwrap()),
                visible(never_left.state().unwrap()),
                "seed {seed}, {length} tokens"
            );
        }
    }
}

/// Without rings an opened session is the replay of its text: the bytes that a replay on the device gives, and at most a window of
/// rows computed again, whatever the length.
#[test]
fn a_restore_replays_a_window() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(42, &shape);
    let engine = engine(load(&gpu, &random, options(768, 64)));
    let all = text(shape.vocab, 42, 600);
    for length in [1, 2, 6, 7, 8, 9, 63, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513] {
        let store = memory();
        let mut session = engine.session().unwrap();
        session.append(&all[..length]).unwrap();
        session.save(&store, "a", Rings::Replay).unwrap();
        let mut opened = engine.open(&store, "a").unwrap();
        assert_eq!(opened.tokens(), &all[..length]);
        let made = tokens(&mut opened, &greedy(8));
        assert!(opened.replayed() <= shape.window, "{} rows for {length} tokens", opened.replayed());
        let rows = opened.layer_rows();
        assert!(rows.iter().all(|rows| rows.whole <= (shape.window + 8) as u64), "{rows:?}");
        // The same definition in another way: the pages of a longer text, cut to this one. The cut keeps the entry of the last token
        // too, so the longer text is cut to a token more first.
        let mut longer = engine.session().unwrap();
        longer.append(&all[..length]).unwrap();
        let mut control = Sequence::new(engine.model().clone()).unwrap();
        let pages = longer.state().unwrap().pages().prefix(length - 1);
        control.resume(all[..length].to_vec(), pages, length - 1, Default::default());
        control.ready(Replay::Bounded).unwrap();
        let expected: Vec<u32> = control.generate(&greedy(8)).unwrap().map(Result::unwrap).collect();
        assert_eq!(made, expected, "{length} tokens");
        assert_eq!(visible(opened.state().unwrap()), visible(&control), "{length} tokens");
    }
}

/// Windows that were not saved can be rebuilt exactly: the session is what an exact reading leaves, at the cost of the rows that
/// it depends on.
#[test]
fn a_restore_can_be_exact() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Fp8);
    let random = random_checkpoint(50, &shape);
    let engine = engine(load(&gpu, &random, options(512, 64)));
    let all = text(shape.vocab, 50, 300);
    let how = Append { prefill: Prefill::Exact, reuse: false };
    for length in [5, 64, 129, 256, 299] {
        let store = memory();
        let mut session = engine.session().unwrap();
        session.append_as(&all[..length], how, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
        session.save(&store, "a", Rings::Replay).unwrap();
        let mut opened = engine.open(&store, "a").unwrap();
        opened.ready(Replay::Exact).unwrap();
        assert_eq!(visible(opened.state().unwrap()), visible(session.state().unwrap()), "{length} tokens");
        let cone = 1 + shape.layers.len() * (shape.window - 1);
        assert!(opened.replayed() <= cone, "{} rows, {cone} at most", opened.replayed());
        assert_eq!(tokens(&mut opened, &greedy(12)), tokens(&mut session, &greedy(12)), "{length} tokens");
    }
}

/// Seeds and the generator's state are part of a session: a text drawn in two sittings is the text drawn in one.
#[test]
fn draws_go_on_after_a_restore() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Bf16);
    let random = random_checkpoint(43, &shape);
    let engine = engine(load(&gpu, &random, options(256, 64)));
    let drawn = |max_tokens| Request {
        sampling: Sampling { temperature: 1.0, top_p: 0.95, top_k: 50, seed: 9 },
        ..greedy(max_tokens)
    };
    let mut one = engine.session().unwrap();
    one.append(&text(shape.vocab, 43, 50)).unwrap();
    let mut other = one.fork().unwrap();
    let whole = tokens(&mut one, &drawn(40));
    let mut parts = tokens(&mut other, &drawn(13));
    let store = memory();
    other.save(&store, "a", Rings::Saved).unwrap();
    let mut opened = engine.open(&store, "a").unwrap();
    parts.extend(tokens(&mut opened, &drawn(27)));
    assert_eq!(whole, parts);
}

/// A save writes what is new: complete pages once, then the page that has begun and what the commit needs.
#[test]
fn saves_are_incremental() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(44, &shape);
    let engine = engine(load(&gpu, &random, options(2048, 128)));
    let store = memory();
    let mut session = engine.session().unwrap();
    session.append(&text(shape.vocab, 44, 1000)).unwrap();
    assert_eq!(session.save(&store, "a", Rings::Replay).unwrap().pages, 7);
    assert_eq!(session.save(&store, "a", Rings::Replay).unwrap().pages, 0);
    tokens(&mut session, &greedy(10));
    assert_eq!(session.save(&store, "a", Rings::Replay).unwrap().pages, 0);
    session.append(&text(shape.vocab, 45, 150)).unwrap();
    assert_eq!(session.save(&store, "a", Rings::Replay).unwrap().pages, 2, "pages 8 and 9 of 1,160 tokens");
    let before = block_on(store.usage()).unwrap();

    // A fork names the same records; a cut keeps what lies before it.
    let mut fork = session.fork().unwrap();
    let written = fork.save(&store, "b", Rings::Replay).unwrap();
    assert_eq!(written.pages, 0);
    assert!(block_on(store.usage()).unwrap().bytes < before.bytes + before.bytes / 4);
    fork.truncate(400, Replay::Bounded).unwrap();
    fork.append(&text(shape.vocab, 46, 200)).unwrap();
    assert_eq!(fork.save(&store, "b", Rings::Replay).unwrap().pages, 1, "page 4 of 600 tokens is new");
    let mut again = engine.open(&store, "b").unwrap();
    assert_eq!(again.save(&store, "b", Rings::Replay).unwrap().pages, 0, "an opened session knows what is saved");
    assert_eq!(engine.open(&store, "a").unwrap().tokens(), session.tokens());

    // What another session's records were is written again once that session is gone.
    assert!(block_on(engine.delete_async(&store, "b")).unwrap());
    assert!(block_on(engine.delete_async(&store, "a")).unwrap());
    assert_eq!(block_on(store.usage()).unwrap().records, 0);
    assert_eq!(session.save(&store, "a", Rings::Replay).unwrap().pages, 9);
    assert!(matches!(engine.open(&store, "b"), Err(Error::NoSession { .. })));
}

/// A store one of whose records is lost, flipped or cut.
#[derive(Debug)]
struct Spoilt {
    store: Rc<dyn Store>,
    id: RecordId,
    how: usize,
}

impl Store for Spoilt {
    fn name(&self) -> &str {
        self.store.name()
    }
    fn put<'a>(&'a self, records: &'a [Record]) -> LocalBoxFuture<'a, Result<(), Error>> {
        self.store.put(records)
    }
    fn release<'a>(&'a self, records: &'a [RecordId]) -> LocalBoxFuture<'a, Result<(), Error>> {
        self.store.release(records)
    }
    fn commit<'a>(
        &'a self,
        session: &'a str,
        manifest: &'a [u8],
        records: &'a [RecordId],
    ) -> LocalBoxFuture<'a, Result<(), Error>> {
        self.store.commit(session, manifest, records)
    }
    fn open<'a>(&'a self, session: &'a str) -> LocalBoxFuture<'a, Result<Option<Vec<u8>>, Error>> {
        self.store.open(session)
    }
    fn get(&self, id: RecordId) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, Error>> {
        Box::pin(async move {
            let bytes = self.store.get(id).await?;
            Ok(bytes.and_then(|mut bytes| match self.how {
                _ if id != self.id => Some(bytes),
                0 => None,
                1 => {
                    let at = bytes.len() / 2;
                    bytes[at] ^= 0x10;
                    Some(bytes)
                }
                _ => {
                    bytes.truncate(bytes.len() / 3);
                    Some(bytes)
                }
            }))
        })
    }
    fn list(&self) -> LocalBoxFuture<'_, Result<Vec<Listed>, Error>> {
        self.store.list()
    }
    fn delete<'a>(&'a self, session: &'a str) -> LocalBoxFuture<'a, Result<bool, Error>> {
        self.store.delete(session)
    }
    fn usage(&self) -> LocalBoxFuture<'_, Result<Usage, Error>> {
        self.store.usage()
    }
}

/// Every record of a saved session lost, flipped or cut: the text comes back whole, what its pages lack is read again, and the
/// result is what such a reading gives. A fresh session afterwards is as good as ever.
#[test]
fn damage_is_mended_or_told() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(47, &shape);
    let engine = engine(load(&gpu, &random, options(768, 64)));
    let all = text(shape.vocab, 47, 500);
    let mut session = engine.session().unwrap();
    let shared = memory();
    for part in [150, 330, 500] {
        let read = session.len();
        session.append(&all[read..part]).unwrap();
        session.save(&shared, "a", Rings::Saved).unwrap();
    }
    let expected = visible(session.state().unwrap());
    let manifest = Manifest::parse("a", &block_on(shared.open("a")).unwrap().unwrap()).unwrap();
    assert_eq!(manifest.page_runs.len(), 3);
    drop(session);
    for (at, id) in manifest.records().into_iter().enumerate() {
        for how in 0..3 {
            let store: Rc<dyn Store> = Rc::new(Spoilt { store: shared.clone(), id, how });
            let mut opened = engine.open(&store, "a").unwrap();
            assert_eq!(opened.tokens(), all, "record {at}");
            let lost = manifest.page_runs.iter().find(|run| run.record.id == id).map(|run| run.first as usize * 128);
            let lost = lost.or(manifest.tail.filter(|tail| tail.id == id).map(|_| manifest.tail_start()));
            let state_lost = manifest.state.is_some_and(|state| state.id == id);
            match lost {
                None if !state_lost => assert_eq!(visible(opened.state().unwrap()), expected, "record {at}"),
                lost => {
                    let paged = lost.unwrap_or(499);
                    let made = tokens(&mut opened, &greedy(5));
                    let read = opened.layer_rows()[0].whole as usize;
                    assert!(read <= 500 - paged + shape.window + 5, "{read} rows read when {} were lost", 500 - paged);
                    // What is sound lies where it lay.
                    let entry = |name: &String| {
                        let parts: Vec<&str> = name.split(' ').collect();
                        let ratio = engine.model().config().layers[parts[1].parse::<usize>().unwrap()].ratio;
                        (parts[2].parse::<usize>().unwrap() + 1) * ratio <= paged
                    };
                    let found = visible(opened.state().unwrap());
                    let sound = expected.iter().filter(|(name, _)| name.starts_with("entry") && entry(name));
                    for (name, bytes) in sound {
                        assert_eq!(&found[name], bytes, "{name}, record {at}");
                    }
                    let mut again = engine.open(&store, "a").unwrap();
                    assert_eq!(tokens(&mut again, &greedy(5)), made, "mending is always the same");
                }
            }
        }
    }
    // The manifest itself, and the model.
    for at in [0, 9, 20, 100] {
        let mut bytes = block_on(shared.open("a")).unwrap().unwrap();
        bytes[at] ^= 4;
        let records: Vec<RecordId> = manifest.records();
        block_on(shared.commit("b", &bytes, &records)).unwrap();
        assert!(matches!(engine.open(&shared, "b"), Err(Error::Session { .. })), "byte {at}");
    }
    let other = Engine::new(engine.model().clone(), Fingerprint { weights: [9; 16], ..*engine.fingerprint() });
    assert!(matches!(other.open(&shared, "a"), Err(Error::Fingerprint { part: "weights", .. })));
    let small = self::engine(load(&gpu, &random, options(256, 64)));
    assert!(matches!(small.open(&shared, "a"), Err(Error::Context { needed: 500, allowed: 256 })));
    let mut fresh = engine.session().unwrap();
    fresh.append(&all).unwrap();
    assert_eq!(visible(fresh.state().unwrap()), expected);
}

/// Prompts find the prefixes of stored sessions, also in a store that another process left behind.
#[test]
fn stored_prefixes_are_found() {
    let Some(gpu) = gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(48, &shape);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sessions.redb");
    let all = text(shape.vocab, 48, 2100);
    {
        let engine = engine(load(&gpu, &random, options(2304, 128)));
        let store: Rc<dyn Store> = Rc::new(RedbStore::open(&path).unwrap());
        let mut session = engine.session().unwrap();
        session.append(&all).unwrap();
        session.save(&store, "log", Rings::Replay).unwrap();
    }
    let engine = engine(load(&gpu, &random, options(2304, 128)));
    let store: Rc<dyn Store> = Rc::new(RedbStore::open(&path).unwrap());
    engine.attach(&store).unwrap();
    for shared in [100, 500, 2000] {
        let mut prompt = all[..shared].to_vec();
        prompt.extend([(all[shared] + 1) % shape.vocab as u32, 5]);
        let mut session = engine.session().unwrap();
        let appended = session.append(&prompt).unwrap();
        assert_eq!(appended.reused, shared);
        assert!(appended.replayed <= shape.window);
        assert!(session.layer_rows()[0].whole <= shape.window as u64 + 2);
        // The same as from a session on the device.
        let made = tokens(&mut session, &greedy(5));
        let mut live = engine.open(&store, "log").unwrap();
        live.truncate(shared, Replay::Bounded).unwrap();
        live.append(&prompt[shared..]).unwrap();
        assert_eq!(tokens(&mut live, &greedy(5)), made, "{shared} shared tokens");
        assert_eq!(visible(live.state().unwrap()), visible(session.state().unwrap()));
    }
    assert!(block_on(engine.delete_async(&store, "log")).unwrap());
    let mut session = engine.session().unwrap();
    assert_eq!(session.append(&all[..300]).unwrap().reused, 0, "a deleted session is in the index no more");
}

/// Law 11 with stores: saving and opening leave device memory as it was. CEDRA_CYCLES asks for more cycles.
#[test]
fn memory_is_flat_over_saves() {
    let Some(gpu) = device_state::own_gpu() else { return };
    let shape = Shape::odd(Storage::Fp4);
    let random = random_checkpoint(49, &shape);
    let engine = engine(load(&gpu, &random, options(640, 64)));
    let cycles = std::env::var("CEDRA_CYCLES").ok().and_then(|n| n.parse().ok()).unwrap_or(15);
    let store = memory();
    let mut session = engine.session().unwrap();
    session.append(&text(shape.vocab, 49, 20)).unwrap();
    let mut random = Random::new(49);
    let mut held = None;
    for cycle in 0..cycles {
        if session.len() > 400 {
            session.truncate(1 + random.below(100), Replay::Bounded).unwrap();
        }
        session.append(&text(shape.vocab, cycle, 1 + random.below(90))).unwrap();
        session.save(&store, "a", if cycle % 2 == 0 { Rings::Saved } else { Rings::Replay }).unwrap();
        let opened = engine.open(&store, "a").unwrap();
        drop(opened);
        let (counters, slabs) = (gpu.counters(), engine.model().pool().slabs(0).len() as u64);
        let now = (counters.allocated_bytes() - slabs * engine.model().plan().slab, counters.buffers - slabs);
        assert_eq!(now, *held.get_or_insert(now), "cycle {cycle}");
    }
}

/// The pocket model on the device says what the CPU model says by the definition: read, cut, restored, at every phase of group,
/// window and page, with 64 greedy tokens each. Where the two part, the CPU model's own margin was small.
#[test]
fn pocket_replays_as_defined() {
    let Some(gpu) = gpu() else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = root.join("models/pocket");
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let tokenizer = cedra::text::Tokenizer::open(&folder).unwrap();
    let tables = NgramTables::new(checkpoint.config(), &tokenizer).unwrap();
    let model = Model::load_blocking(gpu, &checkpoint, &tables, &options(1024, 128), &mut |_, _| {}).unwrap();
    let bytes = std::fs::read(folder.join("tokenizer.json")).unwrap();
    let engine = Engine::new(Arc::new(model), Fingerprint::new(&checkpoint, Some(&bytes)));
    let twin =
        Arc::new(reference::model::Model::load(&checkpoint, &tables, reference::model::Options::default()).unwrap());
    let words = std::fs::read_to_string(root.join("ARCHITECTURE.md")).unwrap();
    let all = [vec![checkpoint.config().bos_token_id], tokenizer.encode_with_special(&words).unwrap()].concat();
    let longest = std::env::var("CEDRA_CASES").is_ok();
    let lengths: &[usize] = match longest {
        true => &[127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513],
        false => &[129, 256, 385, 511],
    };
    let store = memory();
    let mut whole = engine.session().unwrap();
    whole.append(&all[..600]).unwrap();
    let mut cpu_whole = reference::sequence::Sequence::new(twin.clone());
    cpu_whole.append(&all[..600], &mut |_| {}).unwrap();
    let (mut same, mut compared) = (0, 0);
    for &length in lengths {
        // A restore.
        let mut session = engine.session().unwrap();
        let how = Append { reuse: false, prefill: Prefill::Bounded };
        session.append_as(&all[..length], how, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
        session.save(&store, "a", Rings::Replay).unwrap();
        let mut opened = engine.open(&store, "a").unwrap();
        let mut cpu = reference::sequence::Sequence::new(twin.clone());
        cpu.append(&all[..length], &mut |_| {}).unwrap();
        cpu.rebuild(Replay::Bounded).unwrap();
        // A cut.
        let mut cut = whole.fork().unwrap();
        cut.truncate(length, Replay::Bounded).unwrap();
        let mut cpu_cut = cpu_whole.fork();
        cpu_cut.truncate(length, Replay::Bounded).unwrap();
        for (device, cpu) in [(&mut opened, &mut cpu), (&mut cut, &mut cpu_cut)] {
            let made = tokens(device, &greedy(64));
            let expected: Vec<u32> = cpu.generate(&greedy(64)).unwrap().map(Result::unwrap).collect();
            same += made.iter().zip(&expected).take_while(|(a, b)| a == b).count();
            compared += 64;
            assert_eq!(made[..8], expected[..8], "{length} tokens");
        }
    }
    println!("{same} of {compared} greedy tokens are the same until the first that differs");
    assert!(same * 100 >= compared * 90, "{same} of {compared}");
}
