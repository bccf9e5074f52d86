//! A step: every dispatch of a forward over the rows in flight, bound once, recorded again and again.
//!
//! The order is that of ARCHITECTURE.md. Between its parts a step can be watched: [`Watch`] hears of every point at which
//! an intermediate is complete. Decoding watches nothing; tracing reads buffers there.

use super::draft::{DraftKernels, ListenKernels};
use super::weights::{engram_dims, Layer};
use super::Model;
use crate::cache::{history, Cache, Page, PagePool, OUT_RING};
use crate::config::{Candidates, Config, LayerPlan};
use crate::gpu::{Binding, Buffer, Gpu, Recording};
use crate::kernels::attend::{Attend, Selected, Window};
use crate::kernels::boundary::{self, Boundary, Place};
use crate::kernels::cache_append::{CacheAppend, GlobalEntries, IndexQueries, Jobs, PageLayout, WindowKeys};
use crate::kernels::embed::Embed;
use crate::kernels::engram_gate::{self, EngramGate, Expand};
use crate::kernels::engram_gather::{self, EngramGather};
use crate::kernels::experts_down::{ExpertsDown, ExpertsDownIo};
use crate::kernels::experts_up::{ExpertsUp, ExpertsUpIo};
use crate::kernels::group_rows::GroupRows;
use crate::kernels::latent_gather::{LatentGather, LatentGatherDims};
use crate::kernels::linear::{Linear, LinearIo, Pack};
use crate::kernels::ring_commit::RingCommit;
use crate::kernels::route::{Route, RouteDims, RouteIo};
use crate::kernels::sample::{self, Sample};
use crate::kernels::select::{SelectBuffers, SelectKind};
use crate::kernels::selector::{Selector, SelectorBuffers, SelectorDims};
use crate::layout::{boundary_dims, selects, DownRow, PAGE_TOKENS};
use crate::reading::{Depth, Floors, Part};
use crate::Result;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::Arc;

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

/// What a step processes, as the host knows it: grids and traffic follow from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rows {
    /// Tokens in the cache before the step, at least.
    pub position: u32,
    /// How many more that may be: what rounds of drafting make is not known when the next is recorded.
    pub slack: u32,
    /// Rows in flight.
    pub count: u32,
    /// Lowest positions whose window keys are seen.
    pub floors: Floors,
    /// Whether the draft stages are told of the rows.
    pub listen: bool,
}

impl Rows {
    /// End of the positions at which rows may be.
    fn end(&self) -> u32 {
        self.position + self.slack + self.count
    }
}

/// Which slab each page of a text lies in.
#[derive(Debug)]
pub(super) struct Slabs(Vec<usize>);

impl Slabs {
    /// Of a text's pages.
    pub fn of(cache: &Cache) -> Self {
        Self(cache.pages.with(|pages| pages.iter().map(Page::slab).collect()))
    }
    /// The slabs of the pages that may get entries of rows.
    fn of_rows(&self, rows: Rows) -> Vec<usize> {
        self.among(rows.position as usize / PAGE_TOKENS..(rows.end() as usize).div_ceil(PAGE_TOKENS))
    }
    /// The slabs that occur among some pages, ascending.
    fn among(&self, pages: Range<usize>) -> Vec<usize> {
        let pages = &self.0[pages.start.min(self.0.len())..pages.end.min(self.0.len())];
        let mut slabs = pages.to_vec();
        slabs.sort_unstable();
        slabs.dedup();
        slabs
    }
}

/// Rows that a layer has run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct LayerRows {
    /// All of the layer.
    pub whole: u64,
    /// Its keys or entries only.
    pub part: u64,
}

#[derive(Debug, Default)]
struct RowCount {
    whole: AtomicU64,
    part: AtomicU64,
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
    selector: Selector,
    gather: LatentGather,
}

