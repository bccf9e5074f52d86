//! Kernel `route` against its CPU twin.

use super::common::{assert_close, config, gpu, poisoned, read, upload, Random, POISON};
use super::linear::{step, strided};
use cedra::gpu::{Gpu, MemoryKind, Recording};
use cedra::kernels::group_rows::tiles_words;
use cedra::kernels::route::{Route, RouteDims, RouteIo};
use cedra::reference::group_rows::group;
use cedra::reference::route::{route, Route as Twin};
use proptest::prelude::*;

struct Routed {
    ids: Vec<u32>,
    gains: Vec<f32>,
    pairs: Vec<u32>,
    tiles: Vec<u32>,
}

fn run(gpu: &Gpu, dims: &RouteDims, logits: &[Vec<f32>], bias: &[f32]) -> Routed {
    let (rows, slots) = (logits.len() as u32, dims.k + 1);
    let words = (rows * slots) as usize;
    let tiles_words = tiles_words(rows, slots, dims.experts + 1) as usize;
    let [ids, gains, pairs] = ["ids", "gains", "pairs"].map(|name| poisoned(gpu, MemoryKind::Scratch, name, words));
    let tiles = poisoned(gpu, MemoryKind::Scratch, "tiles", tiles_words);
    let io = RouteIo {
        step: &step(gpu, rows),
        logits: &upload(gpu, MemoryKind::Scratch, "logits", &strided(logits, dims.logit_stride as usize, 0)),
        bias: &upload(gpu, MemoryKind::Weights, "bias", bias),
        ids: &ids,
        gains: &gains,
        pairs: &pairs,
        tiles: &tiles,
    };
    let mut recording = Recording::new();
    Route::new(gpu, dims, &io).unwrap().record(&mut recording, rows);
    gpu.submit(recording).unwrap();
    Routed { ids: read(gpu, &ids), gains: read(gpu, &gains), pairs: read(gpu, &pairs), tiles: read(gpu, &tiles) }
}

/// Ids exactly, weights to 1e-5, the shared slot, and for one row pairs and tiles as `group_rows` defines them.
fn check(dims: &RouteDims, routed: &Routed, twins: &[Twin]) {
    let (experts, slots) = (dims.experts, dims.k as usize + 1);
    for (t, twin) in twins.iter().enumerate() {
        let ids = &routed.ids[t * slots..][..slots];
        assert_eq!(ids, [&twin.ids[..], &[experts]].concat());
        assert_close(&routed.gains[t * slots..][..slots], &[&twin.weights[..], &[1.0]].concat(), 1e-5);
    }
    if twins.len() == 1 {
        let groups = group(&routed.ids, experts as usize + 1, 1);
        assert_eq!(routed.pairs, groups.pairs);
        assert_eq!(routed.tiles[..groups.tiles.len()], groups.tiles);
    } else {
        assert!(routed.pairs.iter().chain(&routed.tiles).all(|&word| word == POISON), "left to group_rows");
    }
}

proptest! {
    #![proptest_config(config())]

    /// Any number of experts up to the largest that the family has, with ties.
    #[test]
    fn equals_its_twin(
        seed in any::<u64>(),
        experts in prop_oneof![1u32..40, 250u32..260, Just(384), Just(1024)],
        k in 1u32..9,
        rows in 1usize..4,
        normalise in any::<bool>(),
        levels in 2u32..2000,
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let mut random = Random::new(seed);
        let k = k.min(experts);
        let dims = RouteDims { experts, k, logit_stride: experts.next_multiple_of(4), normalise, scale: 1.5 };
        // Few levels of logits and of bias: many experts tie, and no two others are close.
        let logits: Vec<Vec<f32>> = (0..rows)
            .map(|_| (0..experts).map(|_| random.below(levels) as f32 * (8.0 / levels as f32) - 4.0).collect())
            .collect();
        let bias = vec![0.25; experts as usize];
        let routed = run(gpu, &dims, &logits, &bias);
        let twins: Vec<Twin> = logits.iter().map(|row| route(row, &bias, k as usize, normalise, 1.5)).collect();
        check(&dims, &routed, &twins);
    }
}

/// 384 experts, 6 chosen; all equal, then with a bias that decides alone.
#[test]
fn ties_go_to_the_lower_expert() {
    let Some(gpu) = gpu() else { return };
    let dims = RouteDims { experts: 384, k: 6, logit_stride: 384, normalise: true, scale: 1.5 };
    let logits = vec![vec![0.5f32; 384]];
    let mut bias = vec![0.0; 384];
    assert_eq!(run(gpu, &dims, &logits, &bias).ids, [0, 1, 2, 3, 4, 5, 384]);
    for expert in [383, 257, 256, 255] {
        bias[expert] = 1.0;
    }
    bias[7] = -0.0;
    let routed = run(gpu, &dims, &logits, &bias);
    assert_eq!(routed.ids, [255, 256, 257, 383, 0, 1, 384]);
    // The bias chooses and does not weigh.
    assert_close(&routed.gains, &[0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 1.0], 1e-6);
}

/// Softplus where a naive log(1 + eˣ) fails: far below zero, around the threshold, beyond the range of exp.
#[test]
fn scores_keep_their_precision() {
    let Some(gpu) = gpu() else { return };
    let logits = vec![-80.0f32, -30.0, -17.0, -8.0, -1e-3, 0.0, 1e-3, 8.0, 19.99, 20.0, 20.01, 95.0, 1e4];
    let experts = logits.len() as u32;
    let dims =
        RouteDims { experts, k: experts, logit_stride: experts.next_multiple_of(4), normalise: false, scale: 1.0 };
    let bias = vec![0.0; logits.len()];
    let routed = run(gpu, &dims, std::slice::from_ref(&logits), &bias);
    let twin = route(&logits, &bias, logits.len(), false, 1.0);
    assert_eq!(routed.ids[..logits.len()], twin.ids);
    for (&gain, &expected) in routed.gains.iter().zip(&twin.weights) {
        assert!((gain / expected - 1.0).abs() < 1e-5, "{gain:e} against {expected:e}");
    }
}

/// A NaN logit is not hidden: it is chosen, and its weight is NaN. The ids stay distinct and in range.
#[test]
fn nan_is_passed_on() {
    let Some(gpu) = gpu() else { return };
    let dims = RouteDims { experts: 9, k: 3, logit_stride: 12, normalise: true, scale: 1.5 };
    let mut logits = vec![0.0f32; 9];
    logits[4] = f32::NAN;
    let routed = run(gpu, &dims, &[logits], &[0.0; 9]);
    let mut ids = routed.ids.clone();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 4);
    assert!(ids.contains(&4) && ids.iter().all(|&id| id <= 9));
    assert!(routed.gains[..3].iter().any(|gain| gain.is_nan()));
}
