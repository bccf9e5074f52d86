//! The residual streams: what goes into them, and what is made of them.

use super::lab::{pack, strided, unstrided, Found, Lab, Weight, FORMATS};
use crate::gpu::{Binding, MemoryKind};
use crate::kernels::boundary::{Boundary, Buffers, Dims, Place};
use crate::kernels::embed::Embed;
use crate::kernels::engram_gate::{self, EngramGate, Expand};
use crate::kernels::engram_gather::{self, EngramGather, BEFORE_TEXT};
use crate::kernels::tap::{self, Tap};
use crate::reference::boundary::{collapse, expand, first_pre, mix, partials, sum_parts, Mix, MixShape, MixWeights};
use crate::reference::engram_gate::gate;
use crate::reference::engram_gather::{compress, hash};
use crate::reference::math::Matrix;
use crate::reference::tap::mean;
use crate::Result;

/// The lanes of the device, which variants with subgroups build on.
pub async fn lanes(lab: &Lab<'_>, variant: &str) -> Result<Found> {
    let mut found = Found::exact();
    if let Some(fault) = lab.gpu.lanes(variant).await? {
        found.wrong(1, fault);
    }
    Ok(found)
}

/// Of streams and of what is made of them.
const STREAMS: f64 = 2e-5;
/// Channels whose partial sums lie together.
const SLICE: usize = 64;

/// A table of every format.
pub async fn embed(lab: &mut Lab<'_>) -> Result<Found> {
    let (h, n, rows, vocabulary) = (70, 3, 4, 37);
    let stride = 72;
    let mut found = Found::exact();
    for format in FORMATS {
        let weights = [Weight::random(lab, format, vocabulary, h)];
        let (table, _) = pack(lab, &weights).await?;
        // A row more than is in flight stays as it was.
        let ids: Vec<u32> = (0..rows + 1).map(|_| lab.below(vocabulary as u32)).collect();
        let lab = &*lab;
        let streams = lab
            .run(|recording| {
                let streams = lab.room((rows + 1) * n * stride)?;
                let (step, tokens) = (lab.step_of(rows)?, lab.scratch(&ids)?);
                Embed::new(lab.gpu, &table, &step, &tokens, &streams, n as u32)?.record(recording, rows as u32 + 1);
                Ok(streams)
            })
            .await?;
        let words: Vec<u32> = lab.read(&streams).await?;
        let (written, beyond) = words.split_at(rows * n * stride);
        found.untouched("streams of a row that is not in flight", beyond);
        // Padding may be zeroed.
        let got: Vec<f32> = written.chunks(stride).flat_map(|row| &row[..h]).map(|&w| f32::from_bits(w)).collect();
        let values = weights[0].f32();
        let twin = |&id: &u32| crate::reference::embed::embed(&values[id as usize * h..][..h], n);
        let expected: Vec<f32> = ids[..rows].iter().flat_map(twin).collect();
        found.same_floats(&format!("{format:?}"), &got, &expected);
    }
    Ok(found)
}

fn dims(hidden: u32, streams: u32) -> Dims {
    Dims { hidden, streams, sinkhorn_iterations: 20, norm_eps: 1e-20, eps: 1e-6 }
}

fn shape(dims: &Dims) -> MixShape {
    let Dims { streams, sinkhorn_iterations, norm_eps, eps, .. } = *dims;
    MixShape { streams: streams as usize, sinkhorn_iters: sinkhorn_iterations as usize, rms_eps: norm_eps, hc_eps: eps }
}

fn random_mix(lab: &mut Lab<'_>, dims: &Dims) -> MixWeights {
    let (rows, width) = (dims.projections() as usize, (dims.streams * dims.hidden) as usize);
    MixWeights {
        projection: Matrix::new(rows, width, lab.values(rows * width, 0.1)),
        scale: (0..3).map(|_| lab.random.value() * 0.5 + 1.0).collect(),
        base: lab.values(rows, 1.0),
    }
}

