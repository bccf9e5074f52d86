//! Matrix products, and what leads to those of the experts.

use super::lab::{pack, product, rms_factor, strided, unstrided, Found, Lab, Weight, FORMATS};
use crate::checkpoint::Format;
use crate::gpu::Buffer;
use crate::kernels::experts_down::{ExpertsDown, ExpertsDownIo};
use crate::kernels::experts_up::{ExpertPack, ExpertsUp, ExpertsUpIo};
use crate::kernels::group_rows::{tile_pairs, tiles_words, GroupRows};
use crate::kernels::linear::{Linear, LinearIo};
use crate::kernels::route::{Route, RouteDims, RouteIo};
use crate::model::pack::{slice_limit, ExpertPlan, Loader};
use crate::reference::group_rows::group;
use crate::reference::route::route as choose_experts;
use crate::Result;

const EPS: f32 = 1e-20;
/// Of a product, relative to the sum of its terms' magnitudes.
const PRODUCT: f64 = 1e-5;

/// Matrices of every format in one pack, more chunks of channels than lanes, and a tail.
pub async fn linear(lab: &mut Lab<'_>, rows: usize) -> Result<Found> {
    let k = 1094;
    let weights: Vec<Weight> =
        FORMATS.iter().enumerate().map(|(i, &format)| Weight::random(lab, format, 3 + i, k)).collect();
    let (pack, outputs) = pack(lab, &weights).await?;
    let (x, norm) = (lab.rows(rows, k, 2.0), lab.values(k, 1.0));
    let (x_stride, y_stride, width) = (k.next_multiple_of(4) + 8, outputs[FORMATS.len()] + 3, outputs[FORMATS.len()]);
    let lab = &*lab;
    let y = lab
        .run(|recording| {
            let y = lab.room(rows * y_stride)?;
            let io = LinearIo {
                step: &lab.step_of(rows)?,
                x: &lab.scratch(&strided(&x, x_stride, 4))?,
                x_stride: x_stride as u32,
                x_offset: 4,
                norm: Some((&lab.weights(&strided(std::slice::from_ref(&norm), k.next_multiple_of(4), 0))?, EPS)),
                y: &y,
                y_stride: y_stride as u32,
                y_offset: 1,
                last_row: false,
            };
            Linear::with_features(lab.gpu, lab.features, &pack, &io)?.record(recording, rows as u32);
            Ok(y)
        })
        .await?;
    let mut found = Found::within(PRODUCT);
    let y = unstrided(&mut found, "y", &lab.read(&y).await?, y_stride, 1, width);
    let values: Vec<f32> = weights.iter().flat_map(Weight::f32).collect();
    for (x, y) in x.iter().zip(y.chunks(width)) {
        let (factor, normed) = (rms_factor(x, EPS), times(x, &norm));
        for (i, (&y, w)) in y.iter().zip(values.chunks(k)).enumerate() {
            let (sum, magnitude) = product(w, &normed);
            let error = (f64::from(y) - sum * factor).abs() / (magnitude * factor);
            found.error("y", i, y, sum * factor, error);
        }
    }
    Ok(found)
}

fn times(x: &[f32], norm: &[f32]) -> Vec<f32> {
    x.iter().zip(norm).map(|(x, n)| x * n).collect()
}

/// Rows of few levels, so that many experts tie and no two others are close; several rows, and one, which is grouped too.
pub async fn route(lab: &mut Lab<'_>) -> Result<Found> {
    let (experts, k, stride) = (37u32, 3u32, 40);
    let slots = k as usize + 1;
    let mut found = Found::within(1e-5);
    let bias: Vec<f32> = (0..experts).map(|_| lab.below(3) as f32 * 0.25).collect();
    for rows in [3usize, 1] {
        let logits: Vec<Vec<f32>> =
            (0..rows).map(|_| (0..experts).map(|_| lab.below(16) as f32 * 0.5 - 4.0).collect()).collect();
        let lab = &*lab;
        let outputs = lab
            .run(|recording| {
                let room = || lab.room(rows * slots);
                let (ids, gains, pairs) = (room()?, room()?, room()?);
                let tiles = lab.room(tiles_words(rows as u32, slots as u32, experts + 1) as usize)?;
                let io = RouteIo {
                    step: &lab.step_of(rows)?,
                    logits: &lab.scratch(&strided(&logits, stride, 0))?,
                    bias: &lab.weights(&bias)?,
                    ids: &ids,
                    gains: &gains,
                    pairs: &pairs,
                    tiles: &tiles,
                };
                let dims = RouteDims { experts, k, logit_stride: stride as u32, normalise: true, scale: 1.5 };
                Route::new(lab.gpu, &dims, &io)?.record(recording, rows as u32);
                Ok([ids, gains, pairs, tiles])
            })
            .await?;
        let [ids, gains, pairs, tiles] = &outputs;
        let (mut twin_ids, mut twin_gains) = (vec![], vec![]);
        for row in &logits {
            let twin = choose_experts(row, &bias, k as usize, true, 1.5);
            twin_ids.extend(twin.ids);
            twin_ids.push(experts);
            twin_gains.extend(twin.weights);
            twin_gains.push(1.0);
        }
        found.same("ids", &lab.read::<u32>(ids).await?, &twin_ids);
        found.close("gains", &lab.read::<f32>(gains).await?, &twin_gains);
        let (pairs, tiles) = (lab.read::<u32>(pairs).await?, lab.read::<u32>(tiles).await?);
        if rows == 1 {
            grouped(&mut found, &pairs, &tiles, &twin_ids, experts, 1);
        } else {
            found.untouched("pairs", &pairs);
            found.untouched("tiles", &tiles);
        }
    }
    Ok(found)
}

