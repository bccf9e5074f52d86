//! What is chosen: entries that are worth attending to, and the next token.

use super::lab::{Found, Lab, Pages, POISON};
use crate::formats::CacheFormat::Mxfp4;
use crate::gpu::{Binding, Buffer, MemoryKind};
use crate::kernels::cache_append::PageLayout;
use crate::kernels::index_score::{weight_scale, IndexScore, IndexScoreBuffers, IndexScoreDims};
use crate::kernels::sample::{Buffers, Dims, Sample, NONE};
use crate::kernels::select::{Select, SelectBuffers, SelectDims, SelectKind};
use crate::kernels::select_merge::SelectMerge;
use crate::kernels::tiling::{CandidateDims, Tiles, Tiling, TilingDims, SCORE_BUDGET, SEGMENT};
use crate::kernels::Step;
use crate::reference::index_score::score_packed;
use crate::reference::sample::sample as draw;
use crate::reference::select::{candidate_blocks, candidate_entries, top_k};
use crate::sampling::Sampling;
use crate::Result;

const RATIO: usize = 2;

/// Lists with their counts, one a row; poison behind them.
fn lists(rows: &[Vec<u32>], words: usize) -> Vec<u32> {
    let mut out = vec![POISON; rows.len() * words];
    for (out, list) in out.chunks_mut(words).zip(rows) {
        out[0] = list.len() as u32;
        out[1..][..list.len()].copy_from_slice(list);
    }
    out
}

/// All visible entries of pages in two slabs, then those of candidate blocks.
pub async fn index_score(lab: &mut Lab<'_>, variant: &str) -> Result<Found> {
    let (heads, head_dim, rows, position) = (3usize, 44usize, 3usize, 300usize);
    let part = PageLayout::new(RATIO, 16, head_dim);
    let page = part.within(7, part.words() + 9);
    let entries = (position + rows) / RATIO;
    // Blocks of very different scales.
    let mut packed = || {
        let mut row = lab.values(head_dim, 1.5);
        for block in row.chunks_mut(32) {
            let scale = (lab.below(24) as f32 - 12.0).exp2();
            block.iter_mut().for_each(|v| *v *= scale);
        }
        Mxfp4.pack(&row)
    };
    let keys: Vec<Vec<u32>> = (0..entries).map(|_| packed()).collect();
    let queries: Vec<Vec<u32>> = (0..rows).map(|_| (0..heads).flat_map(|_| packed()).collect()).collect();
    let (weight_offset, weight_stride) = (4usize, 12usize);
    let raw = lab.rows(rows, heads, 2.0);
    let blocks = CandidateDims { block_size: 3, blocks: 7 };
    let capacity = (entries.div_ceil(page.entries) * page.entries) as u32;
    let mut found = Found::exact();
    for candidates in [None, Some(blocks)] {
        let dims = IndexScoreDims {
            heads: heads as u32,
            head_dim: head_dim as u32,
            weight_stride: weight_stride as u32,
            weight_offset: weight_offset as u32,
            ratio: RATIO as u32,
            page,
            capacity,
            candidates,
        };
        let visible = |row: usize| (position + row + 1) / RATIO;
        // The newest block among them.
        let chosen = |row: usize| {
            let last = (visible(row).div_ceil(3) - 1) as u32;
            (0..6).map(|i| i * 7 + row as u32).chain([last]).collect::<Vec<u32>>()
        };
        let chosen: Vec<Vec<u32>> = (0..rows).map(chosen).collect();
        let tiling = TilingDims { rows: rows as u32, slots: dims.slots(), topk: 1, candidates };
        let tiling = Tiling::new(&tiling);
        let pass = tiling.passes(rows as u32, (visible(rows - 1) as u32).min(dims.slots()))[0];
        let lab = &*lab;
        let scores = lab
            .run(|recording| {
                let pages = Pages::new(lab, page.page_words, entries.div_ceil(page.entries))?;
                for (entry, key) in keys.iter().enumerate() {
                    pages.write(lab, page.key(entry), key);
                }
                let scores = lab.room(tiling.score_words())?;
                let step = lab.step(Step { position: position as u32, rows: rows as u32, ..Step::default() })?;
                let buffers = IndexScoreBuffers {
                    step: &step,
                    table: &pages.table,
                    queries: &lab.scratch(&queries.concat())?,
                    weights: &lab.scratch(&super::lab::strided(&raw, weight_stride, weight_offset))?,
                    candidates: &lab.scratch(&lists(&chosen, blocks.list_words() as usize))?,
                    scores: &scores,
                };
                let tiles = Tiles::new(lab.gpu, tiling.clone())?;
                let mut kernel = IndexScore::with_variant(lab.gpu, variant, &dims, &buffers, &tiles)?;
                for slab in &pages.slabs {
                    kernel.add_slab(lab.gpu, slab)?;
                }
                kernel.record(lab.gpu, recording, rows as u32, &pass, &[0, 1])?;
                Ok(scores)
            })
            .await?;
        let mut expected = vec![f32::from_bits(POISON); tiling.score_words()];
        for (row, scores) in expected.chunks_mut(pass.stride as usize).take(rows).enumerate() {
            let scored = match candidates {
                None => (0..visible(row) as u32).collect(),
                Some(blocks) => candidate_entries(&chosen[row], blocks.block_size as usize, visible(row)),
            };
            let scale = weight_scale(heads as u32, head_dim as u32);
            let weights: Vec<f32> = raw[row].iter().map(|w| w * scale).collect();
            for (score, entry) in scores.iter_mut().zip(scored) {
                *score = score_packed(&queries[row], &weights, &keys[entry as usize], head_dim);
            }
        }
        let what = if candidates.is_some() { "scores of candidates" } else { "scores" };
        found.same_floats(what, &lab.read::<f32>(&scores).await?, &expected);
    }
    Ok(found)
}