/// Partial sums of a row's mix, slice after slice.
fn row_partials(streams: &[f32], weights: &MixWeights, dims: &Dims) -> Vec<f32> {
    let h = dims.hidden as usize;
    let slice = |c: usize| partials(streams, &weights.projection, dims.streams as usize, c..(c + SLICE).min(h));
    (0..h).step_by(SLICE).flat_map(slice).collect()
}

/// Vectors of h channels at a distance of whole quads, poison between them.
fn vectors(rows: &[Vec<f32>], h: usize) -> Vec<u32> {
    let vectors: Vec<Vec<f32>> = rows.iter().flat_map(|row| row.chunks(h).map(<[f32]>::to_vec)).collect();
    strided(&vectors, h.next_multiple_of(4), 0)
}

/// Rows before a boundary: their streams, those of the mix before, and the output of the sublayer between.
struct Rows {
    dims: Dims,
    before: Vec<Vec<f32>>,
    streams: Vec<Vec<f32>>,
    z: Vec<Vec<f32>>,
    previous: MixWeights,
}

/// Vectors of a row of z.
const PARTS: usize = 3;

impl Rows {
    fn new(lab: &mut Lab<'_>, dims: Dims, rows: usize) -> Self {
        let (n, h) = (dims.streams as usize, dims.hidden as usize);
        let mut of = |vectors: usize| lab.rows(rows, vectors * h, 1.5);
        let (before, streams, z) = (of(n), of(n), of(PARTS));
        Self { dims, before, streams, z, previous: random_mix(lab, &dims) }
    }
    fn mix_const(&self) -> Vec<f32> {
        [&self.previous.scale[..], &self.previous.base].concat()
    }
    fn partials(&self) -> Vec<f32> {
        self.before.iter().flat_map(|row| row_partials(row, &self.previous, &self.dims)).collect()
    }
    fn mix(&self, row: usize) -> Mix {
        mix(&self.before[row], &self.previous, shape(&self.dims))
    }
    fn expanded(&self, row: usize, mix: &Mix) -> Vec<f32> {
        expand(&self.streams[row], &sum_parts(&self.z[row], self.dims.hidden as usize), mix)
    }
}

/// All four places of a boundary in the model.
pub async fn boundary(lab: &mut Lab<'_>, rows: usize) -> Result<Found> {
    let dims = dims(150, 4);
    let (n, h, stride) = (4, 150, dims.stride() as usize);
    let case = Rows::new(lab, dims, rows);
    let next = random_mix(lab, &dims);
    let words = dims.partials() as usize;
    let mut found = Found::within(STREAMS);
    let lab = &*lab;
    for place in ["first", "between", "after an engram", "last"] {
        let (first, expands) = (place == "first", place == "between" || place == "last");
        let [streams, partials_out, x] = lab
            .run(|recording| {
                let streams = lab.scratch(&vectors(&case.streams, h))?;
                let partials_in = if first { lab.room(words * rows)? } else { lab.scratch(&case.partials())? };
                let z = if expands { lab.scratch(&vectors(&case.z, h))? } else { lab.room(4)? };
                let (partials_out, x) = (lab.room(words * rows)?, lab.room(rows * stride)?);
                let mix_fn = lab.weights(&dims.pad_mix_fn(&next.projection.data))?;
                let mix_const = lab.weights(&case.mix_const())?;
                let (mix_fn, mix_const) = (Binding::Whole(&mix_fn), Binding::Whole(&mix_const));
                let place = match place {
                    "first" => Place::First { mix_fn },
                    "between" => Place::Between { mix_fn, mix_const },
                    "last" => Place::Last { mix_const },
                    _ => Place::AfterEngram { mix_fn, mix_const },
                };
                let step = lab.step_of(rows)?;
                let buffers = Buffers {
                    step: Binding::Whole(&step),
                    z: Binding::Whole(&z),
                    parts: PARTS as u32,
                    streams: Binding::Whole(&streams),
                    partials_in: Binding::Whole(&partials_in),
                    partials_out: Binding::Whole(&partials_out),
                    x: Binding::Whole(&x),
                };
                Boundary::with_features(lab.gpu, lab.features, &dims, place, &buffers)?.record(recording, rows as u32);
                Ok([streams, partials_out, x])
            })
            .await?;
        let (mut twin_streams, mut twin_partials, mut twin_x) = (vec![], vec![], vec![]);
        for row in 0..rows {
            let mix = case.mix(row);
            let streams = if expands { case.expanded(row, &mix) } else { case.streams[row].clone() };
            twin_x.extend(collapse(&streams, &if first { first_pre(n) } else { mix.pre }));
            twin_partials.extend(row_partials(&streams, &next, &dims));
            twin_streams.extend(streams);
        }
        let mut close = |what: &str, words: &[u32], twin: &[f32]| {
            let what = format!("{what} ({place})");
            let got = unstrided(&mut found, &what, words, stride, 0, h);
            found.close(&what, &got, twin);
        };
        close("streams", &lab.read::<u32>(&streams).await?, &twin_streams);
        close("x", &lab.read::<u32>(&x).await?, &twin_x);
        let partials: Vec<f32> = lab.read(&partials_out).await?;
        if place == "last" {
            found.untouched("partial sums (last)", bytemuck::cast_slice(&partials));
        } else {
            found.close(&format!("partial sums ({place})"), &partials, &twin_partials);
        }
    }
    Ok(found)
}

