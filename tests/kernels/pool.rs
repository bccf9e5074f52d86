//! A session's pages for tests: shuffled over several slabs of the device.

use super::common::{poisoned, read, Random, POISON};
use cedra::gpu::{Buffer, Gpu, MemoryKind};
use cedra::kernels::cache_append::{page_place, PageLayout, SLAB_HEADER, TABLE_PAGES};
use std::collections::BTreeSet;
use std::ops::Range;

pub struct Pool {
    pub slabs: Vec<Buffer>,
    pub table: Buffer,
    page_words: usize,
    places: Vec<u32>,
}

impl Pool {
    /// Room for `tokens` tokens in pages of the layer's kind, at random places of `slabs` slabs. All is poisoned, the places
    /// of pages that do not exist too.
    pub fn new(gpu: &Gpu, random: &mut Random, page: &PageLayout, ratio: usize, tokens: usize, slabs: usize) -> Self {
        Self::of_pages(gpu, random, page.page_words, (tokens / ratio).div_ceil(page.entries).max(1), slabs)
    }

    /// Room for so many pages of `page_words` words.
    pub fn of_pages(gpu: &Gpu, random: &mut Random, page_words: usize, pages: usize, slabs: usize) -> Self {
        // A place more than is needed, somewhere in each slab.
        let room = pages.div_ceil(slabs) + 1;
        let mut free: Vec<u32> = (0..slabs * room).map(|i| page_place(i / room, i % room)).collect();
        let places: Vec<u32> = (0..pages).map(|_| free.swap_remove(random.below(free.len() as u32) as usize)).collect();
        let slab = |number: usize| {
            let words = SLAB_HEADER + room * page_words;
            let slab = poisoned(gpu, MemoryKind::Cache, "slab", words);
            gpu.upload(&slab, 0, &(number as u32).to_le_bytes());
            slab
        };
        let table = poisoned(gpu, MemoryKind::Params, "table", TABLE_PAGES);
        gpu.upload(&table, 0, bytemuck::cast_slice(&places));
        Self { slabs: (0..slabs).map(slab).collect(), table, page_words, places }
    }

    /// Pages.
    pub fn pages(&self) -> usize {
        self.places.len()
    }

    /// The slab that has a page.
    pub fn slab(&self, page: usize) -> usize {
        (self.places[page] >> 16) as usize
    }

    /// First word of a page in its slab.
    fn word(&self, page: usize) -> usize {
        SLAB_HEADER + (self.places[page] & 0xffff) as usize * self.page_words
    }

    /// Writes words of one page, `at` counted as if pages lay one after the other.
    pub fn write(&self, gpu: &Gpu, at: usize, words: &[u32]) {
        let page = at / self.page_words;
        let offset = 4 * (self.word(page) + at % self.page_words) as u64;
        gpu.upload(&self.slabs[self.slab(page)], offset, bytemuck::cast_slice(words));
    }

    /// The pages, one after the other. Fails when anything beside them was written.
    #[track_caller]
    pub fn read(&self, gpu: &Gpu) -> Vec<u32> {
        let mut slabs: Vec<Vec<u32>> = self.slabs.iter().map(|slab| read(gpu, slab)).collect();
        let mut pages = Vec::with_capacity(self.places.len() * self.page_words);
        for page in 0..self.places.len() {
            let words = &mut slabs[self.slab(page)][self.word(page)..][..self.page_words];
            pages.extend_from_slice(words);
            words.fill(POISON);
        }
        for (number, slab) in slabs.iter().enumerate() {
            assert_eq!(slab[0], number as u32);
            assert!(slab[1..].iter().all(|&w| w == POISON), "slab {number} was written beside the pages");
        }
        pages
    }

    /// The slabs that hold a range of pages, each once.
    pub fn slabs_of(&self, pages: Range<usize>) -> Vec<usize> {
        let slabs: BTreeSet<usize> = pages.map(|page| self.slab(page)).collect();
        slabs.into_iter().collect()
    }

    /// How many of `rows` rows from `position` on have their entries in one slab, and which. A page has `page_tokens` tokens.
    pub fn cut(&self, position: usize, rows: usize, page_tokens: usize) -> (usize, usize) {
        let slab = |position: usize| self.places.get(position / page_tokens).map_or(0, |place| (place >> 16) as usize);
        let first = slab(position);
        ((1..rows).find(|&row| slab(position + row) != first).unwrap_or(rows), first)
    }
}
