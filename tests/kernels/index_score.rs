//! `index_score` against its twin: bit for bit, in both variants, whatever the shape.

use crate::common::{assert_same_bits, config, gpu, poisoned, read, upload, Random, POISON};
use crate::pool::Pool;
use cedra::formats::CacheFormat::Mxfp4;
use cedra::gpu::{Buffer, DeviceOptions, Gpu, MemoryKind, Recording};
use cedra::kernels::cache_append::PageLayout;
use cedra::kernels::index_score::{weight_scale, IndexScore, IndexScoreBuffers, IndexScoreDims};
use cedra::kernels::tiling::{CandidateDims, Tiles, Tiling, TilingDims};
use cedra::reference::index_score::score_packed;
use cedra::Error;
use proptest::prelude::*;

/// The variants that the device runs.
fn variants(gpu: &Gpu) -> impl Iterator<Item = &'static str> + '_ {
    ["plain", "dot4"].into_iter().filter(|variant| gpu.supports("index_score", variant))
}

/// A cache of random keys, and the queries and weights of the rows from `position` on.
pub struct Case {
    pub dims: IndexScoreDims,
    pub rows: usize,
    pub position: usize,
    /// (entries, row words)
    pub keys: Vec<Vec<u32>>,
    /// (T * H_i, row words)
    pub queries: Vec<Vec<u32>>,
    /// (T, weight_stride), poison but for the weights
    pub weights: Vec<u32>,
    /// (T, blocks): ascending block ids
    pub lists: Vec<Vec<u32>>,
    /// Slabs that the pages lie in.
    pub slabs: usize,
    /// Words of scores at a time, and slots of a segment.
    pub budget: (u32, u32),
}

/// A vector whose blocks are at very different scales.
fn packed(random: &mut Random, channels: usize) -> Vec<u32> {
    let mut row = random.normals(channels, 1.0);
    for block in row.chunks_mut(32) {
        let scale = (random.below(24) as f32 - 12.0).exp2();
        block.iter_mut().for_each(|v| *v *= scale);
    }
    Mxfp4.pack(&row)
}

impl Case {
    pub fn new(seed: u64, heads: usize, head_dim: usize, ratio: usize, rows: usize, position: usize) -> Self {
        let mut random = Random::new(seed);
        let page = PageLayout::new(ratio, 8 * random.below(3) as usize, head_dim);
        // Parts of other layers before and behind.
        let page = page.within(random.below(9) as usize, page.words() + 9);
        let entries = (position + rows) / ratio;
        let weight_offset = 4 * random.below(3);
        let weight_stride = weight_offset + (heads as u32).next_multiple_of(4) + 4 * random.below(2);
        let mut weights = vec![POISON; rows * weight_stride as usize];
        for row in weights.chunks_mut(weight_stride as usize) {
            row[weight_offset as usize..][..heads].fill_with(|| random.normal().to_bits());
        }
        Self {
            dims: IndexScoreDims {
                heads: heads as u32,
                head_dim: head_dim as u32,
                weight_stride,
                weight_offset,
                ratio: ratio as u32,
                page,
                capacity: (entries.div_ceil(page.entries).max(1) * page.entries) as u32,
                candidates: None,
            },
            rows,
            position,
            keys: (0..entries).map(|_| packed(&mut random, head_dim)).collect(),
            queries: (0..rows * heads).map(|_| packed(&mut random, head_dim)).collect(),
            weights,
            lists: vec![],
            slabs: 1 + random.below(3) as usize,
            budget: [(8 << 20, 16 << 10), (1_000, 16), (5_000, 200)][random.below(3) as usize],
        }
    }

    /// Restricts every row to random blocks, its newest among them.
    fn restricted(mut self, seed: u64, block_size: u32, blocks: u32) -> Self {
        let mut random = Random::new(seed);
        self.dims.candidates = Some(CandidateDims { block_size, blocks });
        let list = |row| {
            let mut list: Vec<u32> = (0..(self.visible(row) as u32).div_ceil(block_size)).collect();
            while list.len() > blocks as usize {
                list.remove(random.below(list.len() as u32 - 1) as usize);
            }
            list
        };
        self.lists = (0..self.rows).map(list).collect();
        self
    }

