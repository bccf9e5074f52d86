//! A text as the device has it at one moment: what a save writes, while the text goes on.

use super::generation::{Ahead, Made, NON_FINITE, STOPPED};
use super::sequence::{Sequence, Standing};
use super::Model;
use crate::cache::{history_before, Page, OUT_RING, ROUND_RING};
use crate::config::Role;
use crate::gpu::{Buffer, Copied};
use crate::kernels::verify::record_words;
use crate::layout::{Layout, PAGE_TOKENS};
use crate::snapshot::DraftWindow;
use crate::Result;
use std::sync::Arc;

/// A text after all steps that were sent when it was taken. It owns what it needs: complete pages are shared, and whoever
/// writes to one later takes a copy of its own first; what every step changes is copied on the device, in the order of
/// submissions.
#[derive(Debug)]
pub struct Moment {
    model: Arc<Model>,
    /// What the host knew.
    tokens: Vec<u32>,
    standing: Standing,
    ahead: Ahead,
    /// Complete ones, if no step ahead has ended the text.
    pages: Vec<Page>,
    /// Whether another has begun.
    has_begun: bool,
    /// Remainders and rings, as far as they are those of the text.
    windows: Option<Windows>,
    /// The page that has begun, the tokens ahead, then the windows.
    copy: Option<Copied>,
}

/// Bytes of the two in the copy.
#[derive(Debug, Clone, Copy)]
struct Windows {
    remainders: usize,
    rings: Option<usize>,
    /// Of the draft stages, and the lowest position that they see.
    draft: Option<(usize, usize)>,
}

/// What a [`Moment`] was.
#[derive(Debug)]
pub struct Past {
    /// The whole text.
    pub tokens: Vec<u32>,
    /// Where it stood.
    pub standing: Standing,
    /// The complete pages.
    pub pages: Vec<Page>,
    /// Words of the page that has begun, if one has; zeros after what the text has of it.
    pub begun: Option<Vec<u32>>,
    /// Remainders, with zeros in the places that hold nothing of the text, and rings if they were asked for. None when they are
    /// not those of the text.
    pub windows: Option<(Vec<f32>, Option<Vec<u32>>)>,
    /// What the draft stages see of the text, if rings were asked for and the stages are loaded.
    pub draft: Option<DraftWindow>,
}

impl Past {
    /// Raw ids before the tokens that wait, newest first.
    pub fn history(&self, model: &Model) -> Vec<u32> {
        history_before(model.config(), &self.tokens[..self.standing.cached])
    }
}

impl Sequence {
    /// What the text is once the steps sent so far are done, with its rings if `rings` is set. One submission, and nothing is
    /// waited for; a generation goes on. Only a reading that was left half-way is ended first.
    ///
    /// # Errors
    /// The device's.
    pub async fn moment_async(&mut self, rings: bool) -> Result<Moment> {
        self.settle_reading().await?;
        let (model, standing, ahead) = (self.model().clone(), self.standing(), self.ahead());
        let paged = most_paged(&model, &standing, ahead);
        let held = if model.pool.layout().page_words > 0 { paged / PAGE_TOKENS } else { 0 };
        let pages = self.pages().prefix(paged);
        let mut parts = vec![];
        let begun = pages.get(held).map(|page| model.pool.at(page));
        if let Some((slab, at)) = &begun {
            parts.push((slab, *at, 4 * model.pool.layout().page_words as u64));
        }
        let cache = self.cache();
        let whole = |buffer| -> (&Buffer, u64, u64) {
            let buffer: &Buffer = buffer;
            (buffer, 0, buffer.bytes())
        };
        if ahead.steps > 0 {
            parts.push(whole(&cache.out));
        }
        if let Some(draft) = cache.draft.as_ref().filter(|_| ahead.rounds > 0) {
            parts.push(whole(&draft.out));
        }
        let mut windows = None;
        if self.has_windows() {
            let remainders: Vec<_> = cache.remainders.iter().flatten().map(whole).collect();
            let rings: Option<Vec<_>> = rings.then(|| cache.rings.iter().map(whole).collect());
            let bytes = |parts: &[(&Buffer, u64, u64)]| parts.iter().map(|(.., bytes)| *bytes as usize).sum();
            let stages = cache.draft.as_ref().filter(|_| rings.is_some());
            let draft: Option<Vec<_>> = stages.map(|draft| draft.rings.iter().map(whole).collect());
            windows = Some(Windows {
                remainders: bytes(&remainders),
                rings: rings.as_deref().map(bytes),
                draft: draft.as_deref().map(|rings| (bytes(rings), self.draft_floor)),
            });
            let rings = rings.into_iter().chain(draft).flatten();
            parts.extend(remainders.into_iter().chain(rings));
        }
        parts.retain(|(.., bytes)| *bytes > 0);
        let copy = if parts.is_empty() { None } else { Some(model.gpu.copy_out(&parts)?) };
        let pages = pages[..held].to_vec();
        let has_begun = begun.is_some();
        Ok(Moment { model, tokens: self.tokens().to_vec(), standing, ahead, pages, has_begun, windows, copy })
    }
}

