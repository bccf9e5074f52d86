//! What the kernel tests share: the device, random data, comparisons.
#![allow(dead_code, reason = "each kernel's tests use a part of it")]

use cedra::gpu::{Buffer, DeviceOptions, FeatureUse, Gpu, MemoryKind};
use std::sync::OnceLock;

/// A NaN that shaders must never read: unwritten memory.
pub const POISON: u32 = 0xFFFF_FFFF;

/// The device of this test run, or none: then the caller prints that it skips and returns. With `CEDRA_REQUIRE_GPU=1`
/// a missing device is a failure.
pub fn gpu() -> Option<&'static Gpu> {
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    open(&GPU, FeatureUse::of_kernels())
}

/// The same device without any optional feature: kernels are the plain variants there.
pub fn plain() -> Option<&'static Gpu> {
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    open(&GPU, FeatureUse::NONE)
}

fn open(cell: &'static OnceLock<Option<Gpu>>, features: FeatureUse) -> Option<&'static Gpu> {
    cell.get_or_init(|| match Gpu::new_blocking(&DeviceOptions { software: true, features, ..Default::default() }) {
        Ok(gpu) => Some(gpu),
        Err(error) if std::env::var("CEDRA_REQUIRE_GPU").is_ok_and(|v| v == "1") => panic!("{error}"),
        Err(error) => {
            println!("skipped: no GPU adapter ({error})");
            None
        }
    })
    .as_ref()
}

/// Proptest with few cases: a software device is slow. `CEDRA_CASES` sets another number.
pub fn config() -> proptest::test_runner::Config {
    let cases = std::env::var("CEDRA_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(8);
    proptest::test_runner::Config {
        cases,
        max_shrink_iters: 16,
        failure_persistence: None,
        ..proptest::test_runner::Config::default()
    }
}

/// A seeded generator (SplitMix64).
pub struct Random(u64);

impl Random {
    /// The same seed gives the same numbers.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }
    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    /// Uniform in `0..n`.
    pub fn below(&mut self, n: u32) -> u32 {
        (((self.bits() >> 32) * u64::from(n)) >> 32) as u32
    }
    /// Uniform in `low..high`.
    pub fn uniform(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * (self.bits() >> 40) as f32 / (1 << 24) as f32
    }
    /// Near to normal, mean 0, variance 1: a sum of 12 uniforms.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform(-0.5, 0.5)).sum()
    }
    /// `n` of [`Random::normal`], times `scale`.
    pub fn normals(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.normal() * scale).collect()
    }
    /// `n` random words.
    pub fn words(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.bits() as u32).collect()
    }
    /// `n` random bytes.
    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.bits() as u8).collect()
    }
}

/// A buffer with this content.
pub fn upload<T: bytemuck::Pod>(gpu: &Gpu, kind: MemoryKind, label: &str, data: &[T]) -> Buffer {
    let bytes: &[u8] = bytemuck::cast_slice(data);
    let buffer = gpu.buffer(kind, label, bytes.len() as u64).unwrap();
    gpu.upload(&buffer, 0, bytes);
    buffer
}

/// A poisoned buffer of `words` words.
pub fn poisoned(gpu: &Gpu, kind: MemoryKind, label: &str, words: usize) -> Buffer {
    let buffer = gpu.buffer(kind, label, words as u64 * 4).unwrap();
    gpu.fill(&buffer, POISON);
    buffer
}

/// The content of a buffer.
pub fn read<T: bytemuck::Pod>(gpu: &Gpu, buffer: &Buffer) -> Vec<T> {
    bytemuck::pod_collect_to_vec(&gpu.read_blocking(buffer).unwrap())
}

/// Fails with the worst place when `|a - b| > relative * max(1, |b|)` anywhere, or one of them is not finite. Returns the
/// largest error found, in the same measure.
#[track_caller]
pub fn assert_close(a: &[f32], b: &[f32], relative: f32) -> f32 {
    assert_eq!(a.len(), b.len(), "lengths differ");
    let mut worst = (0.0, 0);
    for (i, (&x, &y)) in a.iter().zip(b).enumerate() {
        assert!(x.is_finite() && y.is_finite(), "at {i}: {x} against {y}");
        let error = (x - y).abs() / y.abs().max(1.0);
        if error > worst.0 {
            worst = (error, i);
        }
    }
    let (error, i) = worst;
    assert!(error <= relative, "at {i}: {} against {}: error {error:e} is above {relative:e}", a[i], b[i]);
    error
}

/// Fails with the first place where the bits differ.
#[track_caller]
pub fn assert_same_bits(a: &[f32], b: &[f32]) {
    assert_eq!(a.len(), b.len(), "lengths differ");
    if let Some(i) = (0..a.len()).find(|&i| a[i].to_bits() != b[i].to_bits()) {
        panic!("at {i}: {} ({:#010x}) against {} ({:#010x})", a[i], a[i].to_bits(), b[i], b[i].to_bits());
    }
}
