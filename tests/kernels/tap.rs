//! Kernel `tap` against its CPU twin.

use super::common::{assert_close, config, gpu, poisoned, read, upload, Random, POISON};
use super::linear::step;
use cedra::gpu::{MemoryKind, Recording};
use cedra::kernels::tap::{Dims, Tap};
use cedra::reference::tap::mean;
use proptest::prelude::*;

proptest! {
    #![proptest_config(config())]

    /// Each row's mean lands in its layer's part, and nothing beside it is written.
    #[test]
    fn equals_its_twin(
        seed in any::<u64>(),
        h in 1usize..200,
        n in 1usize..5,
        (layers, layer) in (1usize..4).prop_flat_map(|layers| (Just(layers), 0..layers)),
        rows in 1usize..6,
    ) {
        let Some(gpu) = gpu() else { return Ok(()) };
        let (h4, stride) = (h.next_multiple_of(4), (layers * h).next_multiple_of(4));
        // Room for one more row than is in flight; between streams lies nothing.
        let mut streams = vec![f32::from_bits(POISON); (rows + 1) * n * h4];
        let mut random = Random::new(seed);
        streams.chunks_mut(h4).take(rows * n).for_each(|stream| stream[..h].copy_from_slice(&random.normals(h, 3.0)));
        let buffer = upload(gpu, MemoryKind::Scratch, "streams", &streams);
        let features = poisoned(gpu, MemoryKind::Scratch, "features", (rows + 1) * stride);
        let dims = Dims { hidden: h as u32, streams: n as u32, stride: stride as u32, at: (layer * h) as u32 };
        let kernel = Tap::new(gpu, &dims, &step(gpu, rows as u32), &buffer, &features).unwrap();
        let mut recording = Recording::new();
        kernel.record(&mut recording, rows as u32 + 1);
        gpu.submit(recording).unwrap();

        let mut found = read::<u32>(gpu, &features);
        for (row, streams) in streams.chunks(n * h4).take(rows).enumerate() {
            let streams: Vec<f32> = streams.chunks(h4).flat_map(|stream| stream[..h].to_vec()).collect();
            let part = &mut found[row * stride + layer * h..][..h];
            let values: Vec<f32> = part.iter().map(|&word| f32::from_bits(word)).collect();
            assert_close(&values, &mean(&streams, n), 1e-6);
            part.fill(POISON);
        }
        prop_assert!(found.iter().all(|&word| word == POISON));
    }
}
