//! Kernel `group_rows` against its CPU twin.

use super::common::{config, gpu, poisoned, read, upload, Random, POISON};
use super::linear::step;
use cedra::gpu::{Gpu, MemoryKind, Recording};
use cedra::kernels::group_rows::{max_tiles, tile_pairs, tiles_words, GroupRows};
use cedra::reference::group_rows::group;
use proptest::prelude::*;

fn check(gpu: &Gpu, ids: &[u32], slots: u32, experts: u32) {
    let rows = ids.len() as u32 / slots;
    let words = tiles_words(rows, slots, experts) as usize;
    let pairs = poisoned(gpu, MemoryKind::Scratch, "pairs", ids.len());
    let tiles = poisoned(gpu, MemoryKind::Scratch, "tiles", words);
    let id_buffer = upload(gpu, MemoryKind::Scratch, "ids", ids);
    let kernel = GroupRows::new(gpu, &step(gpu, rows), &id_buffer, &pairs, &tiles, slots, experts).unwrap();
    let mut recording = Recording::new();
    kernel.record(&mut recording, rows);
    gpu.submit(recording).unwrap();
    let twin = group(ids, experts as usize, tile_pairs(rows) as usize);
    assert!(twin.tiles[0] <= max_tiles(rows, slots, experts), "{} tiles", twin.tiles[0]);
    assert_eq!(read::<u32>(gpu, &pairs), twin.pairs);
    let found = read::<u32>(gpu, &tiles);
    assert_eq!(found[..twin.tiles.len()], twin.tiles);
    assert!(found[twin.tiles.len()..].iter().all(|&word| word == POISON));
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn equals_its_twin(
        seed in any::<u64>(),
        rows in prop_oneof![2u32..34, 100u32..300],
        slots in 1u32..9,
        experts in prop_oneof![1u32..20, 255u32..260, Just(385), Just(1025)],
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let mut random = Random::new(seed);
        let ids: Vec<u32> = (0..rows * slots).map(|_| random.below(experts)).collect();
        check(gpu, &ids, slots, experts);
    }
}

/// Every pair at one expert: the first, the last; and a released-size prefill chunk.
#[test]
fn extremes() {
    let Some(gpu) = gpu() else { return };
    for expert in [0, 384] {
        check(gpu, &[expert; 7 * 37], 7, 385);
    }
    let mut random = Random::new(512);
    let ids: Vec<u32> = (0..512 * 7).map(|i| if i % 7 == 6 { 384 } else { random.below(384) }).collect();
    check(gpu, &ids, 7, 385);
}