/// With an output to expand and without; an image and a padding token get no memory.
pub async fn engram_gate(lab: &mut Lab<'_>) -> Result<Found> {
    const IMAGE: u32 = 7;
    const PAD: u32 = 2;
    let dims = dims(70, 4);
    let (n, h, stride, rows) = (4, 70, dims.stride() as usize, 5);
    let case = Rows::new(lab, dims, rows);
    let (kv, qk) = (lab.rows(rows, (n + 1) * h, 1.5), lab.values(n * h, 1.5));
    let tokens = [100u32, IMAGE, 101, PAD, 102];
    let mut found = Found::within(STREAMS);
    let lab = &*lab;
    for expands in [true, false] {
        let streams = lab
            .run(|recording| {
                let streams = lab.scratch(&vectors(&case.streams, h))?;
                let (z, partials_in) = (lab.scratch(&vectors(&case.z, h))?, lab.scratch(&case.partials())?);
                let mix_const = lab.weights(&case.mix_const())?;
                let kv = lab.scratch(&strided(&kv, ((n + 1) * h).next_multiple_of(4), 0))?;
                let (qk, tokens, step) =
                    (lab.weights(&qk)?, lab.upload(MemoryKind::Cache, &tokens)?, lab.step_of(rows)?);
                let expand = Expand {
                    z: Binding::Whole(&z),
                    parts: PARTS as u32,
                    partials_in: Binding::Whole(&partials_in),
                    mix_const: Binding::Whole(&mix_const),
                };
                let buffers = engram_gate::Buffers {
                    step: Binding::Whole(&step),
                    streams: Binding::Whole(&streams),
                    kv: Binding::Whole(&kv),
                    qk: Binding::Whole(&qk),
                    tokens: Binding::Whole(&tokens),
                };
                let expand = expands.then_some(expand);
                let kernel =
                    EngramGate::with_features(lab.gpu, lab.features, &dims, Some(IMAGE), Some(PAD), expand, &buffers)?;
                kernel.record(recording, rows as u32 + 1);
                Ok(streams)
            })
            .await?;
        let mut expected = vec![];
        for row in 0..rows {
            let mut streams = if expands { case.expanded(row, &case.mix(row)) } else { case.streams[row].clone() };
            if ![IMAGE, PAD].contains(&tokens[row]) {
                gate(&mut streams, &kv[row], &qk, h, dims.norm_eps);
            }
            expected.extend(streams);
        }
        let what = if expands { "streams, expanded" } else { "streams" };
        let got = unstrided(&mut found, what, &lab.read::<u32>(&streams).await?, stride, 0, h);
        found.close(what, &got, &expected);
    }
    Ok(found)
}

