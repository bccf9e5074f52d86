//! Kernels `experts_up` and `experts_down` against dequantised weights in f64, with the tiles that `group_rows` makes.

use super::common::{assert_same_bits, config, gpu, plain, poisoned, read, upload, Random, POISON};
use super::linear::{product, step, strided, Weight, FORMATS};
use cedra::checkpoint::Format;
use cedra::gpu::{Buffer, DeviceOptions, FeatureUse, Gpu, MemoryKind, Recording};
use cedra::kernels::experts_down::{ExpertsDown, ExpertsDownIo};
use cedra::kernels::experts_up::{ExpertPack, ExpertsUp, ExpertsUpIo};
use cedra::kernels::group_rows::{tiles_words, GroupRows};
use cedra::model::pack::{ExpertPlan, Loader};
use cedra::reference::group_rows::group;
use proptest::prelude::*;

const EPS: f32 = 1e-20;

/// Experts of a layer; the last is the shared one.
struct Experts {
    h: usize,
    hidden: usize,
    formats: [Format; 2],
    norm: Vec<f32>,
    limit: f32,
    /// `[w1, w3, w2]`
    experts: Vec<[Weight; 3]>,
}

impl Experts {
    fn random(random: &mut Random, h: usize, hidden: usize, experts: usize, formats: [Format; 2]) -> Self {
        let expert = |random: &mut Random, format| {
            [(hidden, h), (hidden, h), (h, hidden)].map(|(rows, k)| Weight::random(random, format, rows, k))
        };
        let mut all: Vec<_> = (0..experts).map(|_| expert(random, formats[0])).collect();
        all.push(expert(random, formats[1]));
        Self { h, hidden, formats, norm: random.normals(h, 1.0), limit: 10.0, experts: all }
    }
    fn routed(&self) -> usize {
        self.experts.len() - 1
    }
    /// The packs of w1, w3 and of w2.
    fn packs(&self, gpu: &Gpu, limits: [u64; 2]) -> [ExpertPack; 2] {
        let shapes = [(self.hidden, self.h), (self.h, self.hidden)];
        [0, 1].map(|down| {
            let matrices = 2 - down;
            let plan = ExpertPlan::new(matrices, shapes[down], self.routed(), self.formats, limits[down]).unwrap();
            let mut loader = Loader::new(gpu);
            let load = plan.load(&mut loader, "experts", |e, m| Ok(self.experts[e][2 * down + m].tensor()));
            let pack = pollster::block_on(load).unwrap();
            let held: u64 = pack.slices.iter().map(|slice| Buffer::allocated(slice.weights.bytes())).sum();
            assert_eq!(held, plan.bytes(), "the plan is exact");
            assert!(pack.slices.iter().all(|slice| slice.weights.bytes() <= limits[down]));
            pack
        })
    }
}

/// u (T · slots) and z (T · slots) by pair id; unwritten places must be as they were.
fn run(
    gpu: &Gpu,
    experts: &Experts,
    [up, down]: &[ExpertPack; 2],
    x: &[Vec<f32>],
    ids: &[u32],
    gains: &[f32],
) -> [Vec<Vec<f32>>; 2] {
    let rows = x.len() as u32;
    let slots = ids.len() as u32 / rows;
    let count = experts.routed() as u32 + 1;
    let (x_stride, u_stride, z_stride) =
        (experts.h.next_multiple_of(4) + 4, experts.hidden.next_multiple_of(4) + 4, experts.h.next_multiple_of(4) + 4);
    let scratch = |name, words| poisoned(gpu, MemoryKind::Scratch, name, words);
    let pairs = scratch("pairs", ids.len());
    let tiles = scratch("tiles", tiles_words(rows, slots, count) as usize);
    let u = scratch("u", ids.len() * u_stride);
    let z = scratch("z", ids.len() * z_stride);
    let step = step(gpu, rows);
    let norm = strided(std::slice::from_ref(&experts.norm), experts.h.next_multiple_of(4), 0);
    let up_kernel = ExpertsUp::new(
        gpu,
        up,
        &ExpertsUpIo {
            step: &step,
            norm: &upload(gpu, MemoryKind::Weights, "norm", &norm),
            eps: EPS,
            x: &upload(gpu, MemoryKind::Scratch, "x", &strided(x, x_stride, 0)),
            x_stride: x_stride as u32,
            gains: &upload(gpu, MemoryKind::Scratch, "gains", gains),
            pairs: &pairs,
            tiles: &tiles,
            u: &u,
            u_stride: u_stride as u32,
            slots,
            limit: experts.limit,
        },
    )
    .unwrap();
    let down_kernel = ExpertsDown::new(
        gpu,
        down,
        &ExpertsDownIo {
            step: &step,
            u: &u,
            u_stride: u_stride as u32,
            pairs: &pairs,
            tiles: &tiles,
            z: &z,
            z_stride: z_stride as u32,
            slots,
        },
    )
    .unwrap();
    let mut recording = Recording::new();
    if rows == 1 {
        // What `route` writes.
        let groups = group(ids, count as usize, 1);
        gpu.upload(&pairs, 0, bytemuck::cast_slice(&groups.pairs));
        gpu.upload(&tiles, 0, bytemuck::cast_slice(&groups.tiles));
    } else {
        let ids = upload(gpu, MemoryKind::Scratch, "ids", ids);
        GroupRows::new(gpu, &step, &ids, &pairs, &tiles, slots, count).unwrap().record(&mut recording, rows);
    }
    up_kernel.record(&mut recording, rows);
    down_kernel.record(&mut recording, rows);
    gpu.submit(recording).unwrap();
    [(&u, u_stride, experts.hidden), (&z, z_stride, experts.h)].map(|(buffer, stride, width)| {
        let row = |row: &[f32]| {
            assert!(row[width..].iter().all(|v| v.to_bits() == POISON), "written outside its place");
            row[..width].to_vec()
        };
        read::<f32>(gpu, buffer).chunks(stride).map(row).collect()
    })
}