impl Moment {
    /// Waits for what was copied, and says what the text was.
    ///
    /// # Errors
    /// The device's.
    pub async fn past(self) -> Result<Past> {
        let Self { model, mut tokens, mut standing, ahead, mut pages, has_begun, windows, copy } = self;
        let bytes = match copy {
            Some(copy) => copy.bytes(&model.gpu).await?,
            None => vec![],
        };
        let mut words: &[u32] = &bytemuck::allocation::pod_collect_to_vec::<u8, u32>(&bytes);
        let mut take = |count: usize| {
            let (taken, left) = words.split_at(count);
            words = left;
            taken
        };
        let page_words = model.pool.layout().page_words;
        let mut begun = has_begun.then(|| take(page_words).to_vec());
        if ahead.steps > 0 {
            read_ahead(take(2 * OUT_RING), ahead, &mut tokens, &mut standing);
        }
        if ahead.rounds > 0 {
            let words = record_words(model.block_size());
            read_rounds(take(ROUND_RING * words), words, ahead, &mut tokens, &mut standing);
        }
        let mut draft = None;
        let windows = windows.map(|all| {
            let remainders = saved_remainders(&model, take(all.remainders / 4), standing.cached);
            let mut saved = |bytes: usize| saved_rings(&model, take(bytes / 4), standing.cached);
            let rings = all.rings.map(&mut saved);
            draft = all.draft.map(|(bytes, floor)| DraftWindow { floor: floor as u32, rings: saved(bytes) });
            (remainders, rings)
        });
        // A text that a step ahead has ended is shorter than it might have been.
        standing.paged = standing.kept.max(standing.cached);
        let complete = if page_words > 0 { standing.paged / PAGE_TOKENS } else { 0 };
        let within = standing.paged % PAGE_TOKENS;
        if complete < pages.len() {
            let last = pages.split_off(complete);
            let bytes = model.pool.copy_out(&model.gpu, &last[..1])?.bytes(&model.gpu).await?;
            begun = Some(bytemuck::allocation::pod_collect_to_vec(&bytes));
        }
        let begun = begun.filter(|_| within > 0).map(|mut words| {
            blank(&model, &mut words, within);
            words
        });
        Ok(Past { tokens, standing, pages, begun, windows, draft })
    }
}

/// What the steps ahead made, as the device has it in its ring.
fn read_ahead(out: &[u32], ahead: Ahead, tokens: &mut Vec<u32>, standing: &mut Standing) {
    for step in 0..ahead.steps {
        let slot = (ahead.slot + step) % OUT_RING;
        let [token, status] = [out[2 * slot], out[2 * slot + 1]];
        standing.cached += 1;
        if status == NON_FINITE {
            break;
        }
        tokens.push(token);
        standing.generator.drawn = standing.generator.drawn.wrapping_add(1);
        if status == STOPPED {
            break;
        }
    }
}

/// What the rounds ahead made.
fn read_rounds(out: &[u32], words: usize, ahead: Ahead, tokens: &mut Vec<u32>, standing: &mut Standing) {
    for round in 0..ahead.rounds {
        let made = Made::of(&out[(ahead.slot + round) % ROUND_RING * words..][..words]);
        standing.cached += made.rows();
        standing.generator.drawn = standing.generator.drawn.wrapping_add(made.tokens.len() as u32);
        tokens.extend(&made.tokens);
        if made.status != 0 {
            break;
        }
    }
}

/// Tokens whose groups may be in the pages once what is ahead is done.
fn most_paged(model: &Model, standing: &Standing, ahead: Ahead) -> usize {
    standing.kept.max(standing.cached + ahead.steps + ahead.rounds * (1 + model.block_size()))
}

