//! Kernel `sample` against its CPU twin.

use super::common::{config, gpu, poisoned, read, upload, Random, POISON};
use cedra::gpu::{Binding, Buffer, Gpu, MemoryKind, Recording};
use cedra::kernels::sample::{Buffers, Dims, Sample, NONE};
use cedra::kernels::Step;
use cedra::reference::sample::{fixed_point, greedy, random, sample};
use cedra::sampling::Sampling;
use proptest::prelude::*;

const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };

/// A sampler and its buffers.
struct Sampler {
    sample: Sample,
    step: Buffer,
    tokens: Buffer,
    history: Buffer,
    out: Buffer,
}

impl Sampler {
    fn new(gpu: &Gpu, logits: &[f32], step: Step, tokens: &[u32], history: &[u32], stops: &[u32], ring: usize) -> Self {
        let mut padded: Vec<u32> = logits.iter().map(|l| l.to_bits()).collect();
        padded.resize(logits.len().next_multiple_of(4), POISON);
        let logits_buffer = upload(gpu, MemoryKind::Scratch, "logits", &padded);
        let step = gpu.uniform("step", &Step { stop_count: stops.len() as u32, ..step }).unwrap();
        let tokens = upload(gpu, MemoryKind::Cache, "tokens", tokens);
        let dims = Dims { vocabulary: logits.len() as u32, ring: ring as u32, history: history.len() as u32 };
        let history = upload(gpu, MemoryKind::Cache, "history", history);
        let stops = upload(gpu, MemoryKind::Params, "stop ids", stops);
        let out = poisoned(gpu, MemoryKind::Scratch, "out", ring * 2);
        let buffers = Buffers {
            logits: Binding::Whole(&logits_buffer),
            step: Binding::Whole(&step),
            tokens: Binding::Whole(&tokens),
            history: Binding::Whole(&history),
            stop_ids: Binding::Whole(&stops),
            out: Binding::Whole(&out),
        };
        let sample = Sample::new(gpu, &dims, &buffers).unwrap();
        Self { sample, step, tokens, history, out }
    }
    fn run(&self, gpu: &Gpu, times: usize) {
        let mut recording = Recording::new();
        (0..times).for_each(|_| self.sample.record(&mut recording));
        gpu.submit(recording).unwrap();
    }
    fn advance(&self, gpu: &Gpu) {
        let mut recording = Recording::new();
        self.sample.record_advance(&mut recording);
        gpu.submit(recording).unwrap();
    }
    fn step(&self, gpu: &Gpu) -> Step {
        read(gpu, &self.step)[0]
    }
    fn out(&self, gpu: &Gpu) -> Vec<[u32; 2]> {
        read(gpu, &self.out)
    }
}

fn step_of(settings: &Sampling) -> Step {
    Step {
        rows: 1,
        seed_lo: settings.seed as u32,
        seed_hi: (settings.seed >> 32) as u32,
        top_k: settings.top_k,
        temperature: settings.temperature,
        top_p: settings.top_p,
        ..Step::default()
    }
}

/// Tokens of `n` steps that all have these logits.
fn draws(gpu: &Gpu, logits: &[f32], settings: &Sampling, n: usize) -> Vec<u32> {
    let sampler = Sampler::new(gpu, logits, step_of(settings), &[0], &[], &[], n);
    sampler.run(gpu, n);
    let step = sampler.step(gpu);
    assert_eq!((step.position, step.rows, step.sampled, step.status), (n as u32, 1, n as u32, 0));
    let out = sampler.out(gpu);
    assert!(out.iter().all(|&[_, status]| status == 0));
    assert_eq!(read::<u32>(gpu, &sampler.tokens), [out[n - 1][0]]);
    out.iter().map(|&[token, _]| token).collect()
}

#[track_caller]
fn check(gpu: &Gpu, logits: &[f32], settings: &Sampling, n: usize) -> Vec<u32> {
    let got = draws(gpu, logits, settings, n);
    let expected: Vec<u32> = (0..n as u32).map(|counter| sample(logits, settings, counter).unwrap()).collect();
    assert_eq!(got, expected, "{settings:?}, {} logits", logits.len());
    got
}

#[test]
fn greedy_takes_the_lowest_of_the_best() {
    let Some(gpu) = gpu() else { return };
    let mut generator = Random::new(1);
    for v in [1, 2, 3, 4, 5, 255, 1023, 1025, 4096, 129_280] {
        let mut logits = generator.normals(v, 5.0);
        check(gpu, &logits, &GREEDY, 1);
        // The best in several places: in the last id too.
        let best = logits[greedy(&logits).unwrap() as usize];
        for _ in 0..3 {
            logits[generator.below(v as u32) as usize] = best;
        }
        logits[v - 1] = best;
        check(gpu, &logits, &GREEDY, 1);
    }
    // All equal, zeros of both signs, all negative, the extremes of f32.
    assert_eq!(check(gpu, &[-3.0; 700], &GREEDY, 1), [0]);
    assert_eq!(check(gpu, &[-1.0, -0.0, 0.0, -0.0], &GREEDY, 1), [1]);
    assert_eq!(check(gpu, &[f32::MIN, f32::MIN, -3e38], &GREEDY, 1), [2]);
    assert_eq!(check(gpu, &[f32::MIN, f32::MIN], &GREEDY, 1), [0]);
    assert_eq!(check(gpu, &[0.0, 1e-45, f32::MIN_POSITIVE, f32::MAX, 3e38], &GREEDY, 1), [3]);
}