fn grouped(found: &mut Found, pairs: &[u32], tiles: &[u32], ids: &[u32], experts: u32, tile: usize) {
    let twin = group(ids, experts as usize + 1, tile);
    found.same("pairs", pairs, &twin.pairs);
    let (tiles, beyond) = tiles.split_at(twin.tiles.len().min(tiles.len()));
    found.same("tiles", tiles, &twin.tiles);
    found.untouched("tiles", beyond);
}

/// Few rows and many, whose tiles have other sizes.
pub async fn group_rows(lab: &mut Lab<'_>) -> Result<Found> {
    let (slots, experts) = (3u32, 10u32);
    let mut found = Found::exact();
    for rows in [5u32, 40] {
        let ids: Vec<u32> = (0..rows * slots).map(|_| lab.below(experts + 1)).collect();
        let lab = &*lab;
        let [pairs, tiles] = lab
            .run(|recording| {
                let pairs = lab.room(ids.len())?;
                let tiles = lab.room(tiles_words(rows, slots, experts + 1) as usize)?;
                let (step, ids) = (lab.step_of(rows as usize)?, lab.scratch(&ids)?);
                GroupRows::new(lab.gpu, &step, &ids, &pairs, &tiles, slots, experts + 1)?.record(recording, rows);
                Ok([pairs, tiles])
            })
            .await?;
        let (pairs, tiles) = (lab.read::<u32>(&pairs).await?, lab.read::<u32>(&tiles).await?);
        grouped(&mut found, &pairs, &tiles, &ids, experts, tile_pairs(rows) as usize);
    }
    Ok(found)
}

/// Routed experts in FP4 and a shared one in FP8, each row with two of them and the shared one.
struct Experts {
    rows: usize,
    ids: Vec<u32>,
    gains: Vec<f32>,
    /// By expert, the shared one last.
    weights: Vec<Vec<Weight>>,
    pack: ExpertPack,
}

const ROUTED: usize = 5;
const SLOTS: usize = 3;

impl Experts {
    async fn new(lab: &mut Lab<'_>, rows: usize, matrices: usize, shape: (usize, usize)) -> Result<Self> {
        let formats = [Format::Fp4, Format::Fp8Block];
        let mut weights = vec![];
        for e in 0..=ROUTED {
            let format = formats[usize::from(e == ROUTED)];
            weights.push((0..matrices).map(|_| Weight::random(lab, format, shape.0, shape.1)).collect::<Vec<_>>());
        }
        let plan = ExpertPlan::new(matrices, shape, ROUTED, formats, slice_limit(lab.gpu))?;
        let pack = plan.load(&mut Loader::new(lab.gpu), "self test", |e, m| Ok(weights[e][m].tensor())).await?;
        let (mut ids, mut gains) = (vec![], vec![]);
        for _ in 0..rows {
            let first = lab.below(ROUTED as u32);
            ids.extend([first, (first + 1 + lab.below(ROUTED as u32 - 1)) % ROUTED as u32, ROUTED as u32]);
            gains.extend([lab.random.value() + 1.1, lab.random.value() + 1.1, 1.0]);
        }
        Ok(Self { rows, ids, gains, weights, pack })
    }

    /// Pairs and tiles of the rows.
    fn groups(&self, lab: &Lab<'_>) -> Result<[Buffer; 2]> {
        let groups = group(&self.ids, ROUTED + 1, tile_pairs(self.rows as u32) as usize);
        let mut tiles = groups.tiles;
        tiles.resize(tiles_words(self.rows as u32, SLOTS as u32, ROUTED as u32 + 1) as usize, 0);
        Ok([lab.scratch(&groups.pairs)?, lab.scratch(&tiles)?])
    }

