//! `select` against its twin: the same ids, whatever the scores.

use crate::common::{config, gpu, poisoned, read, upload, Random, POISON};
use cedra::gpu::{Buffer, Gpu, MemoryKind, Recording};
use cedra::kernels::select::{score_stride, CandidateDims, Select, SelectBuffers, SelectDims, SelectKind};
use cedra::reference::select::{candidate_blocks, candidate_entries, top_k};
use proptest::prelude::*;

/// Rows of scores of all visible entries.
#[derive(Clone)]
struct Case {
    position: usize,
    ratio: usize,
    topk: usize,
    /// Row t has as many as it sees entries.
    scores: Vec<Vec<f32>>,
}

/// The kernel's variant, with the candidate lists that the restricted one reads.
#[derive(Clone, Copy)]
enum Kind<'a> {
    Plain,
    Source(CandidateDims),
    Restricted(CandidateDims, &'a [Vec<u32>]),
}

impl Case {
    fn new(position: usize, ratio: usize, topk: usize, rows: usize, mut score: impl FnMut() -> f32) -> Self {
        let visible = |row: usize| (position + row + 1) / ratio;
        let scores = (0..rows).map(|row| (0..visible(row)).map(|_| score()).collect()).collect();
        Self { position, ratio, topk, scores }
    }

    /// Runs the kernel over rows of `scores`, poison behind them. Returns the lists that it wrote: selection,
    /// candidates.
    fn run(&self, gpu: &Gpu, scores: &[Vec<f32>], kind: Kind<'_>) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
        let rows = self.scores.len();
        let capacity = self.scores.iter().map(Vec::len).max().unwrap_or(0) as u32 + 3;
        let dims = SelectDims { topk: self.topk as u32, ratio: self.ratio as u32, capacity };
        let slots = match kind {
            Kind::Restricted(c, _) => c.slots(capacity),
            _ => capacity,
        };
        let mut words = vec![POISON; rows * score_stride(slots) as usize];
        for (words, scores) in words.chunks_mut(score_stride(slots) as usize).zip(scores) {
            words.iter_mut().zip(scores).for_each(|(word, score)| *word = score.to_bits());
        }
        let mut step = [0u32; 16];
        (step[0], step[1]) = (self.position as u32, rows as u32);
        let step = upload(gpu, MemoryKind::Params, "step", &step);
        let scores = upload(gpu, MemoryKind::Scratch, "scores", &words);
        // Room for a row more than is in flight: nothing may be written there.
        let empty = |words: u32| poisoned(gpu, MemoryKind::Scratch, "list", (rows + 1) * words as usize);
        let selection = empty(1 + dims.topk);
        let buffers = SelectBuffers { step: &step, scores: &scores, selection: &selection };
        let launch = |kind: SelectKind<'_>| {
            let kernel = Select::new(gpu, &dims, kind, &buffers).unwrap();
            let mut recording = Recording::new();
            kernel.record(&mut recording, rows as u32 + 1);
            gpu.submit(recording).unwrap();
        };
        let written = |buffer: &Buffer, words: u32| -> Vec<Vec<u32>> {
            let lists: Vec<u32> = read(gpu, buffer);
            let (lists, beyond) = lists.split_at(rows * words as usize);
            assert!(beyond.iter().all(|&word| word == POISON), "a row beyond those in flight was written");
            let list = |list: &[u32]| {
                let (list, beyond) = list[1..].split_at(list[0] as usize);
                assert!(beyond.iter().all(|&word| word == POISON), "more was written than counted");
                list.to_vec()
            };
            lists.chunks(words as usize).map(list).collect()
        };
        let mut candidates = vec![];
        match kind {
            Kind::Plain => launch(SelectKind::Plain),
            Kind::Source(c) => {
                let (maxima, lists) = (empty(c.maxima_words(capacity)), empty(c.list_words()));
                launch(SelectKind::Source { dims: c, maxima: &maxima, candidates: &lists });
                candidates = written(&lists, c.list_words());
            }
            Kind::Restricted(c, lists) => {
                let mut words = vec![POISON; rows * c.list_words() as usize];
                for (words, list) in words.chunks_mut(c.list_words() as usize).zip(lists) {
                    words[0] = list.len() as u32;
                    words[1..=list.len()].copy_from_slice(list);
                }
                let lists = upload(gpu, MemoryKind::Scratch, "candidates", &words);
                launch(SelectKind::Restricted { dims: c, candidates: &lists });
            }
        }
        (written(&selection, 1 + dims.topk), candidates)
    }

    /// All three variants against the twin: the source's candidate blocks are those of the restricted one.
    fn check(&self, gpu: &Gpu, block_size: usize, blocks: usize) {
        let expected: Vec<_> = self.scores.iter().map(|scores| top_k(scores, self.topk)).collect();
        assert_eq!(self.run(gpu, &self.scores, Kind::Plain).0, expected);

        let dims = CandidateDims { block_size: block_size as u32, blocks: blocks as u32 };
        let lists: Vec<_> = self.scores.iter().map(|scores| candidate_blocks(scores, block_size, blocks)).collect();
        let (selection, candidates) = self.run(gpu, &self.scores, Kind::Source(dims));
        assert_eq!(selection, expected);
        assert_eq!(candidates, lists);

        let (mut slots, mut expected) = (vec![], vec![]);
        for (scores, list) in self.scores.iter().zip(&lists) {
            let entries = candidate_entries(list, block_size, scores.len());
            let scores: Vec<f32> = entries.iter().map(|&entry| scores[entry as usize]).collect();
            expected.push(top_k(&scores, self.topk).iter().map(|&slot| entries[slot as usize]).collect::<Vec<u32>>());
            slots.push(scores);
        }
        assert_eq!(self.run(gpu, &slots, Kind::Restricted(dims, &lists)).0, expected);
    }
}

/// Scores of a kind: spread, few values, around zero, in one digit, random bits of all magnitudes.
fn scores(kind: u32, seed: u64) -> impl FnMut() -> f32 {
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
    let (selection, _) = case.run(gpu, &case.scores, Kind::Plain);
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
    let (selections, candidates) = case.run(gpu, &case.scores, Kind::Source(dims));
    for row in 0..5 {
        let alone = Case { position: case.position + row, scores: vec![case.scores[row].clone()], ..case };
        let (selection, candidate) = alone.run(gpu, &alone.scores, Kind::Source(dims));
        assert_eq!((&selection[0], &candidate[0]), (&selections[row], &candidates[row]));
    }
}

/// The end of a context of a million tokens at ratio 1.
#[test]
fn a_million_entries() {
    let Some(gpu) = gpu() else { return };
    Case::new(1_048_575, 1, 512, 1, scores(0, 5)).check(gpu, 8, 2_048);
}