/// Fails when u is off by more than its inputs' rounding allows, or z by more than 1e-5 of the sum of magnitudes.
fn check(experts: &Experts, x: &[Vec<f32>], ids: &[u32], gains: &[f32], [u, z]: &[Vec<Vec<f32>>; 2]) {
    const TOLERANCE: f64 = 1e-5;
    let slots = ids.len() / x.len();
    let limit = experts.limit as f64;
    let f32s: Vec<[Vec<f32>; 3]> = experts.experts.iter().map(|e| [e[0].f32(), e[1].f32(), e[2].f32()]).collect();
    for (pair, &id) in ids.iter().enumerate() {
        let x = &x[pair / slots];
        let mean = x.iter().map(|&v| (v as f64).powi(2)).sum::<f64>() / x.len() as f64;
        let factor = 1.0 / (mean + EPS as f64).sqrt();
        let normed: Vec<f32> = x.iter().zip(&experts.norm).map(|(x, n)| x * n).collect();
        let [w1, w3, w2] = &f32s[id as usize];
        for (i, &found) in u[pair].iter().enumerate() {
            let row = i * x.len()..(i + 1) * x.len();
            let (gate, gate_magnitude) = product(&w1[row.clone()], &normed);
            let (up, up_magnitude) = product(&w3[row], &normed);
            let (a, b) = ((gate * factor).min(limit), (up * factor).clamp(-limit, limit));
            let (silu, gain) = (a / (1.0 + (-a).exp()), gains[pair] as f64);
            // The slope of silu is at most 1.1.
            let slack = 1.1 * gate_magnitude * factor * b.abs() + up_magnitude * factor * silu.abs();
            let error = (found as f64 - silu * b * gain).abs();
            let allowed = TOLERANCE * (slack + (silu * b).abs()) * gain + 1e-30;
            assert!(error <= allowed, "pair {pair}, u[{i}] = {found}: error {error:e}, allowed {allowed:e}");
        }
        for (i, &found) in z[pair].iter().enumerate() {
            let (sum, magnitude) = product(&w2[i * experts.hidden..][..experts.hidden], &u[pair]);
            let error = (found as f64 - sum).abs();
            assert!(error <= TOLERANCE * magnitude + 1e-30, "pair {pair}, z[{i}] = {found}: error {error:e}");
        }
    }
}

/// Distinct experts for each row, the shared one last, and their weights.
fn routing(random: &mut Random, rows: usize, k: usize, experts: usize) -> (Vec<u32>, Vec<f32>) {
    let (mut ids, mut gains) = (Vec::new(), Vec::new());
    for _ in 0..rows {
        let mut all: Vec<u32> = (0..experts as u32).collect();
        for slot in 0..k {
            all.swap(slot, slot + random.below((experts - slot) as u32) as usize);
            ids.push(all[slot]);
            gains.push(random.uniform(0.0, 1.5));
        }
        ids.push(experts as u32);
        gains.push(1.0);
    }
    (ids, gains)
}

