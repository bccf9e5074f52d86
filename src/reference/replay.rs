//! What a text's state is, whatever was done to the text (`numerics.md` §11): the definition that sequences are held against.
//!
//! Row by row, and layer by layer. Every layer has a set of window keys by position, no ring; a row is run where the definition
//! needs it, whatever that costs. Nothing here knows how a reading is planned or cut.

use super::cache_append;
use super::math::Matrix;
use super::model::{Global, LogitRows, Model, Rows};
use super::rope;
use super::trace::Trace;
use crate::config::Role;
use crate::formats::CacheFormat;
use crate::reading::{Floors, Prefill, Replay};
use std::collections::BTreeMap;

/// What happens to a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Tokens are appended. All tokens that were not read are read, but for the last.
    Append {
        /// The tokens.
        tokens: Vec<u32>,
        /// How they are read.
        prefill: Prefill,
    },
    /// The waiting token is read, and the token that was made of its logits waits.
    Make {
        /// The token that was made.
        token: u32,
    },
    /// Of the state, only the entries are kept, and the rest is rebuilt: a text that was saved without rings and is opened.
    Rebuild {
        /// How.
        replay: Replay,
    },
    /// The text is cut.
    Truncate {
        /// Tokens that stay.
        length: usize,
        /// How the state is rebuilt.
        replay: Replay,
    },
}

/// The state behind a text.
#[derive(Debug, Clone)]
pub struct Definition<'m> {
    model: &'m Model,
    text: Vec<u32>,
    /// Tokens of the text that are read.
    read: usize,
    /// Tokens whose entries were kept when the state was last rebuilt.
    kept: usize,
    floors: Floors,
    layers: Vec<Memory>,
    /// Keys (D) by position in the window of each draft stage, and the lowest position that it sees.
    draft: Vec<BTreeMap<usize, Vec<f32>>>,
    draft_floor: usize,
    /// Logits (V) of the row before each token that was made.
    pub logits: Vec<Vec<f32>>,
}

/// What a layer remembers.
#[derive(Debug, Clone)]
struct Memory {
    /// Window keys (D) by position.
    keys: BTreeMap<usize, Vec<f32>>,
    /// Latents (C, D) and index keys (C, D_i) of a Full layer.
    global: Global,
    /// `wkv x` and `wgate x` (D each) of a Full layer's tokens by position.
    members: BTreeMap<usize, (Vec<f32>, Vec<f32>)>,
}

impl<'m> Definition<'m> {
    /// An empty text.
    pub fn new(model: &'m Model) -> Self {
        let c = &model.config;
        let global = || Global {
            entries: Matrix::new(0, c.head_dim, vec![]),
            keys: Matrix::new(0, c.index_head_dim, vec![]),
            remainder: Matrix::default(),
        };
        let memory = |_| Memory { keys: BTreeMap::new(), global: global(), members: BTreeMap::new() };
        let stages = model.weights.draft.as_ref().map_or(0, |draft| draft.stages.len());
        Self {
            model,
            text: vec![],
            read: 0,
            kept: 0,
            floors: Floors::default(),
            layers: c.layers.iter().map(memory).collect(),
            draft: vec![BTreeMap::new(); stages],
            draft_floor: 0,
            logits: vec![],
        }
    }

    /// What the state is after one event more.
    pub fn after(&mut self, event: &Event) {
        let (layers, decoder, window) =
            (self.layers.len(), self.model.config.decoder(), self.model.config.sliding_window);
        match event {
            Event::Append { tokens, prefill } => {
                self.text.extend(tokens);
                self.draft_floor = self.draft_floor.max(self.text.len().saturating_sub(window));
                // Bounded: the decoder has the last tokens only, when there are more.
                let tail = self.text.len().saturating_sub(window);
                let bounded = *prefill == Prefill::Bounded && tail > self.read && decoder < layers;
                if bounded {
                    self.floors.decoder = tail;
                }
                while self.read < self.text.len() - 1 {
                    self.row(if bounded && self.read < tail { decoder } else { layers });
                }
            }
            Event::Make { token } => {
                let rows = self.row(layers);
                self.logits.extend(self.model.head(&rows, LogitRows::Last, &mut Trace::off()));
                self.text.push(*token);
            }
            Event::Rebuild { .. } if self.text.is_empty() => {}
            Event::Rebuild { replay } => self.rebuild(self.read.max(self.kept), *replay),
            Event::Truncate { length, .. } if *length >= self.text.len() => {}
            Event::Truncate { length, replay } => {
                self.text.truncate(*length);
                self.rebuild(self.read.max(self.kept).min(*length), *replay);
            }
        }
    }

    /// Keeps the entries of groups that end before position `kept`, and computes everything else again.
    fn rebuild(&mut self, kept: usize, replay: Replay) {
        let (layers, length) = (self.layers.len(), self.text.len());
        self.kept = kept;
        // The first token of a group that is not kept.
        let mut open = length;
        for (plan, memory) in self.model.config.layers.iter().zip(&mut self.layers) {
            memory.keys.clear();
            memory.members.clear();
            if plan.role == Role::Full {
                let entries = kept / plan.ratio;
                for rows in [&mut memory.global.entries, &mut memory.global.keys] {
                    rows.rows = entries;
                    rows.data.truncate(entries * rows.cols);
                }
                open = open.min(entries * plan.ratio);
            }
        }
        let start = match replay {
            Replay::Bounded => length.saturating_sub(self.model.config.sliding_window).min(open),
            Replay::Exact => 0,
        };
        self.floors = Floors { encoder: start, decoder: start };
        self.draft.iter_mut().for_each(BTreeMap::clear);
        self.draft_floor = length.saturating_sub(self.model.config.sliding_window);
        self.read = start;
        while self.read + 1 < length {
            self.row(layers);
        }
    }

