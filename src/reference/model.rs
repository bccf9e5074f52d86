//! The whole model on the CPU: the twins, wired in the order of `numerics.md` §1. Slow and obvious.
//!
//! A forward takes a chunk of tokens of any size and continues a [`State`]; a decode step is a chunk of one. Every row is
//! computed from its own data in an order that does not depend on the chunk, so that the cut makes no difference to a bit.
//! [`Model::append`] and [`Model::rebuild`] run the rows that [`crate::reading`] plans, each as deep as it says.

use super::boundary::{self, Mix, MixShape, MixWeights};
use super::draft::Window;
use super::engram_gather::{self, BEFORE_TEXT};
use super::math::{add, rms_norm, Matrix};
use super::mutation::Mutation;
use super::sequence::check_tokens;
use super::trace::{Trace, Values};
use super::weights::{Compressor, Indexer, Layer, Weights};
use super::{
    attend, cache_append, embed, engram_gate, experts_down, experts_up, index_score, linear, ring_commit, rope, route,
    select,
};
use crate::checkpoint::Checkpoint;
use crate::config::{Candidates, Config, LayerPlan, Role};
use crate::formats::CacheFormat;
use crate::reading::{Depth, Floors, Part, Prefill, Reading, Replay};
use crate::text::NgramTables;
use crate::Result;

/// Rows of one chunk of a reading: between two chunks progress is told.
const CHUNK: usize = 64;

/// How to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Round cache rows and index queries to their packed formats, as the models were trained.
    pub cache_quant: bool,
    /// A slip to make, for tests of the tests.
    #[doc(hidden)]
    pub mutation: Option<Mutation>,
}

impl Default for Options {
    fn default() -> Self {
        Self { cache_quant: true, mutation: None }
    }
}

/// Which rows of a forward get logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// None: the text goes on.
    None,
    /// The last one.
    Last,
    /// All of them.
    All,
}

/// A model with all weights in f32.
#[derive(Debug, Clone)]
pub struct Model {
    /// What it is.
    pub config: Config,
    /// Its weights.
    pub weights: Weights,
    /// Constants of the Engram hash.
    pub tables: NgramTables,
    /// How it computes.
    pub options: Options,
}

/// What a session has in the caches (`numerics.md` §12), dequantised. Memory that nothing was written to is NaN.
#[derive(Debug, Clone)]
pub struct State {
    /// Tokens so far.
    pub position: usize,
    /// Their last N - 1 raw ids, newest first; [`BEFORE_TEXT`] before the text.
    pub history: Vec<u32>,
    /// One ring a layer: position p lies in row `p % rows`. W rows of D; with draft stages a block more, so that rows which are
    /// taken back have replaced none that is seen.
    pub rings: Vec<Matrix>,
    /// The global cache, for Full layers.
    pub globals: Vec<Option<Global>>,
    /// Lowest positions whose window keys may be seen.
    pub floors: Floors,
    /// Entries of groups that end before this position are there and stay as they are.
    pub kept: usize,
    /// What the draft stages see of the text, where the model has some.
    pub draft: Option<Window>,
    /// Rows that each layer has run for the text so far, those of earlier states of it included.
    pub ran: Vec<Ran>,
}

/// Rows that a layer has run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ran {
    /// From end to end.
    pub whole: usize,
    /// Only for what they add to the caches.
    pub part: usize,
}

/// What a Full layer adds to the global cache.
#[derive(Debug, Clone)]
pub struct Global {
    /// Latents (C, D), rotated: keys and values of attention.
    pub entries: Matrix,
    /// Index keys (C, D_i).
    pub keys: Matrix,
    /// `wkv x` and `wgate x` (2 D) of the newest group's tokens but its last, where the ratio is above 1: position p lies in row
    /// `p % rows`. A group of rows; with draft stages a block more, as in the rings.
    pub remainder: Matrix,
}

/// The rows in flight: what passes from layer to layer.
#[derive(Debug, Clone)]
pub struct Rows {
    /// Residual streams (T, n h).
    pub streams: Matrix,
    /// Weights with which the next sublayer collapses them (T, n).
    pub pre: Matrix,
    /// Rows of each Engram layer's table, for each row in flight.
    pub hashes: Vec<Vec<Vec<u32>>>,
    /// Entries that the last index source chose for each row, ascending.
    pub selection: Vec<Vec<u32>>,
    /// Blocks that the candidate source kept for each row, ascending.
    pub candidates: Vec<Vec<u32>>,
    /// What the draft stages are told: means (T, h) over the streams at the inputs of its target layers so far.
    pub taps: Vec<Matrix>,
}

/// How a block chooses experts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    /// Experts a token.
    pub chosen: usize,
    /// Whether their scores are normalised.
    pub normalise: bool,
}

impl Model {
    /// Dequantises a checkpoint.
    pub fn load(checkpoint: &Checkpoint, tables: &NgramTables, options: Options) -> Result<Self> {
        let (config, weights) = (checkpoint.config().clone(), Weights::load(checkpoint)?);
        Ok(Self { config, weights, tables: tables.clone(), options })
    }