/// A layer's kernels.
#[derive(Debug)]
struct LayerKernels {
    engram: Option<EngramKernels>,
    block: BlockKernels,
    /// Of the block's `down`, what window keys and global entries need, and, on the decoder's first layer, what entries need.
    down_keys: Linear,
    down_entries: Option<Linear>,
    append: CacheAppend,
    select: Option<SelectKernels>,
    attend: Attend,
    /// Whether the layer is one of the decoder's.
    decoder: bool,
    /// Tokens an entry; 0 for window-only layers.
    ratio: u32,
    commit: RingCommit,
}

/// What every block has, the model's layers and the draft's stages: boundaries, products and experts.
#[derive(Debug)]
pub(super) struct BlockKernels {
    pub attention_boundary: Boundary,
    pub down: Linear,
    pub up: Linear,
    pub attention_a: Linear,
    pub attention_b: Linear,
    pub expert_boundary: Boundary,
    pub experts: ExpertKernels,
}

/// Experts of a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Experts {
    /// Routed experts.
    pub routed: usize,
    /// Of them, those that a row uses.
    pub chosen: usize,
    /// Whether their scores are normalised.
    pub normalise: bool,
    /// Words of a row of router logits.
    pub gate: usize,
}

/// Router and experts of a block.
#[derive(Debug)]
pub(super) struct ExpertKernels {
    gate: Linear,
    route: Route,
    group: GroupRows,
    experts_up: ExpertsUp,
    experts_down: ExpertsDown,
}

impl ExpertKernels {
    /// Records the choice of experts.
    pub fn record_route(&self, recording: &mut Recording, count: u32) {
        self.gate.record(recording, count);
        self.route.record(recording, count);
        if count > 1 {
            self.group.record(recording, count);
        }
    }
    /// Records what they make.
    pub fn record_output(&self, recording: &mut Recording, count: u32) {
        self.experts_up.record(recording, count);
        self.experts_down.record(recording, count);
    }
}

/// All kernels of a model on one sequence's cache.
#[derive(Debug)]
pub(super) struct StepKernels {
    gpu: Arc<Gpu>,
    embed: Embed,
    layers: Vec<LayerKernels>,
    last_boundary: Boundary,
    head: Linear,
    sample: Sample,
    /// What the draft stages do while a text is read, and what they draft, where they are loaded.
    listen: Option<ListenKernels>,
    pub(super) draft: Option<DraftKernels>,
    /// Slabs that the kernels know.
    slabs: usize,
    counts: Vec<RowCount>,
}

