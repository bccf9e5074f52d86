//! `ring_commit` against its twin.

use super::common::{config, gpu, poisoned, read, upload, Random, POISON};
use cedra::formats::CacheFormat;
use cedra::gpu::{MemoryKind, Recording};
use cedra::kernels::ring_commit::RingCommit;
use cedra::kernels::Step;
use cedra::reference::ring_commit::commit;
use proptest::prelude::*;

proptest! {
    #![proptest_config(config())]

    #[test]
    fn commits_what_later_tokens_see(
        (window, rows, head_dim) in (1usize..150, 1usize..200, (1usize..40).prop_map(|n| 2 * n)),
        position in prop_oneof![0u32..300, 1_048_000u32..1_048_300],
        seed: u64,
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let words = CacheFormat::Fp8.row_words(head_dim);
        let chunk = Random::new(seed).words(rows * words);
        // Rows beyond those in flight are never read.
        let padded = [chunk.clone(), vec![POISON; words]].concat();
        let chunk_buffer = upload(gpu, MemoryKind::Scratch, "chunk", &padded);
        let ring = poisoned(gpu, MemoryKind::Cache, "ring", window * words);
        let step = gpu.uniform("step", &Step { position, rows: rows as u32, ..Step::default() }).unwrap();
        let kernel = RingCommit::new(gpu, &step, head_dim, window, &chunk_buffer, &ring).unwrap();
        let mut recording = Recording::new();
        kernel.record(&mut recording, rows as u32);
        gpu.submit(recording).unwrap();
        let mut expected = vec![POISON; window * words];
        if rows > 1 {
            commit(&mut expected, &chunk, words, position as usize);
        }
        prop_assert!(read::<u32>(gpu, &ring) == expected);
    }
}

#[test]
fn does_nothing_once_generation_has_stopped() {
    let Some(gpu) = gpu() else { return };
    let chunk = upload(gpu, MemoryKind::Scratch, "chunk", &[1u32; 64]);
    let ring = poisoned(gpu, MemoryKind::Cache, "ring", 64);
    for rows in [0, 1] {
        let step = gpu.uniform("step", &Step { position: 9, rows, ..Step::default() }).unwrap();
        let kernel = RingCommit::new(gpu, &step, 32, 4, &chunk, &ring).unwrap();
        let mut recording = Recording::new();
        kernel.record(&mut recording, 4);
        gpu.submit(recording).unwrap();
        assert!(read::<u32>(gpu, &ring).iter().all(|&w| w == POISON));
    }
}