    /// The state before any text.
    pub fn state(&self) -> State {
        let (c, block) = (&self.config, self.block_size());
        let unwritten = |rows, cols| Matrix::new(rows, cols, vec![f32::NAN; rows * cols]);
        let ring = || unwritten(c.sliding_window + block, c.head_dim);
        let global = |plan: &LayerPlan| {
            (plan.role == Role::Full).then(|| Global {
                entries: Matrix::new(0, c.head_dim, vec![]),
                keys: Matrix::new(0, c.index_head_dim, vec![]),
                remainder: unwritten(if plan.ratio > 1 { plan.ratio + block } else { 0 }, 2 * c.head_dim),
            })
        };
        State {
            position: 0,
            history: self.history(&[]),
            rings: c.layers.iter().map(|_| ring()).collect(),
            globals: c.layers.iter().map(global).collect(),
            floors: Floors::default(),
            kept: 0,
            draft: self
                .weights
                .draft
                .as_ref()
                .map(|draft| Window { rings: draft.stages.iter().map(|_| ring()).collect(), floor: 0 }),
            ran: vec![Ran::default(); c.layers.len()],
        }
    }

    /// Tokens of a drafted block; 0 without draft stages.
    pub fn block_size(&self) -> usize {
        self.config.dspark.as_ref().filter(|_| self.weights.draft.is_some()).map_or(0, |dspark| dspark.block_size)
    }

    /// Runs the next tokens of a text and returns logits (V) of the last row or of all.
    ///
    /// # Errors
    /// No tokens, an id outside the vocabulary, or more tokens than `max_position_embeddings`; the state is unchanged.
    pub fn forward(
        &self,
        state: &mut State,
        tokens: &[u32],
        logits: LogitRows,
        trace: Option<&mut Trace>,
    ) -> Result<Vec<Vec<f32>>> {
        let mut off = Trace::off();
        let trace = trace.unwrap_or(&mut off);
        let rows = self.rows(state, tokens, Depth::all(&self.config), trace)?;
        Ok(self.head(&rows, logits, trace))
    }

