//! Kernel `linear`, and the weight packs that it reads, against dequantised weights in f64.

use super::common::{assert_same_bits, config, gpu, plain, poisoned, read, upload, Random, POISON};
use cedra::checkpoint::{Format, Tensor};
use cedra::gpu::{Buffer, Gpu, MemoryKind, Recording};
use cedra::kernels::linear::{Linear, LinearIo, Pack};
use cedra::kernels::Step;
use cedra::model::pack::{LinearPlan, Loader, MatrixSpec};
use proptest::prelude::*;

pub const FORMATS: [Format; 6] =
    [Format::F32, Format::Bf16, Format::F16, Format::Fp8Block, Format::Fp8Row, Format::Fp4];
const EPS: f32 = 1e-20;

/// A random matrix as a checkpoint has it.
pub struct Weight {
    pub shape: [usize; 2],
    pub format: Format,
    pub data: Vec<u8>,
    pub scales: Option<(Vec<u8>, [usize; 2])>,
}

impl Weight {
    pub fn random(random: &mut Random, format: Format, rows: usize, k: usize) -> Self {
        let data = match format {
            Format::F32 => (0..rows * k).flat_map(|_| random.normal().to_le_bytes()).collect(),
            Format::Bf16 => {
                (0..rows * k).flat_map(|_| ((random.normal().to_bits() >> 16) as u16).to_le_bytes()).collect()
            }
            Format::F16 => (0..rows * k).flat_map(|_| half::f16::from_f32(random.normal()).to_le_bytes()).collect(),
            Format::Fp8Block | Format::Fp8Row => random.bytes(rows * k).into_iter().map(finite).collect(),
            Format::Fp4 => random.bytes(rows * k.div_ceil(2)),
        };
        let scale_rows = match format {
            Format::Fp8Block => Some(rows.div_ceil(32)),
            Format::Fp8Row | Format::Fp4 => Some(rows),
            _ => None,
        };
        let scales = scale_rows.map(|rows| {
            let shape = [rows, k.div_ceil(32)];
            ((0..shape[0] * shape[1]).map(|_| 118 + random.below(8) as u8).collect(), shape)
        });
        Self { shape: [rows, k], format, data, scales }
    }
    pub fn tensor(&self) -> Tensor<'_> {
        Tensor {
            name: "random",
            shape: &self.shape,
            format: self.format,
            data: &self.data,
            scales: self.scales.as_ref().map(|(bytes, shape)| (&bytes[..], *shape)),
        }
    }
    pub fn f32(&self) -> Vec<f32> {
        self.tensor().to_f32()
    }
}

/// A code that is not NaN.
fn finite(code: u8) -> u8 {
    if code & 0x7f == 0x7f {
        code ^ 1
    } else {
        code
    }
}

/// `W x` in f64, and the sum of the products' magnitudes: (product, magnitude).
pub fn product(row: &[f32], x: &[f32]) -> (f64, f64) {
    row.iter().zip(x).fold((0.0, 0.0), |(sum, magnitude), (&w, &x)| {
        let p = w as f64 * x as f64;
        (sum + p, magnitude + p.abs())
    })
}

pub fn step(gpu: &Gpu, rows: u32) -> Buffer {
    gpu.uniform("step", &Step { rows, ..Step::default() }).unwrap()
}

/// Rows at a stride, poison between them.
pub fn strided(rows: &[Vec<f32>], stride: usize, offset: usize) -> Vec<u32> {
    let mut out = vec![POISON; rows.len() * stride];
    for (t, row) in rows.iter().enumerate() {
        for (i, v) in row.iter().enumerate() {
            out[t * stride + offset + i] = v.to_bits();
        }
    }
    out
}

