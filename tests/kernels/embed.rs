//! Kernel `embed` against its CPU twin.

use super::common::{config, gpu, poisoned, read, upload, Random, POISON};
use super::linear::{step, Weight, FORMATS};
use cedra::gpu::{MemoryKind, Recording};
use cedra::kernels::embed::Embed;
use cedra::model::pack::{LinearPlan, Loader, MatrixSpec};
use cedra::reference::embed::embed;
use proptest::prelude::*;

proptest! {
    #![proptest_config(config())]

    /// Every format, whole or in slices: exact.
    #[test]
    fn equals_its_twin(
        seed in any::<u64>(),
        format in 0usize..6,
        vocabulary in 1usize..150,
        half_h in 1usize..80,
        n in 1u32..5,
        rows in 1u32..6,
        sliced in any::<bool>(),
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let (mut random, h) = (Random::new(seed), 2 * half_h);
        let weight = Weight::random(&mut random, FORMATS[format], vocabulary, h);
        let limit = if sliced { 128 * h.next_multiple_of(32) as u64 } else { 1 << 27 };
        let plan = LinearPlan::new(&[MatrixSpec::new(&weight.tensor(), 0)], limit).unwrap();
        let table =
            pollster::block_on(plan.load(&mut Loader::new(gpu), "embed", |_| Ok(weight.tensor()))).unwrap();
        // Room for two more rows than are in flight: they stay as they were.
        let ids: Vec<u32> = (0..rows + 2).map(|_| random.below(vocabulary as u32)).collect();
        let h4 = h.next_multiple_of(4);
        let tokens = upload(gpu, MemoryKind::Scratch, "tokens", &ids);
        let streams = poisoned(gpu, MemoryKind::Scratch, "streams", (rows + 2) as usize * n as usize * h4);
        let kernel = Embed::new(gpu, &table, &step(gpu, rows), &tokens, &streams, n).unwrap();
        let mut recording = Recording::new();
        kernel.record(&mut recording, rows + 2);
        gpu.submit(recording).unwrap();

        let (w, found) = (weight.f32(), read::<u32>(gpu, &streams));
        let (written, rest) = found.split_at(rows as usize * n as usize * h4);
        for (&id, found) in ids.iter().zip(written.chunks(n as usize * h4)) {
            let twin = embed(&w[id as usize * h..][..h], n as usize);
            let found: Vec<f32> = found.chunks(h4).flat_map(|row| &row[..h]).map(|&v| f32::from_bits(v)).collect();
            prop_assert_eq!(found, twin);
        }
        prop_assert!(rest.iter().all(|&word| word == POISON));
    }
}