    /// Pair, its gain, and the values of its expert's matrices.
    fn pairs(&self) -> impl Iterator<Item = (usize, f32, Vec<Vec<f32>>)> + '_ {
        let values = |&id: &u32| self.weights[id as usize].iter().map(Weight::f32).collect();
        self.ids.iter().enumerate().map(move |(pair, id)| (pair, self.gains[pair], values(id)))
    }
}

/// The clamp is low enough to bite.
pub async fn experts_up(lab: &mut Lab<'_>, rows: usize) -> Result<Found> {
    let (h, hidden, limit) = (70, 44, 0.7f32);
    let experts = Experts::new(lab, rows, 2, (hidden, h)).await?;
    let (x, norm) = (lab.rows(rows, h, 2.0), lab.values(h, 1.0));
    let (x_stride, u_stride) = (h.next_multiple_of(4) + 4, hidden + 4);
    let lab = &*lab;
    let u = lab
        .run(|recording| {
            let [pairs, tiles] = experts.groups(lab)?;
            let u = lab.room(rows * SLOTS * u_stride)?;
            let io = ExpertsUpIo {
                step: &lab.step_of(rows)?,
                norm: &lab.weights(&strided(std::slice::from_ref(&norm), h.next_multiple_of(4), 0))?,
                eps: EPS,
                x: &lab.scratch(&strided(&x, x_stride, 0))?,
                x_stride: x_stride as u32,
                gains: &lab.scratch(&experts.gains)?,
                pairs: &pairs,
                tiles: &tiles,
                u: &u,
                u_stride: u_stride as u32,
                slots: SLOTS as u32,
                limit,
            };
            ExpertsUp::with_features(lab.gpu, lab.features, &experts.pack, &io)?.record(recording, rows as u32);
            Ok(u)
        })
        .await?;
    let mut found = Found::within(PRODUCT);
    let u = unstrided(&mut found, "u", &lab.read(&u).await?, u_stride, 0, hidden);
    let limit = f64::from(limit);
    for (pair, gain, matrices) in experts.pairs() {
        let x = &x[pair / SLOTS];
        let (factor, normed) = (rms_factor(x, EPS), times(x, &norm));
        for i in 0..hidden {
            let row = i * h..(i + 1) * h;
            let (gate, gate_magnitude) = product(&matrices[0][row.clone()], &normed);
            let (up, up_magnitude) = product(&matrices[1][row], &normed);
            let (a, b) = ((gate * factor).min(limit), (up * factor).clamp(-limit, limit));
            let (silu, gain) = (a / (1.0 + (-a).exp()), f64::from(gain));
            // The slope of silu is at most 1.1.
            let slack = 1.1 * gate_magnitude * factor * b.abs() + up_magnitude * factor * silu.abs();
            let (got, expected) = (u[pair * hidden + i], silu * b * gain);
            let error = (f64::from(got) - expected).abs() / ((slack + (silu * b).abs()) * gain + 1e-25);
            found.error("u", pair * hidden + i, got, expected, error);
        }
    }
    Ok(found)
}

pub async fn experts_down(lab: &mut Lab<'_>, rows: usize) -> Result<Found> {
    let (h, hidden) = (70, 44);
    let experts = Experts::new(lab, rows, 1, (h, hidden)).await?;
    let u = lab.rows(rows * SLOTS, hidden, 1.0);
    let (u_stride, z_stride) = (hidden + 4, h.next_multiple_of(4) + 4);
    let lab = &*lab;
    let z = lab
        .run(|recording| {
            let [pairs, tiles] = experts.groups(lab)?;
            let z = lab.room(rows * SLOTS * z_stride)?;
            let io = ExpertsDownIo {
                step: &lab.step_of(rows)?,
                u: &lab.scratch(&strided(&u, u_stride, 0))?,
                u_stride: u_stride as u32,
                pairs: &pairs,
                tiles: &tiles,
                z: &z,
                z_stride: z_stride as u32,
                slots: SLOTS as u32,
            };
            ExpertsDown::with_features(lab.gpu, lab.features, &experts.pack, &io)?.record(recording, rows as u32);
            Ok(z)
        })
        .await?;
    let mut found = Found::within(PRODUCT);
    let z = unstrided(&mut found, "z", &lab.read(&z).await?, z_stride, 0, h);
    for (pair, _, matrices) in experts.pairs() {
        for (i, w) in matrices[0].chunks(hidden).enumerate() {
            let (sum, magnitude) = product(w, &u[pair]);
            let got = z[pair * h + i];
            found.error("z", pair * h + i, got, sum, (f64::from(got) - sum).abs() / (magnitude + 1e-25));
        }
    }
    Ok(found)
}