fn pack(gpu: &Gpu, specs: &[MatrixSpec], weights: &[Weight], limit: u64) -> Pack {
    let plan = LinearPlan::new(specs, limit).unwrap();
    let pack = pollster::block_on(plan.load(&mut Loader::new(gpu), "pack", |i| Ok(weights[i].tensor()))).unwrap();
    let held: u64 = pack.slices.iter().map(|slice| Buffer::allocated(slice.weights.bytes())).sum();
    assert_eq!(held, plan.bytes(), "the plan is exact");
    assert!(pack.slices.iter().all(|slice| slice.weights.bytes() <= limit));
    pack
}

/// What a run reads: rows of x, and how they are laid out.
struct Case<'a> {
    x: &'a [Vec<f32>],
    x_offset: usize,
    norm: Option<&'a [f32]>,
    outputs: usize,
    last_row: bool,
}

/// y (rows, outputs); what lies beyond the outputs must be as it was.
fn run(gpu: &Gpu, pack: &Pack, case: &Case<'_>) -> Vec<Vec<f32>> {
    let rows = case.x.len();
    let (x_stride, y_stride) = ((case.x[0].len() + case.x_offset).next_multiple_of(4) + 4, case.outputs + 3);
    let x = upload(gpu, MemoryKind::Scratch, "x", &strided(case.x, x_stride, case.x_offset));
    let norm = case.norm.map(|norm| {
        let padded = strided(&[norm.to_vec()], norm.len().next_multiple_of(4), 0);
        upload(gpu, MemoryKind::Weights, "norm", &padded)
    });
    let y = poisoned(gpu, MemoryKind::Scratch, "y", rows * y_stride);
    let io = LinearIo {
        step: &step(gpu, rows as u32),
        x: &x,
        x_stride: x_stride as u32,
        x_offset: case.x_offset as u32,
        norm: norm.as_ref().map(|norm| (norm, EPS)),
        y: &y,
        y_stride: y_stride as u32,
        y_offset: 1,
        last_row: case.last_row,
    };
    let linear = Linear::new(gpu, pack, &io).unwrap();
    let mut recording = Recording::new();
    linear.record(&mut recording, rows as u32);
    gpu.submit(recording).unwrap();
    let y: Vec<f32> = read(gpu, &y);
    let written = if case.last_row { 1 } else { rows };
    y.chunks(y_stride).enumerate().for_each(|(t, row)| {
        let outside = if t < written { [&row[..1], &row[1 + case.outputs..]].concat() } else { row.to_vec() };
        assert!(outside.iter().all(|v| v.to_bits() == POISON), "row {t} was written outside its place");
    });
    y.chunks(y_stride).take(written).map(|row| row[1..1 + case.outputs].to_vec()).collect()
}

/// The largest error against f64, relative to the sum of magnitudes.
fn error(y: &[f32], weight: &[f32], x: &[f32], norm: Option<&[f32]>) -> f64 {
    let k = x.len();
    let factor = norm.map_or(1.0, |_| {
        let mean = x.iter().map(|&v| (v as f64).powi(2)).sum::<f64>() / k as f64;
        1.0 / (mean + EPS as f64).sqrt()
    });
    let normed: Vec<f32> = match norm {
        Some(norm) => x.iter().zip(norm).map(|(x, n)| x * n).collect(),
        None => x.to_vec(),
    };
    let errors = y.iter().zip(weight.chunks(k)).map(|(&y, row)| {
        let (sum, magnitude) = product(row, &normed);
        assert!(y.is_finite());
        (y as f64 - sum * factor).abs() / (magnitude * factor).max(f64::MIN_POSITIVE)
    });
    errors.fold(0.0, f64::max)
}

