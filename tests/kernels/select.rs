//! `select`, and `select_merge` after it, against their twin: the same ids, whatever the scores and however they are cut.

use crate::common::{config, gpu, poisoned, read, upload, Random, POISON};
use cedra::gpu::{Buffer, Gpu, MemoryKind, Recording};
use cedra::kernels::select::{Select, SelectBuffers, SelectDims, SelectKind};
use cedra::kernels::select_merge::SelectMerge;
use cedra::kernels::tiling::{CandidateDims, Tiles, Tiling, TilingDims, SCORE_BUDGET, SEGMENT};
use cedra::reference::select::{candidate_blocks, candidate_entries, top_k};
use proptest::prelude::*;

/// How scores are cut: words of them at a time, slots of a segment, and the most rows in flight.
#[derive(Debug, Clone, Copy)]
pub struct Cut {
    pub budget: u32,
    pub segment: u32,
    pub rows: u32,
}

impl Cut {
    /// The released one.
    pub const RELEASED: Cut = Cut { budget: SCORE_BUDGET, segment: SEGMENT, rows: 10 };
}

/// Rows of scores of all visible entries.
#[derive(Clone)]
pub struct Case {
    pub position: usize,
    pub ratio: usize,
    pub topk: usize,
    /// Row t has as many as it sees entries.
    pub scores: Vec<Vec<f32>>,
    pub cut: Cut,
}

/// The lists of a buffer of them; words behind what a list counts, and rows behind those in flight, were not written.
pub fn lists(gpu: &Gpu, buffer: &Buffer, words: usize, rows: usize) -> Vec<Vec<u32>> {
    let lists: Vec<u32> = read(gpu, buffer);
    let (lists, beyond) = lists.split_at(rows * words);
    assert!(beyond.iter().all(|&word| word == POISON), "a row beyond those in flight was written");
    let list = |list: &[u32]| {
        let (list, beyond) = list[1..].split_at(list[0] as usize);
        assert!(beyond.iter().all(|&word| word == POISON), "more was written than counted");
        list.to_vec()
    };
    lists.chunks(words).map(list).collect()
}

impl Case {
    pub fn new(position: usize, ratio: usize, topk: usize, rows: usize, mut score: impl FnMut() -> f32) -> Self {
        let visible = |row: usize| (position + row + 1) / ratio;
        let scores = (0..rows).map(|row| (0..visible(row)).map(|_| score()).collect()).collect();
        Self { position, ratio, topk, scores, cut: Cut::RELEASED }
    }

    /// The same, cut otherwise.
    pub fn cut(mut self, budget: u32, segment: u32, rows: u32) -> Self {
        self.cut = Cut { budget, segment, rows };
        self
    }

