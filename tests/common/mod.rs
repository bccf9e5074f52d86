//! What several test binaries share: recorded reference data, small random models.
#![allow(dead_code)] // each binary uses its own part

pub mod cpu_state;
pub mod golden;
pub mod random_model;
#[path = "../support/mod.rs"]
pub mod support;

/// A small reproducible generator of random numbers (splitmix64).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }
    /// One of several.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
    /// Uniform in (0, 1).
    pub fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }
    /// Normal with mean 0 and deviation 1.
    pub fn normal(&mut self) -> f32 {
        ((-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()) as f32
    }
    /// `len` normal numbers of a deviation.
    pub fn normals(&mut self, len: usize, deviation: f32) -> Vec<f32> {
        (0..len).map(|_| self.normal() * deviation).collect()
    }
}
