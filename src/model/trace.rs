//! Reads a step's intermediates back, under the names of the recorded reference.
//!
//! What the device never writes down (a normalised input, a key before it is packed) is derived from what it does, by the
//! CPU twins, and only where that is one elementwise step; `attended` before the inverse rotation is not kept.

use super::step::{Point, Rows, Slabs, Watch};
use super::{Model, Sequence};
use crate::config::{Config, LayerPlan};
use crate::formats::CacheFormat;
use crate::gpu::{Buffer, Gpu, Recording};
use crate::kernels::Step;
use crate::layout::{selects, DownRow, Layout};
use crate::reading::Depth;
use crate::reference::boundary::{finish, Mix, MixShape, MixWeights};
use crate::reference::math::{rms_norm, Matrix};
use crate::reference::sequence::check_tokens;
use crate::reference::trace::{Trace, Values};
use crate::{Error, Result};
use std::ops::Range;

/// Reads buffers at every [`Point`] of a step.
struct Reader<'a> {
    sequence: &'a Sequence,
    trace: &'a mut Trace,
    rows: Rows,
    layers: Range<usize>,
    /// The mix weights of the expert sublayer before each layer, on the host.
    mixes: Vec<[MixWeights; 2]>,
    norms: Vec<[Vec<f32>; 3]>,
    /// `pre` with which the next collapse happens.
    pre: Vec<f32>,
}

impl Sequence {
    /// Runs `tokens` as one step after the text so far and returns its intermediates. The tokens become part of the text.
    /// Layers outside `layers` run without being recorded.
    ///
    /// # Errors
    /// As [`Sequence::append`]; [`Error::Setting`] when there are more tokens than a step may have rows.
    pub fn trace(&mut self, tokens: &[u32], layers: Range<usize>) -> Result<Trace> {
        let model = self.model.clone();
        let layout = &model.layout;
        check_tokens(tokens, model.config.vocab_size, self.len(), layout.context)?;
        let pending = self.len() - self.cached;
        if pending > 0 || tokens.len() > layout.rows {
            let found = format!("{} with {pending} waiting", tokens.len());
            return Err(Error::Setting { setting: "traced tokens", found, allowed: format!("1 to {}", layout.rows) });
        }
        self.tokens.extend(tokens);
        let rows = pollster::block_on(self.send_rows(tokens.len(), Step::default()))?;
        if rows.count as usize != tokens.len() {
            self.tokens.truncate(self.cached);
            let (found, allowed) = (tokens.len().to_string(), "as many as lie in one slab of pages".into());
            return Err(Error::Setting { setting: "traced tokens", found, allowed });
        }
        let mut trace = Trace::new();
        let mut recording = Recording::new();
        let mut reader = Reader::new(self, &mut trace, rows, layers)?;
        self.kernels.record(&mut recording, &self.cache, rows, Depth::all(&model.config), true, &mut reader)?;
        self.kernels.record_advance(&mut recording);
        self.gpu().submit(recording)?;
        self.cached += tokens.len();
        Ok(trace)
    }

