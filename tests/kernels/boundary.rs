//! Kernel `boundary` against its CPU twin.

use super::common::{assert_close, assert_same_bits, config, gpu, plain, poisoned, read, upload, Random, POISON};
use super::linear::{step, strided};
use cedra::gpu::{Binding, Buffer, Gpu, MemoryKind, Recording};
use cedra::kernels::boundary::{Boundary, Buffers, Dims, Place};
use cedra::reference::boundary::{collapse, expand, finish, first_pre, partials, sum_parts, MixShape, MixWeights};
use cedra::reference::math::Matrix;
use proptest::prelude::*;

pub const SLICE: usize = 64;
const TOLERANCE: f32 = 2e-5;

pub fn dims(streams: usize, hidden: usize) -> Dims {
    Dims { hidden: hidden as u32, streams: streams as u32, sinkhorn_iterations: 20, norm_eps: 1e-20, eps: 1e-6 }
}

pub fn shape(dims: &Dims) -> MixShape {
    let Dims { streams, sinkhorn_iterations, norm_eps, eps, .. } = *dims;
    MixShape { streams: streams as usize, sinkhorn_iters: sinkhorn_iterations as usize, rms_eps: norm_eps, hc_eps: eps }
}

pub fn random_mix(random: &mut Random, dims: &Dims) -> MixWeights {
    let (rows, width) = (dims.projections() as usize, (dims.streams * dims.hidden) as usize);
    MixWeights {
        projection: Matrix::new(rows, width, random.normals(rows * width, 0.05)),
        scale: (0..3).map(|_| random.uniform(0.5, 1.5)).collect(),
        base: random.normals(rows, 1.0),
    }
}

/// [scale, base] as the kernels read them.
pub fn mix_const(gpu: &Gpu, weights: &MixWeights) -> Buffer {
    upload(gpu, MemoryKind::Weights, "mix_const", &[&weights.scale[..], &weights.base].concat())
}

/// Partial sums of the mix of a row of streams, slice after slice.
pub fn row_partials(streams: &[f32], weights: &MixWeights, dims: &Dims) -> Vec<f32> {
    let h = dims.hidden as usize;
    let slice = |c: usize| partials(streams, &weights.projection, dims.streams as usize, c..(c + SLICE).min(h));
    (0..h).step_by(SLICE).flat_map(slice).collect()
}

/// Rows of vectors of h channels, each vector padded to h4 with poison.
pub fn padded(gpu: &Gpu, label: &str, rows: &[Vec<f32>], h: usize) -> Buffer {
    let vectors: Vec<Vec<f32>> = rows.iter().flat_map(|row| row.chunks(h).map(<[f32]>::to_vec)).collect();
    upload(gpu, MemoryKind::Scratch, label, &strided(&vectors, h.next_multiple_of(4), 0))
}