/// `select` over what one segment holds, or with `merges` `select_merge` over several tiles of several segments. Scores of few
/// values, so that many tie, then scores of many.
pub async fn select(lab: &mut Lab<'_>, variant: &str, merges: bool) -> Result<Found> {
    let kind = match variant {
        "source" => SelectKind::Source,
        "restricted" => SelectKind::Restricted,
        _ => SelectKind::Plain,
    };
    let (position, rows, topk, blocks) = (319usize, 3usize, 17usize, CandidateDims { block_size: 3, blocks: 20 });
    let visible = |row: usize| (position + row + 1) / RATIO;
    let most = visible(rows - 1) as u32;
    let mut found = Found::exact();
    for levels in [5u32, 1 << 20] {
        let all: Vec<Vec<f32>> = (0..rows)
            .map(|row| (0..visible(row)).map(|_| lab.below(levels) as f32 - (levels / 2) as f32).collect())
            .collect();
        let of_blocks: Vec<Vec<u32>> = all.iter().map(|scores| candidate_blocks(scores, 3, 20)).collect();
        // What each slot's entry is, and its score.
        let slots: Vec<Vec<u32>> = match kind {
            SelectKind::Restricted => {
                (0..rows).map(|row| candidate_entries(&of_blocks[row], 3, visible(row))).collect()
            }
            _ => (0..rows).map(|row| (0..visible(row) as u32).collect()).collect(),
        };
        let scores: Vec<Vec<f32>> =
            (0..rows).map(|row| slots[row].iter().map(|&entry| all[row][entry as usize]).collect()).collect();

        let dims = SelectDims { kind, ratio: RATIO as u32, capacity: most + 3 };
        let of_restricted = blocks.slots(dims.capacity);
        let tiling = TilingDims {
            rows: rows as u32,
            slots: dims.capacity.max(of_restricted),
            topk: topk as u32,
            candidates: (kind != SelectKind::Plain).then_some(blocks),
        };
        // Segments of 24 slots in tiles of 48.
        let (budget, segment) = if merges { (3 * 48, 24) } else { (SCORE_BUDGET, SEGMENT) };
        let tiling = Tiling::within(&tiling, budget, segment);
        let bound = if kind == SelectKind::Restricted { most.min(of_restricted) } else { most };
        let lab = &*lab;
        let make = || {
            let tiles = Tiles::new(lab.gpu, tiling.clone())?;
            let step = lab.step(Step { position: position as u32, rows: rows as u32, ..Step::default() })?;
            // Scores, lists, carry, maxima, selection, candidates.
            let room = |words: usize| lab.room(words);
            let candidates = match kind {
                SelectKind::Restricted => lab.scratch(&lists(&of_blocks, blocks.list_words() as usize))?,
                _ => room(rows * blocks.list_words() as usize)?,
            };
            let buffers: [Buffer; 6] = [
                room(tiling.score_words())?,
                room(tiling.list_words())?,
                room(tiling.carry_words())?,
                room(tiling.maxima_words())?,
                room(rows * (1 + topk))?,
                candidates,
            ];
            let bound = SelectBuffers {
                step: &step,
                scores: &buffers[0],
                lists: &buffers[1],
                carry: &buffers[2],
                maxima: &buffers[3],
                selection: &buffers[4],
                candidates: &buffers[5],
            };
            let select = Select::new(lab.gpu, &dims, &bound, &tiles)?;
            let merge = SelectMerge::new(lab.gpu, &dims, &bound, &tiles)?;
            Ok((select, merge, buffers))
        };
        let (select, merge, buffers) = lab.gpu.settled(make).await?;
        for pass in tiling.passes(rows as u32, bound) {
            let mut words = vec![POISON; tiling.score_words()];
            for (words, scores) in words.chunks_mut(pass.stride as usize).zip(&scores) {
                let scores = scores.iter().skip(pass.first as usize);
                words.iter_mut().zip(scores).for_each(|(word, score)| *word = score.to_bits());
            }
            lab.gpu.upload(&buffers[0], 0, bytemuck::cast_slice(&words));
            lab.run(|recording| {
                select.record(lab.gpu, recording, rows as u32, &pass)?;
                merge.record(lab.gpu, recording, rows as u32, &pass)
            })
            .await?;
        }
        let best = |row: usize| top_k(&scores[row], topk).iter().map(|&slot| slots[row][slot as usize]).collect();
        let expected: Vec<Vec<u32>> = (0..rows).map(best).collect();
        found.same("selection", &lab.read::<u32>(&buffers[4]).await?, &lists(&expected, 1 + topk));
        let written: Vec<u32> = lab.read(&buffers[5]).await?;
        match kind {
            SelectKind::Plain => found.untouched("candidate blocks", &written),
            _ => found.same("candidate blocks", &written, &lists(&of_blocks, blocks.list_words() as usize)),
        }
    }
    Ok(found)
}

