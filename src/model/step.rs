//! A step: every dispatch of a forward over the rows in flight, bound once, recorded again and again.
//!
//! The order is that of ARCHITECTURE.md. Between its parts a step can be watched: [`Watch`] hears of every point at which
//! an intermediate is complete. Decoding watches nothing; tracing reads buffers there.

use super::weights::engram_dims;
use super::Model;
use crate::cache::{history, Cache, OUT_RING};
use crate::config::{Candidates, Config, LayerPlan, Role};
use crate::gpu::{Binding, Buffer, Gpu, Recording};
use crate::kernels::attend::{Attend, Selected, Window};
use crate::kernels::boundary::{self, Boundary, Place};
use crate::kernels::cache_append::{CacheAppend, GlobalEntries, IndexQueries, WindowKeys};
use crate::kernels::embed::Embed;
use crate::kernels::engram_gate::{self, EngramGate, Expand};
use crate::kernels::engram_gather::{self, EngramGather};
use crate::kernels::experts_down::{ExpertsDown, ExpertsDownIo};
use crate::kernels::experts_up::{ExpertsUp, ExpertsUpIo};
use crate::kernels::group_rows::GroupRows;
use crate::kernels::index_score::{IndexScore, IndexScoreBuffers, IndexScoreDims};
use crate::kernels::linear::{Linear, LinearIo, Pack};
use crate::kernels::ring_commit::RingCommit;
use crate::kernels::route::{Route, RouteDims, RouteIo};
use crate::kernels::sample::{self, Sample};
use crate::kernels::select::{Select, SelectBuffers, SelectDims, SelectKind};
use crate::layout::{boundary_dims, candidate_dims, selects, DownRow, PAGE_TOKENS};
use crate::Result;

/// A point of a step at which intermediates are complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Point {
    /// Embedded tokens are in the streams.
    Embedded,
    /// A layer begins: its input is complete (for layers after the first, streams still await `boundary`).
    EngramRows,
    /// Keys and value of an Engram.
    EngramValues,
    /// The Engram's memory is in the streams.
    EngramDone,
    /// Streams, mix partials and collapsed input of the attention sublayer.
    AttentionInput,
    /// `down` and `up` rows.
    Projected,
    /// Ring or chunk, pages and index queries.
    Appended,
    /// Scores and selection.
    Selected,
    /// Attention before `wo_a`.
    Attended,
    /// After `wo_a`.
    AttentionLatent,
    /// Attention output, in `z`.
    AttentionOutput,
    /// Streams, mix partials and collapsed input of the expert sublayer.
    ExpertInput,
    /// Router's choice.
    Routed,
    /// Expert outputs, in `z`.
    ExpertOutput,
    /// Final collapse.
    Final,
    /// Logits.
    Logits,
}

/// Hears of every [`Point`], with the layer it belongs to; may submit what was recorded so far.
pub(super) trait Watch {
    /// The point was reached.
    fn reached(&mut self, recording: &mut Recording, layer: usize, point: Point) -> Result<()>;
}

/// Watches nothing.
impl Watch for () {
    fn reached(&mut self, _: &mut Recording, _: usize, _: Point) -> Result<()> {
        Ok(())
    }
}

/// What a step processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rows {
    /// Tokens in the cache before the step, as the host knows them: grids and traffic follow from it.
    pub position: u32,
    /// Rows in flight.
    pub count: u32,
}

/// An Engram's kernels.
#[derive(Debug)]
struct EngramKernels {
    gather: EngramGather,
    wkv: Linear,
    gate: EngramGate,
}

/// What a layer that selects runs besides.
#[derive(Debug)]
struct SelectKernels {
    score: IndexScore,
    select: Select,
    ratio: u32,
}

/// A layer's kernels.
#[derive(Debug)]
struct LayerKernels {
    engram: Option<EngramKernels>,
    attention_boundary: Boundary,
    down: Linear,
    up: Linear,
    append: CacheAppend,
    select: Option<SelectKernels>,
    attend: Attend,
    commit: RingCommit,
    attention_a: Linear,
    attention_b: Linear,
    expert_boundary: Boundary,
    gate: Linear,
    route: Route,
    group: GroupRows,
    experts_up: ExpertsUp,
    experts_down: ExpertsDown,
}

/// All kernels of a model on one sequence's cache.
#[derive(Debug)]
pub(super) struct StepKernels {
    embed: Embed,
    layers: Vec<LayerKernels>,
    last_boundary: Boundary,
    head: Linear,
    sample: Sample,
}

