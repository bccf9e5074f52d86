//! Pages of all sessions of a model: 128 tokens of the global cache each, in slabs of device memory that one binding can hold.
//!
//! The pool grows by whole slabs. A page goes back to it with its last handle; the lowest free place is taken first, so that a
//! session's pages lie side by side.

use crate::gpu::{Buffer, Copied, Gpu, MemoryKind, Recording};
use crate::kernels::cache_append::page_place;
use crate::layout::PoolLayout;
use crate::Result;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The pages of all sessions of a model.
#[derive(Debug)]
pub struct PagePool {
    layout: PoolLayout,
    /// What a new slab is filled with, if anything.
    fill: Option<u32>,
    /// A page on its way from one place to another: a buffer cannot be copied into itself.
    passage: Buffer,
    places: Arc<Mutex<Places>>,
}

#[derive(Debug)]
struct Places {
    slabs: Vec<Buffer>,
    free: BTreeSet<u32>,
}

/// A page. Clones share it; whoever writes to a page makes sure first that it is the only one ([`Page::is_shared`]).
#[derive(Debug, Clone)]
pub struct Page(Arc<Lease>);

#[derive(Debug)]
struct Lease {
    place: u32,
    places: Arc<Mutex<Places>>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        locked(&self.places).free.insert(self.place);
    }
}

impl Page {
    /// Entry of a page table.
    pub fn place(&self) -> u32 {
        self.0.place
    }
    /// Number of the slab.
    pub fn slab(&self) -> usize {
        self.0.place as usize >> 16
    }
    fn index(&self) -> usize {
        self.0.place as usize & 0xffff
    }
    /// Whether another session has it too.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

fn locked(places: &Mutex<Places>) -> MutexGuard<'_, Places> {
    places.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PagePool {
    /// A pool with one slab; new slabs are filled with `fill`.
    ///
    /// # Errors
    /// As [`Gpu::buffer`].
    pub fn new(gpu: &Gpu, layout: PoolLayout, fill: Option<u32>) -> Result<Self> {
        let passage = gpu.buffer(MemoryKind::Cache, "page on its way", 4 * layout.page_words as u64)?;
        let places = Arc::new(Mutex::new(Places { slabs: vec![], free: BTreeSet::new() }));
        let pool = Self { layout, fill, passage, places };
        pool.grow(gpu, &mut locked(&pool.places))?;
        Ok(pool)
    }

    /// Sizes.
    pub fn layout(&self) -> PoolLayout {
        self.layout
    }

    /// The slabs from number `first` on.
    pub fn slabs(&self, first: usize) -> Vec<Buffer> {
        locked(&self.places).slabs[first..].to_vec()
    }

    /// Pages in use.
    pub fn used(&self) -> usize {
        let places = locked(&self.places);
        places.slabs.len() * self.layout.slab_pages - places.free.len()
    }

    fn grow(&self, gpu: &Gpu, places: &mut Places) -> Result<()> {
        let slab = self.slab(gpu, places.slabs.len())?;
        self.add(gpu, places, slab);
        Ok(())
    }

    fn slab(&self, gpu: &Gpu, number: usize) -> Result<Buffer> {
        gpu.buffer(MemoryKind::Cache, &format!("page slab {number}"), 4 * self.layout.slab_words() as u64)
    }

    fn add(&self, gpu: &Gpu, places: &mut Places, slab: Buffer) {
        let number = places.slabs.len();
        if let Some(word) = self.fill {
            gpu.fill(&slab, word);
        }
        gpu.upload(&slab, 0, bytemuck::bytes_of(&(number as u32)));
        places.slabs.push(slab);
        places.free.extend((0..self.layout.slab_pages).map(|index| page_place(number, index)));
    }

    /// Makes sure that so many pages are free. A slab for which there is no memory is not in the pool, and nobody's page lies
    /// in it: a browser says so only later, so what takes pages asks for them here first.
    ///
    /// # Errors
    /// As [`Gpu::buffer`]; the pool is as it was.
    pub async fn reserve(&self, gpu: &Gpu, pages: usize) -> Result<()> {
        loop {
            let number = {
                let places = locked(&self.places);
                if places.free.len() >= pages {
                    return Ok(());
                }
                places.slabs.len()
            };
            let slab = gpu.settled(|| self.slab(gpu, number)).await?;
            // Another session may have let the pool grow, or pages go, in the meantime.
            let mut places = locked(&self.places);
            if places.free.len() < pages {
                self.add(gpu, &mut places, slab);
            }
        }
    }

    /// A page that nobody else has; what it holds is left over.
    ///
    /// # Errors
    /// As [`Gpu::buffer`], when the pool has to grow.
    pub fn take(&self, gpu: &Gpu) -> Result<Page> {
        let mut places = locked(&self.places);
        if places.free.is_empty() {
            self.grow(gpu, &mut places)?;
        }
        let place = places.free.pop_first().expect("the pool has grown");
        Ok(Page(Arc::new(Lease { place, places: self.places.clone() })))
    }

    /// A page of one's own with what `page` holds.
    ///
    /// # Errors
    /// As [`PagePool::take`]; the device's.
    pub fn copy(&self, gpu: &Gpu, page: &Page) -> Result<Page> {
        let copy = self.take(gpu)?;
        let bytes = 4 * self.layout.page_words as u64;
        let mut recording = Recording::new();
        let (from, from_at) = self.at(page);
        let (to, to_at) = self.at(&copy);
        recording.copy(&from, from_at, &self.passage, 0, bytes);
        recording.copy(&self.passage, 0, &to, to_at, bytes);
        gpu.submit(recording)?;
        Ok(copy)
    }

    /// The slab that a page lies in, and the page's first byte there.
    pub fn at(&self, page: &Page) -> (Buffer, u64) {
        (locked(&self.places).slabs[page.slab()].clone(), self.layout.offset(page.index()))
    }

    /// What pages hold, one after the other.
    ///
    /// # Errors
    /// As [`Gpu::read`].
    pub async fn read(&self, gpu: &Gpu, pages: &[Page]) -> Result<Vec<u8>> {
        let bytes = 4 * self.layout.page_words as u64;
        let places: Vec<_> = pages.iter().map(|page| self.at(page)).collect();
        let parts: Vec<_> = places.iter().map(|(slab, at)| (slab, *at, bytes)).collect();
        gpu.read_parts(&parts).await
    }

    /// As [`PagePool::read`], beside other work: the bytes are taken later.
    ///
    /// # Errors
    /// As [`Gpu::copy_out`].
    pub fn copy_out(&self, gpu: &Gpu, pages: &[Page]) -> Result<Copied> {
        let bytes = 4 * self.layout.page_words as u64;
        let places: Vec<_> = pages.iter().map(|page| self.at(page)).collect();
        let parts: Vec<_> = places.iter().map(|(slab, at)| (slab, *at, bytes)).collect();
        gpu.copy_out(&parts)
    }

    /// Fills a page of one's own.
    ///
    /// # Panics
    /// When `words` are not those of a page.
    pub fn write(&self, gpu: &Gpu, page: &Page, words: &[u32]) {
        assert_eq!(words.len(), self.layout.page_words, "a page");
        let (slab, at) = self.at(page);
        gpu.upload(&slab, at, bytemuck::cast_slice(words));
    }
}