/// Greedy, drawn among all, among the best, and within a mass; then a logit that is no number.
pub async fn sample(lab: &mut Lab<'_>) -> Result<Found> {
    let (vocabulary, draws) = (301usize, 8usize);
    let mut logits = lab.values(vocabulary, 4.0);
    let mut found = Found::exact();
    let setting = |temperature, top_k, top_p| Sampling { temperature, top_k, top_p, seed: 77 | 5 << 32 };
    for settings in [setting(0.0, 0, 1.0), setting(0.9, 0, 1.0), setting(1.3, 12, 1.0), setting(0.8, 0, 0.7)] {
        let (out, step) = run(lab, &logits, &settings, draws).await?;
        let expected: Vec<u32> =
            (0..draws as u32).flat_map(|counter| [draw(&logits, &settings, counter).unwrap_or(NONE), 0]).collect();
        found.same(&format!("tokens at {settings:?}"), &out, &expected);
        found.same("step", &step[..4], &[draws as u32, 1, draws as u32, 0]);
    }
    logits[200] = f32::NAN;
    let (out, step) = run(lab, &logits, &setting(0.0, 0, 1.0), 1).await?;
    found.same("token of a logit that is no number", &out, &[NONE, 2]);
    found.same("step after it", &step[..4], &[1, 0, 0, 2]);
    Ok(found)
}

/// Tokens with their status, and the step, after so many draws from the same logits.
async fn run(lab: &Lab<'_>, logits: &[f32], settings: &Sampling, draws: usize) -> Result<(Vec<u32>, Vec<u32>)> {
    let vocabulary = logits.len() as u32;
    let mut words: Vec<u32> = logits.iter().map(|logit| logit.to_bits()).collect();
    words.resize(logits.len().next_multiple_of(4), POISON);
    let [step, out] = lab
        .run(|recording| {
            let step = lab.step(Step {
                rows: 1,
                seed_lo: settings.seed as u32,
                seed_hi: (settings.seed >> 32) as u32,
                top_k: settings.top_k,
                temperature: settings.temperature,
                top_p: settings.top_p,
                ..Step::default()
            })?;
            let (logits, tokens, history) = (lab.scratch(&words)?, lab.scratch(&[0u32])?, lab.scratch(&[0u32])?);
            let (stop_ids, out) = (lab.upload(MemoryKind::Params, &[0u32])?, lab.room(2 * draws)?);
            let buffers = Buffers {
                logits: Binding::Whole(&logits),
                step: Binding::Whole(&step),
                tokens: Binding::Whole(&tokens),
                history: Binding::Whole(&history),
                stop_ids: Binding::Whole(&stop_ids),
                out: Binding::Whole(&out),
            };
            let dims = Dims { vocabulary, ring: draws as u32, history: 0 };
            let sample = Sample::new(lab.gpu, &dims, &buffers)?;
            (0..draws).for_each(|_| sample.record(recording));
            Ok([step, out])
        })
        .await?;
    Ok((lab.read(&out).await?, lab.read(&step).await?))
}