proptest! {
    #![proptest_config(config())]

    /// Several matrices of mixed formats, any shape: right, the same bits for any number of rows in flight, whole or
    /// in slices, and nothing unwritten is read.
    #[test]
    fn equals_f64_and_itself(
        seed in any::<u64>(),
        half_k in 1usize..140,
        rows in 1usize..12,
        shapes in prop::collection::vec((0usize..6, 1usize..75), 1..6),
        normed in any::<bool>(),
        x_offset in 0usize..3,
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let (mut random, k) = (Random::new(seed), 2 * half_k);
        let weights: Vec<Weight> =
            shapes.iter().map(|&(format, rows)| Weight::random(&mut random, FORMATS[format], rows, k)).collect();
        let mut outputs = 0;
        let specs: Vec<MatrixSpec> = weights.iter().map(|weight| {
            let spec = MatrixSpec::new(&weight.tensor(), outputs);
            outputs += weight.shape[0];
            spec
        }).collect();
        let x: Vec<Vec<f32>> = (0..rows).map(|_| random.normals(k, 2.0)).collect();
        let norm = normed.then(|| random.normals(k, 1.0));
        let case = Case { x: &x, x_offset: 4 * x_offset, norm: norm.as_deref(), outputs, last_row: false };

        let whole = pack(gpu, &specs, &weights, 1 << 27);
        let y = run(gpu, &whole, &case);
        for (spec, weight) in specs.iter().zip(&weights) {
            let w = weight.f32();
            for (x, y) in x.iter().zip(&y) {
                let error = error(&y[spec.out..spec.out + spec.rows], &w, x, norm.as_deref());
                prop_assert!(error < 1e-5, "{:?}: {error:e}", spec.format);
            }
        }
        let row = random.below(rows as u32) as usize;
        let alone = run(gpu, &whole, &Case { x: &x[row..row + 1], ..case });
        assert_same_bits(&alone[0], &y[row]);
        let plain = plain().expect("the same adapter");
        let on_plain = pack(plain, &specs, &weights, 1 << 27);
        assert_same_bits(&run(plain, &on_plain, &Case { x: &x[row..row + 1], ..case })[0], &alone[0]);
        run(plain, &on_plain, &case).iter().zip(&y).for_each(|(a, b)| assert_same_bits(a, b));
        let newest = run(gpu, &whole, &Case { last_row: true, ..case });
        assert_same_bits(&newest[0], &y[rows - 1]);
        // 32 rows of F32 take 128 bytes a channel.
        let sliced = pack(gpu, &specs, &weights, 128 * k.next_multiple_of(32) as u64 + 16);
        for (a, b) in run(gpu, &sliced, &case).iter().zip(&y) {
            assert_same_bits(a, b);
        }
    }

    /// Groups of rows that read different channels, at sizes where a tile of four outputs fits a group and where not.
    #[test]
    fn groups_read_their_channels(
        seed in any::<u64>(),
        format in 0usize..6,
        half_k in 1usize..40,
        groups in 1usize..5,
        group_rows in 1usize..40,
        rows in 1usize..6,
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let (mut random, k) = (Random::new(seed), 2 * half_k);
        let weight = Weight::random(&mut random, FORMATS[format], groups * group_rows, k);
        let stride = k.next_multiple_of(4);
        let spec = MatrixSpec::new(&weight.tensor(), 0).grouped(group_rows, stride);
        let x: Vec<Vec<f32>> = (0..rows).map(|_| random.normals(stride * groups, 1.0)).collect();
        let mut poisoned = x.clone();
        for row in &mut poisoned {
            row.chunks_mut(stride).for_each(|part| part[k..].fill(f32::NAN));
        }
        let case = Case { x: &poisoned, x_offset: 0, norm: None, outputs: groups * group_rows, last_row: false };
        let weights = [weight];
        let y = run(gpu, &pack(gpu, &[spec], &weights, 1 << 27), &case);
        let w = weights[0].f32();
        for (x, y) in x.iter().zip(&y) {
            for g in 0..groups {
                let (y, w) = (&y[g * group_rows..][..group_rows], &w[g * group_rows * k..][..group_rows * k]);
                let error = error(y, w, &x[g * stride..][..k], None);
                prop_assert!(error < 1e-5, "group {g}: {error:e}");
            }
        }
        let sliced = pack(gpu, &[spec], &weights, 128 * k.next_multiple_of(32) as u64);
        for (a, b) in run(gpu, &sliced, &case).iter().zip(&y) {
            assert_same_bits(a, b);
        }
    }
}