    /// Runs the kernels over rows of `scores`, a tile at a time, poison behind them and in all scratch. Candidate lists are
    /// given to [`SelectKind::Restricted`]. Returns the lists that were written: selection, candidates.
    pub fn run(
        &self,
        gpu: &Gpu,
        scores: &[Vec<f32>],
        kind: SelectKind,
        candidates: CandidateDims,
        given: &[Vec<u32>],
    ) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
        let rows = self.scores.len();
        let visible = self.scores.iter().map(Vec::len).max().unwrap_or(0) as u32;
        let dims = SelectDims { kind, ratio: self.ratio as u32, capacity: visible + 3 };
        let tiling = TilingDims {
            rows: self.cut.rows,
            slots: dims.capacity.max(candidates.slots(dims.capacity)),
            topk: self.topk as u32,
            candidates: (kind != SelectKind::Plain).then_some(candidates),
        };
        let tiles = Tiles::new(gpu, Tiling::within(&tiling, self.cut.budget, self.cut.segment)).unwrap();
        let tiling = tiles.tiling();
        // The grid has a row more than is in flight where the tiles allow it: nothing may be written there.
        let launched = (rows as u32 + 1).min(self.cut.rows);
        let empty = |words: usize| poisoned(gpu, MemoryKind::Scratch, "list", (rows + 1) * words);
        let (selection, list_words) = (empty(1 + self.topk), candidates.list_words() as usize);
        let blocks = empty(list_words);
        if kind == SelectKind::Restricted {
            let mut words = vec![POISON; (rows + 1) * list_words];
            for (words, list) in words.chunks_mut(list_words).zip(given) {
                words[0] = list.len() as u32;
                words[1..=list.len()].copy_from_slice(list);
            }
            gpu.upload(&blocks, 0, bytemuck::cast_slice(&words));
        }
        let mut step = [0u32; 16];
        (step[0], step[1]) = (self.position as u32, rows as u32);
        let scratch = |words: usize| poisoned(gpu, MemoryKind::Scratch, "scratch", words);
        let buffers = SelectBuffers {
            step: &upload(gpu, MemoryKind::Params, "step", &step),
            scores: &scratch(tiling.score_words()),
            lists: &scratch(tiling.list_words()),
            carry: &scratch(tiling.carry_words()),
            maxima: &scratch(tiling.maxima_words()),
            selection: &selection,
            candidates: &blocks,
        };
        let select = Select::new(gpu, &dims, &buffers, &tiles).unwrap();
        let merge = SelectMerge::new(gpu, &dims, &buffers, &tiles).unwrap();
        // The host may know no more than an upper bound.
        let bound = match kind {
            SelectKind::Restricted => (visible + 2).min(candidates.slots(dims.capacity)),
            _ => visible + 2,
        };
        for pass in tiling.passes(launched, bound) {
            let mut words = vec![POISON; tiling.score_words()];
            for (words, scores) in words.chunks_mut(pass.stride as usize).zip(scores) {
                let scores = scores.iter().skip(pass.first as usize);
                words.iter_mut().zip(scores).for_each(|(word, score)| *word = score.to_bits());
            }
            gpu.upload(buffers.scores, 0, bytemuck::cast_slice(&words));
            gpu.fill(buffers.lists, POISON);
            gpu.fill(buffers.maxima, POISON);
            let mut recording = Recording::new();
            select.record(gpu, &mut recording, launched, &pass).unwrap();
            merge.record(gpu, &mut recording, launched, &pass).unwrap();
            gpu.submit(recording).unwrap();
        }
        let written = match kind {
            SelectKind::Source => lists(gpu, &blocks, list_words, rows),
            _ => vec![],
        };
        (lists(gpu, &selection, 1 + self.topk, rows), written)
    }

    /// All three variants against the twin: the source's candidate blocks are those of the restricted one.
    pub fn check(&self, gpu: &Gpu, block_size: usize, blocks: usize) {
        let expected: Vec<_> = self.scores.iter().map(|scores| top_k(scores, self.topk)).collect();
        let dims = CandidateDims { block_size: block_size as u32, blocks: blocks as u32 };
        let run = |scores: &[Vec<f32>], kind, given: &[Vec<u32>]| self.run(gpu, scores, kind, dims, given);
        assert_eq!(run(&self.scores, SelectKind::Plain, &[]).0, expected);

        let lists: Vec<_> = self.scores.iter().map(|scores| candidate_blocks(scores, block_size, blocks)).collect();
        let (selection, candidates) = run(&self.scores, SelectKind::Source, &[]);
        assert_eq!(selection, expected);
        assert_eq!(candidates, lists);

        let (mut slots, mut expected) = (vec![], vec![]);
        for (scores, list) in self.scores.iter().zip(&lists) {
            let entries = candidate_entries(list, block_size, scores.len());
            let scores: Vec<f32> = entries.iter().map(|&entry| scores[entry as usize]).collect();
            expected.push(top_k(&scores, self.topk).iter().map(|&slot| entries[slot as usize]).collect::<Vec<u32>>());
            slots.push(scores);
        }
        assert_eq!(run(&slots, SelectKind::Restricted, &lists).0, expected);
    }
}