    /// The text.
    pub fn text(&self) -> &[u32] {
        &self.text
    }

    /// Tokens of it that are read.
    pub fn read(&self) -> usize {
        self.read
    }

    /// Latents (C, D) and index keys (C, D_i) of a Full layer.
    pub fn entries(&self, layer: usize) -> (&Matrix, &Matrix) {
        (&self.layers[layer].global.entries, &self.layers[layer].global.keys)
    }

    /// Window keys (D) by position that the next row of a layer sees besides its own.
    pub fn window(&self, layer: usize) -> BTreeMap<usize, &[f32]> {
        let positions = self.lowest(layer, self.read)..self.read;
        positions.map(|s| (s, self.layers[layer].keys[&s].as_slice())).collect()
    }

    /// Keys (D) by position of the tokens before the next one that a draft stage sees.
    pub fn draft_window(&self, stage: usize) -> BTreeMap<usize, &[f32]> {
        let lowest = self.read.saturating_sub(self.model.config.sliding_window).max(self.draft_floor);
        (lowest..self.read).map(|s| (s, self.draft[stage][&s].as_slice())).collect()
    }

    /// `wkv x` and `wgate x` (D each) by position of those tokens of a Full layer's next group that are read.
    pub fn remainder(&self, layer: usize) -> BTreeMap<usize, (&[f32], &[f32])> {
        let Memory { global, members, .. } = &self.layers[layer];
        let open = global.entries.rows * self.model.config.layers[layer].ratio;
        members.range(open..).map(|(&s, (value, gate))| (s, (value.as_slice(), gate.as_slice()))).collect()
    }

    /// Reads the next token: runs its row through the layers before `end`, and adds its entry in layer `end`, if there is one.
    fn row(&mut self, end: usize) -> Rows {
        let (model, p, off) = (self.model, self.read, &mut Trace::off());
        let mut rows = model.embedded(&model.history(&self.text[..p]), &self.text[p..=p], off);
        for index in 0..end {
            model.sublayers(index, &mut rows, off, |x, rows, off| self.attention(index, x, rows, off));
        }
        if end < self.layers.len() {
            let x = model.attention_input(end, &mut rows, off);
            self.compress(end, &x);
        }
        if let Some(features) = model.features(&rows.taps) {
            let keys = model.context_keys(&features, p, off);
            self.draft.iter_mut().zip(keys).for_each(|(window, key)| drop(window.insert(p, key.data)));
        }
        self.read += 1;
        rows
    }

    /// Attention of one row.
    fn attention(&mut self, index: usize, x: &Matrix, rows: &mut Rows, off: &mut Trace) -> Matrix {
        let (model, p) = (self.model, self.read);
        let (plan, w) = (&model.config.layers[index], &model.weights.layers[index]);
        let freqs = rope::frequencies(&model.config, plan.ratio > 0);
        let (q_latent, q) = model.queries(w, x, p, &freqs, off);
        let key = model.window_keys(w, x, p, &freqs, off);
        self.layers[index].keys.insert(p, key.data);
        self.compress(index, x);
        let global = plan.kv_source.filter(|_| plan.ratio > 0).map(|source| &self.layers[source].global);
        if let (Some(w), Some(global)) = (&w.indexer, global) {
            model.choose(plan, w, x, &q_latent, p, &freqs, global, rows, off);
        }
        let mut keys: Vec<&[f32]> =
            (self.lowest(index, p)..=p).map(|s| self.layers[index].keys[&s].as_slice()).collect();
        if let Some(global) = global {
            keys.extend(rows.selection[0].iter().map(|&entry| global.entries.row(entry as usize)));
        }
        model.attended(w, &q, p, &freqs, |_| keys.clone(), off)
    }

    /// Remembers a row of a Full layer, and adds the entry of a group that it completes and that has none.
    fn compress(&mut self, index: usize, x: &Matrix) {
        let (model, p, c) = (self.model, self.read, &self.model.config);
        let (ratio, eps) = (c.layers[index].ratio, c.rms_norm_eps);
        let Some(w) = &model.weights.layers[index].compressor else { return };
        let Memory { global, members, .. } = &mut self.layers[index];
        let gate = w.wgate.as_ref().map_or(vec![], |wgate| wgate.matvec(x.row(0)));
        members.insert(p, (w.wkv.matvec(x.row(0)), gate));
        let group = p / ratio;
        if (p + 1) % ratio != 0 || group < global.entries.rows {
            return;
        }
        let (values, gates): (Vec<&[f32]>, Vec<&[f32]>) =
            (group * ratio..=p).map(|s| (members[&s].0.as_slice(), members[&s].1.as_slice())).unzip();
        let pooled = if ratio == 1 { values[0].to_vec() } else { cache_append::pool(&values, &gates) };
        let (start, freqs) = ((group * ratio) as u32, rope::frequencies(c, true));
        let latent = cache_append::latent(&pooled, &w.norm, eps);
        let entry = cache_append::entry(&latent, start, &freqs);
        let key = cache_append::index_key(&latent, &w.wk, &w.k_norm, eps, start, &freqs);
        for (to, row, format) in
            [(&mut global.entries, entry, CacheFormat::Nvfp4), (&mut global.keys, key, CacheFormat::Mxfp4)]
        {
            to.data.extend(model.quantise(format, Matrix::new(1, row.len(), row)).data);
            to.rows += 1;
        }
    }

    /// The lowest position whose window key a layer's row at `position` sees.
    fn lowest(&self, layer: usize, position: usize) -> usize {
        let c = &self.model.config;
        let floor = if layer < c.decoder() { self.floors.encoder } else { self.floors.decoder };
        (position + 1).saturating_sub(c.sliding_window).max(floor)
    }
}
