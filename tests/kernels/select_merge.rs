//! `select_merge`: tiles and segments so short that many of them make a selection. What is cut gives what is whole.

use crate::common::{config, gpu};
use crate::select::{scores, Case};
use cedra::kernels::select::SelectKind;
use cedra::kernels::tiling::{CandidateDims, Tiling, TilingDims, SCORE_BUDGET, SEGMENT};
use proptest::prelude::*;

proptest! {
    #![proptest_config(config())]

    #[test]
    fn random_cuts(
        (position, ratio) in (0..2_000usize, 1..=2usize),
        rows in prop::sample::select(vec![1usize, 6, 8, 9, 33]),
        topk in prop::sample::select(vec![1usize, 2, 7, 64, 512]),
        (block_size, blocks) in (prop::sample::select(vec![1usize, 2, 3, 5, 8, 16]), 1..100usize),
        (segment, tile) in (1..300u32, 1..900u32),
        (kind, seed) in (0..5u32, any::<u64>()),
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let case = Case::new(position, ratio, topk, rows, scores(kind, seed));
        case.cut(34 * tile, segment, 34).check(gpu, block_size, blocks);
    }
}

/// From below to above `topk`, the blocks, a segment, a tile, several tiles; several rows end on both sides of each.
#[test]
fn around_every_boundary() {
    let Some(gpu) = gpu() else { return };
    // Blocks of 3: segments of 24, tiles of 48 for up to 8 rows and of 24 beyond.
    for (topk, blocks) in [(1, 1), (5, 4), (24, 8), (30, 20)] {
        for ends in [topk, 3 * blocks, 24, 48, 72, 96, 150] {
            for (kind, rows) in [(0, 3), (1, 9)] {
                let case = Case::new(ends.max(3) - 3, 1, topk, rows, scores(kind, ends as u64));
                case.cut(400, 25, 16).check(gpu, 3, blocks);
            }
        }
    }
}

/// The best come last, so that every tile drives out what was carried; and first, so that all of it stays.
#[test]
fn rising_and_falling() {
    let Some(gpu) = gpu() else { return };
    for direction in [1.0, -1.0] {
        let mut next = 0.0;
        let case = Case::new(1_400, 1, 130, 2, || {
            next += direction;
            next
        });
        case.cut(8 * 320, 160, 8).check(gpu, 8, 37);
    }
}

/// Equal scores in all tiles: the lowest positions win, whatever the signs of zeros.
#[test]
fn ties_over_tiles() {
    let Some(gpu) = gpu() else { return };
    for (value, sign) in [(0.0f32, -1.0), (-0.0, 1.0), (2.5, 1.0)] {
        let mut next = value;
        let case = Case::new(700, 1, 90, 9, || {
            next *= sign;
            next
        });
        let case = case.cut(9 * 64, 32, 9);
        case.check(gpu, 8, 11);
        let (selection, candidates) =
            case.run(gpu, &case.scores, SelectKind::Source, CandidateDims { block_size: 8, blocks: 11 }, &[]);
        assert_eq!(selection[0], (0..90).collect::<Vec<u32>>());
        assert_eq!(candidates[0], (0..10).chain([87]).collect::<Vec<u32>>());
    }
}

/// The released sizes and more, over two segments and over two tiles of a wide step.
#[test]
fn large_selections() {
    let Some(gpu) = gpu() else { return };
    for (topk, rows) in [(512, 1), (2_048, 2)] {
        Case::new(40_000, 1, topk, rows, scores(0, 7)).check(gpu, 8, 2_048);
        Case::new(40_000, 1, topk, rows, scores(1, 7)).cut(2 << 15, 1 << 14, 2).check(gpu, 8, 2_048);
    }
}

/// How the released sizes are cut, and what scratch they take.
#[test]
fn released_tilings() {
    let candidates = Some(CandidateDims { block_size: 8, blocks: 2_048 });
    let dims = |rows, slots| TilingDims { rows, slots, topk: 512, candidates };
    let million = Tiling::new(&dims(512, 1 << 20));
    let decode = million.passes(1, 1 << 20);
    assert_eq!(decode.len(), 1);
    assert_eq!((decode[0].segments, decode[0].slots, decode[0].merged), (64, 1 << 20, true));
    let wide = million.passes(512, 1 << 20);
    assert_eq!((wide.len(), wide[63].first, wide[63].segments), (64, 63 << 14, 1));
    assert!(wide.iter().all(|pass| pass.slots == SEGMENT && pass.merged));
    assert_eq!(million.passes(512, SEGMENT).len(), 1);
    assert!(!million.passes(8, SEGMENT)[0].merged && million.passes(8, SEGMENT + 1)[0].merged);
    assert_eq!(million.score_words(), SCORE_BUDGET as usize);
    assert_eq!(million.list_words(), 512 * 2 * 512);
    assert_eq!(million.carry_words(), 512 * (512 + 2_048));
    assert_eq!(million.maxima_words(), (SCORE_BUDGET / 8) as usize);
    assert_eq!(million.uniforms(), (1 + 1) + (1 + 64));
    assert_eq!(million.uniform_bytes(), 67 * 16);

    // A short context takes no more than it needs: one class, nothing to merge.
    let short = Tiling::new(&dims(4, 4_096));
    assert_eq!((short.score_words(), short.list_words(), short.carry_words()), (4 * 4_096, 0, 0));
    assert_eq!((short.maxima_words(), short.uniforms()), (4 * 512, 1));

    // Scores stay in the budget, whatever the sizes, as long as it holds four blocks a row.
    for rows in [1, 3, 8, 9, 128, 4_096] {
        for slots in [1, 100, 16_385, 524_288, 1 << 20] {
            for block_size in [1, 3, 8, 100] {
                let candidates = Some(CandidateDims { block_size, blocks: 2_048 });
                let tiling = Tiling::new(&TilingDims { rows, slots, topk: 512, candidates });
                assert!(tiling.score_words() <= SCORE_BUDGET as usize);
                let passes = tiling.passes(rows, slots);
                assert_eq!(passes.iter().map(|pass| pass.slots).sum::<u32>(), slots);
                assert!(passes.iter().all(|pass| pass.first % (4 * block_size) == 0));
                assert!(passes.iter().all(|pass| (pass.stride * rows) as usize <= tiling.score_words()));
            }
        }
    }
}