    /// Runs the next tokens of a text as deep as `depth` says.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn read(&self, state: &mut State, tokens: &[u32], depth: Depth) -> Result<()> {
        self.rows(state, tokens, depth, &mut Trace::off()).map(drop)
    }

    /// Reads the next tokens of a text, all but the last: that one is read by the step that makes the token after it. `progress`
    /// hears how many are done.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn append(
        &self,
        state: &mut State,
        tokens: &[u32],
        prefill: Prefill,
        progress: &mut dyn FnMut(usize),
    ) -> Result<()> {
        let (c, start) = (&self.config, state.position);
        check_tokens(tokens, c.vocab_size, start, c.max_position_embeddings)?;
        let reading = Reading::append(c, prefill, state.floors, start, start + tokens.len());
        state.floors = reading.floors;
        self.limit_draft(state, start + tokens.len());
        for span in &reading.spans {
            for chunk in tokens[span.start - start..span.end - start].chunks(CHUNK) {
                self.read(state, chunk, span.depth)?;
                progress(state.position - start);
            }
        }
        Ok(())
    }

    /// Makes the state behind `text`, whose last token waits to be read, from the entries of `state` that end before position
    /// `kept`. Nothing else of `state` is used.
    ///
    /// # Errors
    /// As [`Model::forward`], but that `text` may be empty.
    ///
    /// # Panics
    /// When `kept` goes beyond the text or the entries.
    pub fn rebuild(&self, state: &mut State, text: &[u32], kept: usize, replay: Replay) -> Result<()> {
        let c = &self.config;
        if !text.is_empty() {
            check_tokens(text, c.vocab_size, 0, c.max_position_embeddings)?;
        }
        assert!(kept <= text.len(), "{kept} tokens kept of {}", text.len());
        let reading = Reading::replay(c, replay, text.len(), kept);
        let old = std::mem::replace(state, self.state());
        for (plan, (new, old)) in c.layers.iter().zip(state.globals.iter_mut().zip(old.globals)) {
            if let (Some(new), Some(old)) = (new, old) {
                (new.entries, new.keys) = (old.entries, old.keys);
                truncate(&mut new.entries, kept / plan.ratio);
                truncate(&mut new.keys, kept / plan.ratio);
            }
        }
        (state.floors, state.kept, state.ran) = (reading.floors, kept, old.ran);
        self.limit_draft(state, text.len());
        let start = reading.spans.first().map_or(text.len().saturating_sub(1), |span| span.start);
        state.position = start;
        state.history = self.history(&text[..start]);
        for span in &reading.spans {
            for chunk in text[span.start..span.end].chunks(CHUNK) {
                self.read(state, chunk, span.depth)?;
            }
        }
        Ok(())
    }

    /// The rows of the next tokens after the layers that `depth` names. The state moves on.
    fn rows(&self, state: &mut State, tokens: &[u32], depth: Depth, trace: &mut Trace) -> Result<Rows> {
        let mut rows = self.embed(state, tokens, trace)?;
        for index in 0..depth.whole {
            self.layer(index, state, &mut rows, trace);
        }
        if let Some(part) = depth.part {
            self.part(depth.whole, part, state, &mut rows);
        }
        self.remember(state, &rows.taps, trace);
        for &token in &tokens[tokens.len().saturating_sub(state.history.len())..] {
            state.history.rotate_right(1);
            state.history[0] = token;
        }
        state.position += tokens.len();
        Ok(rows)
    }

    /// Takes back the newest rows of a forward: `text` are the tokens that stay read. At most a block of rows, of one forward.
    ///
    /// # Panics
    /// When that are more rows.
    pub fn take_back(&self, state: &mut State, text: &[u32]) {
        let (position, block) = (text.len(), self.block_size());
        assert!(position <= state.position && state.position - position <= block, "more than {block} rows");
        for (plan, global) in self.config.layers.iter().zip(&mut state.globals) {
            if let Some(global) = global {
                let entries = position.max(state.kept) / plan.ratio;
                truncate(&mut global.entries, entries);
                truncate(&mut global.keys, entries);
            }
        }
        (state.position, state.history) = (position, self.history(text));
    }

    /// The newest N - 1 raw ids of a text, newest first.
    pub(super) fn history(&self, text: &[u32]) -> Vec<u32> {
        let length = self.config.engram.as_ref().map_or(0, |e| e.max_ngram_size - 1);
        text.iter().rev().copied().chain(std::iter::repeat(BEFORE_TEXT)).take(length).collect()
    }

    /// The rows of the next tokens before the first layer.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn embed(&self, state: &State, tokens: &[u32], trace: &mut Trace) -> Result<Rows> {
        let c = &self.config;
        check_tokens(tokens, c.vocab_size, state.position, c.max_position_embeddings)?;
        Ok(self.embedded(&state.history, tokens, trace))
    }

    /// [`Model::embed`] of tokens that follow `history`.
    pub(super) fn embedded(&self, history: &[u32], tokens: &[u32], trace: &mut Trace) -> Rows {
        let c = &self.config;
        let (n, h, t) = (c.hc_mult, c.hidden_size, tokens.len());
        let embedded = Matrix::stack(h, tokens.iter().map(|&id| self.weights.embed.row(id as usize).to_vec()));
        trace.enter(None);
        trace.record("embeddings", &[1, t, h], &embedded.data);
        let hashes: Vec<Vec<Vec<u32>>> = (0..c.engram.as_ref().map_or(0, |e| e.layer_ids.len()))
            .map(|slot| (0..t).map(|t| self.hash(slot, history, &tokens[..=t])).collect())
            .collect();
        if let Some(engram) = &c.engram {
            trace.put("engram_hash_ids", &[1, t, hashes.len(), engram.rows_per_token()], || {
                Values::I64(
                    (0..t).flat_map(|t| hashes.iter().flat_map(move |h| h[t].iter().map(|&r| r as i64))).collect(),
                )
            });
        }
        Rows {
            streams: embedded.map_rows(n * h, |_, row| embed::embed(row, n)),
            pre: Matrix::stack(n, (0..t).map(|_| boundary::first_pre(n))),
            hashes,
            selection: vec![vec![]; t],
            candidates: vec![vec![]; t],
            taps: vec![],
        }
    }

    /// Table rows of the last token of `tokens`, which follow `history`.
    fn hash(&self, slot: usize, history: &[u32], tokens: &[u32]) -> Vec<u32> {
        let recent: Vec<u32> = tokens.iter().rev().chain(history).take(history.len() + 1).copied().collect();
        let compressed = engram_gather::compress(&recent, &self.tables.token_map, self.tables.pad);
        let layer = &self.tables.layers[slot];
        engram_gather::hash(&compressed, &layer.multipliers, &layer.primes, &layer.offsets)
    }

    /// One layer: reads and writes its part of the state, and the rows in flight. `state.position` is the position of the
    /// first row, and stays.
    pub fn layer(&self, index: usize, state: &mut State, rows: &mut Rows, trace: &mut Trace) {
        state.ran[index].whole += rows.streams.rows;
        self.sublayers(index, rows, trace, |x, rows, trace| self.attention(index, x, state, rows, trace));
    }

    /// What a layer does with rows whose output nobody needs. The rows in flight end here.
    fn part(&self, index: usize, part: Part, state: &mut State, rows: &mut Rows) {
        let (plan, w, off) = (&self.config.layers[index], &self.weights.layers[index], &mut Trace::off());
        let (first, freqs) = (state.position, rope::frequencies(&self.config, plan.ratio > 0));
        state.ran[index].part += rows.streams.rows;
        let x = self.attention_input(index, rows, off);
        if let (Some(w), Some(global)) = (&w.compressor, &mut state.globals[index]) {
            self.compress(plan, w, &x, first, state.kept, &freqs, global, off);
        }
        if part == Part::Keys {
            let keys = self.window_keys(w, &x, first, &freqs, off);
            ring_commit::commit(&mut state.rings[index].data, &keys.data, keys.cols, first);
        }
    }

    /// The normed input (T, h) of a layer's attention when no mix of its own is needed: the Engram, then the collapse with
    /// the carried `pre`.
    pub(super) fn attention_input(&self, index: usize, rows: &mut Rows, trace: &mut Trace) -> Matrix {
        let (c, w) = (&self.config, &self.weights.layers[index]);
        self.open(index, rows, trace);
        collapse(&rows.streams, &rows.pre, c.hidden_size)
            .map_rows(c.hidden_size, |_, x| rms_norm(x, &w.attn_norm, c.rms_norm_eps))
    }

    /// A layer around its attention, which makes (T, h) of its normed input (T, h).
    pub(super) fn sublayers(
        &self,
        index: usize,
        rows: &mut Rows,
        trace: &mut Trace,
        attention: impl FnOnce(&Matrix, &mut Rows, &mut Trace) -> Matrix,
    ) {
        let (c, t) = (&self.config, rows.streams.rows);
        trace.enter(Some(index));
        trace.record("streams_in", &[1, t, c.hc_mult, c.hidden_size], &rows.streams.data);
        trace.record("pre_mix_in", &[1, t, c.hc_mult], &rows.pre.data);
        self.open(index, rows, trace);
        let choice = Choice { chosen: c.num_experts_per_tok, normalise: c.norm_topk_prob };
        self.block(&self.weights.layers[index], choice, rows, trace, attention);
    }

    /// What a layer begins with: its Engram, and a look at the streams for the draft stages.
    fn open(&self, index: usize, rows: &mut Rows, trace: &mut Trace) {
        if let Some(slot) = self.config.layers[index].engram {
            self.engram(&self.weights.layers[index], slot, rows, trace);
        }
        self.tap(index, rows);
    }

    /// A block around its attention, which makes (T, h) of its normed input (T, h): a layer after its Engram, or a draft stage.
    pub(super) fn block(
        &self,
        w: &Layer,
        choice: Choice,
        rows: &mut Rows,
        trace: &mut Trace,
        attention: impl FnOnce(&Matrix, &mut Rows, &mut Trace) -> Matrix,
    ) {
        let c = &self.config;
        let (t, n, h) = (rows.streams.rows, c.hc_mult, c.hidden_size);
        let mixes = self.mix("attn", &w.hc_attn, &rows.streams, trace);
        let pre = if self.slips(Mutation::PreWithoutLag) { pre_of(&mixes) } else { rows.pre.clone() };
        let collapsed = collapse(&rows.streams, &pre, h);
        let x = collapsed.map_rows(h, |_, x| rms_norm(x, &w.attn_norm, c.rms_norm_eps));
        trace.record("attn_collapsed", &[1, t, h], &collapsed.data);
        trace.record("attn_in", &[1, t, h], &x.data);
        let y = attention(&x, rows, trace);
        trace.record("attn_out", &[1, t, h], &y.data);
        rows.streams = expand(&rows.streams, &y, &mixes);
        trace.record("streams_mid", &[1, t, n, h], &rows.streams.data);
        let pre = pre_of(&mixes);

        let mixes = self.mix("ffn", &w.hc_ffn, &rows.streams, trace);
        let pre = if self.slips(Mutation::PreWithoutLag) { pre_of(&mixes) } else { pre };
        let collapsed = collapse(&rows.streams, &pre, h);
        let x = collapsed.map_rows(h, |_, x| rms_norm(x, &w.ffn_norm, c.rms_norm_eps));
        trace.record("ffn_collapsed", &[1, t, h], &collapsed.data);
        trace.record("ffn_in", &[1, t, h], &x.data);
        let z = self.experts(w, choice, &x, trace);
        trace.record("ffn_out", &[1, t, h], &z.data);
        rows.streams = expand(&rows.streams, &z, &mixes);
        rows.pre = pre_of(&mixes);
        trace.record("streams_out", &[1, t, n, h], &rows.streams.data);
        trace.record("pre_mix_out", &[1, t, n], &rows.pre.data);
    }

    /// Engram (`numerics.md` §8): rows of the table, their projection, the gate into every stream.
    fn engram(&self, w: &Layer, slot: usize, rows: &mut Rows, trace: &mut Trace) {
        let Some(w) = &w.engram else { return };
        let (t, n, h) = (rows.streams.rows, self.config.hc_mult, self.config.hidden_size);
        let per_token = rows.hashes[slot][0].len();
        let gathered = rows.hashes[slot].iter().map(|ids| ids.iter().flat_map(|&id| w.table.row(id as usize)).copied());
        let gathered = Matrix::stack(per_token * w.table.cols, gathered.map(|row| row.collect()));
        let kv = w.wkv.apply(&gathered);
        for i in 0..t {
            engram_gate::gate(rows.streams.row_mut(i), kv.row(i), &w.qk, h, self.config.rms_norm_eps);
        }
        trace.record("engram_rows", &[1, t, per_token, w.table.cols], &gathered.data);
        trace.record("engram_kv", &[1, t, (n + 1) * h], &kv.data);
        trace.record("engram_out", &[1, t, n, h], &rows.streams.data);
    }

    /// The mix of every row (`numerics.md` §2).
    fn mix(&self, name: &str, weights: &MixWeights, streams: &Matrix, trace: &mut Trace) -> Vec<Mix> {
        let c = &self.config;
        let shape = MixShape::new(c);
        let mut mixes: Vec<Mix> = streams.iter().map(|row| boundary::mix(row, weights, shape)).collect();
        let (t, n) = (streams.rows, c.hc_mult);
        let all = |part: fn(&Mix) -> &Vec<f32>| Values::F32(mixes.iter().flat_map(part).copied().collect());
        trace.put(&format!("hc_{name}_pre"), &[1, t, n], || all(|m| &m.pre));
        trace.put(&format!("hc_{name}_post"), &[1, t, n], || all(|m| &m.post));
        trace.put(&format!("hc_{name}_comb"), &[1, t, n, n], || all(|m| &m.comb));
        if self.slips(Mutation::CombTransposed) {
            for mix in &mut mixes {
                mix.comb = (0..n * n).map(|i| mix.comb[i % n * n + i / n]).collect();
            }
        }
        mixes
    }

    /// Attention (`numerics.md` §4 to §6) on a state's caches.
    fn attention(&self, index: usize, x: &Matrix, state: &mut State, rows: &mut Rows, trace: &mut Trace) -> Matrix {
        let (c, plan, w) = (&self.config, &self.config.layers[index], &self.weights.layers[index]);
        let (t, d, first, window) = (x.rows, c.head_dim, state.position, c.sliding_window);
        let slots = state.rings[index].rows;
        let freqs = rope::frequencies(c, plan.ratio > 0);
        let (q_latent, q) = self.queries(w, x, first, &freqs, trace);
        let window_keys = self.window_keys(w, x, first, &freqs, trace);
        if let (Some(w), Some(global)) = (&w.compressor, &mut state.globals[index]) {
            self.compress(plan, w, x, first, state.kept, &freqs, global, trace);
        }
        let none = Matrix::new(0, d, vec![]);
        let global = plan.kv_source.filter(|_| plan.ratio > 0).and_then(|source| state.globals[source].as_ref());
        if let (Some(w), Some(global)) = (&w.indexer, global) {
            self.choose(plan, w, x, &q_latent, first, &freqs, global, rows, trace);
        }
        let entries = global.map_or(&none, |global| &global.entries);
        if plan.ratio > 0 {
            let k = c.index_topk.min(entries.rows);
            trace.record("comp_kv_used", &[1, entries.rows, d], &entries.data);
            trace.put("topk", &[1, t, k], || {
                let ids = |chosen: &Vec<u32>| {
                    let ids: Vec<i32> =
                        chosen.iter().map(|&id| id as i32).chain(std::iter::repeat(-1)).take(k).collect();
                    ids
                };
                Values::I32(rows.selection.iter().flat_map(ids).collect())
            });
        }

        let floor = if index < c.decoder() { state.floors.encoder } else { state.floors.decoder };
        let ring = &state.rings[index];
        let keys = |i: usize| {
            let position = first + i;
            let mut keys: Vec<&[f32]> = ((position + 1).saturating_sub(window).max(floor)..=position)
                .map(|s| if s < first { ring.row(s % slots) } else { window_keys.row(s - first) })
                .collect();
            if plan.ratio > 0 {
                keys.extend(rows.selection[i].iter().map(|&entry| entries.row(entry as usize)));
            }
            keys
        };
        let y = self.attended(w, &q, first, &freqs, keys, trace);
        ring_commit::commit(&mut state.rings[index].data, &window_keys.data, d, first);
        y
    }

    /// The normed query latents (T, r_q) and the rotated queries (T, H, D) of rows from position `first`.
    pub(super) fn queries(
        &self,
        w: &Layer,
        x: &Matrix,
        first: usize,
        freqs: &[f32],
        trace: &mut Trace,
    ) -> (Matrix, Matrix) {
        let (c, eps, t, d) = (&self.config, self.config.rms_norm_eps, x.rows, self.config.head_dim);
        let latent = w.wq_a.apply(x);
        let q_latent = match self.slips(Mutation::NoQueryNorm) {
            true => latent,
            false => latent.map_rows(c.q_lora_rank, |_, q| rms_norm(q, &w.q_norm, eps)),
        };
        trace.record("q_latent", &[1, t, c.q_lora_rank], &q_latent.data);
        let mut q = w.wq_b.apply(&q_latent);
        trace.record("q_prerope", &[1, t, c.num_attention_heads * d], &q.data);
        if self.slips(Mutation::QueryNormPerHead) {
            q.data.chunks_exact_mut(d).for_each(|head| head.copy_from_slice(&rms_norm(head, &vec![1.0; d], eps)));
        }
        for i in 0..t {
            rope::rotate_heads(q.row_mut(i), d, (first + i) as u32, freqs, false);
        }
        (q_latent, q)
    }

    /// The window keys (T, D) of rows from position `first`.
    pub(super) fn window_keys(&self, w: &Layer, x: &Matrix, first: usize, freqs: &[f32], trace: &mut Trace) -> Matrix {
        let (eps, t, d) = (self.config.rms_norm_eps, x.rows, self.config.head_dim);
        let keys = w.wkv.apply(x).map_rows(d, |i, kv| match self.slips(Mutation::NoWindowKeyNorm) {
            true => cache_append::entry(kv, (first + i) as u32, freqs),
            false => cache_append::window_key(kv, &w.kv_norm, eps, (first + i) as u32, freqs),
        });
        trace.record("swa_kv_prequant", &[1, t, d], &keys.data);
        let keys = self.quantise(CacheFormat::Fp8, keys);
        trace.record("swa_kv", &[1, t, d], &keys.data);
        keys
    }

    /// The output (T, h) of queries that attend to the keys which `keys` names for each row.
    pub(super) fn attended<'k>(
        &self,
        w: &Layer,
        q: &Matrix,
        first: usize,
        freqs: &[f32],
        keys: impl Fn(usize) -> Vec<&'k [f32]>,
        trace: &mut Trace,
    ) -> Matrix {
        let (c, t, d, heads) = (&self.config, q.rows, self.config.head_dim, self.config.num_attention_heads);
        let scale = (d as f64).powf(-0.5) as f32;
        let mut attended = q.map_rows(heads * d, |i, q| attend::attend(q, &keys(i), &w.sink, scale));
        trace.record("attended", &[1, t, heads, d], &attended.data);
        if !self.slips(Mutation::NoInverseRope) {
            for i in 0..t {
                rope::rotate_heads(attended.row_mut(i), d, (first + i) as u32, freqs, true);
            }
        }
        trace.record("attended_derope", &[1, t, c.o_groups, heads / c.o_groups * d], &attended.data);
        let u = attended.map_rows(c.o_groups * c.o_lora_rank, |_, o| linear::grouped(&w.wo_a, o, c.o_groups));
        trace.record("wo_a_out", &[1, t, c.o_groups, c.o_lora_rank], &u.data);
        w.wo_b.apply(&u)
    }

    /// Adds the groups that the rows complete to a Full layer's global cache, but for those that end before position `kept`,
    /// and keeps what an incomplete one needs (`numerics.md` §5, §6).
    #[allow(clippy::too_many_arguments)] // one Full layer's whole surroundings
    fn compress(
        &self,
        plan: &LayerPlan,
        w: &Compressor,
        x: &Matrix,
        first: usize,
        kept: usize,
        freqs: &[f32],
        global: &mut Global,
        trace: &mut Trace,
    ) {
        let (c, eps, ratio) = (&self.config, self.config.rms_norm_eps, plan.ratio);
        let (d, d_i) = (c.head_dim, c.index_head_dim);
        let values = w.wkv.apply(x);
        let gates = w.wgate.as_ref().map(|wgate| wgate.apply(x));
        let end = first + x.rows;
        // Groups that end among the rows; their tokens lie in the remainder and in the rows.
        let groups = (first / ratio).max(kept / ratio)..end / ratio;
        let pooled = groups.clone().map(|group| {
            let Some(gates) = &gates else { return values.row(group - first).to_vec() };
            let member = |s: usize| match s < first {
                true => global.remainder.row(s % global.remainder.rows).split_at(d),
                false => (values.row(s - first), gates.row(s - first)),
            };
            let (values, gates): (Vec<_>, Vec<_>) = (group * ratio..(group + 1) * ratio).map(member).unzip();
            cache_append::pool(&values, &gates)
        });
        let latents = Matrix::stack(d, pooled.map(|pooled| cache_append::latent(&pooled, &w.norm, eps)));
        if let Some(gates) = &gates {
            for s in (first..end).filter(|s| (s + 1) % ratio != 0) {
                let held = global.remainder.row_mut(s % global.remainder.rows);
                held[..d].copy_from_slice(values.row(s - first));
                held[d..].copy_from_slice(gates.row(s - first));
            }
        }

        let position = |i: usize| {
            let group = groups.start + i;
            let at = if self.slips(Mutation::EntryAtGroupEnd) { ratio - 1 } else { 0 };
            (group * ratio + at) as u32
        };
        let entries = latents.map_rows(d, |i, latent| cache_append::entry(latent, position(i), freqs));
        let index_key = |i: usize, latent: &[f32]| {
            let latent = if self.slips(Mutation::IndexKeyFromEntry) { entries.row(i) } else { latent };
            match self.slips(Mutation::NoIndexKeyNorm) {
                true => cache_append::entry(&w.wk.matvec(latent), position(i), freqs),
                false => cache_append::index_key(latent, &w.wk, &w.k_norm, eps, position(i), freqs),
            }
        };
        let keys = latents.map_rows(d_i, index_key);
        trace.record("comp_latent", &[1, latents.rows, d], &latents.data);
        trace.record("comp_kv_prequant", &[1, latents.rows, d], &entries.data);
        trace.record("index_k_prequant", &[1, latents.rows, d_i], &keys.data);
        let entries = self.quantise(CacheFormat::Nvfp4, entries);
        let keys = self.quantise(CacheFormat::Mxfp4, keys);
        trace.record("comp_kv", &[1, latents.rows, d], &entries.data);
        trace.record("index_k", &[1, latents.rows, d_i], &keys.data);
        append(&mut global.entries, entries);
        append(&mut global.keys, keys);
    }

    /// Chooses the entries that each row attends to, and at the candidate source the blocks that later layers may choose
    /// from (`numerics.md` §6).
    #[allow(clippy::too_many_arguments)] // one index source's whole surroundings
    pub(super) fn choose(
        &self,
        plan: &LayerPlan,
        w: &Indexer,
        x: &Matrix,
        q_latent: &Matrix,
        first: usize,
        freqs: &[f32],
        global: &Global,
        rows: &mut Rows,
        trace: &mut Trace,
    ) {
        let c = &self.config;
        let (t, heads, d_i, entries) = (x.rows, c.index_n_heads, c.index_head_dim, global.entries.rows);
        let queries = w.wq_b.apply(q_latent);
        let queries =
            queries.map_rows(heads * d_i, |i, q| cache_append::index_query(q, d_i, (first + i) as u32, freqs));
        trace.record("index_q_prequant", &[1, t, heads, d_i], &queries.data);
        let by_head = Matrix::new(t * heads, d_i, queries.data);
        let queries = Matrix::new(t, heads * d_i, self.quantise(CacheFormat::Mxfp4, by_head).data);
        trace.record("index_q", &[1, t, heads, d_i], &queries.data);
        let raw = w.weights_proj.apply(x);
        trace.record("index_w_raw", &[1, t, heads], &raw.data);
        let scale = ((d_i as f64).powf(-0.5) * (heads as f64).powf(-0.5)) as f32;

        let mut recorded = trace.is_on().then(|| vec![f32::NEG_INFINITY; t * entries]);
        for i in 0..t {
            let visible = self.visible(first + i, plan.ratio, entries);
            let restricted = plan.candidates == Candidates::Restricted && !self.slips(Mutation::CandidatesIgnored);
            let eligible = match restricted {
                true => select::candidate_entries(&rows.candidates[i], c.candidate_block_size, visible),
                false => (0..visible as u32).collect(),
            };
            let weights: Vec<f32> = raw.row(i).iter().map(|w| w * scale).collect();
            let keys = eligible.iter().map(|&entry| global.keys.row(entry as usize));
            let scores: Vec<f32> = match self.slips(Mutation::ScoreWithoutRelu) {
                true => {
                    let heads = || queries.row(i).chunks_exact(d_i).zip(&weights);
                    keys.map(|key| heads().map(|(q, w)| w * super::math::dot(q, key)).sum()).collect()
                }
                false => {
                    let scorer = index_score::Scorer::new(queries.row(i), weights, d_i);
                    keys.map(|key| scorer.score(key)).collect()
                }
            };
            let chosen = select::top_k(&scores, c.index_topk);
            rows.selection[i] = chosen.iter().map(|&at| eligible[at as usize]).collect();
            if plan.candidates == Candidates::Source {
                let (block, blocks) = (c.candidate_block_size, c.candidate_topk_blocks);
                rows.candidates[i] = match self.slips(Mutation::NewestBlockNotForced) {
                    true => select::top_k(&select::block_scores(&scores, block), blocks),
                    false => select::candidate_blocks(&scores, block, blocks),
                };
            }
            if let Some(recorded) = &mut recorded {
                eligible.iter().zip(&scores).for_each(|(&e, &s)| recorded[i * entries + e as usize] = s);
            }
        }
        if let Some(recorded) = recorded {
            trace.record("index_scores", &[1, t, entries], &recorded);
            if plan.candidates == Candidates::Source {
                self.record_candidates(plan, first, entries, &recorded, rows, trace);
            }
        }
    }

    fn record_candidates(
        &self,
        plan: &LayerPlan,
        first: usize,
        entries: usize,
        scores: &[f32],
        rows: &Rows,
        trace: &mut Trace,
    ) {
        let (t, block) = (rows.candidates.len(), self.config.candidate_block_size);
        let blocks: Vec<f32> = scores.chunks(entries.max(1)).flat_map(|row| select::block_scores(row, block)).collect();
        trace.record("candidate_block_scores", &[1, t, entries.div_ceil(block)], &blocks);
        trace.put("candidates", &[1, t, entries], || {
            let mut mask = vec![false; t * entries];
            for (i, blocks) in rows.candidates.iter().enumerate() {
                let visible = self.visible(first + i, plan.ratio, entries);
                for entry in select::candidate_entries(blocks, block, visible) {
                    mask[i * entries + entry as usize] = true;
                }
            }
            Values::Bool(mask)
        });
    }

    /// Entries that the query at `position` sees: those of complete groups (`numerics.md` §5).
    fn visible(&self, position: usize, ratio: usize, entries: usize) -> usize {
        let visible = match self.options.mutation {
            Some(Mutation::VisibleOneFewer) => position / ratio,
            Some(Mutation::VisibleIncomplete) => (position + 1).div_ceil(ratio),
            _ => (position + 1) / ratio,
        };
        visible.min(entries)
    }

    /// Experts (`numerics.md` §9): the routed parts in the order of choice, then the shared one.
    fn experts(&self, w: &Layer, choice: Choice, x: &Matrix, trace: &mut Trace) -> Matrix {
        let c = &self.config;
        let (t, h, k, limit) = (x.rows, c.hidden_size, choice.chosen, c.swiglu_limit);
        let logits = w.gate.apply(x);
        let mut routes: Vec<route::Route> = logits
            .iter()
            .map(|l| route::route(l, &w.gate_bias, k, choice.normalise, c.routed_scaling_factor))
            .collect();
        if self.slips(Mutation::BiasInRouteWeight) {
            for route in &mut routes {
                route.weights = route.ids.iter().map(|&e| route.scores[e as usize] + w.gate_bias[e as usize]).collect();
                let sum: f32 = route.weights.iter().sum();
                route.weights.iter_mut().for_each(|g| *g *= c.routed_scaling_factor / sum);
            }
        }
        let part = |expert: &super::weights::Expert, x: &[f32], weight: f32| {
            let (mut gate, up) = (expert.w1.matvec(x), expert.w3.matvec(x));
            if self.slips(Mutation::GateClampedBelow) {
                gate.iter_mut().for_each(|a| *a = a.max(-limit));
            }
            experts_down::part(&expert.w2, &experts_up::activate(&gate, &up, weight, limit))
        };
        let routed = x.map_rows(h, |i, x| {
            let parts = routes[i].ids.iter().zip(&routes[i].weights);
            let parts: Vec<f32> = parts.flat_map(|(&e, &weight)| part(&w.experts[e as usize], x, weight)).collect();
            boundary::sum_parts(&parts, h)
        });
        let shared = x.map_rows(h, |_, x| part(&w.shared, x, 1.0));

        let all =
            |values: fn(&route::Route) -> &Vec<f32>| Values::F32(routes.iter().flat_map(values).copied().collect());
        trace.put("moe_scores", &[t, w.experts.len()], || all(|r| &r.scores));
        trace.put("moe_weights", &[t, k], || all(|r| &r.weights));
        let ids = || Values::I32(routes.iter().flat_map(|r| &r.ids).map(|&id| id as i32).collect());
        trace.put("moe_indices", &[t, k], ids);
        trace.record("routed_out", &[t, h], &routed.data);
        trace.record("shared_out", &[t, h], &shared.data);
        let mut out = routed;
        add(&mut out.data, &shared.data);
        out
    }

    /// Logits (`numerics.md` §10).
    pub(super) fn head(&self, rows: &Rows, logits: LogitRows, trace: &mut Trace) -> Vec<Vec<f32>> {
        let c = &self.config;
        let (t, h) = (rows.streams.rows, c.hidden_size);
        if logits == LogitRows::None {
            return vec![];
        }
        let collapsed = collapse(&rows.streams, &rows.pre, h);
        let x = collapsed.map_rows(h, |_, x| rms_norm(x, &self.weights.norm, c.rms_norm_eps));
        let x = match logits {
            LogitRows::All => x,
            LogitRows::Last | LogitRows::None => Matrix::stack(h, [x.row(t - 1).to_vec()]),
        };
        let logits = self.weights.head.apply(&x);
        trace.enter(None);
        trace.record("final_collapsed", &[1, t, h], &collapsed.data);
        trace.record("final_normed", &[1, x.rows, h], &x.data);
        trace.record("logits", &[1, x.rows, c.vocab_size], &logits.data);
        logits.iter().map(<[f32]>::to_vec).collect()
    }

    pub(super) fn quantise(&self, format: CacheFormat, rows: Matrix) -> Matrix {
        match self.options.cache_quant {
            true => rows.map_rows(rows.cols, |_, row| format.round_trip(row)),
            false => rows,
        }
    }

    fn slips(&self, mutation: Mutation) -> bool {
        self.options.mutation == Some(mutation)
    }
}

fn pre_of(mixes: &[Mix]) -> Matrix {
    Matrix::stack(mixes[0].pre.len(), mixes.iter().map(|mix| mix.pre.clone()))
}

pub(super) fn collapse(streams: &Matrix, pre: &Matrix, h: usize) -> Matrix {
    streams.map_rows(h, |t, row| boundary::collapse(row, pre.row(t)))
}

fn expand(streams: &Matrix, y: &Matrix, mixes: &[Mix]) -> Matrix {
    streams.map_rows(streams.cols, |t, row| boundary::expand(row, y.row(t), &mixes[t]))
}

fn append(to: &mut Matrix, rows: Matrix) {
    to.rows += rows.rows;
    to.data.extend(rows.data);
}

fn truncate(to: &mut Matrix, rows: usize) {
    assert!(rows <= to.rows, "{rows} entries kept of {}", to.rows);
    to.rows = rows;
    to.data.truncate(rows * to.cols);
}