impl StepKernels {
    /// Makes all pipelines, uniforms and bind groups.
    pub fn new(model: &Model, cache: &Cache) -> Result<Self> {
        let Model { gpu, config, layout, weights, scratch, .. } = model;
        let builder = Builder { model, gpu, config, cache };
        let layers: Result<Vec<_>> = config.layers.iter().map(|layer| builder.layer(layer)).collect();
        let last = &weights.layers[weights.layers.len() - 1].mixes[1];
        let streams = config.hc_mult as u32;
        Ok(Self {
            embed: Embed::new(gpu, &weights.embed, &cache.step, &cache.tokens, &scratch.streams, streams)?,
            layers: layers?,
            last_boundary: builder.boundary(Place::Last { mix_const: (&last.constants).into() }, layout.parts, true)?,
            head: Linear::new(
                gpu,
                &weights.head,
                &LinearIo {
                    step: &cache.step,
                    x: &scratch.x,
                    x_stride: layout.hidden as u32,
                    x_offset: 0,
                    norm: Some((&weights.norm, config.rms_norm_eps)),
                    y: &scratch.logits,
                    y_stride: layout.logits as u32,
                    y_offset: 0,
                    last_row: layout.logit_rows == 1,
                },
            )?,
            sample: Sample::new(
                gpu,
                &sample::Dims {
                    vocabulary: config.vocab_size as u32,
                    ring: OUT_RING as u32,
                    history: history(config) as u32,
                },
                &sample::Buffers {
                    logits: (&scratch.logits).into(),
                    step: (&cache.step).into(),
                    tokens: (&cache.tokens).into(),
                    history: (&cache.history).into(),
                    stop_ids: (&cache.stop_ids).into(),
                    out: (&cache.out).into(),
                },
            )?,
        })
    }

    /// Records embedding, all layers and, if asked for, the head.
    pub fn record(&self, recording: &mut Recording, rows: Rows, head: bool, watch: &mut impl Watch) -> Result<()> {
        self.embed.record(recording, rows.count);
        self.record_lookups(recording, rows);
        watch.reached(recording, 0, Point::Embedded)?;
        for index in 0..self.layers.len() {
            self.record_layer(recording, index, rows, watch)?;
        }
        if head {
            let last = self.layers.len() - 1;
            self.last_boundary.record(recording, rows.count);
            watch.reached(recording, last, Point::Final)?;
            self.head.record(recording, rows.count);
            watch.reached(recording, last, Point::Logits)?;
        }
        Ok(())
    }

    /// Records the lookups of all Engrams, which depend on tokens only.
    pub fn record_lookups(&self, recording: &mut Recording, rows: Rows) {
        for engram in self.layers.iter().filter_map(|layer| layer.engram.as_ref()) {
            engram.gather.record(recording, rows.count);
        }
    }

    /// Records one layer: streams that await the expansion of the sublayer before in, the same out.
    pub fn record_layer(
        &self,
        recording: &mut Recording,
        index: usize,
        rows: Rows,
        watch: &mut impl Watch,
    ) -> Result<()> {
        let layer = &self.layers[index];
        let Rows { position, count } = rows;
        let mut reached = |recording: &mut Recording, point| watch.reached(recording, index, point);
        if let Some(engram) = &layer.engram {
            reached(recording, Point::EngramRows)?;
            engram.wkv.record(recording, count);
            reached(recording, Point::EngramValues)?;
            engram.gate.record(recording, count);
            reached(recording, Point::EngramDone)?;
        }
        layer.attention_boundary.record(recording, count);
        reached(recording, Point::AttentionInput)?;
        layer.down.record(recording, count);
        layer.up.record(recording, count);
        reached(recording, Point::Projected)?;
        layer.append.record(recording, position, count);
        reached(recording, Point::Appended)?;
        if let Some(select) = &layer.select {
            select.score.record(recording, count, (position + count) / select.ratio);
            select.select.record(recording, count);
            reached(recording, Point::Selected)?;
        }
        layer.attend.record(recording, position, count);
        layer.commit.record(recording, count);
        reached(recording, Point::Attended)?;
        layer.attention_a.record(recording, count);
        reached(recording, Point::AttentionLatent)?;
        layer.attention_b.record(recording, count);
        reached(recording, Point::AttentionOutput)?;
        layer.expert_boundary.record(recording, count);
        reached(recording, Point::ExpertInput)?;
        layer.gate.record(recording, count);
        layer.route.record(recording, count);
        if count > 1 {
            layer.group.record(recording, count);
        }
        reached(recording, Point::Routed)?;
        layer.experts_up.record(recording, count);
        layer.experts_down.record(recording, count);
        reached(recording, Point::ExpertOutput)
    }

