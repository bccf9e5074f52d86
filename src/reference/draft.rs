//! The draft on the CPU (`numerics.md` §13): a small model of the checkpoint proposes a block of tokens in one go.
//!
//! What it sees of the text are the residual streams at the inputs of some of the model's layers, one key a token and stage:
//! they are made whenever rows run through all those layers, and lie in rings of their own. A block has the token that waits to be
//! read, the *anchor*, and noise; its rows see each other and the window before the anchor. Tokens are then taken from left to
//! right, each with the one before it: [`Drafting`] goes place by place, so that nobody can look ahead.

use super::boundary;
use super::math::{dot, rms_norm, Matrix};
use super::model::{collapse, Choice, Model, Rows, State};
use super::rope;
use super::tap;
use super::trace::{Trace, Values};
use super::weights::Draft;
use crate::config::DsparkConfig;

/// What the draft stages see of a text.
#[derive(Debug, Clone)]
pub struct Window {
    /// One ring a stage, of as many rows as those of the layers: position p lies in row `p % rows`.
    pub rings: Vec<Matrix>,
    /// The lowest position whose keys may be seen. A reading makes them of the text's last W tokens, but for the one that waits.
    pub floor: usize,
}

/// A block whose tokens are taken from left to right.
#[derive(Debug, Clone)]
pub struct Drafting<'m> {
    draft: &'m Draft,
    /// Logits (B, V) without what the token before says.
    pub base: Matrix,
    /// Residuals (B, h) that confidences are read from.
    pub raw: Matrix,
    before: u32,
    place: usize,
}

impl Drafting<'_> {
    /// Whether all places are taken.
    pub fn is_done(&self) -> bool {
        self.place == self.base.rows
    }

    /// Logit of the probability that the token at the next place is accepted when those before it are. It knows these, and not
    /// what is taken next.
    pub fn confidence(&self) -> f32 {
        let (raw, embedding) = (self.raw.row(self.place), self.draft.markov_embed.row(self.before as usize));
        let (residual, markov) = self.draft.confidence.split_at(raw.len());
        dot(residual, raw) + dot(markov, embedding)
    }

    /// Logits (V) of the next place, after the token before it.
    pub fn logits(&self) -> Vec<f32> {
        let bias = self.draft.markov_head.matvec(self.draft.markov_embed.row(self.before as usize));
        self.base.row(self.place).iter().zip(&bias).map(|(base, bias)| base + bias).collect()
    }

    /// Takes a token for the next place.
    pub fn take(&mut self, token: u32) {
        (self.before, self.place) = (token, self.place + 1);
    }
}

impl Model {
    fn stages(&self) -> Option<(&DsparkConfig, &Draft)> {
        self.config.dspark.as_ref().zip(self.weights.draft.as_ref())
    }

    /// Looks at the streams before a layer's attention, when it is a target layer.
    pub(super) fn tap(&self, index: usize, rows: &mut Rows) {
        let Some((dspark, _)) = self.stages() else { return };
        if dspark.target_layer_ids.contains(&index) {
            let (n, h) = (self.config.hc_mult, self.config.hidden_size);
            rows.taps.push(rows.streams.map_rows(h, |_, streams| tap::mean(streams, n)));
        }
    }

    /// Adds the keys of rows from the state's position on to the draft's window. Rows that have not come past all target layers
    /// leave none.
    pub(super) fn remember(&self, state: &mut State, taps: &[Matrix], trace: &mut Trace) {
        if let Some(features) = self.features(taps) {
            self.remember_features(state, &features, trace);
        }
    }

    /// What the taps of all target layers say (T, target layers · h), once there are all.
    pub(super) fn features(&self, taps: &[Matrix]) -> Option<Matrix> {
        let (dspark, _) = self.stages()?;
        let width = taps.len() * self.config.hidden_size;
        let row = |t: usize| taps.iter().flat_map(|tap| tap.row(t)).copied().collect();
        (taps.len() == dspark.target_layer_ids.len()).then(|| Matrix::stack(width, (0..taps[0].rows).map(row)))
    }

