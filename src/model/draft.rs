//! A drafted block on the device (`numerics.md` §13): the draft stages on the token that waits and noise.
//!
//! The kernels are those of the layers, on a step of the block's own. All rows of a block see each other and the window before it;
//! what they see of the text lies in rings of the stages, and what they add of themselves only in the chunk.

use super::generation::Made;
use super::step::{BlockKernels, Builder, Experts};
use super::weights::{stage_plan, Layer};
use super::{Model, Sequence};
use crate::cache::{history, DraftCache, ROUND_RING};
use crate::config::DsparkConfig;
use crate::gpu::Recording;
use crate::kernels::attend::{Attend, Window};
use crate::kernels::boundary::{Boundary, Place};
use crate::kernels::cache_append::{CacheAppend, Jobs, WindowKeys};
use crate::kernels::draft_begin::{round_words, DraftBegin};
use crate::kernels::draft_pick::{self, DraftPick};
use crate::kernels::embed::Embed;
use crate::kernels::linear::{Linear, LinearIo};
use crate::kernels::ring_commit::RingCommit;
use crate::kernels::tap::{self, Tap};
use crate::kernels::verify::{self, record_words, Verify};
use crate::kernels::Step;
use crate::layout::DownRow;
use crate::reading::Depth;
use crate::Result;

/// A stage's kernels.
#[derive(Debug)]
struct StageKernels {
    block: BlockKernels,
    append: CacheAppend,
    attend: Attend,
}

/// What a stage remembers of the rows of a text.
#[derive(Debug)]
struct MemoryKernels {
    key: Linear,
    append: CacheAppend,
    commit: RingCommit,
}

/// What the draft stages do while a text is read.
#[derive(Debug)]
pub(super) struct ListenKernels {
    /// By layer; none but at target layers.
    taps: Vec<Option<Tap>>,
    main: Linear,
    stages: Vec<MemoryKernels>,
    /// The last target layer.
    last: usize,
}

impl ListenKernels {
    /// Makes pipelines, uniforms and bind groups; none for a model without draft stages.
    ///
    /// # Errors
    /// The device's.
    pub fn new(builder: &Builder<'_>) -> Result<Option<Self>> {
        let Model { gpu, config, layout, weights, scratch, .. } = builder.model;
        let parts = config.dspark.as_ref().zip(layout.draft.as_ref()).zip(weights.draft.as_ref());
        let Some((((dspark, sizes), draft), cache)) = parts.zip(builder.cache.draft.as_ref()) else { return Ok(None) };
        let tap = |layer: usize| {
            let Some(at) = dspark.target_layer_ids.iter().position(|&target| target == layer) else { return Ok(None) };
            let dims = tap::Dims {
                hidden: config.hidden_size as u32,
                streams: config.hc_mult as u32,
                stride: sizes.features as u32,
                at: (at * config.hidden_size) as u32,
            };
            Tap::new(gpu, &dims, builder.step, &scratch.streams, &scratch.features).map(Some)
        };
        let stage = |(stage, layer): (usize, &Layer)| {
            let down = DownRow::new(config, &stage_plan(config, stage));
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
                ring: &cache.rings[stage],
                chunk: &scratch.chunk,
            };
            Ok(MemoryKernels {
                // There is no norm of the stage's own before its keys.
                key: builder.linear(
                    &layer.down.part(down.window..down.width),
                    (&scratch.main, layout.hidden),
                    Some(&draft.main_norm),
                    (&scratch.down, down.width),
                )?,
                append: CacheAppend::new(gpu, builder.step, &keys, None, None)?,
                commit: RingCommit::new(
                    gpu,
                    builder.step,
                    config.head_dim,
                    layout.ring_rows,
                    &scratch.chunk,
                    &cache.rings[stage],
                )?,
            })
        };
        Ok(Some(Self {
            taps: (0..config.layers.len()).map(tap).collect::<Result<_>>()?,
            main: builder.linear(
                &draft.main,
                (&scratch.features, sizes.features),
                None,
                (&scratch.main, layout.hidden),
            )?,
            stages: draft.stages.iter().enumerate().map(stage).collect::<Result<_>>()?,
            last: dspark.target_layer_ids[dspark.target_layer_ids.len() - 1],
        }))
    }

    /// Records a look at the streams before a layer's attention.
    pub fn record_tap(&self, recording: &mut Recording, layer: usize, rows: u32) {
        if let Some(tap) = &self.taps[layer] {
            tap.record(recording, rows);
        }
    }

    /// Records the keys of rows at `position` that went as deep as `depth`; nothing for rows that did not come past all target
    /// layers.
    pub fn record(&self, recording: &mut Recording, position: u32, rows: u32, depth: Depth) {
        if depth.whole + usize::from(depth.part.is_some()) <= self.last {
            return;
        }
        self.main.record(recording, rows);
        for stage in &self.stages {
            stage.key.record(recording, rows);
            stage.append.record(recording, position, rows, Jobs::All, &[]);
            stage.commit.record(recording, rows);
        }
    }
}

