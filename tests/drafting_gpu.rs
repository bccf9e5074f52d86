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
use cedra::spec::Draft;
use cedra::text::{NgramTables, Tokenizer};
use cedra::Error;
use common::random_model::{random_checkpoint, DraftShape, RandomModel, Shape, Storage};
use common::support::fixture;
use common::Random;
use device_state::{gpu, greedy, options, own_gpu, visible};
use std::ops::ControlFlow;
use std::path::Path;
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
fn backbone(sequence: &Sequence) -> std::collections::BTreeMap<String, Vec<u8>> {
    let mut state = visible(sequence);
    state.retain(|name, _| !name.starts_with("draft key"));
    state
}

#[test]
fn greedy_text_and_state_are_those_of_plain_decoding() {
    let Some(gpu) = gpu() else { return };
    let (mut accepted, mut refused) = (0, 0);
    for seed in 0..cases(4) {
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
    assert!(accepted > 100 && refused > 100);
}