/// Scores of a kind: spread, few values, around zero, in one digit, random bits of all magnitudes.
pub fn scores(kind: u32, seed: u64) -> impl FnMut() -> f32 {
    let mut random = Random::new(seed);
    move || match kind {
        0 => random.normal(),
        1 => random.below(5) as f32 - 2.0,
        2 => [0.0, -0.0, 1e-40, -1e-40, -1.0, f32::MIN][random.below(6) as usize],
        3 => 1.0 + random.below(40) as f32 * f32::EPSILON,
        _ => f32::from_bits(random.bits() as u32 & 0xBFFF_FFFF),
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn random_scores(
        (position, ratio, rows) in (0..3_000usize, 1..=2usize, 1..=9usize),
        topk in prop::sample::select(vec![1usize, 2, 7, 64, 512]),
        (block_size, blocks) in (prop::sample::select(vec![1usize, 2, 3, 5, 8, 16]), 1..200usize),
        (kind, seed) in (0..5u32, any::<u64>()),
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        Case::new(position, ratio, topk, rows, scores(kind, seed)).check(gpu, block_size, blocks);
    }
}

/// From one visible entry fewer than `topk` to two more: 512 of 513 among them.
#[test]
fn around_topk() {
    let Some(gpu) = gpu() else { return };
    for topk in [2, 16, 512] {
        for kind in 0..5 {
            Case::new(topk - 2, 1, topk, 4, scores(kind, 1)).check(gpu, 3, 7);
        }
    }
}

#[test]
fn all_scores_equal() {
    let Some(gpu) = gpu() else { return };
    for value in [0.0, -0.0, 1.5, -3.0] {
        Case::new(4_999, 1, 512, 2, || value).check(gpu, 8, 100);
    }
}

/// Both zeros are one value: the lower position wins, whatever its sign.
#[test]
fn zeros_of_both_signs() {
    let Some(gpu) = gpu() else { return };
    let mut zero = 0.0f32;
    let alternating = || {
        zero = -zero;
        zero
    };
    let case = Case::new(99, 1, 10, 1, alternating);
    let none = CandidateDims { block_size: 1, blocks: 0 };
    let (selection, _) = case.run(gpu, &case.scores, SelectKind::Plain, none, &[]);
    assert_eq!(selection, [(0..10).collect::<Vec<u32>>()]);
}

/// The released sizes, where candidate blocks begin to prune.
#[test]
fn twenty_thousand_visible() {
    let Some(gpu) = gpu() else { return };
    for kind in [0, 1] {
        Case::new(19_998, 1, 512, 2, scores(kind, 2)).check(gpu, 8, 2_048);
    }
}

/// From one block fewer than are kept to two more; the newest is kept, however bad it is.
#[test]
fn around_the_number_of_blocks() {
    let Some(gpu) = gpu() else { return };
    let mut next = 0.0;
    let case = Case::new(46, 1, 5, 9, || {
        next -= 1.0;
        next
    });
    case.check(gpu, 3, 17);
    case.check(gpu, 3, 1);
}

/// Rows that see nothing.
#[test]
fn before_the_first_entry() {
    let Some(gpu) = gpu() else { return };
    Case::new(0, 2, 4, 3, scores(0, 3)).check(gpu, 2, 2);
}

#[test]
fn rows_do_not_depend_on_their_neighbours() {
    let Some(gpu) = gpu() else { return };
    let case = Case::new(700, 1, 64, 5, scores(1, 4));
    let dims = CandidateDims { block_size: 8, blocks: 20 };
    let (selections, candidates) = case.run(gpu, &case.scores, SelectKind::Source, dims, &[]);
    for row in 0..5 {
        let alone = Case { position: case.position + row, scores: vec![case.scores[row].clone()], ..case };
        let (selection, candidate) = alone.run(gpu, &alone.scores, SelectKind::Source, dims, &[]);
        assert_eq!((&selection[0], &candidate[0]), (&selections[row], &candidates[row]));
    }
}

/// The end of a context of a million tokens at ratio 1.
#[test]
fn a_million_entries() {
    let Some(gpu) = gpu() else { return };
    Case::new(1_048_575, 1, 512, 1, scores(0, 5)).check(gpu, 8, 2_048);
}