    /// Adds the keys of rows from the state's position on to the draft's window. `features` is (T, target layers · h).
    pub fn remember_features(&self, state: &mut State, features: &Matrix, trace: &mut Trace) {
        let first = state.position;
        let keys = self.context_keys(features, first, trace);
        for (ring, keys) in state.draft.iter_mut().flat_map(|window| &mut window.rings).zip(keys) {
            super::ring_commit::commit(&mut ring.data, &keys.data, keys.cols, first);
        }
    }

    /// The keys (T, D) of rows from position `first` in each stage's window. There is no norm between `main` and the keys.
    pub(super) fn context_keys(&self, features: &Matrix, first: usize, trace: &mut Trace) -> Vec<Matrix> {
        let Some((_, draft)) = self.stages() else { return vec![] };
        let (h, eps) = (self.config.hidden_size, self.config.rms_norm_eps);
        let main = draft.main_proj.apply(features).map_rows(h, |_, x| rms_norm(x, &draft.main_norm, eps));
        trace.enter_draft(None);
        trace.record("context_features", &[1, features.rows, features.cols], &features.data);
        trace.record("main_x", &[1, main.rows, h], &main.data);
        let freqs = rope::frequencies(&self.config, false);
        draft.stages.iter().map(|w| self.window_keys(w, &main, first, &freqs, &mut Trace::off())).collect()
    }

    /// A reading of a text up to `end` makes keys of the last W tokens, but for the one that waits.
    pub(super) fn limit_draft(&self, state: &mut State, end: usize) {
        if let Some(window) = &mut state.draft {
            window.floor = window.floor.max(end.saturating_sub(self.config.sliding_window));
        }
    }

    /// Drafts the block behind `anchor`, the token at the state's position.
    ///
    /// # Panics
    /// When the model has no draft stages.
    pub fn draft(&self, state: &State, anchor: u32, trace: &mut Trace) -> Drafting<'_> {
        let ((dspark, draft), window) = self.stages().zip(state.draft.as_ref()).expect("a model with draft stages");
        let (c, first) = (&self.config, state.position);
        let lowest = first.saturating_sub(c.sliding_window).max(window.floor);
        let (b, n, h) = (dspark.block_size, c.hc_mult, c.hidden_size);
        let ids = (0..b).map(|i| if i == 0 { anchor } else { dspark.noise_token_id });
        let embedded = ids.map(|id| super::embed::embed(self.weights.embed.row(id as usize), n));
        let mut rows = Rows {
            streams: Matrix::stack(n * h, embedded),
            pre: Matrix::stack(n, (0..b).map(|_| boundary::first_pre(n))),
            hashes: vec![],
            selection: vec![],
            candidates: vec![],
            taps: vec![],
        };
        let freqs = rope::frequencies(c, false);
        let choice = Choice { chosen: dspark.num_experts_per_tok, normalise: dspark.norm_topk_prob };
        for (stage, w) in draft.stages.iter().enumerate() {
            trace.enter_draft(Some(stage));
            let ring = &window.rings[stage];
            let seen: Vec<&[f32]> = (lowest..first).map(|s| ring.row(s % ring.rows)).collect();
            self.block(w, choice, &mut rows, trace, |x, _, trace| {
                let (_, q) = self.queries(w, x, first, &freqs, trace);
                let own = self.window_keys(w, x, first, &freqs, trace);
                // Every row of the block sees all of it, and the same window before it.
                self.attended(w, &q, first, &freqs, |_| seen.iter().copied().chain(own.iter()).collect(), trace)
            });
        }
        let raw = collapse(&rows.streams, &rows.pre, h);
        let x = raw.map_rows(h, |_, x| rms_norm(x, &draft.norm, c.rms_norm_eps));
        let base = self.weights.head.apply(&x);
        trace.enter_draft(None);
        trace.put("anchor_token", &[1, 1], || Values::I64(vec![anchor.into()]));
        trace.record("collapsed", &[1, b, h], &raw.data);
        trace.record("normed", &[1, b, h], &x.data);
        trace.record("base_logits", &[1, b, c.vocab_size], &base.data);
        Drafting { draft, base, raw, before: anchor, place: 0 }
    }
}