    /// Runs one layer from given streams (T, n, h) and carried `pre` (T, n), as if `tokens` followed the text so far, and records
    /// it. The text stays; the layer's caches are written.
    ///
    /// # Errors
    /// The device's.
    #[doc(hidden)]
    pub fn trace_layer(&mut self, index: usize, tokens: &[u32], streams: &[f32], pre: &[f32]) -> Result<Trace> {
        let model = self.model.clone();
        let Model { gpu, config, layout, scratch, weights, .. } = &*model;
        let (t, h) = (tokens.len(), config.hidden_size);
        self.tokens.extend(tokens);
        let rows = pollster::block_on(self.send_rows(t, Step::default()));
        self.tokens.truncate(self.cached);
        let rows = rows?;
        let mut padded = vec![0.0; t * layout.streams];
        for (to, from) in padded.chunks_mut(layout.hidden).zip(streams.chunks(h)) {
            to[..h].copy_from_slice(from);
        }
        gpu.upload(&scratch.streams, 0, bytemuck::cast_slice(&padded));
        if index > 0 {
            // Nothing waits to be expanded: z is zero, the mix carries `pre` and leaves the streams where they are.
            gpu.fill(&scratch.z, 0);
            let constants = floats(gpu, &weights.layers[index - 1].mixes[1].constants)?;
            let partials = carrying(config, layout, &constants, pre);
            gpu.upload(&scratch.partials_ffn, 0, bytemuck::cast_slice(&partials));
        }
        let mut trace = Trace::new();
        let mut recording = Recording::new();
        let mut reader = Reader::new(self, &mut trace, rows, index..index + 1)?;
        reader.pre = pre.to_vec();
        self.kernels.record_lookups(&mut recording, rows, config.layers.len());
        self.kernels.record_layer(&mut recording, index, rows, &Slabs::of(&self.cache), &mut reader)?;
        gpu.submit(recording)?;
        Ok(trace)
    }
}

/// Partial sums (T, S, n (n + 2) + 1) whose mix has this `pre` and, to the Sinkhorn iteration's eps, an identity `comb`.
fn carrying(config: &Config, layout: &Layout, constants: &[f32], pre: &[f32]) -> Vec<f32> {
    let n = config.hc_mult;
    let (scale, base) = constants.split_at(3);
    let mut partials = vec![0.0; pre.len() / n * layout.partials];
    for (row, pre) in partials.chunks_mut(layout.partials).zip(pre.chunks(n)) {
        for (i, &p) in pre.iter().enumerate() {
            let p = (p - config.hc_eps).clamp(1e-30, 1.0 - f32::EPSILON) as f64;
            row[i] = (((p / (1.0 - p)).ln() as f32).clamp(-80.0, 80.0) - base[i]) / scale[0];
        }
        for i in 0..n {
            for o in 0..n {
                let at = 2 * n + i * n + o;
                row[at] = (if i == o { 40.0 } else { -40.0 } - base[at]) / scale[2];
            }
        }
        // A mean square of 1: the projections are taken as they are.
        row[n * (n + 2)] = (n * config.hidden_size) as f32;
    }
    partials
}