/// Products of 64 bits, n-grams that an image and the beginning of the text cut short, and a table of every format.
pub async fn engram_gather(lab: &mut Lab<'_>) -> Result<Found> {
    const IMAGE: u32 = 3;
    let dims = engram_gather::Dims {
        ngram: 3,
        heads: 2,
        head_dim: 40,
        image_token: Some(IMAGE),
        pad_token: None,
        pad_compressed: 1,
    };
    let (multipliers, primes) =
        ([76_632_096_046_245u64, 4_839_876_093_313, 35_959_672_319_349], [101u32, 103, 107, 109]);
    let token_map: Vec<u32> = (0..50).map(|_| lab.below(40)).collect();
    let text: Vec<u32> = vec![9, 41, 17, IMAGE, 5, 22, 48];
    let history = [7, BEFORE_TEXT];
    let offsets: Vec<u32> = primes.iter().scan(0, |at, prime| Some(std::mem::replace(at, *at + prime))).collect();
    let (width, stride) = (40 * primes.len(), dims.stride() as usize);
    let mut rows = vec![];
    for t in 0..text.len() {
        // An image is to what comes after it as the beginning of the text.
        let recent = text[..=t].iter().rev().chain(&history).take(3);
        let recent: Vec<u32> = recent.map(|&id| if id == IMAGE { BEFORE_TEXT } else { id }).collect();
        rows.extend(hash(&compress(&recent, &token_map, dims.pad_compressed), &multipliers, &primes, &offsets));
    }
    let mut found = Found::exact();
    for format in FORMATS {
        let weights = [Weight::random(lab, format, primes.iter().sum::<u32>() as usize, 40)];
        let (table, _) = pack(lab, &weights).await?;
        let lab = &*lab;
        let out = lab
            .run(|recording| {
                let upload = |words: &[u32]| lab.upload(MemoryKind::Cache, words);
                let (tokens, history) = (upload(&text)?, upload(&history)?);
                let (token_map, hash) = (upload(&token_map)?, upload(&dims.hash(&multipliers, &primes))?);
                let (out, step) = (lab.room(text.len() * stride)?, lab.step_of(text.len())?);
                let buffers = engram_gather::Buffers {
                    step: Binding::Whole(&step),
                    tokens: Binding::Whole(&tokens),
                    history: Binding::Whole(&history),
                    token_map: Binding::Whole(&token_map),
                    hash: Binding::Whole(&hash),
                    rows_out: Binding::Whole(&out),
                };
                EngramGather::new(lab.gpu, &dims, &table, &buffers)?.record(recording, text.len() as u32 + 1);
                Ok(out)
            })
            .await?;
        let what = format!("{format:?}");
        let got = unstrided(&mut found, &what, &lab.read::<u32>(&out).await?, stride, 0, width);
        let values = weights[0].f32();
        let expected: Vec<f32> = rows.iter().flat_map(|&row| &values[row as usize * 40..][..40]).copied().collect();
        found.same_floats(&what, &got, &expected);
    }
    Ok(found)
}

/// The second of three layers' parts.
pub async fn tap(lab: &mut Lab<'_>) -> Result<Found> {
    let (h, n, rows, stride) = (70, 3, 4, 212);
    let at = h;
    let case = lab.rows(rows, n * h, 3.0);
    let mut found = Found::within(STREAMS);
    let lab = &*lab;
    let features = lab
        .run(|recording| {
            let (streams, features) = (lab.scratch(&vectors(&case, h))?, lab.room((rows + 1) * stride)?);
            let dims = tap::Dims { hidden: h as u32, streams: n as u32, stride: stride as u32, at: at as u32 };
            Tap::new(lab.gpu, &dims, &lab.step_of(rows)?, &streams, &features)?.record(recording, rows as u32 + 1);
            Ok(features)
        })
        .await?;
    let words: Vec<u32> = lab.read(&features).await?;
    let (written, beyond) = words.split_at(rows * stride);
    found.untouched("features of a row that is not in flight", beyond);
    let got = unstrided(&mut found, "features of other layers", written, stride, at, h);
    let expected: Vec<f32> = case.iter().flat_map(|row| mean(row, n)).collect();
    found.close("features", &got, &expected);
    Ok(found)
}
