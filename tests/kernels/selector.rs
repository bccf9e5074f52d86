//! The three kernels of a layer that selects, against their twins: exact, whatever the shape.

use crate::common::{config, gpu, poisoned, Random};
use crate::index_score;
use crate::select::lists;
use cedra::gpu::{DeviceOptions, FeatureUse, Gpu, MemoryKind, Recording};
use cedra::kernels::select::{SelectBuffers, SelectKind};
use cedra::kernels::selector::{Selector, SelectorBuffers, SelectorDims};
use cedra::kernels::tiling::{CandidateDims, Tiles, Tiling, TilingDims};
use cedra::reference::select::{candidate_blocks, candidate_entries, top_k};
use proptest::prelude::*;

/// A candidate source, and a restricted layer of other queries behind it, on the same scratch.
struct Case {
    source: index_score::Case,
    restricted: index_score::Case,
    topk: usize,
    candidates: CandidateDims,
}

impl Case {
    fn new(source: index_score::Case, seed: u64, topk: usize, candidates: CandidateDims) -> Self {
        let dims = &source.dims;
        let (heads, head_dim, ratio) = (dims.heads as usize, dims.head_dim as usize, dims.ratio as usize);
        let mut restricted = index_score::Case::new(seed, heads, head_dim, ratio, source.rows, 0);
        restricted.position = source.position;
        Self { source, restricted, topk, candidates }
    }

    fn check(&self, gpu: &Gpu, tiling: Tiling) {
        let (source, rows) = (&self.source, self.source.rows);
        let pool = source.pool(gpu);
        let tiles = Tiles::new(gpu, tiling).unwrap();
        let tiling = tiles.tiling();
        let scratch = |words: usize| poisoned(gpu, MemoryKind::Scratch, "scratch", words);
        let (scores, block_list) =
            (scratch(tiling.score_words()), scratch(rows * self.candidates.list_words() as usize));
        let (segment_lists, carry, maxima) =
            (scratch(tiling.list_words()), scratch(tiling.carry_words()), scratch(tiling.maxima_words()));
        let selections = [(); 3].map(|()| scratch(rows * (1 + self.topk)));
        let visible = source.visible(rows - 1);
        let mut recording = Recording::new();
        let layers = [
            (source, SelectKind::Plain, &selections[0]),
            (source, SelectKind::Source, &selections[1]),
            (&self.restricted, SelectKind::Restricted, &selections[2]),
        ];
        for (case, kind, selection) in layers {
            let (step, queries, weights) = case.inputs(gpu, 0, rows);
            let dims = SelectorDims {
                kind,
                heads: case.dims.heads,
                head_dim: case.dims.head_dim,
                weight_stride: case.dims.weight_stride,
                weight_offset: case.dims.weight_offset,
                ratio: case.dims.ratio,
                page: source.dims.page,
                capacity: source.dims.capacity,
            };
            let select = SelectBuffers {
                step: &step,
                scores: &scores,
                lists: &segment_lists,
                carry: &carry,
                maxima: &maxima,
                selection,
                candidates: &block_list,
            };
            let buffers = SelectorBuffers { table: &pool.table, queries: &queries, weights: &weights, select };
            let mut selector = Selector::new(gpu, &dims, &buffers, &tiles).unwrap();
            for slab in &pool.slabs {
                selector.add_slab(gpu, slab).unwrap();
            }
            let slabs_of = |pages| pool.slabs_of(pages);
            selector.record(gpu, &mut recording, rows as u32, visible as u32, &slabs_of).unwrap();
        }
        gpu.submit(recording).unwrap();

        let read = |buffer, words| lists(gpu, buffer, words, rows);
        let blocks = read(&block_list, self.candidates.list_words() as usize);
        let [plain, with_blocks, restricted] = selections.each_ref().map(|buffer| read(buffer, 1 + self.topk));
        let (block_size, count) = (self.candidates.block_size as usize, self.candidates.blocks as usize);
        for row in 0..rows {
            let scores = source.scores(row);
            assert_eq!(plain[row], top_k(&scores, self.topk));
            assert_eq!(with_blocks[row], plain[row]);
            assert_eq!(blocks[row], candidate_blocks(&scores, block_size, count));
            let entries = candidate_entries(&blocks[row], block_size, scores.len());
            let scores = self.restricted.scores_of(row, &source.keys, entries.iter().map(|&entry| entry as usize));
            let best: Vec<u32> = top_k(&scores, self.topk).iter().map(|&slot| entries[slot as usize]).collect();
            assert_eq!(restricted[row], best);
        }
    }

    fn dims(&self, rows: u32) -> TilingDims {
        let slots = self.source.dims.capacity.max(self.candidates.slots(self.source.dims.capacity));
        TilingDims { rows, slots, topk: self.topk as u32, candidates: Some(self.candidates) }
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn random_shapes(
        (heads, head_dim) in (1..=9usize, prop::sample::select(vec![8usize, 20, 32, 44, 128])),
        (ratio, position) in (1..=2usize, 0..1_500usize),
        rows in prop::sample::select(vec![1usize, 6, 8, 9, 33]),
        topk in prop::sample::select(vec![1usize, 7, 64]),
        (block_size, blocks) in (prop::sample::select(vec![1u32, 3, 8]), 1..60u32),
        (segment, tile, seed) in (1..300u32, 1..900u32, any::<u64>()),
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let source = index_score::Case::new(seed, heads, head_dim, ratio, rows, position);
        let case = Case::new(source, seed ^ 1, topk, CandidateDims { block_size, blocks });
        case.check(gpu, Tiling::within(&case.dims(33), 33 * tile, segment));
    }
}

/// Sessions move between threads.
#[test]
fn selectors_are_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Selector>();
}

/// The end of a context of a million entries, on what every WebGPU device has: three slabs, a tile of 64 segments.
#[test]
fn a_million_entries_on_the_least_device() {
    let Some(_) = gpu() else { return };
    let least = DeviceOptions { software: true, features: FeatureUse::NONE, default_limits: true };
    let gpu = Gpu::new_blocking(&least).unwrap();
    let mut random = Random::new(11);
    let mut source = index_score::Case::new(11, 2, 32, 1, 1, 0);
    source.position = 1_048_575;
    source.slabs = 3;
    source.dims.capacity = 1_048_576;
    source.dims.page = source.dims.page.within(0, source.dims.page.words());
    let words = source.dims.page.key_words;
    source.keys = (0..1_048_576).map(|_| random.words(words)).collect();
    // Scales of 2^-4 to 2^3.
    source.keys.iter_mut().for_each(|key| key[words - 1] = 123 + key[words - 1] % 8);
    let case = Case::new(source, 12, 512, CandidateDims { block_size: 8, blocks: 2_048 });
    let tiling = Tiling::new(&case.dims(512));
    assert_eq!(tiling.passes(1, 1_048_576).len(), 1);
    case.check(&gpu, tiling);
}