    /// Records the end of a step: choose a token and move on.
    pub fn record_sample(&self, recording: &mut Recording) {
        self.sample.record(recording);
    }

    /// Records the end of a step that chooses no token.
    pub fn record_advance(&self, recording: &mut Recording) {
        self.sample.record_advance(recording);
    }
}

/// What all constructors need.
struct Builder<'a> {
    model: &'a Model,
    gpu: &'a Gpu,
    config: &'a Config,
    cache: &'a Cache,
}

impl<'a> Builder<'a> {
    /// A boundary: before an attention sublayer (`attention`) it reads the partial sums of an expert sublayer's mix, and the
    /// other way round.
    fn boundary(&self, place: Place<'a>, parts: usize, attention: bool) -> Result<Boundary> {
        let scratch = &self.model.scratch;
        let (before, after) = match attention {
            true => (&scratch.partials_ffn, &scratch.partials_attn),
            false => (&scratch.partials_attn, &scratch.partials_ffn),
        };
        let buffers = boundary::Buffers {
            step: (&self.cache.step).into(),
            z: (&scratch.z).into(),
            parts: parts as u32,
            streams: (&scratch.streams).into(),
            partials_in: before.into(),
            partials_out: after.into(),
            x: (&scratch.x).into(),
        };
        Boundary::new(self.gpu, &boundary_dims(self.config), place, &buffers)
    }

    /// A product whose input rows and output rows fill their buffers.
    fn linear(
        &self,
        pack: &Pack,
        (x, x_stride): (&Buffer, usize),
        norm: Option<&Buffer>,
        (y, y_stride): (&Buffer, usize),
    ) -> Result<Linear> {
        let io = LinearIo {
            step: &self.cache.step,
            x,
            x_stride: x_stride as u32,
            x_offset: 0,
            norm: norm.map(|norm| (norm, self.config.rms_norm_eps)),
            y,
            y_stride: y_stride as u32,
            y_offset: 0,
            last_row: false,
        };
        Linear::new(self.gpu, pack, &io)
    }

    fn layer(&self, plan: &LayerPlan) -> Result<LayerKernels> {
        let Model { gpu, config, layout, weights, scratch, .. } = self.model;
        let step = &self.cache.step;
        let layer = &weights.layers[plan.index];
        let before = plan.index.checked_sub(1).map(|index| &weights.layers[index].mixes[1]);
        let [attn_mix, ffn_mix] = &layer.mixes;
        let down = DownRow::new(config, plan);
        let mix_fn: Binding<'_> = (&attn_mix.projection).into();
        let place = match (before, plan.engram) {
            (None, _) => Place::First { mix_fn },
            (Some(before), None) => Place::Between { mix_fn, mix_const: (&before.constants).into() },
            (Some(before), Some(_)) => Place::AfterEngram { mix_fn, mix_const: (&before.constants).into() },
        };
        let slots = layout.parts as u32;
        Ok(LayerKernels {
            engram: self.engram(plan)?,
            attention_boundary: self.boundary(place, layout.parts, true)?,
            down: self.linear(
                &layer.down,
                (&scratch.x, layout.hidden),
                Some(&layer.attn_norm),
                (&scratch.down, down.width),
            )?,
            // The query latent is the first part of a `down` row.
            up: self.linear(&layer.up, (&scratch.down, down.width), Some(&layer.q_norm), (&scratch.up, layout.up))?,
            append: self.append(plan, &down)?,
            select: if selects(plan) { Some(self.select(plan, &down)?) } else { None },
            attend: self.attend(plan)?,
            commit: RingCommit::new(
                gpu,
                step,
                config.head_dim,
                config.sliding_window,
                &scratch.chunk,
                &self.cache.rings[plan.index],
            )?,
            attention_a: self.linear(
                &layer.attention_a,
                (&scratch.attended, layout.attended),
                None,
                (&scratch.attention_latent, layout.attention_latent),
            )?,
            attention_b: self.linear(
                &layer.attention_b,
                (&scratch.attention_latent, layout.attention_latent),
                None,
                (&scratch.z, layout.hidden),
            )?,
            expert_boundary: self.boundary(
                Place::Between { mix_fn: (&ffn_mix.projection).into(), mix_const: (&attn_mix.constants).into() },
                1,
                false,
            )?,
            gate: self.linear(
                &layer.gate,
                (&scratch.x, layout.hidden),
                Some(&layer.ffn_norm),
                (&scratch.gate, layout.gate),
            )?,
            route: Route::new(
                gpu,
                &RouteDims {
                    experts: config.n_routed_experts as u32,
                    k: config.num_experts_per_tok as u32,
                    logit_stride: layout.gate as u32,
                    normalise: config.norm_topk_prob,
                    scale: config.routed_scaling_factor,
                },
                &RouteIo {
                    step,
                    logits: &scratch.gate,
                    bias: &layer.gate_bias,
                    ids: &scratch.route_ids,
                    gains: &scratch.route_gains,
                    pairs: &scratch.pairs,
                    tiles: &scratch.tiles,
                },
            )?,
            group: GroupRows::new(
                gpu,
                step,
                &scratch.route_ids,
                &scratch.pairs,
                &scratch.tiles,
                slots,
                config.n_routed_experts as u32 + 1,
            )?,
            experts_up: ExpertsUp::new(
                gpu,
                &layer.experts_up,
                &ExpertsUpIo {
                    step,
                    norm: &layer.ffn_norm,
                    eps: config.rms_norm_eps,
                    x: &scratch.x,
                    x_stride: layout.hidden as u32,
                    gains: &scratch.route_gains,
                    pairs: &scratch.pairs,
                    tiles: &scratch.tiles,
                    u: &scratch.hidden,
                    u_stride: layout.expert_hidden as u32,
                    slots,
                    limit: config.swiglu_limit,
                },
            )?,
            experts_down: ExpertsDown::new(
                gpu,
                &layer.experts_down,
                &ExpertsDownIo {
                    step,
                    u: &scratch.hidden,
                    u_stride: layout.expert_hidden as u32,
                    pairs: &scratch.pairs,
                    tiles: &scratch.tiles,
                    z: &scratch.z,
                    z_stride: layout.hidden as u32,
                    slots,
                },
            )?,
        })
    }

