//! What the tests of sessions share: engines on a software device, and the state of a text as bytes with names.
#![allow(dead_code)] // each binary uses its own part

use super::common::random_model::RandomModel;
use super::common::Random;
use cedra::checkpoint::Fingerprint;
use cedra::config::Role;
use cedra::gpu::{DeviceOptions, Gpu};
use cedra::model::{Model, Options, Sequence};
use cedra::sampling::{Request, Sampling};
use cedra::session::Engine;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

/// The device of this run, shared: pipelines are made once. None where there is none, which is a failure under
/// `CEDRA_REQUIRE_GPU=1`.
pub fn gpu() -> Option<Arc<Gpu>> {
    static GPU: OnceLock<Option<Arc<Gpu>>> = OnceLock::new();
    GPU.get_or_init(own_gpu).clone()
}

/// A device of one's own, for tests that count.
pub fn own_gpu() -> Option<Arc<Gpu>> {
    match Gpu::new_blocking(&DeviceOptions { software: true, ..DeviceOptions::default() }) {
        Ok(gpu) => Some(Arc::new(gpu)),
        Err(error) if std::env::var("CEDRA_REQUIRE_GPU").is_ok_and(|v| v == "1") => panic!("{error}"),
        Err(error) => {
            println!("skipped: no GPU adapter ({error})");
            None
        }
    }
}

pub fn options(context: usize, chunk: usize) -> Options {
    Options { context, chunk, poison: true, ..Options::default() }
}

pub fn load(gpu: &Arc<Gpu>, random: &RandomModel, options: Options) -> Arc<Model> {
    let checkpoint = random.checkpoint();
    Arc::new(Model::load_blocking(gpu.clone(), &checkpoint, &random.tables, &options, &mut |_, _| {}).unwrap())
}

pub fn engine(model: Arc<Model>) -> Rc<Engine> {
    Engine::new(model, Fingerprint { config: [1; 16], weights: [2; 16], tokenizer: [3; 16] })
}

pub fn text(vocabulary: usize, seed: u64, len: usize) -> Vec<u32> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.below(vocabulary) as u32).collect()
}

pub fn greedy(max_tokens: usize) -> Request {
    Request { max_tokens, sampling: Sampling::default(), stop_ids: vec![] }
}

/// The next greedy tokens.
pub fn made(sequence: &mut Sequence, tokens: usize) -> Vec<u32> {
    sequence.generate(&greedy(tokens)).unwrap().map(Result::unwrap).collect()
}

/// Everything that what comes next can see, and nothing else: window keys by position, open groups, entries, the text.
pub fn visible(sequence: &Sequence) -> BTreeMap<String, Vec<u8>> {
    let model = sequence.model();
    let (gpu, config, layout) = (model.gpu(), model.config(), model.layout());
    let standing = sequence.standing();
    let cached = standing.cached;
    let mut state = BTreeMap::new();
    state.insert("text".into(), sequence.tokens().iter().flat_map(|id| id.to_le_bytes()).collect());
    let window = config.sliding_window;
    for (index, ring) in sequence.cache().rings.iter().enumerate() {
        let bytes = gpu.read_blocking(ring).unwrap();
        let floor = if index < config.decoder() { standing.floors.encoder } else { standing.floors.decoder };
        for position in (cached + 1).saturating_sub(window).max(floor)..cached {
            let row = &bytes[position % layout.ring_rows * 4 * layout.window_row..][..4 * layout.window_row];
            state.insert(format!("key {index:02} {position:05}"), row.to_vec());
        }
    }
    for (stage, ring) in sequence.cache().draft.iter().flat_map(|draft| &draft.rings).enumerate() {
        let bytes = gpu.read_blocking(ring).unwrap();
        for position in cached.saturating_sub(window).max(sequence.draft_floor())..cached {
            let row = &bytes[position % layout.ring_rows * 4 * layout.window_row..][..4 * layout.window_row];
            state.insert(format!("draft key {stage} {position:05}"), row.to_vec());
        }
    }
    let pages = sequence.pages().with(|pages| pages.clone());
    let pages = pollster::block_on(model.pool().read(gpu, &pages)).unwrap();
    for layer in config.layers.iter().filter(|layer| layer.role == Role::Full) {
        let part = layout.page_parts[layer.index].unwrap();
        for entry in 0..standing.paged / layer.ratio {
            let words = |first: usize, count: usize| pages[4 * first..][..4 * count].to_vec();
            let both = [words(part.latent(entry), part.latent_words), words(part.key(entry), part.key_words)].concat();
            state.insert(format!("entry {:02} {entry:05}", layer.index), both);
        }
        if let Some(remainder) = &sequence.cache().remainders[layer.index] {
            let bytes = gpu.read_blocking(remainder).unwrap();
            for position in cached / layer.ratio * layer.ratio..cached {
                let row = 8 * config.head_dim;
                let slot = &bytes[position % layout.remainder(layer.ratio).cycle * row..][..row];
                state.insert(format!("member {:02} {position:05}", layer.index), slot.to_vec());
            }
        }
    }
    state
}
