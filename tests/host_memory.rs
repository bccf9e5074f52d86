//! Weights stream from the mapped file to the device: the heap never holds more than pieces of them.

mod common;
#[path = "kernels/common.rs"]
mod device;

use cedra::checkpoint::Checkpoint;
use cedra::gpu::{DeviceOptions, Gpu};
use cedra::model::{Model, Options};
use common::random_model::{random_checkpoint, Shape, Storage};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::Arc;

/// Counts what is held on the heap, and the most that was.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(held, Relaxed);
        // SAFETY: the caller's promises are those that the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

#[test]
fn the_heap_holds_pieces_only() {
    if device::gpu().is_none() {
        return;
    }
    let shape = Shape { vocab: 30_000, hidden: 700, ..Shape::odd(Storage::F32) };
    let folder = tempfile::tempdir().unwrap();
    let (tables, file) = {
        let random = random_checkpoint(12, &shape);
        random.write(folder.path());
        (random.tables.clone(), random.safetensors.len())
    };
    let largest = 4 * shape.vocab * shape.hidden;
    let allowed = (64 << 20) + largest;
    assert!(file > allowed, "a file that is read whole ({file} bytes) would go unnoticed");

    let gpu = Arc::new(Gpu::new_blocking(&DeviceOptions { software: true, ..DeviceOptions::default() }).unwrap());
    let before = HELD.load(Relaxed);
    PEAK.store(before, Relaxed);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let options = Options { context: 64, chunk: 16, ..Options::default() };
    let model = Model::load_blocking(gpu, &checkpoint, &tables, &options, &mut |_, _| {}).unwrap();
    let peak = PEAK.load(Relaxed) - before;
    println!("{} MiB of heap at most for {} MiB of weights", peak >> 20, model.plan().weights >> 20);
    assert!(model.plan().weights as usize > allowed);
    assert!(peak < allowed, "{peak} bytes of heap, {allowed} allowed");
}