/// The vectors of [`padded`] without their padding, which must still be poison.
pub fn unpadded(gpu: &Gpu, buffer: &Buffer, h: usize) -> Vec<f32> {
    let words: Vec<f32> = read(gpu, buffer);
    words.chunks(h.next_multiple_of(4)).for_each(|vector| {
        assert!(vector[h..].iter().all(|v| v.to_bits() == POISON), "padding was written");
    });
    words.chunks(h.next_multiple_of(4)).flat_map(|vector| vector[..h].to_vec()).collect()
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum At {
    First,
    Between,
    AfterEngram,
    Last,
}

/// Rows before a boundary. The previous mix was of `before`, the streams of that time.
struct Case {
    dims: Dims,
    before: Vec<Vec<f32>>,
    streams: Vec<Vec<f32>>,
    z: Vec<Vec<f32>>,
    parts: usize,
    previous: MixWeights,
    next: MixWeights,
}

struct Output {
    streams: Vec<f32>,
    partials: Vec<f32>,
    x: Vec<f32>,
}

impl Case {
    fn random(dims: Dims, rows: usize, parts: usize, scale: f32, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let (n, h) = (dims.streams as usize, dims.hidden as usize);
        let mut of = |vectors: usize| (0..rows).map(|_| random.normals(vectors * h, scale)).collect();
        let (before, streams, z) = (of(n), of(n), of(parts));
        let (previous, next) = (random_mix(&mut random, &dims), random_mix(&mut random, &dims));
        Self { dims, before, streams, z, parts, previous, next }
    }

    fn row(&self, t: usize) -> Case {
        let one = |rows: &Vec<Vec<f32>>| vec![rows[t].clone()];
        let (before, streams, z) = (one(&self.before), one(&self.streams), one(&self.z));
        Case {
            dims: self.dims,
            before,
            streams,
            z,
            parts: self.parts,
            previous: self.previous.clone(),
            next: self.next.clone(),
        }
    }

    /// The kernel, with room for a few rows more than there are.
    fn run(&self, gpu: &Gpu, at: At) -> Output {
        let (rows, h) = (self.streams.len(), self.dims.hidden as usize);
        let words = self.dims.partials() as usize;
        let streams = padded(gpu, "streams", &self.streams, h);
        let before: Vec<f32> =
            self.before.iter().flat_map(|row| row_partials(row, &self.previous, &self.dims)).collect();
        let partials_in = match at {
            At::First => poisoned(gpu, MemoryKind::Scratch, "partials in", words * rows),
            _ => upload(gpu, MemoryKind::Scratch, "partials in", &before),
        };
        let z = match at {
            At::Between | At::Last => padded(gpu, "z", &self.z, h),
            At::First | At::AfterEngram => poisoned(gpu, MemoryKind::Scratch, "z", 4),
        };
        let partials_out = poisoned(gpu, MemoryKind::Scratch, "partials out", words * rows);
        let x = poisoned(gpu, MemoryKind::Scratch, "x", rows * h.next_multiple_of(4));
        let next = upload(gpu, MemoryKind::Weights, "mix_fn", &self.dims.pad_mix_fn(&self.next.projection.data));
        let previous = mix_const(gpu, &self.previous);
        let (mix_fn, mix_const) = (Binding::Whole(&next), Binding::Whole(&previous));
        let place = match at {
            At::First => Place::First { mix_fn },
            At::Between => Place::Between { mix_fn, mix_const },
            At::AfterEngram => Place::AfterEngram { mix_fn, mix_const },
            At::Last => Place::Last { mix_const },
        };
        let step = step(gpu, rows as u32);
        let buffers = Buffers {
            step: Binding::Whole(&step),
            z: Binding::Whole(&z),
            parts: self.parts as u32,
            streams: Binding::Whole(&streams),
            partials_in: Binding::Whole(&partials_in),
            partials_out: Binding::Whole(&partials_out),
            x: Binding::Whole(&x),
        };
        let boundary = Boundary::new(gpu, &self.dims, place, &buffers).unwrap();
        let mut recording = Recording::new();
        boundary.record(&mut recording, if rows == 1 { 1 } else { rows as u32 + 5 });
        gpu.submit(recording).unwrap();
        Output { streams: unpadded(gpu, &streams, h), partials: read(gpu, &partials_out), x: unpadded(gpu, &x, h) }
    }

    /// The twin.
    fn expected(&self, at: At) -> Output {
        let (n, h) = (self.dims.streams as usize, self.dims.hidden as usize);
        let mut out = Output { streams: Vec::new(), partials: Vec::new(), x: Vec::new() };
        for t in 0..self.streams.len() {
            let sums = partials(&self.before[t], &self.previous.projection, n, 0..h);
            let mix = finish(&sums, n * h, &self.previous, shape(&self.dims));
            let streams = match at {
                At::Between | At::Last => expand(&self.streams[t], &sum_parts(&self.z[t], h), &mix),
                At::First | At::AfterEngram => self.streams[t].clone(),
            };
            let pre = if at == At::First { first_pre(n) } else { mix.pre };
            out.x.extend(collapse(&streams, &pre));
            if at != At::Last {
                out.partials.extend(row_partials(&streams, &self.next, &self.dims));
            }
            out.streams.extend(streams);
        }
        out
    }

    fn check(&self, gpu: &Gpu, at: At) -> f32 {
        let (got, expected) = (self.run(gpu, at), self.expected(at));
        let mut worst = assert_close(&got.streams, &expected.streams, TOLERANCE);
        worst = worst.max(assert_close(&got.x, &expected.x, TOLERANCE));
        if at == At::Last {
            assert!(got.partials.iter().all(|v| v.to_bits() == POISON), "partials were written");
        } else {
            worst = worst.max(assert_close(&got.partials, &expected.partials, TOLERANCE));
        }
        if at == At::First {
            assert_same_bits(&got.x, &expected.x);
        }
        worst
    }

    /// Rows together and rows alone, in other variants, give the same bits.
    fn check_alone(&self, gpu: &Gpu, at: At) {
        let together = self.run(gpu, at);
        let rows = self.streams.len();
        for t in 0..rows {
            let alone = self.row(t).run(gpu, at);
            let of = |all: &[f32]| all[t * (all.len() / rows)..][..all.len() / rows].to_vec();
            assert_same_bits(&of(&together.streams), &alone.streams);
            assert_same_bits(&of(&together.x), &alone.x);
            assert_same_bits(&of(&together.partials), &alone.partials);
        }
    }
}

const PLACES: [At; 4] = [At::First, At::Between, At::AfterEngram, At::Last];

#[test]
fn boundary_matches_its_twin_at_every_place() {
    let Some(gpu) = gpu() else { return };
    for (n, h, rows, parts) in [(4, 66, 5, 7), (3, 128, 2, 1), (4, 64, 1, 7), (1, 5, 4, 2), (8, 65, 3, 3)] {
        for at in PLACES {
            let case = Case::random(dims(n, h), rows, parts, 1.0, (n * h + rows) as u64);
            case.check(gpu, at);
        }
    }
}

#[test]
fn boundary_at_the_released_width() {
    let Some(gpu) = gpu() else { return };
    let case = Case::random(dims(4, 5120), 2, 7, 3.0, 1);
    let error = case.check(gpu, At::Between);
    println!("boundary at h = 5120, n = 4: largest error {error:e}");
    case.check_alone(gpu, At::Between);
}

#[test]
fn boundary_rows_do_not_depend_on_each_other() {
    let Some(gpu) = gpu() else { return };
    for (n, at) in [(4, At::Between), (3, At::First), (2, At::Last), (5, At::AfterEngram)] {
        Case::random(dims(n, 150), 6, 3, 1.0, n as u64).check_alone(gpu, at);
    }
}

/// A mix of huge and tiny streams: the root mean square must neither overflow nor vanish in an epsilon.
#[test]
fn boundary_with_streams_of_any_size() {
    let Some(gpu) = gpu() else { return };
    for scale in [1e-6, 1e4] {
        let case = Case::random(dims(4, 70), 3, 2, scale, 9);
        let (got, expected) = (case.run(gpu, At::Between), case.expected(At::Between));
        let relative = |v: &[f32]| v.iter().map(|v| v / scale).collect::<Vec<_>>();
        assert_close(&relative(&got.x), &relative(&expected.x), TOLERANCE);
        assert_close(&relative(&got.streams), &relative(&expected.streams), TOLERANCE);
    }
}

/// Streams of exact zeros: the mix is its base.
#[test]
fn boundary_with_zero_streams() {
    let Some(gpu) = gpu() else { return };
    Case::random(dims(4, 32), 2, 1, 0.0, 3).check(gpu, At::Between);
}

/// No rows in flight: nothing is written.
#[test]
fn boundary_without_rows_writes_nothing() {
    let Some(gpu) = gpu() else { return };
    let dims = dims(2, 8);
    let scratch = |label| poisoned(gpu, MemoryKind::Scratch, label, 64);
    let (z, streams, partials_in, partials_out, x) =
        (scratch("z"), scratch("r"), scratch("a"), scratch("b"), scratch("x"));
    let weights = upload(gpu, MemoryKind::Weights, "weights", &[0f32; 256]);
    let place = Place::Between { mix_fn: Binding::Whole(&weights), mix_const: Binding::Whole(&weights) };
    let step = step(gpu, 0);
    let buffers = Buffers {
        step: Binding::Whole(&step),
        z: Binding::Whole(&z),
        parts: 1,
        streams: Binding::Whole(&streams),
        partials_in: Binding::Whole(&partials_in),
        partials_out: Binding::Whole(&partials_out),
        x: Binding::Whole(&x),
    };
    let boundary = Boundary::new(gpu, &dims, place, &buffers).unwrap();
    let mut recording = Recording::new();
    boundary.record(&mut recording, 1);
    boundary.record(&mut recording, 4);
    gpu.submit(recording).unwrap();
    for buffer in [&streams, &partials_out, &x] {
        assert!(read::<u32>(gpu, buffer).iter().all(|&word| word == POISON), "{buffer:?} was written");
    }
}

proptest! {
    #![proptest_config(config())]
    #[test]
    fn boundary_matches_its_twin(
        n in 1usize..=8, h in 1usize..200, rows in 1usize..7, parts in 1usize..8, at in 0usize..4, seed in any::<u64>(),
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let (case, at) = (Case::random(dims(n, h), rows, parts, 1.0, seed), PLACES[at]);
        case.check(gpu, at);
        let (got, plain) = (case.run(gpu, at), case.run(plain().expect("the same adapter"), at));
        assert_same_bits(&got.streams, &plain.streams);
        assert_same_bits(&got.x, &plain.x);
        assert_same_bits(&got.partials, &plain.partials);
    }
}
