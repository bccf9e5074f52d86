//! A sequence's state on the device: what the model remembers of a text (`numerics.md` §12).
//!
//! Everything lies in its packed format. Rings, remainders and step state have a fixed size and belong to the sequence; the
//! global cache lies in pages of the model's [`PagePool`], which sequences may share.

pub mod pool;

pub use pool::{Page, PagePool};

use crate::config::{Config, Role};
use crate::gpu::{Buffer, Gpu, MemoryKind, Recording};
use crate::kernels::cache_append::{PAGE_TOKENS, TABLE_PAGES};
use crate::kernels::draft_begin::round_size;
use crate::kernels::engram_gather::BEFORE_TEXT;
use crate::kernels::verify::record_words;
use crate::kernels::Step;
use crate::layout::Layout;
use crate::sampling::MAX_STOP_IDS;
use crate::Result;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Steps whose tokens the device keeps until the host has read them.
pub const OUT_RING: usize = 32;

/// Rounds of drafting whose records the device keeps until the host has read them.
pub const ROUND_RING: usize = 4;

/// The pages of a text, in order. Whoever has the list can share what is in it.
#[derive(Debug, Clone, Default)]
pub struct Pages(Arc<Mutex<Vec<Page>>>);

impl Pages {
    /// Runs `f` on the list.
    pub fn with<T>(&self, f: impl FnOnce(&mut Vec<Page>) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
    /// The first pages, as many as `tokens` tokens have, shared.
    pub fn prefix(&self, tokens: usize) -> Vec<Page> {
        self.with(|pages| pages[..tokens.div_ceil(PAGE_TOKENS).min(pages.len())].to_vec())
    }
    /// Pages.
    pub fn len(&self) -> usize {
        self.with(|pages| pages.len())
    }
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Caches and step state of one sequence.
#[derive(Debug)]
pub struct Cache {
    /// The [`Step`].
    pub step: Buffer,
    /// Ids of the step in flight (T).
    pub tokens: Buffer,
    /// Raw ids before the step, newest first; one word at least.
    pub history: Buffer,
    /// Ids that end the text; a uniform for some kernels.
    pub stop_ids: Buffer,
    /// (OUT_RING, 2): sampled tokens and the status after them.
    pub out: Buffer,
    /// Places of the pages, [`TABLE_PAGES`] words: `PageTable` in `shared/pages.wgsl`.
    pub table: Buffer,
    /// One a layer: (ring rows, packed window key), position p in row `p % ring rows`.
    pub rings: Vec<Buffer>,
    /// What a drafted block needs, where the draft stages are loaded.
    pub draft: Option<DraftCache>,
    /// Full layers with a ratio above 1: the incomplete group, (rows, 2, D) f32, as [`Layout::remainder`] says.
    pub remainders: Vec<Option<Buffer>>,
    /// The pages.
    pub pages: Pages,
}

/// What the draft stages have of a text.
#[derive(Debug)]
pub struct DraftCache {
    /// The [`Step`] of a block: its rows, and as the decoder's floor the lowest position that it sees.
    pub step: Buffer,
    /// Ids of the block (B): the token that waits, then noise.
    pub tokens: Buffer,
    /// What a round's kernels hand on: `shared/round.wgsl`.
    pub round: Buffer,
    /// (ROUND_RING, 4 + 1 + B): what rounds made.
    pub out: Buffer,
    /// One a stage, as those of the layers.
    pub rings: Vec<Buffer>,
}

/// Words of each buffer of a cache, in the order of [`Cache::new`], and its kind.
pub(crate) fn words(config: &Config, layout: &Layout) -> Vec<(MemoryKind, usize)> {
    let mut list = vec![
        (MemoryKind::Params, std::mem::size_of::<Step>() / 4),
        (MemoryKind::Cache, layout.rows),
        (MemoryKind::Cache, history(config).max(1)),
        (MemoryKind::Params, MAX_STOP_IDS),
        (MemoryKind::Cache, 2 * OUT_RING),
        (MemoryKind::Params, TABLE_PAGES),
    ];
    for layer in &config.layers {
        list.push((MemoryKind::Cache, layout.ring_rows * layout.window_row));
        if layer.role == Role::Full && layer.ratio > 1 {
            list.push((MemoryKind::Cache, layout.remainder(layer.ratio).rows * 2 * config.head_dim));
        }
    }
    if let Some((dspark, draft)) = config.dspark.as_ref().zip(layout.draft.as_ref()) {
        list.extend([
            (MemoryKind::Params, std::mem::size_of::<Step>() / 4),
            (MemoryKind::Cache, draft.block),
            (MemoryKind::Cache, round_size(draft.block)),
            (MemoryKind::Cache, ROUND_RING * record_words(draft.block)),
        ]);
        list.extend((0..dspark.stages).map(|_| (MemoryKind::Cache, layout.ring_rows * layout.window_row)));
    }
    list
}

/// Ids that a step must know of the text before it.
pub fn history(config: &Config) -> usize {
    config.engram.as_ref().map_or(0, |engram| engram.max_ngram_size - 1)
}

/// Raw ids before what follows `tokens`, newest first: what a step must know of them.
pub fn history_before(config: &Config, tokens: &[u32]) -> Vec<u32> {
    let id = |back: usize| tokens.len().checked_sub(back).map_or(BEFORE_TEXT, |at| tokens[at]);
    (1..=history(config)).map(id).collect()
}

impl Cache {
    /// An empty text's cache.
    ///
    /// # Errors
    /// As [`Gpu::buffer`].
    pub fn new(gpu: &Gpu, config: &Config, layout: &Layout) -> Result<Self> {
        let mut sizes = words(config, layout).into_iter();
        let mut next = |label: &str| {
            let (kind, words) = sizes.next().expect("as many sizes as buffers");
            gpu.buffer(kind, label, 4 * words as u64)
        };
        let step = next("step")?;
        let tokens = next("tokens")?;
        let history = next("n-gram history")?;
        let stop_ids = next("stop ids")?;
        let out = next("sampled tokens")?;
        let table = next("page table")?;
        let (mut rings, mut remainders) = (vec![], vec![]);
        for layer in &config.layers {
            rings.push(next(&format!("window ring of layer {}", layer.index))?);
            let remainder = layer.role == Role::Full && layer.ratio > 1;
            remainders.push(if remainder { Some(next(&format!("remainder of layer {}", layer.index))?) } else { None });
        }
        let pages = Pages::default();
        let draft = match config.dspark.as_ref().filter(|_| layout.draft.is_some()) {
            Some(dspark) => {
                let (step, tokens) = (next("draft step")?, next("drafted block")?);
                let (round, out) = (next("round of drafting")?, next("records of rounds")?);
                let ring = |stage| next(&format!("window ring of draft stage {stage}"));
                Some(DraftCache {
                    step,
                    tokens,
                    round,
                    out,
                    rings: (0..dspark.stages).map(ring).collect::<Result<_>>()?,
                })
            }
            None => None,
        };
        let cache = Self { step, tokens, history, stop_ids, out, table, rings, draft, remainders, pages };
        cache.clear(gpu);
        Ok(cache)
    }

    /// Forgets the text, and gives its pages back. What the rings hold stays, and is never read.
    pub fn clear(&self, gpu: &Gpu) {
        gpu.upload(&self.step, 0, bytemuck::bytes_of(&Step::default()));
        gpu.fill(&self.history, BEFORE_TEXT);
        self.pages.with(Vec::clear);
    }

    /// Fills everything that a text writes besides its pages with `word`: NaN bits show a read of something unwritten.
    pub fn poison(&self, gpu: &Gpu, word: u32) {
        let draft = self.draft.iter().flat_map(|draft| &draft.rings);
        for buffer in self.rings.iter().chain(self.remainders.iter().flatten()).chain(draft) {
            gpu.fill(buffer, word);
        }
    }

    /// The buffers that hold the text's state besides its pages: rings, remainders, history.
    pub fn state(&self) -> impl Iterator<Item = &Buffer> {
        self.rings.iter().chain(self.remainders.iter().flatten()).chain([&self.history])
    }

    /// Copies rings and remainders of another cache of the same model.
    pub fn copy_windows(&self, recording: &mut Recording, from: &Cache) {
        let both = self.rings.iter().zip(&from.rings);
        let remainders = self.remainders.iter().flatten().zip(from.remainders.iter().flatten());
        let draft = |cache: &'_ Cache| cache.draft.as_ref().map_or(vec![], |draft| draft.rings.clone());
        let (to, from) = (draft(self), draft(from));
        for (to, from) in both.chain(remainders).chain(to.iter().zip(&from)) {
            recording.copy(from, 0, to, 0, from.bytes().next_multiple_of(4));
        }
    }

    /// How many pages [`Cache::own_pages`] will take.
    pub fn missing_pages(&self, positions: Range<usize>) -> usize {
        if positions.is_empty() {
            return 0;
        }
        let numbers = positions.start / PAGE_TOKENS..=(positions.end - 1) / PAGE_TOKENS;
        self.pages.with(|pages| numbers.filter(|&number| pages.get(number).is_none_or(Page::is_shared)).count())
    }

    /// Makes sure that the text has pages of its own for the tokens at `positions`: new ones where there are none, copies where
    /// others share them.
    ///
    /// # Errors
    /// As [`PagePool::take`].
    pub fn own_pages(&self, gpu: &Gpu, pool: &PagePool, positions: Range<usize>) -> Result<()> {
        if positions.is_empty() {
            return Ok(());
        }
        self.pages.with(|pages| {
            for number in positions.start / PAGE_TOKENS..=(positions.end - 1) / PAGE_TOKENS {
                debug_assert!(number <= pages.len(), "pages follow each other");
                if number == pages.len() {
                    pages.push(pool.take(gpu)?);
                } else if pages[number].is_shared() {
                    pages[number] = pool.copy(gpu, &pages[number])?;
                } else {
                    continue;
                }
                self.place(gpu, number, &pages[number]);
            }
            Ok(())
        })
    }

    /// Takes over pages that others may share.
    pub fn share_pages(&self, gpu: &Gpu, shared: Vec<Page>) {
        for (number, page) in shared.iter().enumerate() {
            self.place(gpu, number, page);
        }
        self.pages.with(|pages| *pages = shared);
    }

    fn place(&self, gpu: &Gpu, number: usize, page: &Page) {
        gpu.upload(&self.table, 4 * number as u64, bytemuck::bytes_of(&page.place()));
    }
}