/// Zeroes what a page with `tokens` tokens holds beyond them: another text's leftovers.
fn blank(model: &Model, page: &mut [u32], tokens: usize) {
    for (layer, part) in model.layout.page_parts.iter().enumerate() {
        let Some(part) = part else { continue };
        let entries = tokens / model.config.layers[layer].ratio;
        let keys = part.at + part.entries * part.latent_words;
        page[part.at + entries * part.latent_words..keys].fill(0);
        page[keys + entries * part.key_words..part.at + part.words()].fill(0);
    }
}

/// Rows of all rings with W slots, position p in slot `p % W`, from rings as the device has them.
fn saved_rings(model: &Model, words: &[u32], cached: usize) -> Vec<u32> {
    let Layout { window_row, ring_rows, .. } = model.layout;
    let window = model.config.sliding_window;
    if ring_rows == window {
        return words.to_vec();
    }
    let mut saved = vec![0; words.len() / ring_rows * window];
    for (ring, saved) in words.chunks(ring_rows * window_row).zip(saved.chunks_mut(window * window_row)) {
        for position in cached.saturating_sub(window)..cached {
            let row = &ring[position % ring_rows * window_row..][..window_row];
            saved[position % window * window_row..][..window_row].copy_from_slice(row);
        }
    }
    saved
}

/// Members of open groups, of position p in slot `p % ratio` of `ratio - 1`, and zeros in the places that hold nothing of a text of
/// `cached` tokens: on the device they may hold anything, NaN bits too.
fn saved_remainders(model: &Model, words: &[u32], cached: usize) -> Vec<f32> {
    let row = 2 * model.config.head_dim;
    let (mut saved, mut words) = (vec![], words);
    for layer in model.config.layers.iter().filter(|layer| layer.role == Role::Full && layer.ratio > 1) {
        let remainder = model.layout.remainder(layer.ratio);
        let (held, rest) = words.split_at(remainder.rows * row);
        words = rest;
        let open = cached / layer.ratio * layer.ratio;
        for slot in 0..layer.ratio - 1 {
            let member = |position: usize| &held[position % remainder.cycle * row..][..row];
            match open + slot < cached {
                true => saved.extend(member(open + slot).iter().map(|&word| f32::from_bits(word))),
                false => saved.extend(vec![0.0; row]),
            }
        }
    }
    saved
}

impl Sequence {
    /// Gives an empty sequence the remainders and rings of a text of `cached` tokens, as a [`Past`] has them.
    pub fn upload_windows(&self, remainders: &[f32], rings: &[u32], cached: usize) {
        let Model { gpu, config, layout, .. } = &**self.model();
        let row = 2 * config.head_dim;
        let mut members = remainders.chunks_exact(row);
        for layer in config.layers.iter().filter(|layer| layer.role == Role::Full && layer.ratio > 1) {
            let buffer = self.cache().remainders[layer.index].as_ref().expect("a layer with groups has a remainder");
            let open = cached / layer.ratio * layer.ratio;
            let held = members.by_ref().take(layer.ratio - 1);
            for (position, member) in (open..).zip(held).take_while(|&(position, _)| position < cached) {
                let at = position % layout.remainder(layer.ratio).cycle * row;
                gpu.upload(buffer, 4 * at as u64, bytemuck::cast_slice(member));
            }
        }
        self.upload_rings(&self.cache().rings, rings, cached);
    }

    /// Gives a sequence with the windows of a text what the draft stages saw of it. Nothing where they are not loaded.
    pub fn upload_draft(&mut self, window: &DraftWindow, cached: usize) {
        let Some(draft) = &self.cache.draft else { return };
        self.upload_rings(&draft.rings, &window.rings, cached);
        self.draft_floor = window.floor as usize;
    }

    fn upload_rings(&self, to: &[Buffer], rings: &[u32], cached: usize) {
        let Model { gpu, config, layout, .. } = &**self.model();
        let (window, row) = (config.sliding_window, layout.window_row);
        for (ring, saved) in to.iter().zip(rings.chunks(window * row)) {
            let mut words = vec![0; layout.ring_rows * row];
            for position in cached.saturating_sub(window)..cached {
                let key = &saved[position % window * row..][..row];
                words[position % layout.ring_rows * row..][..row].copy_from_slice(key);
            }
            gpu.upload(ring, 0, bytemuck::cast_slice(&words));
        }
    }
}