/// Every code of every packed format, and every scale, decodes to what the host makes of it.
#[test]
fn codes_decode_exactly() {
    let Some(gpu) = gpu() else { return };
    let check = |weight: Weight| {
        let expected = weight.f32();
        let (rows, format) = (weight.shape[0], weight.format);
        let weights = [weight];
        let pack = pack(gpu, &[MatrixSpec::new(&weights[0].tensor(), 0)], &weights, 1 << 27);
        let mut x = vec![0.0; weights[0].shape[1]];
        x[0] = 1.0;
        let case = Case { x: &[x], x_offset: 0, norm: None, outputs: rows, last_row: false };
        let y = run(gpu, &pack, &case);
        for (r, (y, w)) in y[0].iter().zip(expected.chunks(weights[0].shape[1])).enumerate() {
            assert!(y == &w[0] || (y.is_nan() && w[0].is_nan()), "{format:?}, row {r}: {y:e} against {:e}", w[0]);
        }
    };
    let halves = (0..=u16::MAX).filter(|bits| bits & 0x7c00 != 0x7c00);
    let data: Vec<u8> = halves.flat_map(u16::to_le_bytes).collect();
    check(Weight { shape: [data.len() / 2, 1], format: Format::F16, data, scales: None });
    // BF16 down to the smallest normal number: a device may flush what is below.
    let brains = (0..=u16::MAX).filter(|bits| (0x80..0x7f80).contains(&(bits & 0x7fff)));
    let data: Vec<u8> = brains.flat_map(u16::to_le_bytes).collect();
    check(Weight { shape: [data.len() / 2, 1], format: Format::Bf16, data, scales: None });
    let data: Vec<u8> = (0..=255u8).map(finite).collect();
    let scales = Some((vec![127; 256], [256, 1]));
    check(Weight { shape: [256, 1], format: Format::Fp8Row, data, scales });
    let data: Vec<u8> = (0..16).collect();
    check(Weight { shape: [16, 2], format: Format::Fp4, data, scales: Some((vec![127; 16], [16, 1])) });
    // 0x7e is 448, so that a scale of 2^-127 leaves a normal number; 2^119 is the largest that does not overflow. Scale
    // 255, NaN, never gets here: a checkpoint that holds one is refused before its bytes are packed.
    let scales: Vec<u8> = (0..=246).collect();
    let rows = scales.len();
    check(Weight {
        shape: [rows, 1],
        format: Format::Fp8Row,
        data: vec![0x7e; rows],
        scales: Some((scales, [rows, 1])),
    });
}

