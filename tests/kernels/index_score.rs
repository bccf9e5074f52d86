//! `index_score` against its twin: bit for bit, in both variants, whatever the shape.

use crate::common::{assert_same_bits, config, gpu, poisoned, read, upload, Random, POISON};
use cedra::formats::CacheFormat::Mxfp4;
use cedra::gpu::{Gpu, MemoryKind, Recording};
use cedra::kernels::index_score::{weight_scale, IndexScore, IndexScoreBuffers, IndexScoreDims};
use cedra::kernels::select::{score_stride, CandidateDims};
use cedra::reference::index_score::score_packed;
use cedra::Error;
use proptest::prelude::*;

/// The variants that the device runs.
fn variants(gpu: &Gpu) -> impl Iterator<Item = &'static str> + '_ {
    ["plain", "dot4"].into_iter().filter(|variant| gpu.supports("index_score", variant))
}

/// A cache of random keys, and the queries and weights of the rows from `position` on.
struct Case {
    dims: IndexScoreDims,
    rows: usize,
    position: usize,
    /// (entries, row words)
    keys: Vec<Vec<u32>>,
    /// (T * H_i, row words)
    queries: Vec<Vec<u32>>,
    /// (T, weight_stride), poison but for the weights
    weights: Vec<u32>,
    /// (T, blocks): ascending block ids
    lists: Vec<Vec<u32>>,
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
    fn new(seed: u64, heads: usize, head_dim: usize, ratio: usize, rows: usize, position: usize) -> Self {
        let mut random = Random::new(seed);
        let page_entries = 128 / ratio;
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
                page_entries: page_entries as u32,
                latent_words: random.below(5),
                capacity: (entries.div_ceil(page_entries).max(1) * page_entries) as u32,
                candidates: None,
            },
            rows,
            position,
            keys: (0..entries).map(|_| packed(&mut random, head_dim)).collect(),
            queries: (0..rows * heads).map(|_| packed(&mut random, head_dim)).collect(),
            weights,
            lists: vec![],
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

    fn visible(&self, row: usize) -> usize {
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

    /// What the twin says; poison where nothing is written.
    fn expected(&self) -> Vec<f32> {
        let (heads, stride) = (self.dims.heads as usize, score_stride(self.dims.slots()) as usize);
        let scale = weight_scale(self.dims.heads, self.dims.head_dim);
        let mut scores = vec![f32::from_bits(POISON); self.rows * stride];
        for row in 0..self.rows {
            let at = row * self.dims.weight_stride as usize + self.dims.weight_offset as usize;
            let weights: Vec<f32> = self.weights[at..at + heads].iter().map(|&w| f32::from_bits(w) * scale).collect();
            let queries = self.queries[row * heads..(row + 1) * heads].concat();
            for (slot, entry) in self.entries(row).into_iter().enumerate() {
                let score = score_packed(&queries, &weights, &self.keys[entry], self.dims.head_dim as usize);
                scores[row * stride + slot] = score;
            }
        }
        scores
    }

    /// The pages: keys where they belong, poison elsewhere.
    fn pages(&self) -> Vec<u32> {
        let dims = &self.dims;
        let page_entries = dims.page_entries as usize;
        let row_words = Mxfp4.row_words(dims.head_dim as usize);
        let page_words = page_entries * (dims.latent_words as usize + row_words);
        let mut pages = vec![POISON; (dims.capacity as usize).div_ceil(page_entries) * page_words];
        for (entry, key) in self.keys.iter().enumerate() {
            let at = entry / page_entries * page_words
                + page_entries * dims.latent_words as usize
                + entry % page_entries * row_words;
            pages[at..at + row_words].copy_from_slice(key);
        }
        pages
    }

    /// What the kernel says about `rows` rows from row `first` on.
    fn run(&self, gpu: &Gpu, variant: &str, first: usize, rows: usize) -> Vec<f32> {
        let dims = &self.dims;
        let (heads, weight_stride) = (dims.heads as usize, dims.weight_stride as usize);
        let stride = score_stride(dims.slots()) as usize;
        let mut step = [0u32; 16];
        (step[0], step[1]) = ((self.position + first) as u32, rows as u32);
        let step = upload(gpu, MemoryKind::Params, "step", &step);
        let queries = self.queries[first * heads..(first + rows) * heads].concat();
        let queries = upload(gpu, MemoryKind::Scratch, "queries", &queries);
        let weights = &self.weights[first * weight_stride..(first + rows) * weight_stride];
        let weights = upload(gpu, MemoryKind::Scratch, "weights", weights);
        let pages = upload(gpu, MemoryKind::Cache, "pages", &self.pages());
        let candidates = dims.candidates.map(|c| {
            let mut words = vec![POISON; rows * c.list_words() as usize];
            for (words, list) in words.chunks_mut(c.list_words() as usize).zip(&self.lists[first..]) {
                words[0] = list.len() as u32;
                words[1..=list.len()].copy_from_slice(list);
            }
            upload(gpu, MemoryKind::Scratch, "candidates", &words)
        });
        // Room for a row more than is in flight: nothing may be written there.
        let scores = poisoned(gpu, MemoryKind::Scratch, "scores", (rows + 1) * stride);
        let buffers = IndexScoreBuffers {
            step: &step,
            queries: &queries,
            weights: &weights,
            pages: &pages,
            candidates: candidates.as_ref(),
            scores: &scores,
        };
        let kernel = IndexScore::with_variant(gpu, variant, dims, &buffers).unwrap();
        let mut recording = Recording::new();
        kernel.record(&mut recording, rows as u32 + 1, self.visible(first + rows - 1) as u32);
        gpu.submit(recording).unwrap();
        let mut scores: Vec<f32> = read(gpu, &scores);
        let beyond = scores.split_off(rows * stride);
        assert!(beyond.iter().all(|s| s.to_bits() == POISON), "a row beyond those in flight was written");
        scores
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
    let stride = score_stride(case.dims.slots()) as usize;
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

#[test]
fn traffic_is_that_of_the_visible_keys() {
    let Some(gpu) = gpu() else { return };
    let case = Case::new(9, 2, 128, 1, 3, 400);
    let before = gpu.counters().cache_bytes;
    case.run(gpu, "plain", 0, 3);
    // Three rows and the one that the grid has beyond them; 128 channels are 68 bytes.
    assert!(gpu.counters().cache_bytes - before >= 4 * 403 * 68);
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
        queries: &read,
        weights: &read,
        pages: &read,
        candidates: None,
        scores: &scores,
    };
    let error = IndexScore::new(gpu, &dims, &buffers).unwrap_err();
    assert!(matches!(error, Error::DeviceLimit { allowed: 16_384, .. }), "{error}");
}