    fn engram(&self, plan: &LayerPlan) -> Result<Option<EngramKernels>> {
        let Model { gpu, config, layout, weights, scratch, ngrams, .. } = self.model;
        let (Some(engram), Some(settings), Some(token_map)) =
            (&weights.layers[plan.index].engram, &config.engram, &weights.token_map)
        else {
            return Ok(None);
        };
        let dims = engram_dims(settings, ngrams);
        let slot = plan.engram.expect("a layer with Engram weights");
        let (first, bytes) = (slot * layout.engram_region, 4 * layout.engram_region as u64);
        let before = plan.index.checked_sub(1).map(|index| &weights.layers[index].mixes[1]);
        let expand = before.map(|before| Expand {
            z: (&scratch.z).into(),
            parts: layout.parts as u32,
            partials_in: (&scratch.partials_ffn).into(),
            mix_const: (&before.constants).into(),
        });
        Ok(Some(EngramKernels {
            gather: EngramGather::new(
                gpu,
                &dims,
                &engram.table,
                &engram_gather::Buffers {
                    step: (&self.cache.step).into(),
                    tokens: (&self.cache.tokens).into(),
                    history: (&self.cache.history).into(),
                    token_map: token_map.into(),
                    hash: (&engram.hash).into(),
                    rows_out: Binding::Range(&scratch.engram_rows, slot as u64 * bytes, bytes),
                },
            )?,
            wkv: Linear::new(
                gpu,
                &engram.wkv,
                &LinearIo {
                    step: &self.cache.step,
                    x: &scratch.engram_rows,
                    x_stride: layout.engram as u32,
                    x_offset: first as u32,
                    norm: None,
                    y: &scratch.engram_kv,
                    y_stride: layout.engram_kv as u32,
                    y_offset: 0,
                    last_row: false,
                },
            )?,
            gate: EngramGate::new(
                gpu,
                &boundary_dims(config),
                dims.image_token,
                dims.pad_token,
                expand,
                &engram_gate::Buffers {
                    step: (&self.cache.step).into(),
                    streams: (&scratch.streams).into(),
                    kv: (&scratch.engram_kv).into(),
                    qk: (&engram.qk).into(),
                    tokens: (&self.cache.tokens).into(),
                },
            )?,
        }))
    }