    pub fn visible(&self, row: usize) -> usize {
        (self.position + row + 1) / self.dims.ratio as usize
    }

    /// The entries that a row scores, in the order of its slots.
    fn entries(&self, row: usize) -> Vec<usize> {
        let visible = self.visible(row);
        match self.dims.candidates {
            None => (0..visible).collect(),
            Some(CandidateDims { block_size, .. }) => {
                let block = |&id: &u32| (id * block_size) as usize..((id + 1) * block_size) as usize;
                self.lists[row].iter().flat_map(block).filter(|&entry| entry < visible).collect()
            }
        }
    }

    /// What the twin says of a row.
    pub fn scores(&self, row: usize) -> Vec<f32> {
        self.scores_of(row, &self.keys, self.entries(row))
    }

    /// What the twin says of some entries of these keys.
    pub fn scores_of(&self, row: usize, keys: &[Vec<u32>], entries: impl IntoIterator<Item = usize>) -> Vec<f32> {
        let heads = self.dims.heads as usize;
        let scale = weight_scale(self.dims.heads, self.dims.head_dim);
        let at = row * self.dims.weight_stride as usize + self.dims.weight_offset as usize;
        let weights: Vec<f32> = self.weights[at..at + heads].iter().map(|&w| f32::from_bits(w) * scale).collect();
        let queries = self.queries[row * heads..(row + 1) * heads].concat();
        let score = |entry: usize| score_packed(&queries, &weights, &keys[entry], self.dims.head_dim as usize);
        entries.into_iter().map(score).collect()
    }

    /// What the twin says of all rows; poison where nothing is written.
    fn expected(&self) -> Vec<f32> {
        let mut scores = vec![f32::from_bits(POISON); self.rows * self.dims.slots() as usize];
        for (row, scores) in scores.chunks_mut(self.dims.slots() as usize).enumerate() {
            let seen = self.scores(row);
            scores[..seen.len()].copy_from_slice(&seen);
        }
        scores
    }

    /// The pages one after the other: keys where they belong, poison elsewhere.
    fn pages(&self) -> Vec<u32> {
        let page = &self.dims.page;
        let mut pages = vec![POISON; (self.dims.capacity as usize).div_ceil(page.entries) * page.page_words];
        for (entry, key) in self.keys.iter().enumerate() {
            pages[page.key(entry)..][..page.key_words].copy_from_slice(key);
        }
        pages
    }

    /// The pages in slabs.
    pub fn pool(&self, gpu: &Gpu) -> Pool {
        let (pages, page_words) = (self.pages(), self.dims.page.page_words);
        let random = &mut Random::new(self.position as u64);
        let pool = Pool::of_pages(gpu, random, page_words, pages.len() / page_words, self.slabs);
        for (number, page) in pages.chunks(page_words).enumerate() {
            pool.write(gpu, number * page_words, page);
        }
        pool
    }

    /// Step, queries and weights of `rows` rows from row `first` on.
    pub fn inputs(&self, gpu: &Gpu, first: usize, rows: usize) -> (Buffer, Buffer, Buffer) {
        let (heads, weight_stride) = (self.dims.heads as usize, self.dims.weight_stride as usize);
        let mut step = [0u32; 16];
        (step[0], step[1]) = ((self.position + first) as u32, rows as u32);
        let queries = self.queries[first * heads..(first + rows) * heads].concat();
        let weights = &self.weights[first * weight_stride..(first + rows) * weight_stride];
        (
            upload(gpu, MemoryKind::Params, "step", &step),
            upload(gpu, MemoryKind::Scratch, "queries", &queries),
            upload(gpu, MemoryKind::Scratch, "weights", weights),
        )
    }