proptest! {
    #![proptest_config(config())]

    /// Any shape and formats: right, the same bits for any number of rows in flight, whole or in slices.
    #[test]
    fn equal_f64_and_themselves(
        seed in any::<u64>(),
        (half_h, half_hidden) in (1usize..60, 1usize..40),
        experts in 1usize..9,
        k in 1usize..5,
        rows in prop_oneof![1usize..7, Just(33usize)],
        (routed, shared) in (0usize..6, 0usize..6),
        small_limit in any::<bool>(),
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let mut random = Random::new(seed);
        let (h, hidden, k) = (2 * half_h, 2 * half_hidden, k.min(experts));
        let formats = [FORMATS[routed], FORMATS[shared]];
        let mut layer = Experts::random(&mut random, h, hidden, experts, formats);
        if small_limit {
            layer.limit = 0.5;
        }
        let x: Vec<Vec<f32>> = (0..rows).map(|_| random.normals(h, 2.0)).collect();
        let (ids, gains) = routing(&mut random, rows, k, experts);

        let whole = layer.packs(gpu, [1 << 27; 2]);
        let all = run(gpu, &layer, &whole, &x, &ids, &gains);
        check(&layer, &x, &ids, &gains, &all);
        let (t, slots) = (random.below(rows as u32) as usize, k + 1);
        let pairs = t * slots..(t + 1) * slots;
        let alone = run(gpu, &layer, &whole, &x[t..t + 1], &ids[pairs.clone()], &gains[pairs.clone()]);
        for (alone, all) in alone.iter().zip(&all) {
            alone.iter().zip(&all[pairs.clone()]).for_each(|(a, b)| assert_same_bits(a, b));
        }
        let plain = plain().expect("the same adapter");
        let on_plain = layer.packs(plain, [1 << 27; 2]);
        let again = run(plain, &layer, &on_plain, &x[t..t + 1], &ids[pairs.clone()], &gains[pairs]);
        for (again, alone) in again.iter().zip(&alone) {
            again.iter().zip(alone).for_each(|(a, b)| assert_same_bits(a, b));
        }
        // As few experts a slice as the largest of them allows.
        let limits = [0, 1].map(|i| whole[i].expert_bytes.into_iter().max().unwrap() + 16);
        let sliced = layer.packs(gpu, limits);
        let again = run(gpu, &layer, &sliced, &x, &ids, &gains);
        for (again, all) in again.iter().zip(&all) {
            again.iter().zip(all).for_each(|(a, b)| assert_same_bits(a, b));
        }
    }
}

/// 384 experts of which 6 are chosen, FP4 with an FP8 shared expert, h = 5120 and a few hidden channels; decode, a
/// draft's 6 rows. The weights read in decode are exactly those of the chosen experts. On a device of its own, with
/// WebGPU's default limits: its counters are this test's alone.
#[test]
fn real_widths() {
    if gpu().is_none() {
        return;
    }
    let options = DeviceOptions { software: true, features: FeatureUse::NONE, default_limits: true };
    let gpu = &Gpu::new_blocking(&options).unwrap();
    let mut random = Random::new(384);
    let layer = Experts::random(&mut random, 5120, 6, 384, [Format::Fp4, Format::Fp8Block]);
    let packs = layer.packs(gpu, [1 << 22, 1 << 27]);
    assert!(packs[0].slices.len() > 1);
    for rows in [1, 6] {
        let x: Vec<Vec<f32>> = (0..rows).map(|_| random.normals(5120, 2.0)).collect();
        let (ids, gains) = routing(&mut random, rows, 6, 384);
        let before = gpu.counters().weight_bytes;
        let found = run(gpu, &layer, &packs, &x, &ids, &gains);
        let read = gpu.counters().weight_bytes - before;
        if rows == 1 {
            let expected: u64 = packs.iter().map(|pack| 6 * pack.expert_bytes[0] + pack.expert_bytes[1]).sum();
            assert_eq!(read, expected);
        }
        check(&layer, &x, &ids, &gains, &found);
    }
}

/// NaN in x reaches u and z of its own row, through the clamps, and of no other row.
#[test]
fn nan_is_passed_on() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random::new(3);
    let layer = Experts::random(&mut random, 40, 8, 3, [Format::Bf16, Format::Bf16]);
    let mut x: Vec<Vec<f32>> = (0..3).map(|_| random.normals(40, 1.0)).collect();
    x[1][7] = f32::NAN;
    let (ids, gains) = routing(&mut random, 3, 2, 3);
    for found in run(gpu, &layer, &layer.packs(gpu, [1 << 27; 2]), &x, &ids, &gains) {
        for (pair, row) in found.iter().enumerate() {
            let nan = row.iter().all(|v| v.is_nan());
            let finite = row.iter().all(|v| v.is_finite());
            assert!(if pair / 3 == 1 { nan } else { finite }, "pair {pair}: {row:?}");
        }
    }
}

/// An expert that no binding holds is refused with numbers.
#[test]
fn too_large_an_expert_is_refused() {
    let error = ExpertPlan::new(2, (64, 64), 4, [Format::F32; 2], 1 << 14).unwrap_err();
    assert_eq!(error.to_string(), "an expert of 2 matrices 64 x 64 needs 32768 bytes, the device allows 16384");
}