/// Widths of the released model: all formats at once, several sweeps of the lanes.
#[test]
fn real_widths() {
    let Some(gpu) = gpu() else { return };
    let mut random = Random::new(5120);
    for k in [1280, 5120] {
        let weights: Vec<Weight> = FORMATS.iter().map(|&f| Weight::random(&mut random, f, 41, k)).collect();
        let specs: Vec<_> = weights.iter().enumerate().map(|(i, w)| MatrixSpec::new(&w.tensor(), 44 * i)).collect();
        let pack = pack(gpu, &specs, &weights, 1 << 27);
        let x: Vec<Vec<f32>> = (0..6).map(|_| random.normals(k, 3.0)).collect();
        let norm = random.normals(k, 1.0);
        // Three floats of padding between the matrices stay as they are, and are left out here.
        let y_stride = 44 * 6;
        let xs = upload(gpu, MemoryKind::Scratch, "x", &strided(&x, k, 0));
        let norms = upload(gpu, MemoryKind::Weights, "norm", &norm);
        let ys = |rows: &[Vec<f32>], xs: &Buffer| {
            let y = poisoned(gpu, MemoryKind::Scratch, "y", rows.len() * y_stride);
            let io = LinearIo {
                step: &step(gpu, rows.len() as u32),
                x: xs,
                x_stride: k as u32,
                x_offset: 0,
                norm: Some((&norms, EPS)),
                y: &y,
                y_stride: y_stride as u32,
                y_offset: 0,
                last_row: false,
            };
            let linear = Linear::new(gpu, &pack, &io).unwrap();
            let before = gpu.counters().weight_bytes;
            let mut recording = Recording::new();
            linear.record(&mut recording, rows.len() as u32);
            gpu.submit(recording).unwrap();
            assert!(gpu.counters().weight_bytes - before >= pack.slices[0].weights.bytes());
            read::<f32>(gpu, &y)
        };
        let y = ys(&x, &xs);
        let mut worst = 0f64;
        for (spec, weight) in specs.iter().zip(&weights) {
            let w = weight.f32();
            for (t, x) in x.iter().enumerate() {
                worst = worst.max(error(&y[t * y_stride + spec.out..][..41], &w, x, Some(&norm)));
            }
        }
        println!("k = {k}: error {worst:e} of the sum of magnitudes");
        assert!(worst < 1e-5);
        for (t, row) in x.iter().enumerate() {
            let alone = ys(&x[t..t + 1], &upload(gpu, MemoryKind::Scratch, "x", row));
            assert_same_bits(&alone[..41], &y[t * y_stride..][..41]);
            assert_same_bits(&alone[220..261], &y[t * y_stride + 220..][..41]);
        }
    }
}

/// Nothing in flight: nothing is written. An all-zero row stays zero under the norm.
#[test]
fn no_rows_and_zero_rows() {
    let Some(gpu) = gpu() else { return };
    let weights = [Weight::random(&mut Random::new(1), Format::Fp4, 9, 44)];
    let pack = pack(gpu, &[MatrixSpec::new(&weights[0].tensor(), 0)], &weights, 1 << 27);
    let norm = vec![1.0; 44];
    let case = Case { x: &[vec![0.0; 44]], x_offset: 0, norm: Some(&norm), outputs: 9, last_row: false };
    assert_eq!(run(gpu, &pack, &case), [vec![0.0; 9]]);

    let x = upload(gpu, MemoryKind::Scratch, "x", &[1f32; 44]);
    let y = poisoned(gpu, MemoryKind::Scratch, "y", 9);
    for last_row in [false, true] {
        let io = LinearIo {
            step: &step(gpu, 0),
            x: &x,
            x_stride: 44,
            x_offset: 0,
            norm: None,
            y: &y,
            y_stride: 9,
            y_offset: 0,
            last_row,
        };
        let mut recording = Recording::new();
        Linear::new(gpu, &pack, &io).unwrap().record(&mut recording, 4);
        gpu.submit(recording).unwrap();
    }
    assert_eq!(read::<u32>(gpu, &y), [POISON; 9]);
}

/// A matrix too large for a slice of 32 rows, and a NaN weight, are refused with numbers.
#[test]
fn refusals_say_why() {
    let spec = MatrixSpec { format: Format::F32, rows: 64, k: 64, out: 0, group_rows: 0, group_stride: 0 };
    let error = LinearPlan::new(&[spec], 4096).unwrap_err();
    assert_eq!(error.to_string(), "32 rows of 64 channels in F32 needs 8192 bytes, the device allows 4096");

    let Some(gpu) = gpu() else { return };
    let mut weight = Weight::random(&mut Random::new(2), Format::Fp8Block, 33, 40);
    weight.data[32 * 40 + 7] = 0xff;
    let plan = LinearPlan::new(&[MatrixSpec::new(&weight.tensor(), 0)], 1 << 27).unwrap();
    let loaded = pollster::block_on(plan.load(&mut Loader::new(gpu), "pack", |_| Ok(weight.tensor())));
    assert_eq!(loaded.unwrap_err().to_string(), "tensor `random`: found NaN at [32, 7], allowed: finite weights");
}