    /// What the kernel says about `rows` rows from row `first` on, all tiles together.
    fn run(&self, gpu: &Gpu, variant: &str, first: usize, rows: usize) -> Vec<f32> {
        let dims = &self.dims;
        let (step, queries, weights) = self.inputs(gpu, first, rows);
        let pool = self.pool(gpu);
        let list_words = dims.candidates.map_or(1, |c| c.list_words() as usize);
        let mut lists = vec![POISON; rows * list_words];
        for (words, list) in lists.chunks_mut(list_words).zip(&self.lists[first.min(self.lists.len())..]) {
            words[0] = list.len() as u32;
            words[1..=list.len()].copy_from_slice(list);
        }
        let candidates = upload(gpu, MemoryKind::Scratch, "candidates", &lists);
        // The grid has a row more than is in flight: nothing may be written there.
        let launched = rows as u32 + 1;
        let tiling = TilingDims { rows: launched, slots: dims.slots(), topk: 1, candidates: dims.candidates };
        let tiling = Tiling::within(&tiling, self.budget.0, self.budget.1);
        let scores = poisoned(gpu, MemoryKind::Scratch, "scores", tiling.score_words());
        let buffers = IndexScoreBuffers {
            step: &step,
            table: &pool.table,
            queries: &queries,
            weights: &weights,
            candidates: &candidates,
            scores: &scores,
        };
        let tiles = Tiles::new(gpu, tiling).unwrap();
        let mut kernel = IndexScore::with_variant(gpu, variant, dims, &buffers, &tiles).unwrap();
        for slab in &pool.slabs {
            kernel.add_slab(gpu, slab).unwrap();
        }
        let visible = self.visible(first + rows - 1);
        let mut all = vec![f32::from_bits(POISON); rows * dims.slots() as usize];
        for pass in tiles.tiling().passes(launched, (visible as u32).min(dims.slots())) {
            gpu.fill(&scores, POISON);
            let mut recording = Recording::new();
            let slabs = pool.slabs_of(0..visible.div_ceil(dims.page.entries));
            kernel.record(gpu, &mut recording, launched, &pass, &slabs).unwrap();
            gpu.submit(recording).unwrap();
            let mut scores: Vec<f32> = read(gpu, &scores);
            let beyond = scores.split_off(rows * pass.stride as usize);
            assert!(beyond.iter().all(|s| s.to_bits() == POISON), "a row beyond those in flight was written");
            for (all, scores) in all.chunks_mut(dims.slots() as usize).zip(scores.chunks(pass.stride as usize)) {
                let (written, beyond) = scores.split_at(pass.slots as usize);
                all[pass.first as usize..][..written.len()].copy_from_slice(written);
                assert!(beyond.iter().all(|s| s.to_bits() == POISON), "a slot beyond those in sight was written");
            }
        }
        all
    }

    fn check(&self, gpu: &Gpu) {
        let expected = self.expected();
        for variant in variants(gpu) {
            assert_same_bits(&self.run(gpu, variant, 0, self.rows), &expected);
        }
    }
}

fn shape() -> impl Strategy<Value = (usize, usize, usize, usize, usize)> {
    let head_dim = prop::sample::select(vec![8usize, 20, 32, 44, 64, 72, 128, 192]);
    (1..=32usize, head_dim, 1..=2usize, 1..=9usize, 0..600usize)
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn all_visible_entries((heads, head_dim, ratio, rows, position) in shape(), seed: u64) {
        let Some(gpu) = gpu() else { return Ok(()) };
        Case::new(seed, heads, head_dim, ratio, rows, position).check(gpu);
    }

    #[test]
    fn candidate_blocks(
        (heads, head_dim, ratio, rows, position) in shape(),
        (block_size, blocks) in (1..=9u32, 1..=40u32),
        seed: u64,
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        Case::new(seed, heads, head_dim, ratio, rows, position).restricted(seed, block_size, blocks).check(gpu);
    }
}

#[test]
fn released_widths() {
    let Some(gpu) = gpu() else { return };
    Case::new(1, 32, 128, 1, 6, 700).check(gpu);
    Case::new(2, 32, 128, 2, 6, 1_201).restricted(2, 8, 50).check(gpu);
}

/// More heads than workgroup memory holds the queries of.
#[test]
fn many_heads() {
    let Some(gpu) = gpu() else { return };
    Case::new(3, 150, 128, 1, 2, 40).check(gpu);
}

