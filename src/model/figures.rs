//! What a step leaves behind, to be shown: the entries that its token attended to, the n-grams that it looked up. Nothing runs for it.

use super::Sequence;
use crate::cache::ROUND_RING;
use crate::config::Candidates;

use crate::kernels::verify::record_words;
use crate::kernels::Step;
use crate::reference::engram_gather::{compress, hash, BEFORE_TEXT};
use crate::{Error, Result};
use serde::Serialize;
use std::mem::size_of;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

/// What the last token that was read attended to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Attention {
    /// The token that was read. It sees itself and what is before it.
    pub position: usize,
    /// Every layer, in order.
    pub layers: Vec<LayerAttention>,
}

/// What a layer attended to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayerAttention {
    /// Positions whose window keys were seen.
    pub window: Range<usize>,
    /// Tokens an entry: entry e stands for positions e · ratio to before (e + 1) · ratio. 0 for layers that see their window only.
    pub ratio: usize,
    /// Entries that were selected, ascending.
    pub entries: Vec<u32>,
    /// Positions from which this layer, or the one whose selection it takes over, could select; none where it could from all.
    pub candidates: Option<Vec<Range<usize>>>,
}

/// The n-grams that end at a token, as one Engram looks them up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Ngrams {
    /// The layer that opens with the Engram.
    pub layer: usize,
    /// By order, from 2 on: the rows of the layer's table, one a hash head.
    pub rows: Vec<Vec<u32>>,
}

/// The row of the last token that was read and stands, in the last of `rounds` rounds that made one.
fn last_row(records: &[u32], rounds: usize) -> Option<usize> {
    let words = records.len() / ROUND_RING;
    let made = |back: usize| records[(rounds - back) % ROUND_RING * words] as usize;
    (1..=rounds.min(ROUND_RING)).map(made).find(|&made| made > 0).map(|made| made - 1)
}

impl Sequence {
    /// What the last step that made a token attended to. None where no such step was, or another step, of this text or of another
    /// on the same model, has written over what it left. It may be called while tokens are made, and waits for the device.
    ///
    /// # Errors
    /// The device's; [`Error::NonFinite`] when the step's logits were not finite.
    pub async fn attention_async(&self) -> Result<Option<Attention>> {
        let model = &*self.model;
        let mine = |number| number == model.steps.load(Relaxed);
        let Some((number, round)) = self.looked.filter(|&(number, _)| mine(number)) else { return Ok(None) };
        let (config, scratch) = (&model.config, &model.scratch);
        // A round has a row for each token that it verified; which of them was the last to stand, its record says.
        let draft = self.cache.draft.as_ref().filter(|_| round);
        let rows = if round { 1 + model.block_size() } else { 1 };
        let whole = |words: usize| 4 * (rows * words) as u64;
        let mut parts = vec![(&self.cache.step, 0, size_of::<Step>() as u64)];
        parts.extend(draft.map(|draft| (&draft.out, 0, draft.out.bytes())));
        parts.extend(scratch.selections.iter().flatten().map(|list| (list, 0, whole(model.layout.selection))));
        if config.layers.iter().any(|layer| layer.candidates == Candidates::Source) {
            parts.push((&scratch.candidates, 0, whole(model.layout.candidates)));
        }
        let bytes = model.gpu.read_parts(&parts).await?;
        // Another text may have run while this one waited.
        if !mine(number) {
            return Ok(None);
        }
        let (step, lists) = bytes.split_at(size_of::<Step>());
        let step: Step = bytemuck::pod_read_unaligned(step);
        let Some(position) = step.position.checked_sub(1) else { return Ok(None) };
        let position = position as usize;
        if step.status == 2 {
            return Err(Error::NonFinite { position });
        }
        let words: Vec<u32> = bytemuck::pod_collect_to_vec(lists);
        let mut lists = words.as_slice();
        let mut row = 0;
        if draft.is_some() {
            let (records, rest) = lists.split_at(ROUND_RING * record_words(model.block_size()));
            lists = rest;
            row = last_row(records, step.round as usize).unwrap_or(0);
        }
        let mut take = |words: usize| {
            let (list, rest) = lists.split_at(rows * words);
            lists = rest;
            let list = &list[row * words..][..words];
            list[1..][..list[0].min(words as u32 - 1) as usize].to_vec()
        };
        let selected: Vec<Option<Vec<u32>>> =
            scratch.selections.iter().map(|there| there.as_ref().map(|_| take(model.layout.selection))).collect();
        let source = config.layers.iter().any(|layer| layer.candidates == Candidates::Source);
        let blocks = if source { take(model.layout.candidates) } else { vec![] };
        let layers = config.layers.iter().map(|layer| {
            let floor = if layer.index < config.decoder() { step.encoder_floor } else { step.decoder_floor };
            let source = layer.index_source.map(|source| &config.layers[source]);
            let restricted = source.is_some_and(|source| source.candidates == Candidates::Restricted);
            let block = config.candidate_block_size * layer.ratio;
            let ranges = || {
                let end = (position + 1) / layer.ratio * layer.ratio;
                blocks.iter().map(|&id| id as usize * block..((id as usize + 1) * block).min(end)).collect()
            };
            LayerAttention {
                window: (position + 1).saturating_sub(config.sliding_window).max(floor as usize)..position + 1,
                ratio: layer.ratio,
                entries: layer.index_source.and_then(|source| selected[source].clone()).unwrap_or_default(),
                candidates: restricted.then(ranges),
            }
        });
        Ok(Some(Attention { position, layers: layers.collect() }))
    }

    /// [`Sequence::attention_async`], blocking.
    ///
    /// # Errors
    /// As [`Sequence::attention_async`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn attention(&self) -> Result<Option<Attention>> {
        pollster::block_on(self.attention_async())
    }

    /// The n-grams that end at `position`, as each Engram of the model looks them up.
    ///
    /// # Errors
    /// [`Error::Setting`] for a position that the text does not have.
    pub fn ngrams(&self, position: usize) -> Result<Vec<Ngrams>> {
        let Some(text) = self.tokens.get(..=position) else {
            let allowed = format!("a position before the text's end at {}", self.tokens.len());
            return Err(Error::Setting { setting: "position", found: position.to_string(), allowed });
        };
        let (config, tables) = (&self.model.config, &self.model.ngrams);
        let Some(engram) = &config.engram else { return Ok(vec![]) };
        let before = std::iter::repeat(BEFORE_TEXT);
        let recent: Vec<u32> = text.iter().rev().copied().chain(before).take(engram.max_ngram_size).collect();
        let compressed = compress(&recent, &tables.token_map, tables.pad);
        let looked_up = engram.layer_ids.iter().zip(&tables.layers).map(|(&layer, constants)| {
            let rows = hash(&compressed, &constants.multipliers, &constants.primes, &constants.offsets);
            Ngrams { layer, rows: rows.chunks(engram.n_heads).map(<[u32]>::to_vec).collect() }
        });
        Ok(looked_up.collect())
    }
}