#[test]
fn a_logit_that_is_not_finite_is_no_token() {
    let Some(gpu) = gpu() else { return };
    let mut generator = Random::new(2);
    let nans = [0x7fc0_0000u32, 0xffff_ffff, 0x7f80_0001, 0xff80_0001].map(f32::from_bits);
    for (i, bad) in nans.into_iter().chain([f32::INFINITY, f32::NEG_INFINITY]).enumerate() {
        for settings in [GREEDY, Sampling { temperature: 1.0, top_k: 3, top_p: 0.5, seed: 1 }] {
            let mut logits = generator.normals(1001, 1.0);
            logits[[0, 1000, 500, 256, 3, 77][i]] = bad;
            let start = Step { position: 10, rows: 2, sampled: 5, ..step_of(&settings) };
            let sampler = Sampler::new(gpu, &logits, start, &[8, 9], &[1, 2, 3], &[], 4);
            sampler.run(gpu, 2);
            let step = sampler.step(gpu);
            assert_eq!((step.position, step.rows, step.sampled, step.status), (12, 0, 5, 2), "{bad}");
            assert_eq!(sampler.out(gpu)[5 % 4], [NONE, 2]);
            assert_eq!(read::<u32>(gpu, &sampler.tokens), [8, 9], "no token was made");
            assert_eq!(read::<u32>(gpu, &sampler.history), [9, 8, 1]);
        }
    }
}

#[test]
fn a_stop_id_ends_the_text() {
    let Some(gpu) = gpu() else { return };
    let logits = [0.0, 1.0, 9.0, 3.0];
    let sampler = Sampler::new(gpu, &logits, step_of(&GREEDY), &[7], &[], &[40, 2], 4);
    sampler.run(gpu, 3);
    let step = sampler.step(gpu);
    assert_eq!((step.position, step.rows, step.sampled, step.status), (1, 0, 1, 1));
    let nothing = [POISON, POISON];
    assert_eq!(sampler.out(gpu), [[2, 1], [NONE, 1], nothing, nothing]);
    assert_eq!(read::<u32>(gpu, &sampler.tokens), [2]);
}

/// Position and history after chunks of any length, with and without a token at the end.
#[test]
fn a_step_moves_on() {
    let Some(gpu) = gpu() else { return };
    for rows in 0..6usize {
        for choose in [false, true] {
            let tokens: Vec<u32> = (100..108).collect();
            let history = [9, 8, 7, 6];
            let start = Step { position: 50, rows: rows as u32, sampled: 3, ..step_of(&GREEDY) };
            let sampler = Sampler::new(gpu, &[0.0, 5.0], start, &tokens, &history, &[], 2);
            if choose {
                sampler.run(gpu, 1);
            } else {
                sampler.advance(gpu);
            }
            let step = sampler.step(gpu);
            let newer = tokens[..rows].iter().rev().chain(&history).copied();
            assert_eq!(read::<u32>(gpu, &sampler.history), newer.take(4).collect::<Vec<_>>());
            assert_eq!((step.position, step.status), (50 + rows as u32, 0));
            let token = choose && rows > 0;
            assert_eq!(step.sampled, 3 + token as u32);
            assert_eq!(step.rows, if token { 1 } else { rows as u32 });
            let first = read::<u32>(gpu, &sampler.tokens)[0];
            assert_eq!(first, if token { 1 } else { 100 });
            let record = match (choose, rows) {
                (false, _) => [POISON, POISON],
                (true, 0) => [NONE, 0],
                (true, _) => [1, 0],
            };
            assert_eq!(sampler.out(gpu)[1], record);
        }
    }
}

#[test]
fn draws_equal_the_twins() {
    let Some(gpu) = gpu() else { return };
    let mut generator = Random::new(3);
    for (v, temperature, top_k, top_p) in [
        (5, 1.0, 0, 1.0),
        (50, 0.7, 10, 1.0),
        (50, 1.3, 0, 0.8),
        (64, 1.0, 20, 0.6),
        (300, 0.9, 299, 0.99),
        (7, 2.0, 3, 1e-6),
        (33, 5.0, 32, 0.999),
    ] {
        let logits = generator.normals(v, 2.0);
        check(gpu, &logits, &Sampling { temperature, top_k, top_p, seed: generator.bits() }, 60);
    }
}