fn words(gpu: &Gpu, buffer: &Buffer) -> Result<Vec<u32>> {
    let bytes = gpu.read_blocking(buffer)?;
    Ok(bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

fn floats(gpu: &Gpu, buffer: &Buffer) -> Result<Vec<f32>> {
    Ok(words(gpu, buffer)?.into_iter().map(f32::from_bits).collect())
}

impl<'a> Reader<'a> {
    fn new(sequence: &'a Sequence, trace: &'a mut Trace, rows: Rows, layers: Range<usize>) -> Result<Self> {
        let Model { gpu, config, weights, .. } = &*sequence.model;
        let n = config.hc_mult;
        let (mut mixes, mut norms) = (vec![], vec![]);
        for layer in &weights.layers {
            let mix = |mix: &super::weights::Mix| -> Result<MixWeights> {
                let constants = floats(gpu, &mix.constants)?;
                let (scale, base) = constants.split_at(3);
                let projection = Matrix::new(0, n * config.hidden_size, vec![]);
                Ok(MixWeights { projection, base: base[..n * (n + 2)].to_vec(), scale: scale.to_vec() })
            };
            mixes.push([mix(&layer.mixes[0])?, mix(&layer.mixes[1])?]);
            norms.push([floats(gpu, &layer.attn_norm)?, floats(gpu, &layer.q_norm)?, floats(gpu, &layer.ffn_norm)?]);
        }
        let mut pre = vec![0.0; rows.count as usize * n];
        pre.iter_mut().step_by(n).for_each(|p| *p = 1.0);
        Ok(Self { sequence, trace, rows, layers, mixes, norms, pre })
    }

    fn model(&self) -> &'a Model {
        &self.sequence.model
    }

    fn rows(&self) -> usize {
        self.rows.count as usize
    }

    /// `width` floats from `offset` on of each row of a buffer of rows of `stride` floats.
    fn take(&self, buffer: &Buffer, stride: usize, offset: usize, width: usize) -> Result<Vec<f32>> {
        let all = floats(&self.model().gpu, buffer)?;
        Ok(all.chunks(stride).take(self.rows()).flat_map(|row| row[offset..offset + width].to_vec()).collect())
    }

    fn put(&mut self, name: &str, shape: &[usize], values: Vec<f32>) {
        self.trace.put(name, shape, || Values::F32(values));
    }

    /// Streams (T, n, h) without padding.
    fn streams(&self) -> Result<Vec<f32>> {
        let Model { config, layout, scratch, .. } = self.model();
        let padded = self.take(&scratch.streams, layout.streams, 0, layout.streams)?;
        Ok(padded.chunks(layout.hidden).flat_map(|stream| stream[..config.hidden_size].to_vec()).collect())
    }

    /// `parts` vectors of `z` a row, summed from `from` to `to`.
    fn output(&self, parts: usize, range: Range<usize>) -> Result<Vec<f32>> {
        let Model { config, layout, scratch, .. } = self.model();
        let h = config.hidden_size;
        let all = self.take(&scratch.z, parts * layout.hidden, 0, parts * layout.hidden)?;
        let mut sums = Vec::with_capacity(self.rows() * h);
        for row in all.chunks(parts * layout.hidden) {
            let mut sum = vec![0.0f32; h];
            for part in row.chunks(layout.hidden).take(range.end).skip(range.start) {
                sum.iter_mut().zip(part).for_each(|(s, v)| *s += v);
            }
            sums.extend(sum);
        }
        Ok(sums)
    }

    /// The mixes of a sublayer, finished from its partial sums.
    fn finish(&self, layer: usize, sublayer: usize) -> Result<Vec<Mix>> {
        let Model { config, layout, scratch, .. } = self.model();
        let buffer = [&scratch.partials_attn, &scratch.partials_ffn][sublayer];
        let width = config.hc_mult * (config.hc_mult + 2) + 1;
        let partials = self.take(buffer, layout.partials, 0, layout.partials)?;
        let shape = MixShape::new(config);
        let finished = partials.chunks(layout.partials).map(|row| {
            let mut sums = vec![0.0; width];
            for slice in row.chunks(width) {
                sums.iter_mut().zip(slice).for_each(|(s, v)| *s += v);
            }
            finish(&sums, config.hc_mult * config.hidden_size, &self.mixes[layer][sublayer], shape)
        });
        Ok(finished.collect())
    }

    /// What both sublayers' inputs have: mix, collapsed input and its norm.
    fn sublayer_input(&mut self, layer: usize, sublayer: usize) -> Result<()> {
        let Model { config, layout, scratch, .. } = self.model();
        let (t, n, h) = (self.rows(), config.hc_mult, config.hidden_size);
        let name = ["attn", "ffn"][sublayer];
        let mixes = self.finish(layer, sublayer)?;
        let all = |of: fn(&Mix) -> &[f32]| mixes.iter().flat_map(|mix| of(mix).to_vec()).collect::<Vec<_>>();
        let pre = all(|mix| &mix.pre);
        self.put(&format!("hc_{name}_pre"), &[1, t, n], pre.clone());
        self.put(&format!("hc_{name}_post"), &[1, t, n], all(|mix| &mix.post));
        self.put(&format!("hc_{name}_comb"), &[1, t, n, n], all(|mix| &mix.comb));
        self.pre = pre;
        let x = self.take(&scratch.x, layout.hidden, 0, h)?;
        let norm = &self.norms[layer][2 * sublayer][..h];
        let normed = x.chunks(h).flat_map(|row| rms_norm(row, norm, config.rms_norm_eps)).collect();
        self.put(&format!("{name}_in"), &[1, t, h], normed);
        self.put(&format!("{name}_collapsed"), &[1, t, h], x);
        Ok(())
    }

    fn projected(&mut self, plan: &LayerPlan) -> Result<()> {
        let Model { config, layout, scratch, .. } = self.model();
        let t = self.rows();
        let down = DownRow::new(config, plan);
        let latent = self.take(&scratch.down, down.width, 0, config.q_lora_rank)?;
        let norm = &self.norms[plan.index][1][..config.q_lora_rank];
        let normed = latent.chunks(config.q_lora_rank).flat_map(|row| rms_norm(row, norm, config.rms_norm_eps));
        self.put("q_latent", &[1, t, config.q_lora_rank], normed.collect());
        let width = config.num_attention_heads * config.head_dim;
        let queries = self.take(&scratch.up, layout.up, 0, width)?;
        self.put("q_prerope", &[1, t, width], queries);
        if selects(plan) {
            let weights = self.take(&scratch.down, down.width, down.index_weights, config.index_n_heads)?;
            self.put("index_w_raw", &[1, t, config.index_n_heads], weights);
        }
        Ok(())
    }

    fn appended(&mut self, plan: &LayerPlan) -> Result<()> {
        let Model { gpu, config, layout, scratch, .. } = self.model();
        let (t, d) = (self.rows(), config.head_dim);
        let cache = &self.sequence.cache;
        let keys: Vec<f32> = if t == 1 {
            let ring = words(gpu, &cache.rings[plan.index])?;
            let slot = self.rows.position as usize % layout.ring_rows;
            CacheFormat::Fp8.unpack(&ring[slot * layout.window_row..][..layout.window_row], d)
        } else {
            let chunk = words(gpu, &scratch.chunk)?;
            chunk.chunks(layout.window_row).take(t).flat_map(|row| CacheFormat::Fp8.unpack(row, d)).collect()
        };
        self.put("swa_kv", &[1, t, d], keys);
        if let Some(at) = layout.page_parts[plan.index] {
            let pages = cache.pages.with(|pages| pollster::block_on(self.model().pool.read(gpu, pages)))?;
            let pages: &[u32] = &bytemuck::allocation::pod_collect_to_vec(&pages);
            let first = self.rows.position as usize / plan.ratio;
            let entries = first..(self.rows.position as usize + t) / plan.ratio;
            let latents = entries
                .clone()
                .flat_map(|entry| CacheFormat::Nvfp4.unpack(&pages[at.latent(entry)..][..at.latent_words], d));
            let (count, index_dim) = (entries.len(), config.index_head_dim);
            self.put("comp_kv", &[1, count, d], latents.collect());
            let keys =
                entries.flat_map(|entry| CacheFormat::Mxfp4.unpack(&pages[at.key(entry)..][..at.key_words], index_dim));
            self.put("index_k", &[1, count, index_dim], keys.collect());
        }
        if selects(plan) {
            let queries = words(gpu, &scratch.index_queries)?;
            let rows = queries.chunks(layout.key_row).take(t * config.index_n_heads);
            let values = rows.flat_map(|row| CacheFormat::Mxfp4.unpack(row, config.index_head_dim)).collect();
            self.put("index_q", &[1, t, config.index_n_heads, config.index_head_dim], values);
        }
        Ok(())
    }

    fn selected(&mut self, plan: &LayerPlan) -> Result<()> {
        let Model { gpu, layout, scratch, config, .. } = self.model();
        let t = self.rows();
        let chosen = words(gpu, scratch.selections[plan.index].as_ref().expect("a layer that selects"))?;
        let ids = chosen.chunks(layout.selection).take(t).flat_map(|row| {
            let count = row[0] as usize;
            let filler = std::iter::repeat_n(-1, config.index_topk - count);
            row[1..1 + count].iter().map(|&id| id as i32).chain(filler).collect::<Vec<_>>()
        });
        let ids: Vec<i32> = ids.collect();
        self.trace.put("topk", &[1, t, config.index_topk], || Values::I32(ids));
        let entries = (self.rows.position as usize + t) / plan.ratio;
        let visible = |row: usize| (self.rows.position as usize + row + 1) / plan.ratio;
        if plan.candidates == crate::config::Candidates::Source {
            let lists = words(gpu, &scratch.candidates)?;
            let mut mask = vec![false; t * entries];
            for (row, list) in lists.chunks(layout.candidates).take(t).enumerate() {
                for &block in &list[1..1 + list[0] as usize] {
                    let first = block as usize * config.candidate_block_size;
                    for entry in first..(first + config.candidate_block_size).min(visible(row)) {
                        mask[row * entries + entry] = true;
                    }
                }
            }
            self.trace.put("candidates", &[1, t, entries], || Values::Bool(mask));
        }
        if plan.candidates != crate::config::Candidates::Restricted {
            // Rows of scores lie a tile apart; all of them are there as long as they fit one.
            let passes = layout.tiling.passes(t as u32, entries as u32);
            if passes.len() > 1 {
                return Ok(());
            }
            let stride = layout.tiling.score_stride(t as u32);
            let all = floats(gpu, &scratch.scores)?;
            let rows = all.chunks(stride).take(t).enumerate();
            let scores = rows.flat_map(|(row, scores)| {
                let seen = visible(row);
                let hidden = std::iter::repeat_n(f32::NEG_INFINITY, entries - seen);
                scores[..seen].iter().copied().chain(hidden).collect::<Vec<_>>()
            });
            let scores = scores.collect();
            self.put("index_scores", &[1, t, entries], scores);
        }
        Ok(())
    }

    fn routed(&mut self) -> Result<()> {
        let Model { gpu, config, layout, scratch, .. } = self.model();
        let (t, k) = (self.rows(), config.num_experts_per_tok);
        let ids = words(gpu, &scratch.route_ids)?;
        let ids = ids.chunks(layout.parts).take(t).flat_map(|row| row[..k].iter().map(|&id| id as i32));
        let ids: Vec<i32> = ids.collect();
        self.trace.put("moe_indices", &[t, k], || Values::I32(ids));
        let gains = self.take(&scratch.route_gains, layout.parts, 0, k)?;
        self.put("moe_weights", &[t, k], gains);
        let logits = self.take(&scratch.gate, layout.gate, 0, config.n_routed_experts)?;
        let scores = logits.iter().map(|&l| crate::reference::math::softplus(l).sqrt()).collect();
        self.put("moe_scores", &[t, config.n_routed_experts], scores);
        Ok(())
    }

    fn read(&mut self, layer: usize, point: Point) -> Result<()> {
        let Model { config, layout, scratch, .. } = self.model();
        let plan = &config.layers[layer];
        let (t, n, h) = (self.rows(), config.hc_mult, config.hidden_size);
        match point {
            Point::Embedded => {
                let embeddings = self.take(&scratch.streams, layout.streams, 0, h)?;
                self.trace.enter(None);
                self.put("embeddings", &[1, t, h], embeddings);
            }
            Point::EngramRows => {
                let engram = config.engram.as_ref().expect("an Engram layer");
                let slot = plan.engram.expect("an Engram layer");
                let all = floats(&self.model().gpu, &scratch.engram_rows)?;
                let rows = all[slot * layout.engram_region..].chunks(layout.engram).take(t);
                let rows = rows.flat_map(|row| row[..engram.width()].to_vec()).collect();
                self.put("engram_rows", &[1, t, engram.rows_per_token(), engram.head_dim], rows);
            }
            Point::EngramValues => {
                let kv = self.take(&scratch.engram_kv, layout.engram_kv, 0, (n + 1) * h)?;
                self.put("engram_kv", &[1, t, (n + 1) * h], kv);
            }
            Point::EngramDone => {
                let streams = self.streams()?;
                self.put("engram_out", &[1, t, n, h], streams);
            }
            Point::AttentionInput => {
                self.put("pre_mix_in", &[1, t, n], self.pre.clone());
                if plan.engram.is_none() {
                    let streams = self.streams()?;
                    self.put("streams_in", &[1, t, n, h], streams);
                }
                self.sublayer_input(layer, 0)?;
            }
            Point::Projected => self.projected(plan)?,
            Point::Appended => self.appended(plan)?,
            Point::Selected => self.selected(plan)?,
            Point::Attended => {
                let attended = self.take(&scratch.attended, layout.attended, 0, layout.attended)?;
                let width = config.num_attention_heads / config.o_groups * config.head_dim;
                let groups = attended.chunks(layout.group).flat_map(|group| group[..width].to_vec()).collect();
                self.put("attended_derope", &[1, t, config.o_groups, width], groups);
            }
            Point::AttentionLatent => {
                let width = config.o_groups * config.o_lora_rank;
                let latent = self.take(&scratch.attention_latent, layout.attention_latent, 0, width)?;
                self.put("wo_a_out", &[1, t, config.o_groups, config.o_lora_rank], latent);
            }
            Point::AttentionOutput => {
                let output = self.output(1, 0..1)?;
                self.put("attn_out", &[1, t, h], output);
            }
            Point::ExpertInput => {
                let streams = self.streams()?;
                self.put("streams_mid", &[1, t, n, h], streams);
                self.sublayer_input(layer, 1)?;
            }
            Point::Routed => self.routed()?,
            Point::ExpertOutput => {
                let k = layout.parts - 1;
                let (routed, shared) = (self.output(layout.parts, 0..k)?, self.output(layout.parts, k..k + 1)?);
                self.put("routed_out", &[t, h], routed);
                self.put("shared_out", &[t, h], shared);
                let output = self.output(layout.parts, 0..k + 1)?;
                self.put("ffn_out", &[1, t, h], output.clone());
                self.put("pre_mix_out", &[1, t, n], self.pre.clone());
                // The next boundary expands; here its twin does.
                let (streams, mixes) = (self.streams()?, self.finish(layer, 1)?);
                let out = streams.chunks(n * h).zip(output.chunks(h)).zip(&mixes);
                let expanded = out.flat_map(|((r, y), mix)| crate::reference::boundary::expand(r, y, mix));
                let expanded = expanded.collect();
                self.put("streams_out", &[1, t, n, h], expanded);
            }
            Point::Final => {
                self.trace.enter(None);
                let x = self.take(&scratch.x, layout.hidden, 0, h)?;
                self.put("final_collapsed", &[1, t, h], x);
            }
            Point::Logits => {
                self.trace.enter(None);
                let all = floats(&self.model().gpu, &scratch.logits)?;
                let count = layout.logit_rows.min(t);
                let logits = all.chunks(layout.logits).take(count).flat_map(|row| row[..config.vocab_size].to_vec());
                let logits = logits.collect();
                self.put("logits", &[1, count, config.vocab_size], logits);
            }
        }
        Ok(())
    }
}

impl Watch for Reader<'_> {
    fn reached(&mut self, recording: &mut Recording, layer: usize, point: Point) -> Result<()> {
        let of_layer = !matches!(point, Point::Embedded | Point::Final | Point::Logits);
        if of_layer {
            self.trace.enter(Some(layer));
        }
        // `pre` passes from layer to layer, recorded or not.
        let carries = matches!(point, Point::AttentionInput | Point::ExpertInput);
        if of_layer && !self.layers.contains(&layer) && !carries {
            return Ok(());
        }
        self.model().gpu.submit(std::mem::take(recording))?;
        if of_layer && !self.layers.contains(&layer) {
            let sublayer = (point == Point::ExpertInput) as usize;
            self.pre = self.finish(layer, sublayer)?.iter().flat_map(|mix| mix.pre.clone()).collect();
            return Ok(());
        }
        self.read(layer, point)
    }
}