#[test]
fn rows_do_not_depend_on_their_neighbours() {
    let Some(gpu) = gpu() else { return };
    let case = Case::new(4, 5, 44, 2, 7, 300);
    let stride = case.dims.slots() as usize;
    for variant in variants(gpu) {
        let together = case.run(gpu, variant, 0, 7);
        for row in 0..7 {
            assert_same_bits(&case.run(gpu, variant, row, 1), &together[row * stride..(row + 1) * stride]);
        }
    }
}

/// Negative weights make every score zero or less: the zeros are the best.
#[test]
fn weights_below_zero() {
    let Some(gpu) = gpu() else { return };
    let mut case = Case::new(5, 2, 32, 1, 3, 200);
    case.weights.iter_mut().filter(|w| **w != POISON).for_each(|w| *w |= 1 << 31);
    let scores = case.expected();
    assert!(scores.contains(&0.0) && scores.iter().all(|&s| s.is_nan() || s <= 0.0));
    case.check(gpu);
}

/// Random codes under all scales whose products stay normal; a row of 44 channels ends in padding.
#[test]
fn codes_and_scales() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random::new(6);
    for head_dim in [32, 44] {
        let mut case = Case::new(7, 8, head_dim, 1, 4, 250);
        let mut row = |scale: u32| {
            let mut row = vec![0; Mxfp4.row_words(head_dim)];
            for channel in 0..head_dim {
                row[channel / 8] |= random.below(16) << (channel % 8 * 4);
            }
            row[Mxfp4.code_words(head_dim)] = scale | (scale + 1) << 8;
            row
        };
        case.keys.iter_mut().enumerate().for_each(|(i, key)| *key = row(i as u32 % 253 + 1));
        case.queries.iter_mut().enumerate().for_each(|(i, query)| *query = row(127 + i as u32 % 2));
        // Within 2^16 of the ends of f32 the sums overflow, or products are subnormal: those keys are in the middle.
        let middle = row(127);
        for key in &mut case.keys {
            let scale = key[Mxfp4.code_words(head_dim)] & 255;
            if !(20..230).contains(&scale) {
                key.clone_from(&middle);
            }
        }
        case.check(gpu);
    }
}

/// The end of a context of a million tokens at ratio 2.
#[test]
fn half_a_million_entries() {
    let Some(gpu) = gpu() else { return };
    let mut case = Case::new(8, 2, 32, 2, 1, 2_000);
    let few = std::mem::take(&mut case.keys);
    case.position = 1_048_575;
    case.dims.capacity = 524_288;
    case.keys = (0..524_288).map(|i| few[(i * 37 + i / 1_000) % few.len()].clone()).collect();
    case.check(gpu);
}

/// Pages of other slabs than the one at hand are skipped: every key is counted, and scored, once.
#[test]
fn traffic_is_that_of_the_visible_keys() {
    let Some(_) = gpu() else { return };
    let gpu = Gpu::new_blocking(&DeviceOptions { software: true, ..Default::default() }).unwrap();
    let mut case = Case::new(9, 2, 128, 1, 3, 400);
    case.slabs = 3;
    case.run(&gpu, "plain", 0, 3);
    // Three rows and the one that the grid has beyond them; 128 channels are 68 bytes.
    assert_eq!(gpu.counters().cache_bytes, 4 * 403 * 68);
}

#[test]
fn a_query_beyond_workgroup_memory_is_refused() {
    let Some(gpu) = gpu() else { return };
    let mut dims = Case::new(10, 1, 32, 1, 1, 1).dims;
    dims.head_dim = 16_384;
    let step = upload(gpu, MemoryKind::Params, "step", &[0u32; 16]);
    let (read, scores) =
        (poisoned(gpu, MemoryKind::Scratch, "read", 4), poisoned(gpu, MemoryKind::Scratch, "scores", 4));
    let buffers = IndexScoreBuffers {
        step: &step,
        table: &step,
        queries: &read,
        weights: &read,
        candidates: &read,
        scores: &scores,
    };
    let tiling = Tiling::new(&TilingDims { rows: 1, slots: dims.slots(), topk: 1, candidates: None });
    let error = IndexScore::new(gpu, &dims, &buffers, &Tiles::new(gpu, tiling).unwrap()).unwrap_err();
    assert!(matches!(error, Error::DeviceLimit { allowed: 16_384, .. }), "{error}");
}