/// Where probabilities are equal, the lower ids stay.
#[test]
fn ties_at_a_cut_keep_the_lower_ids() {
    let Some(gpu) = gpu() else { return };
    let settings = |top_k, top_p| Sampling { temperature: 1.0, top_k, top_p, seed: 11 };
    // 1024 equal logits: each has exactly 2^21.
    let equal = [0.5; 1024];
    assert!(check(gpu, &equal, &settings(7, 1.0), 80).iter().all(|&id| id < 7));
    assert!(check(gpu, &equal, &settings(0, 0.25), 80).iter().all(|&id| id < 256));
    assert!(check(gpu, &equal, &settings(512, 0.25), 80).iter().all(|&id| id < 128));
    assert!(check(gpu, &equal, &settings(0, 1.0), 80).iter().any(|&id| id > 900));
    // Some far below: their probability is zero, and only a top-k that needs them keeps them.
    let mut mixed = [-1000.0; 600];
    (0..128).for_each(|i| mixed[i * 4 + 3] = 2.0);
    check(gpu, &mixed, &settings(0, 1.0), 40);
    check(gpu, &mixed, &settings(130, 1.0), 40);
    assert!(check(gpu, &mixed, &settings(16, 1.0), 80).iter().all(|&id| id < 64));
    assert!(check(gpu, &mixed, &settings(300, 0.5), 80).iter().all(|&id| id < 256));
    // Two levels, cut inside each.
    let levels: Vec<f32> = (0..400).map(|i| if i % 3 == 0 { 1.0 } else { 0.0 }).collect();
    for (top_k, top_p) in [(10, 1.0), (134, 1.0), (200, 1.0), (0, 0.1), (0, 0.9), (300, 0.97), (150, 0.5)] {
        check(gpu, &levels, &settings(top_k, top_p), 40);
    }
}

#[test]
fn settings_at_their_ends() {
    let Some(gpu) = gpu() else { return };
    let mut generator = Random::new(5);
    let logits = generator.normals(200, 2.0);
    let best = greedy(&logits).unwrap();
    let base = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 99 };
    let always_best = [
        Sampling { top_k: 1, ..base },
        Sampling { top_p: 1e-9, ..base },
        Sampling { top_p: 0.0, ..base },
        Sampling { temperature: 1e-4, ..base },
        Sampling { temperature: 1e-30, ..base },
    ];
    for settings in always_best {
        assert_eq!(check(gpu, &logits, &settings, 8), [best; 8], "{settings:?}");
    }
    let all = check(gpu, &logits, &base, 40);
    for top_k in [200, 201, u32::MAX] {
        assert_eq!(check(gpu, &logits, &Sampling { top_k, ..base }, 40), all);
    }
    check(gpu, &logits, &Sampling { temperature: 1e6, ..base }, 40);
    assert_ne!(check(gpu, &logits, &Sampling { seed: 100, ..base }, 40), all);
    assert_ne!(check(gpu, &logits, &Sampling { seed: 99 | 1 << 32, ..base }, 40), all);
    assert_eq!(check(gpu, &[3.0], &base, 3), [0, 0, 0]);
}

#[test]
fn draws_from_a_whole_vocabulary() {
    let Some(gpu) = gpu() else { return };
    let mut generator = Random::new(6);
    let logits = generator.normals(129_280, 4.0);
    for (top_k, top_p) in [(0, 1.0), (50, 1.0), (0, 0.9), (1000, 0.95)] {
        check(gpu, &logits, &Sampling { temperature: 0.8, top_k, top_p, seed: 7 }, 2);
    }
    let equal = vec![1.0; 1 << 17];
    assert!(check(gpu, &equal, &Sampling { temperature: 1.0, top_k: 1 << 16, top_p: 0.5, seed: 8 }, 2)
        .iter()
        .all(|&id| id < 1 << 15));
}

/// Draws follow the probabilities: chi-square with 15 degrees of freedom, the bound is passed once in 100,000 tries.
#[test]
fn draws_follow_the_probabilities() {
    let Some(gpu) = gpu() else { return };
    let logits: Vec<f32> = (0..16).map(|i| (i * 7 % 16) as f32 * 0.15).collect();
    let settings = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 2026 };
    let n = 4000;
    let mut counts = [0f64; 16];
    draws(gpu, &logits, &settings, n).iter().for_each(|&token| counts[token as usize] += 1.0);
    let probabilities = fixed_point(&logits, 15.0 * 0.15, 1.0);
    let total: f64 = probabilities.iter().map(|&q| q as f64).sum();
    let chi: f64 = (0..16)
        .map(|i| {
            let expected = probabilities[i] as f64 / total * n as f64;
            (counts[i] - expected).powi(2) / expected
        })
        .sum();
    println!("chi-square of {n} draws: {chi:.1}");
    assert!(chi < 50.0, "chi-square {chi}");
    assert_ne!(random(2026, 0), random(2026, 1));
}

proptest! {
    #![proptest_config(config())]
    #[test]
    fn sample_matches_its_twin(
        v in 1usize..300, spread in 0usize..3, temperature in 0.3f32..3.0, top_k in 0u32..40, p in 0u32..12, seed: u64,
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let mut generator = Random::new(seed);
        let mut logits = generator.normals(v, [0.5, 2.0, 8.0][spread]);
        (0..v / 4).for_each(|_| logits[generator.below(v as u32) as usize] = logits[generator.below(v as u32) as usize]);
        let top_p = (p as f32 * 0.1).min(1.0);
        check(gpu, &logits, &Sampling { temperature, top_k, top_p, seed }, 12);
    }
}