impl StepKernels {
    /// Makes all pipelines, uniforms and bind groups.
    pub fn new(model: &Model, cache: &Cache) -> Result<Self> {
        let Model { gpu, config, layout, weights, scratch, .. } = model;
        let builder = Builder { model, gpu, config, cache, step: &cache.step };
        let layers: Result<Vec<_>> = config.layers.iter().map(|layer| builder.layer(layer)).collect();
        let last = &weights.layers[weights.layers.len() - 1].mixes[1];
        let streams = config.hc_mult as u32;
        Ok(Self {
            gpu: gpu.clone(),
            slabs: 0,
            listen: ListenKernels::new(&builder)?,
            draft: DraftKernels::new(&builder)?,
            counts: config.layers.iter().map(|_| RowCount::default()).collect(),
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
                    last_row: !model.options.all_logits,
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

    /// Lets the kernels know the slabs that the pool has grown by.
    ///
    /// # Errors
    /// As [`Gpu::bind`].
    pub fn know_slabs(&mut self, pool: &PagePool) -> Result<()> {
        let gpu = &self.gpu;
        for slab in pool.slabs(self.slabs) {
            for layer in &mut self.layers {
                layer.append.add_slab(gpu, &slab)?;
                if let Some(select) = &mut layer.select {
                    select.selector.add_slab(gpu, &slab)?;
                    select.gather.add_slab(gpu, &slab)?;
                }
            }
            self.slabs += 1;
        }
        Ok(())
    }

    /// Rows that each layer has run.
    pub fn layer_rows(&self) -> Vec<LayerRows> {
        let count = |count: &RowCount| LayerRows { whole: count.whole.load(Relaxed), part: count.part.load(Relaxed) };
        self.counts.iter().map(count).collect()
    }

    /// Records embedding, the layers as deep as the rows go and, if asked for, the head.
    pub fn record(
        &self,
        recording: &mut Recording,
        cache: &Cache,
        rows: Rows,
        depth: Depth,
        head: bool,
        watch: &mut impl Watch,
    ) -> Result<()> {
        self.embed.record(recording, rows.count);
        let seen = depth.whole + usize::from(depth.part.is_some());
        self.record_lookups(recording, rows, seen);
        watch.reached(recording, 0, Point::Embedded)?;
        let slabs = Slabs::of(cache);
        for index in 0..depth.whole {
            self.record_layer(recording, index, rows, &slabs, watch)?;
        }
        if let Some(part) = depth.part {
            self.record_part(recording, depth.whole, rows, part, &slabs);
        }
        if let Some(listen) = self.listen.as_ref().filter(|_| rows.listen) {
            listen.record(recording, rows.position, rows.count, depth);
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

    /// Records the lookups of the Engrams of the first `layers` layers: they depend on tokens only.
    pub fn record_lookups(&self, recording: &mut Recording, rows: Rows, layers: usize) {
        for engram in self.layers[..layers].iter().filter_map(|layer| layer.engram.as_ref()) {
            engram.gather.record(recording, rows.count);
        }
    }

    /// Records what comes before a layer's projections: its Engram, and the input of its attention.
    fn record_input(&self, recording: &mut Recording, index: usize, rows: Rows, watch: &mut impl Watch) -> Result<()> {
        let count = rows.count;
        let layer = &self.layers[index];
        let mut reached = |recording: &mut Recording, point| watch.reached(recording, index, point);
        if let Some(engram) = &layer.engram {
            reached(recording, Point::EngramRows)?;
            engram.wkv.record(recording, count);
            reached(recording, Point::EngramValues)?;
            engram.gate.record(recording, count);
            reached(recording, Point::EngramDone)?;
        }
        layer.block.attention_boundary.record(recording, count);
        if let Some(listen) = self.listen.as_ref().filter(|_| rows.listen) {
            listen.record_tap(recording, index, count);
        }
        reached(recording, Point::AttentionInput)
    }

    /// Records a part of a layer: what its rows leave in the caches.
    fn record_part(&self, recording: &mut Recording, index: usize, rows: Rows, part: Part, slabs: &Slabs) {
        let layer = &self.layers[index];
        let Rows { position, count, .. } = rows;
        self.counts[index].part.fetch_add(count.into(), Relaxed);
        self.record_input(recording, index, rows, &mut ()).expect("nothing watches");
        let slabs = &slabs.of_rows(rows);
        match (part, &layer.down_entries) {
            (Part::Entries, Some(down)) => {
                down.record(recording, count);
                layer.append.record(recording, position, count, Jobs::Entries, slabs);
            }
            _ => {
                layer.down_keys.record(recording, count);
                layer.append.record(recording, position, count, Jobs::Keys, slabs);
                layer.commit.record(recording, count);
            }
        }
    }

    /// Records one layer: streams that await the expansion of the sublayer before in, the same out.
    pub fn record_layer(
        &self,
        recording: &mut Recording,
        index: usize,
        rows: Rows,
        slabs: &Slabs,
        watch: &mut impl Watch,
    ) -> Result<()> {
        let layer = &self.layers[index];
        let Rows { position, count, .. } = rows;
        self.counts[index].whole.fetch_add(count.into(), Relaxed);
        self.record_input(recording, index, rows, watch)?;
        let mut reached = |recording: &mut Recording, point| watch.reached(recording, index, point);
        layer.block.down.record(recording, count);
        layer.block.up.record(recording, count);
        reached(recording, Point::Projected)?;
        layer.append.record(recording, position, count, Jobs::All, &slabs.of_rows(rows));
        reached(recording, Point::Appended)?;
        if let Some(select) = &layer.select {
            let visible = rows.end() / layer.ratio;
            select.selector.record(&self.gpu, recording, count, visible, &|pages| slabs.among(pages))?;
            select.gather.record(recording, count, visible, &slabs.among(0..slabs.0.len()));
            reached(recording, Point::Selected)?;
        }
        let floor = if layer.decoder { rows.floors.decoder } else { rows.floors.encoder } as u32;
        layer.attend.record(recording, position, count, floor);
        layer.commit.record(recording, count);
        reached(recording, Point::Attended)?;
        layer.block.attention_a.record(recording, count);
        reached(recording, Point::AttentionLatent)?;
        layer.block.attention_b.record(recording, count);
        reached(recording, Point::AttentionOutput)?;
        layer.block.expert_boundary.record(recording, count);
        reached(recording, Point::ExpertInput)?;
        layer.block.experts.record_route(recording, count);
        reached(recording, Point::Routed)?;
        layer.block.experts.record_output(recording, count);
        reached(recording, Point::ExpertOutput)
    }

    /// Records a round of drafting: a block of tokens is drafted, `places` of them at most are taken, and `rows` are read, the token
    /// that waits and one for each place; then what stands of them is judged. The block sees nothing of the text below `floor`.
    ///
    /// # Panics
    /// When the draft stages are not loaded.
    pub fn record_round(
        &self,
        recording: &mut Recording,
        cache: &Cache,
        rows: Rows,
        floor: u32,
        places: usize,
    ) -> Result<()> {
        let draft = self.draft.as_ref().expect("the draft stages are loaded");
        draft.record(recording, rows.position + rows.slack, floor, places);
        self.record(recording, cache, rows, Depth { whole: self.layers.len(), part: None }, false, &mut ())?;
        self.record_verdict(recording, rows.count);
        Ok(())
    }

    /// Records what comes of a round's rows that have run through the layers.
    ///
    /// # Panics
    /// When the draft stages are not loaded.
    pub fn record_verdict(&self, recording: &mut Recording, count: u32) {
        self.last_boundary.record(recording, count);
        self.draft.as_ref().expect("the draft stages are loaded").record_verdict(recording, count);
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
pub(super) struct Builder<'a> {
    pub model: &'a Model,
    pub gpu: &'a Gpu,
    pub config: &'a Config,
    pub cache: &'a Cache,
    /// The step of the rows: the text's, or that of a drafted block.
    pub step: &'a Buffer,
}

impl<'a> Builder<'a> {
    /// A boundary: before an attention sublayer (`attention`) it reads the partial sums of an expert sublayer's mix, and the
    /// other way round.
    pub fn boundary(&self, place: Place<'a>, parts: usize, attention: bool) -> Result<Boundary> {
        let scratch = &self.model.scratch;
        let (before, after) = match attention {
            true => (&scratch.partials_ffn, &scratch.partials_attn),
            false => (&scratch.partials_attn, &scratch.partials_ffn),
        };
        let buffers = boundary::Buffers {
            step: self.step.into(),
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
    pub fn linear(
        &self,
        pack: &Pack,
        (x, x_stride): (&Buffer, usize),
        norm: Option<&Buffer>,
        (y, y_stride): (&Buffer, usize),
    ) -> Result<Linear> {
        let io = LinearIo {
            step: self.step,
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
        let down = DownRow::new(config, plan);
        let mix_fn: Binding<'_> = (&layer.mixes[0].projection).into();
        let place = match (before, plan.engram) {
            (None, _) => Place::First { mix_fn },
            (Some(before), None) => Place::Between { mix_fn, mix_const: (&before.constants).into() },
            (Some(before), Some(_)) => Place::AfterEngram { mix_fn, mix_const: (&before.constants).into() },
        };
        let experts = Experts {
            routed: config.n_routed_experts,
            chosen: config.num_experts_per_tok,
            normalise: config.norm_topk_prob,
            gate: layout.gate,
        };
        Ok(LayerKernels {
            engram: self.engram(plan)?,
            block: self.block(layer, place, layout.parts, down.width, &experts)?,
            down_keys: self.linear(
                &layer.down.part(down.window..down.index_weights),
                (&scratch.x, layout.hidden),
                Some(&layer.attn_norm),
                (&scratch.down, down.width),
            )?,
            down_entries: match plan.index == config.decoder() {
                true => Some(self.linear(
                    &layer.down.part(down.latent..down.index_weights),
                    (&scratch.x, layout.hidden),
                    Some(&layer.attn_norm),
                    (&scratch.down, down.width),
                )?),
                false => None,
            },
            decoder: plan.index >= config.decoder(),
            ratio: plan.ratio as u32,
            append: self.append(plan, &down)?,
            select: if selects(plan) { Some(self.select(plan, &down)?) } else { None },
            attend: self.attend(plan)?,
            commit: RingCommit::new(
                gpu,
                step,
                config.head_dim,
                layout.ring_rows,
                &scratch.chunk,
                &self.cache.rings[plan.index],
            )?,
        })
    }

    /// What every block has, here one at `place`, behind `parts` partial outputs, with so many words in a `down` row.
    pub fn block(
        &self,
        layer: &Layer,
        place: Place<'_>,
        parts: usize,
        down: usize,
        experts: &Experts,
    ) -> Result<BlockKernels> {
        let Model { layout, scratch, .. } = self.model;
        let [attn_mix, ffn_mix] = &layer.mixes;
        let x = (&scratch.x, layout.hidden);
        let down = (&scratch.down, down);
        let latent = (&scratch.attention_latent, layout.attention_latent);
        Ok(BlockKernels {
            attention_boundary: self.boundary(place, parts, true)?,
            down: self.linear(&layer.down, x, Some(&layer.attn_norm), down)?,
            // The query latent is the first part of a `down` row.
            up: self.linear(&layer.up, down, Some(&layer.q_norm), (&scratch.up, layout.up))?,
            attention_a: self.linear(&layer.attention_a, (&scratch.attended, layout.attended), None, latent)?,
            attention_b: self.linear(&layer.attention_b, latent, None, (&scratch.z, layout.hidden))?,
            expert_boundary: self.boundary(
                Place::Between { mix_fn: (&ffn_mix.projection).into(), mix_const: (&attn_mix.constants).into() },
                1,
                false,
            )?,
            experts: self.experts(layer, experts)?,
        })
    }

    /// What a block runs after its second boundary.
    pub fn experts(&self, layer: &Layer, experts: &Experts) -> Result<ExpertKernels> {
        let Model { gpu, config, layout, scratch, .. } = self.model;
        let slots = experts.chosen as u32 + 1;
        Ok(ExpertKernels {
            gate: self.linear(
                &layer.gate,
                (&scratch.x, layout.hidden),
                Some(&layer.ffn_norm),
                (&scratch.gate, experts.gate),
            )?,
            route: Route::new(
                gpu,
                &RouteDims {
                    experts: experts.routed as u32,
                    k: experts.chosen as u32,
                    logit_stride: experts.gate as u32,
                    normalise: experts.normalise,
                    scale: config.routed_scaling_factor,
                },
                &RouteIo {
                    step: self.step,
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
                self.step,
                &scratch.route_ids,
                &scratch.pairs,
                &scratch.tiles,
                slots,
                experts.routed as u32 + 1,
            )?,
            experts_up: ExpertsUp::new(
                gpu,
                &layer.experts_up,
                &ExpertsUpIo {
                    step: self.step,
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
                    step: self.step,
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

    /// Where the entries that a layer reads lie in a page.
    fn page(&self, plan: &LayerPlan) -> Option<PageLayout> {
        plan.kv_source.and_then(|source| self.model.layout.page_parts[source])
    }

    fn append(&self, plan: &LayerPlan, down: &DownRow) -> Result<CacheAppend> {
        let Model { gpu, config, layout, weights, scratch, .. } = self.model;
        let layer = &weights.layers[plan.index];
        let keys = WindowKeys {
            head_dim: config.head_dim,
            rotary: config.qk_rope_head_dim,
            slots: layout.ring_rows,
            block: false,
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
        let entries = match (&layer.wk, layout.page_parts[plan.index]) {
            (Some(wk), Some(page)) => Some(GlobalEntries {
                ratio: plan.ratio,
                latent_at: down.latent,
                gate_at: down.gate,
                wk: *wk,
                page,
                table: &self.cache.table,
                remainder: self.cache.remainders[plan.index].as_ref(),
                spare: layout.spare,
            }),
            _ => None,
        };
        CacheAppend::new(gpu, &self.cache.step, &keys, queries.as_ref(), entries.as_ref())
    }

    fn select(&self, plan: &LayerPlan, down: &DownRow) -> Result<SelectKernels> {
        let Model { gpu, config, layout, scratch, tiles, .. } = self.model;
        let page = self.page(plan).expect("a layer that selects has a source");
        let dims = SelectorDims {
            kind: match plan.candidates {
                Candidates::Ignored => SelectKind::Plain,
                Candidates::Source => SelectKind::Source,
                Candidates::Restricted => SelectKind::Restricted,
            },
            heads: config.index_n_heads as u32,
            head_dim: config.index_head_dim as u32,
            weight_stride: down.width as u32,
            weight_offset: down.index_weights as u32,
            ratio: plan.ratio as u32,
            page,
            capacity: layout.capacity(plan.ratio) as u32,
        };
        let selection = scratch.selections[plan.index].as_ref().expect("a layer that selects");
        let (step, table) = (&self.cache.step, &self.cache.table);
        let buffers = SelectorBuffers {
            table,
            queries: &scratch.index_queries,
            weights: &scratch.down,
            select: SelectBuffers {
                step,
                scores: &scratch.scores,
                lists: &scratch.lists,
                carry: &scratch.carry,
                maxima: &scratch.block_maxima,
                selection,
                candidates: &scratch.candidates,
            },
        };
        let gather = LatentGatherDims { topk: config.index_topk, page };
        Ok(SelectKernels {
            selector: Selector::new(gpu, &dims, &buffers, tiles)?,
            gather: LatentGather::new(gpu, &gather, step, table, selection, &scratch.latents)?,
        })
    }

    fn attend(&self, plan: &LayerPlan) -> Result<Attend> {
        let Model { gpu, config, layout, weights, scratch, .. } = self.model;
        let window = Window {
            heads: config.num_attention_heads,
            head_dim: config.head_dim,
            rotary: config.qk_rope_head_dim,
            window: config.sliding_window,
            slots: layout.ring_rows,
            block: false,
            groups: config.o_groups,
            up_stride: layout.up,
            query_at: 0,
            up: &scratch.up,
            ring: &self.cache.rings[plan.index],
            chunk: &scratch.chunk,
            constants: &weights.layers[plan.index].attend,
            attended: &scratch.attended,
            decoder: plan.index >= config.decoder(),
        };
        let selection = plan.index_source.and_then(|source| scratch.selections[source].as_ref());
        let selected = selection.map(|selection| Selected {
            ratio: plan.ratio,
            topk: config.index_topk,
            latents: &scratch.latents,
            selection,
        });
        Attend::new(gpu, &self.cache.step, &window, selected.as_ref())
    }
}