/// All kernels of the draft stages on one sequence's cache.
#[derive(Debug)]
pub(super) struct DraftKernels {
    embed: Embed,
    stages: Vec<StageKernels>,
    last_boundary: Boundary,
    head: Linear,
    rows: u32,
    begin: DraftBegin,
    /// The Markov head: embeddings of the tokens before the places, and what it makes of each.
    markov_embed: Embed,
    markov: Vec<Linear>,
    pick: DraftPick,
    /// The model's head, for all rows of a round.
    model_head: Linear,
    verify: Verify,
}

impl DraftKernels {
    /// Makes pipelines, uniforms and bind groups; none for a model without draft stages.
    ///
    /// # Errors
    /// The device's.
    pub fn new(text: &Builder<'_>) -> Result<Option<Self>> {
        let (model, cache) = (text.model, text.cache);
        let Model { gpu, config, layout, weights, scratch, .. } = model;
        let parts =
            config.dspark.as_ref().zip(layout.draft.as_ref()).zip(weights.draft.as_ref()).zip(cache.draft.as_ref());
        let Some((((dspark, sizes), draft), block)) = parts else { return Ok(None) };
        let builder = Builder { model, gpu, config, cache, step: &block.step };
        let stages = (0..dspark.stages).map(|stage| Self::stage(&builder, dspark, block, stage));
        let stages = stages.collect::<Result<Vec<_>>>()?;
        let mix_const = (&draft.stages[dspark.stages - 1].mixes[1].constants).into();
        let (logits, confidence) = (layout.logits as u32, &draft.confidence);
        let [block_size, vocabulary] = [sizes.block as u32, config.vocab_size as u32];
        let markov = |place: usize| {
            let io = LinearIo {
                step: &cache.step,
                x: &scratch.markov_rows,
                x_stride: sizes.markov as u32,
                x_offset: 0,
                norm: None,
                y: &scratch.markov,
                y_stride: logits,
                y_offset: place as u32 * logits,
                last_row: true,
            };
            Linear::new(gpu, &draft.markov, &io)
        };
        let [base, said, round] = [&scratch.draft_logits, &scratch.markov, &block.round];
        Ok(Some(Self {
            begin: DraftBegin::new(
                gpu,
                sizes.block,
                [&cache.step, &cache.tokens],
                round,
                [&block.step, &block.tokens],
            )?,
            markov_embed: Embed::new(gpu, &draft.markov_embed, &cache.step, &cache.tokens, &scratch.markov_rows, 1)?,
            markov: (0..sizes.block).map(markov).collect::<Result<_>>()?,
            pick: DraftPick::new(
                gpu,
                &draft_pick::Dims {
                    block: block_size,
                    vocabulary,
                    stride: logits,
                    hidden: config.hidden_size as u32,
                    rank: dspark.markov_rank as u32,
                },
                &draft_pick::Buffers {
                    base,
                    markov: said,
                    raw: &scratch.x,
                    embeddings: &scratch.markov_rows,
                    confidence,
                    step: &cache.step,
                    tokens: &cache.tokens,
                    round,
                },
            )?,
            model_head: text.linear(
                &weights.head,
                (&scratch.x, layout.hidden),
                Some(&weights.norm),
                (&scratch.logits, layout.logits),
            )?,
            verify: Verify::new(
                gpu,
                &verify::Dims {
                    block: block_size,
                    vocabulary,
                    stride: logits,
                    ring: ROUND_RING as u32,
                    history: history(config) as u32,
                },
                &verify::Buffers {
                    logits: &scratch.logits,
                    base,
                    markov: said,
                    step: &cache.step,
                    tokens: &cache.tokens,
                    history: &cache.history,
                    stop_ids: &cache.stop_ids,
                    round,
                    out: &block.out,
                },
            )?,
            embed: Embed::new(
                gpu,
                &weights.embed,
                &block.step,
                &block.tokens,
                &scratch.streams,
                config.hc_mult as u32,
            )?,
            stages,
            last_boundary: builder.boundary(Place::Last { mix_const }, sizes.parts, true)?,
            head: builder.linear(
                &weights.head,
                (&scratch.x, layout.hidden),
                Some(&draft.norm),
                (&scratch.draft_logits, layout.logits),
            )?,
            rows: sizes.block as u32,
        }))
    }