    /// Pages of the layer that a layer reads its global entries from.
    fn pages(&self, plan: &LayerPlan) -> Option<&'a Buffer> {
        plan.kv_source.and_then(|source| self.cache.pages[source].as_ref())
    }

    fn append(&self, plan: &LayerPlan, down: &DownRow) -> Result<CacheAppend> {
        let Model { gpu, config, layout, weights, scratch, .. } = self.model;
        let layer = &weights.layers[plan.index];
        let keys = WindowKeys {
            head_dim: config.head_dim,
            rotary: config.qk_rope_head_dim,
            window: config.sliding_window,
            eps: config.rms_norm_eps,
            down_stride: down.width,
            key_at: down.window,
            down: &scratch.down,
            constants: &layer.append,
            ring: &self.cache.rings[plan.index],
            chunk: &scratch.chunk,
        };
        let queries = selects(plan).then_some(IndexQueries {
            heads: config.index_n_heads,
            head_dim: config.index_head_dim,
            up_stride: layout.up,
            query_at: layout.up_index,
            up: &scratch.up,
            queries: &scratch.index_queries,
        });
        let entries = match (&layer.wk, &self.cache.pages[plan.index]) {
            (Some(wk), Some(pages)) => Some(GlobalEntries {
                ratio: plan.ratio,
                latent_at: down.latent,
                gate_at: down.gate,
                wk: *wk,
                pages,
                remainder: self.cache.remainders[plan.index].as_ref(),
            }),
            _ => None,
        };
        CacheAppend::new(gpu, &self.cache.step, &keys, queries.as_ref(), entries.as_ref())
    }

    fn select(&self, plan: &LayerPlan, down: &DownRow) -> Result<SelectKernels> {
        let Model { gpu, config, layout, scratch, .. } = self.model;
        let step = &self.cache.step;
        let pages = self.pages(plan).expect("a layer that selects has a source");
        let candidates = candidate_dims(config);
        let restricted = plan.candidates == Candidates::Restricted;
        let page_entries = (PAGE_TOKENS / plan.ratio) as u32;
        let capacity = layout.context.div_ceil(PAGE_TOKENS) as u32 * page_entries;
        let score_dims = IndexScoreDims {
            heads: config.index_n_heads as u32,
            head_dim: config.index_head_dim as u32,
            weight_stride: down.width as u32,
            weight_offset: down.index_weights as u32,
            ratio: plan.ratio as u32,
            page_entries,
            latent_words: layout.latent_row as u32,
            capacity,
            candidates: restricted.then_some(candidates),
        };
        let score_buffers = IndexScoreBuffers {
            step,
            queries: &scratch.index_queries,
            weights: &scratch.down,
            pages,
            candidates: restricted.then_some(&scratch.candidates),
            scores: &scratch.scores,
        };
        let kind = match plan.candidates {
            Candidates::Ignored => SelectKind::Plain,
            Candidates::Source => {
                SelectKind::Source { dims: candidates, maxima: &scratch.block_maxima, candidates: &scratch.candidates }
            }
            Candidates::Restricted => SelectKind::Restricted { dims: candidates, candidates: &scratch.candidates },
        };
        let select_dims = SelectDims { topk: config.index_topk as u32, ratio: plan.ratio as u32, capacity };
        let select_buffers = SelectBuffers { step, scores: &scratch.scores, selection: &scratch.selection };
        Ok(SelectKernels {
            score: IndexScore::new(gpu, &score_dims, &score_buffers)?,
            select: Select::new(gpu, &select_dims, kind, &select_buffers)?,
            ratio: plan.ratio as u32,
        })
    }

    fn attend(&self, plan: &LayerPlan) -> Result<Attend> {
        let Model { gpu, config, layout, weights, scratch, .. } = self.model;
        let window = Window {
            heads: config.num_attention_heads,
            head_dim: config.head_dim,
            rotary: config.qk_rope_head_dim,
            window: config.sliding_window,
            groups: config.o_groups,
            up_stride: layout.up,
            query_at: 0,
            up: &scratch.up,
            ring: &self.cache.rings[plan.index],
            chunk: &scratch.chunk,
            constants: &weights.layers[plan.index].attend,
            attended: &scratch.attended,
        };
        let selected = match (plan.role, self.pages(plan)) {
            (Role::Window, _) | (_, None) => None,
            (_, Some(pages)) => Some(Selected {
                ratio: plan.ratio,
                index_dim: config.index_head_dim,
                topk: config.index_topk,
                pages,
                selection: &scratch.selection,
            }),
        };
        Attend::new(gpu, &self.cache.step, &window, selected.as_ref())
    }
}
