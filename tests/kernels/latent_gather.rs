//! `latent_gather` against its twin, bit for bit, with pages anywhere.

use super::attend::select;
use super::common::{config, gpu, poisoned, read, upload, Random, POISON};
use super::pool::Pool;
use cedra::gpu::{DeviceOptions, Gpu, MemoryKind, Recording};
use cedra::kernels::cache_append::PageLayout;
use cedra::kernels::latent_gather::{LatentGather, LatentGatherDims};
use cedra::kernels::Step;
use cedra::reference::latent_gather::gather;
use proptest::prelude::*;

/// `rows` rows at `position`, with pages in `slabs` slabs of which one after the other is gathered from. Everything but the
/// latents that are selected is poisoned, and may not be read.
fn check(page: PageLayout, ratio: usize, topk: usize, position: usize, rows: usize, slabs: usize, seed: u64) {
    let Some(gpu) = gpu() else { return };
    let mut random = Random::new(seed);
    let width = page.latent_words;
    let entries = (position + rows) / ratio;
    let pool = Pool::new(gpu, &mut random, &page, ratio, position + rows, slabs);
    let latents = random.words(entries * width);
    let lists: Vec<Vec<u32>> = (0..rows).map(|row| select(&mut random, (position + row + 1) / ratio, topk)).collect();
    // A row more than are in flight.
    let mut selection = vec![POISON; (rows + 1) * (1 + topk)];
    for (row, list) in selection.chunks_exact_mut(1 + topk).zip(&lists) {
        row[0] = list.len() as u32;
        row[1..][..list.len()].copy_from_slice(list);
        for &entry in list {
            pool.write(gpu, page.latent(entry as usize), &latents[entry as usize * width..][..width]);
        }
    }
    let step = Step { position: position as u32, rows: rows as u32, ..Step::default() };
    let step = gpu.uniform("step", &step).unwrap();
    let selection = upload(gpu, MemoryKind::Scratch, "selection", &selection);
    let gathered = poisoned(gpu, MemoryKind::Scratch, "latents", (rows + 1) * topk * width);
    let dims = LatentGatherDims { topk, page };
    let mut kernel = LatentGather::new(gpu, &dims, &step, &pool.table, &selection, &gathered).unwrap();
    for slab in &pool.slabs {
        kernel.add_slab(gpu, slab).unwrap();
    }

    let mut expected = vec![POISON; (rows + 1) * topk * width];
    // The last slab first; those of the others are left alone until their turn.
    for slab in (0..slabs).rev() {
        let mut recording = Recording::new();
        kernel.record(&mut recording, rows as u32 + 1, entries as u32, &[slab]);
        gpu.submit(recording).unwrap();
        for (row, list) in expected.chunks_exact_mut(topk * width).zip(&lists) {
            let all = gather(&latents, width, list);
            for (i, &entry) in list.iter().enumerate() {
                if pool.slab(entry as usize / page.entries) == slab {
                    row[i * width..][..width].copy_from_slice(&all[i * width..][..width]);
                }
            }
        }
        assert!(read::<u32>(gpu, &gathered) == expected, "slab {slab} of {slabs}");
    }
    // All at once leaves the same.
    gpu.fill(&gathered, POISON);
    let mut recording = Recording::new();
    kernel.record(&mut recording, rows as u32, entries as u32, &(0..slabs).collect::<Vec<_>>());
    gpu.submit(recording).unwrap();
    assert!(read::<u32>(gpu, &gathered) == expected, "{slabs} slabs");
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn any_selection_equals_the_twin(
        (head_dim, index_dim) in ((1usize..80).prop_map(|n| 2 * n), (1usize..20).prop_map(|n| 2 * n)),
        (ratio, topk) in (1usize..4, 1usize..300),
        (before, behind) in (0usize..40, 0usize..40),
        (position, rows, slabs) in (0usize..1500, 1usize..9, 1usize..4),
        seed: u64,
    ) {
        let part = PageLayout::new(ratio, head_dim, index_dim);
        let page = part.within(before, before + part.words() + behind);
        check(page, ratio, topk, position, rows, slabs, seed);
    }
}

#[test]
fn released_widths_equal_the_twin() {
    let page = PageLayout::new(2, 512, 128);
    let page = page.within(page.words(), 4 * page.words());
    check(page, 2, 512, 3_000, 1, 3, 1);
    check(page, 2, 512, 900, 128, 2, 2);
}

#[test]
fn the_last_entry_of_a_million_tokens_is_found() {
    check(PageLayout::new(1, 6, 2), 1, 5, 1_048_573, 3, 3, 1);
}

#[test]
fn counts_every_latent_once() {
    if gpu().is_none() {
        return;
    }
    // A device of its own: other tests count on theirs.
    let gpu = &Gpu::new_blocking(&DeviceOptions { software: true, ..DeviceOptions::default() }).unwrap();
    let page = PageLayout::new(2, 512, 128);
    let pool = Pool::new(gpu, &mut Random::new(1), &page, 2, 128, 3);
    let step = gpu.uniform("step", &Step::default()).unwrap();
    let selection = poisoned(gpu, MemoryKind::Scratch, "selection", 4096);
    let latents = poisoned(gpu, MemoryKind::Scratch, "latents", 4096);
    let dims = LatentGatherDims { topk: 512, page };
    let mut kernel = LatentGather::new(gpu, &dims, &step, &pool.table, &selection, &latents).unwrap();
    for slab in &pool.slabs {
        kernel.add_slab(gpu, slab).unwrap();
    }
    // No rows in flight on the device: nothing runs, and the counters say what was recorded.
    let counted = |rows, visible, slabs: &[usize]| {
        let before = gpu.counters();
        let mut recording = Recording::new();
        kernel.record(&mut recording, rows, visible, slabs);
        gpu.submit(recording).unwrap();
        let after = gpu.counters();
        (after.dispatches - before.dispatches, after.cache_bytes - before.cache_bytes)
    };
    assert_eq!(counted(1, 0, &[0]), (0, 0));
    assert_eq!(counted(1, 1, &[0]), (1, 288));
    assert_eq!(counted(3, 500_000, &[2]), (1, 3 * 512 * 288));
    assert_eq!(counted(3, 100, &[0, 2]), (2, 3 * 100 * 288));
    assert_eq!(counted(3, 100, &[]), (0, 0));
}
