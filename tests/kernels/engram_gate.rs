//! Kernel `engram_gate` against its CPU twin.

use super::boundary::{dims, mix_const, padded, random_mix, row_partials, shape, unpadded};
use super::common::{assert_close, assert_same_bits, config, gpu, plain, upload, Random};
use super::linear::{step, strided};
use cedra::gpu::{Binding, Gpu, MemoryKind, Recording};
use cedra::kernels::boundary::Dims;
use cedra::kernels::engram_gate::{Buffers, EngramGate, Expand};
use cedra::reference::boundary::{expand, mix, sum_parts, MixWeights};
use cedra::reference::engram_gate::gate;
use proptest::prelude::*;

const IMAGE: u32 = 7;
const PAD: u32 = 2;
const TOLERANCE: f32 = 2e-5;

struct Case {
    dims: Dims,
    before: Vec<Vec<f32>>,
    streams: Vec<Vec<f32>>,
    z: Vec<Vec<f32>>,
    parts: usize,
    previous: MixWeights,
    kv: Vec<Vec<f32>>,
    qk: Vec<f32>,
    tokens: Vec<u32>,
}

impl Case {
    fn random(dims: Dims, rows: usize, parts: usize, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let (n, h) = (dims.streams as usize, dims.hidden as usize);
        let mut of = |vectors: usize| (0..rows).map(|_| random.normals(vectors * h, 1.0)).collect();
        let (before, streams, z, kv) = (of(n), of(n), of(parts), of(n + 1));
        let previous = random_mix(&mut random, &dims);
        let qk = random.normals(n * h, 1.0);
        let tokens =
            (0..rows as u32).map(|t| [100 + t, IMAGE, PAD][random.below(6).saturating_sub(3) as usize]).collect();
        Self { dims, before, streams, z, parts, previous, kv, qk, tokens }
    }

    fn run(&self, gpu: &Gpu, expands: bool, rows: std::ops::Range<usize>) -> Vec<f32> {
        let h = self.dims.hidden as usize;
        let streams = padded(gpu, "streams", &self.streams[rows.clone()], h);
        let z = padded(gpu, "z", &self.z[rows.clone()], h);
        let before: Vec<f32> =
            self.before[rows.clone()].iter().flat_map(|row| row_partials(row, &self.previous, &self.dims)).collect();
        let partials_in = upload(gpu, MemoryKind::Scratch, "partials in", &before);
        let mix_const = mix_const(gpu, &self.previous);
        let kv_stride = self.kv[0].len().next_multiple_of(4);
        let kv = upload(gpu, MemoryKind::Scratch, "kv", &strided(&self.kv[rows.clone()], kv_stride, 0));
        let qk = upload(gpu, MemoryKind::Weights, "qk", &self.qk);
        let tokens = upload(gpu, MemoryKind::Cache, "tokens", &self.tokens[rows.clone()]);
        let step = step(gpu, rows.len() as u32);
        let expand = Expand {
            z: Binding::Whole(&z),
            parts: self.parts as u32,
            partials_in: Binding::Whole(&partials_in),
            mix_const: Binding::Whole(&mix_const),
        };
        let buffers = Buffers {
            step: Binding::Whole(&step),
            streams: Binding::Whole(&streams),
            kv: Binding::Whole(&kv),
            qk: Binding::Whole(&qk),
            tokens: Binding::Whole(&tokens),
        };
        let expand = expands.then_some(expand);
        let gate = EngramGate::new(gpu, &self.dims, Some(IMAGE), Some(PAD), expand, &buffers).unwrap();
        let mut recording = Recording::new();
        gate.record(&mut recording, rows.len() as u32 + 1);
        gpu.submit(recording).unwrap();
        unpadded(gpu, &streams, h)
    }

    fn expected(&self, expands: bool) -> Vec<f32> {
        let h = self.dims.hidden as usize;
        let row = |t: usize| {
            let mut streams = self.streams[t].clone();
            if expands {
                let mix = mix(&self.before[t], &self.previous, shape(&self.dims));
                streams = expand(&streams, &sum_parts(&self.z[t], h), &mix);
            }
            if ![IMAGE, PAD].contains(&self.tokens[t]) {
                gate(&mut streams, &self.kv[t], &self.qk, h, self.dims.norm_eps);
            }
            streams
        };
        (0..self.streams.len()).flat_map(row).collect()
    }

    fn check(&self, gpu: &Gpu, expands: bool) -> f32 {
        assert_close(&self.run(gpu, expands, 0..self.streams.len()), &self.expected(expands), TOLERANCE)
    }
}

#[test]
fn engram_gate_matches_its_twin() {
    let Some(gpu) = gpu() else { return };
    for (n, h, rows, parts) in [(4, 66, 5, 7), (3, 128, 2, 1), (1, 5, 3, 2), (8, 300, 2, 3)] {
        for expands in [true, false] {
            Case::random(dims(n, h), rows, parts, (n * h) as u64).check(gpu, expands);
        }
    }
}

#[test]
fn engram_gate_at_the_released_width() {
    let Some(gpu) = gpu() else { return };
    let mut case = Case::random(dims(4, 5120), 2, 7, 5);
    case.tokens = vec![50, 60];
    println!("engram_gate at h = 5120, n = 4: largest error {:e}", case.check(gpu, true));
}

#[test]
fn engram_gate_rows_do_not_depend_on_each_other() {
    let Some(gpu) = gpu() else { return };
    let case = Case::random(dims(4, 70), 6, 2, 8);
    let alone: Vec<f32> = (0..6).flat_map(|t| case.run(gpu, true, t..t + 1)).collect();
    assert_same_bits(&case.run(gpu, true, 0..6), &alone);
}

/// The floor under the root, 1e-3, keeps a gate off one half; its sign is the score's, also of a negative zero.
#[test]
fn engram_gate_of_tiny_scores() {
    let Some(gpu) = gpu() else { return };
    let mut case = Case::random(dims(2, 16), 3, 1, 1);
    case.tokens = vec![10, 11, 12];
    // Keys of zeros make the score 0, tiny ones of either sign make it tiny.
    case.kv[0][..32].fill(0.0);
    case.qk.fill(1e-9);
    case.qk[16..].fill(-1e-9);
    case.check(gpu, false);
}

#[test]
fn engram_gate_leaves_images_and_padding_alone() {
    let Some(gpu) = gpu() else { return };
    let mut case = Case::random(dims(4, 20), 3, 1, 2);
    case.tokens = vec![IMAGE, 9, PAD];
    let got = case.run(gpu, false, 0..3);
    assert_same_bits(&got[..80], &case.streams[0]);
    assert_same_bits(&got[160..], &case.streams[2]);
    assert!(got[80..160].iter().zip(&case.streams[1]).all(|(a, b)| a != b));
}

proptest! {
    #![proptest_config(config())]
    #[test]
    fn engram_gate_of_any_shape(
        n in 1usize..=8, h in 1usize..300, rows in 1usize..5, parts in 1usize..8, expands: bool, seed in any::<u64>(),
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let case = Case::random(dims(n, h), rows, parts, seed);
        case.check(gpu, expands);
        let plain = plain().expect("the same adapter");
        assert_same_bits(&case.run(gpu, expands, 0..rows), &case.run(plain, expands, 0..rows));
    }
}