    fn stage(builder: &Builder<'_>, dspark: &DsparkConfig, block: &DraftCache, stage: usize) -> Result<StageKernels> {
        let Model { gpu, config, layout, weights, scratch, .. } = builder.model;
        let (sizes, draft) = layout.draft.as_ref().zip(weights.draft.as_ref()).expect("the draft stages are loaded");
        let layer = &draft.stages[stage];
        let before = stage.checked_sub(1).map(|before| &draft.stages[before].mixes[1]);
        let down = DownRow::new(config, &stage_plan(config, stage));
        let mix_fn = (&layer.mixes[0].projection).into();
        let place = match before {
            None => Place::First { mix_fn },
            Some(before) => Place::Between { mix_fn, mix_const: (&before.constants).into() },
        };
        let keys = WindowKeys {
            head_dim: config.head_dim,
            rotary: config.qk_rope_head_dim,
            slots: layout.ring_rows,
            block: true,
            eps: config.rms_norm_eps,
            down_stride: down.width,
            key_at: down.window,
            down: &scratch.down,
            constants: &layer.append,
            ring: &block.rings[stage],
            chunk: &scratch.chunk,
        };
        let window = Window {
            heads: config.num_attention_heads,
            head_dim: config.head_dim,
            rotary: config.qk_rope_head_dim,
            window: config.sliding_window,
            slots: layout.ring_rows,
            block: true,
            groups: config.o_groups,
            up_stride: layout.up,
            query_at: 0,
            up: &scratch.up,
            ring: &block.rings[stage],
            chunk: &scratch.chunk,
            constants: &layer.attend,
            attended: &scratch.attended,
            decoder: true,
        };
        let experts = Experts {
            routed: dspark.n_routed_experts,
            chosen: dspark.num_experts_per_tok,
            normalise: dspark.norm_topk_prob,
            gate: sizes.gate,
        };
        Ok(StageKernels {
            block: builder.block(layer, place, sizes.parts, down.width, &experts)?,
            append: CacheAppend::new(gpu, builder.step, &keys, None, None)?,
            attend: Attend::new(gpu, builder.step, &window, None)?,
        })
    }

    /// Records the drafting of a round at `position` or before: the block, then the tokens of its first `places`, one after the
    /// other.
    pub fn record(&self, recording: &mut Recording, position: u32, floor: u32, places: usize) {
        if places == 0 {
            return;
        }
        self.begin.record(recording);
        self.record_block(recording, position, floor);
        for place in 0..places {
            self.markov_embed.record(recording, place as u32 + 1);
            self.markov[place].record(recording, place as u32 + 1);
            self.pick.record(recording, place);
        }
    }

    /// Records what comes of a round's `rows` rows: their logits, which of the drafted tokens stand, and the token after them.
    pub fn record_verdict(&self, recording: &mut Recording, rows: u32) {
        self.model_head.record(recording, rows);
        self.verify.record(recording, rows);
    }

    /// Records the block at `position`, whose rows see nothing of the text below `floor`: its logits without what the Markov head
    /// adds, in `draft_logits`, and the residuals before the last norm, in `x`.
    pub fn record_block(&self, recording: &mut Recording, position: u32, floor: u32) {
        let rows = self.rows;
        self.embed.record(recording, rows);
        for StageKernels { block, append, attend } in &self.stages {
            block.attention_boundary.record(recording, rows);
            block.down.record(recording, rows);
            block.up.record(recording, rows);
            append.record(recording, position, rows, Jobs::All, &[]);
            attend.record(recording, position, rows, floor);
            block.attention_a.record(recording, rows);
            block.attention_b.record(recording, rows);
            block.expert_boundary.record(recording, rows);
            block.experts.record_route(recording, rows);
            block.experts.record_output(recording, rows);
        }
        self.last_boundary.record(recording, rows);
        self.head.record(recording, rows);
    }
}

/// What a drafted block was, for tests.
#[doc(hidden)]
#[derive(Debug, Clone)]
pub struct Block {
    /// Logits (B, V) before the Markov head.
    pub base: Vec<f32>,
    /// Residuals (B, h) before the last norm.
    pub residuals: Vec<f32>,
    /// Logits (B, V) behind it.
    pub logits: Vec<f32>,
    /// Tokens (B).
    pub tokens: Vec<u32>,
    /// Probabilities that they are accepted (B).
    pub accepts: Vec<f32>,
}

impl Sequence {
    /// Lowest position whose keys a block behind the text would see.
    #[doc(hidden)]
    pub fn draft_floor(&self) -> usize {
        self.draft_floor
    }

    /// Reads the token that waits and `drafted` ones, and puts what the model makes of them behind the text: the drafted tokens that
    /// are its best, and one more. Returns them.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Panics
    /// When the draft stages are not loaded, or the windows are not those of the text.
    #[doc(hidden)]
    pub async fn trace_verify(&mut self, drafted: &[u32]) -> Result<Vec<u32>> {
        self.settle_async().await?;
        assert!(self.has_windows() && self.cached + 1 == self.tokens.len(), "a token waits");
        let model = self.model.clone();
        self.own_pages(self.cached..self.cached + 1 + drafted.len()).await?;
        let step = Step { limit: u32::MAX, ..Step::default() };
        let mut rows = self.send_rows(1, step).await?;
        rows.count += drafted.len() as u32;
        let draft = self.cache.draft.as_ref().expect("the draft stages are loaded");
        model.gpu.upload(&self.cache.step, std::mem::offset_of!(Step, rows) as u64, bytemuck::bytes_of(&rows.count));
        model.gpu.upload(&self.cache.tokens, 4, bytemuck::cast_slice(drafted));
        let mut recording = Recording::new();
        self.kernels.record(&mut recording, &self.cache, rows, Depth::all(&model.config), false, &mut ())?;
        self.kernels.record_verdict(&mut recording, rows.count);
        model.gpu.submit(recording)?;
        let bytes = model.gpu.read_range(&draft.out, 0, 4 * record_words(model.block_size()) as u64).await?;
        let made = Made::of(&bytemuck::allocation::pod_collect_to_vec::<u8, u32>(&bytes));
        self.cached += made.rows();
        self.tokens.extend(&made.tokens);
        Ok(made.tokens)
    }

    /// Drafts the block behind `anchor` at `position`, each stage seeing the window of `keys` (packed, the last of them of the position
    /// before) that is given for it, and takes the best token at each place.
    ///
    /// # Errors
    /// The device's.
    ///
    /// # Panics
    /// When the draft stages are not loaded.
    #[doc(hidden)]
    pub async fn trace_draft(&self, anchor: u32, position: usize, keys: &[Vec<Vec<u32>>]) -> Result<Block> {
        let Model { gpu, config, layout, scratch, .. } = &*self.model;
        let kernels = self.kernels.draft.as_ref();
        let loaded = kernels.zip(self.cache.draft.as_ref()).zip(layout.draft.as_ref()).zip(config.dspark.as_ref());
        let (((kernels, cache), sizes), dspark) = loaded.expect("the draft stages are loaded");
        let floor = position - keys[0].len();
        for (ring, keys) in cache.rings.iter().zip(keys) {
            for (s, key) in (floor..).zip(keys) {
                let row = s % layout.ring_rows * layout.window_row;
                gpu.upload(ring, 4 * row as u64, bytemuck::cast_slice(key));
            }
        }
        let text = Step { position: position as u32, rows: 1, limit: u32::MAX, ..Step::default() };
        let block = Step { decoder_floor: floor as u32, ..Step::default() };
        gpu.upload(&self.cache.step, 0, bytemuck::bytes_of(&text));
        gpu.upload(&self.cache.tokens, 0, bytemuck::bytes_of(&anchor));
        gpu.upload(&cache.step, 0, bytemuck::bytes_of(&block));
        gpu.upload(&cache.tokens, 0, bytemuck::cast_slice(&vec![dspark.noise_token_id; sizes.block]));
        let words = round_words(Some(sizes.block as u32), &vec![1.0; sizes.block + 1], &vec![1.0; sizes.block]);
        gpu.upload(&cache.round, 0, bytemuck::cast_slice(&words));
        let mut recording = Recording::new();
        kernels.record(&mut recording, position as u32, floor as u32, sizes.block);
        gpu.submit(recording)?;
        let rows = |bytes: &[u8], stride: usize, width: usize| -> Vec<f32> {
            let row = |row: &[u8]| bytemuck::pod_collect_to_vec::<u8, f32>(&row[..4 * width]);
            bytes.chunks(4 * stride).flat_map(row).collect()
        };
        let read = async |buffer, stride: usize, width| -> Result<Vec<f32>> {
            Ok(rows(&gpu.read_range(buffer, 0, 4 * (sizes.block * stride) as u64).await?, stride, width))
        };
        let base = read(&scratch.draft_logits, layout.logits, config.vocab_size).await?;
        let markov = read(&scratch.markov, layout.logits, config.vocab_size).await?;
        let residuals = read(&scratch.x, layout.hidden, config.hidden_size).await?;
        let round: Vec<u32> = bytemuck::allocation::pod_collect_to_vec(&gpu.read(&cache.round).await?);
        let odds = round[round.len() - 8 * sizes.block..].chunks(8);
        let (tokens, accepts) = odds.map(|odds| (odds[6], f32::from_bits(odds[7]))).unzip();
        let logits = base.iter().zip(&markov).map(|(base, markov)| base + markov).collect();
        Ok(Block { base, residuals, logits, tokens, accepts })
    }
}
