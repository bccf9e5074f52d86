//! Caches that nobody has read: random codes where a text's entries and keys would lie, to measure long contexts without the
//! time that reading them takes.

use super::{Model, Sequence, Standing};
use crate::cache::Page;
use crate::config::Config;
use crate::formats::CacheFormat;
use crate::gpu::Recording;
use crate::layout::Layout;
use crate::reading::Floors;
use crate::reference::sequence::check_tokens;
use crate::sampling::Generator;
use crate::Result;

/// Bytes of pages that wait in the queue at a time.
const FLUSH: usize = 8 << 20;

/// A small reproducible generator of random bits (splitmix64).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The same seed gives the same bits.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }
    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// Uniform in -1 to 1.
    pub fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
    /// `len` token ids of a vocabulary.
    pub fn tokens(&mut self, vocabulary: usize, len: usize) -> Vec<u32> {
        (0..len).map(|_| (self.bits() % vocabulary as u64) as u32).collect()
    }
    /// Fills a packed row of `channels` values, padding with zeros: any code is as likely as any other of those below 2 (FP8),
    /// or of all (FP4); scales are of about 1/8 to 1. Nothing is NaN or infinite.
    pub fn row(&mut self, format: CacheFormat, channels: usize, row: &mut [u32]) {
        let (codes, scales) = row.split_at_mut(format.code_words(channels));
        // Without the top bit of its exponent no E4M3 code is NaN.
        let (code_bits, mask) = match format {
            CacheFormat::Fp8 => (8, 0xbfbf_bfbf_bfbf_bfbf),
            CacheFormat::Nvfp4 | CacheFormat::Mxfp4 => (4, u64::MAX),
        };
        // E4M3 0.5 to 0.6875; UE8M0 1/8 to 1.
        let least: u64 = match format {
            CacheFormat::Nvfp4 => 0x3030_3030,
            CacheFormat::Fp8 | CacheFormat::Mxfp4 => 0x7c7c_7c7c,
        };
        for pair in codes.chunks_mut(2) {
            let bits = self.bits() & mask;
            pair.iter_mut().zip([bits, bits >> 32]).for_each(|(word, bits)| *word = bits as u32);
        }
        scales.iter_mut().for_each(|word| *word = (least + (self.bits() & 0x0303_0303)) as u32);
        let cut = |words: &mut [u32], bits: usize| {
            if let (Some(last), 1..) = (words.last_mut(), bits % 32) {
                *last &= (1 << (bits % 32)) - 1;
            }
        };
        cut(codes, code_bits * channels);
        cut(scales, 8 * channels.div_ceil(format.group()));
    }
    /// Fills a page: entries of all Full layers.
    pub fn page(&mut self, config: &Config, layout: &Layout, page: &mut [u32]) {
        for part in layout.page_parts.iter().flatten() {
            let (latents, keys) = page[part.at..][..part.words()].split_at_mut(part.entries * part.latent_words);
            for row in latents.chunks_mut(part.latent_words) {
                self.row(CacheFormat::Nvfp4, config.head_dim, row);
            }
            for row in keys.chunks_mut(part.key_words) {
                self.row(CacheFormat::Mxfp4, config.index_head_dim, row);
            }
        }
    }
}

impl Sequence {
    /// An empty sequence becomes a text of `length` random tokens, all but the last of which seem to have been read: pages, rings
    /// and remainders hold random values. What it goes on with is nonsense, at the cost that a text of this length has.
    ///
    /// # Errors
    /// [`Error::EmptyPrompt`](crate::Error::EmptyPrompt), [`Error::Context`](crate::Error::Context); the device's.
    ///
    /// # Panics
    /// When the sequence is not empty.
    pub async fn synthesize_async(&mut self, length: usize, seed: u64) -> Result<()> {
        let model = self.model.clone();
        let Model { gpu, config, layout, pool, .. } = &*model;
        let mut random = Random::new(seed);
        let tokens = random.tokens(config.vocab_size, length);
        check_tokens(&tokens, config.vocab_size, self.len(), layout.context)?;
        let cached = length - 1;

        let page_words = layout.pool.page_words;
        let count = if page_words > 0 { layout.pages(cached) } else { 0 };
        let mut pages: Vec<Page> = Vec::with_capacity(count);
        let mut words = vec![0; page_words];
        while pages.len() < count {
            random.page(config, layout, &mut words);
            let page = pool.take(gpu)?;
            pool.write(gpu, &page, &words);
            pages.push(page);
            if pages.len().is_multiple_of((FLUSH / (4 * page_words)).max(1)) {
                gpu.submit(Recording::new())?;
            }
        }
        for ring in &self.cache.rings {
            let mut words = vec![0; ring.bytes() as usize / 4];
            for row in words.chunks_mut(layout.window_row) {
                random.row(CacheFormat::Fp8, config.head_dim, row);
            }
            gpu.upload(ring, 0, bytemuck::cast_slice(&words));
        }
        for remainder in self.cache.remainders.iter().flatten() {
            let values: Vec<f32> = (0..remainder.bytes() / 4).map(|_| random.value()).collect();
            gpu.upload(remainder, 0, bytemuck::cast_slice(&values));
        }
        gpu.submit(Recording::new())?;
        gpu.settle().await?;
        let (floors, generator) = (Floors::default(), Generator::default());
        self.resume_exactly(tokens, pages, &Standing { cached, paged: cached, floors, kept: 0, generator });
        Ok(())
    }

    /// [`Sequence::synthesize_async`], blocking.
    ///
    /// # Errors
    /// As [`Sequence::synthesize_async`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn synthesize(&mut self, length: usize, seed: u64) -> Result<()> {
        pollster::block_on(self.synthesize_async(length, seed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_finite_and_padded() {
        let mut random = Random::new(1);
        for format in [CacheFormat::Fp8, CacheFormat::Nvfp4, CacheFormat::Mxfp4] {
            for channels in [16, 36, 44, 64, 512] {
                let mut row = vec![u32::MAX; format.row_words(channels)];
                random.row(format, channels, &mut row);
                let values = format.unpack(&row, channels);
                assert!(values.iter().all(|v| v.abs() <= 6.0), "{format:?}: {values:?}");
                assert!(values.iter().any(|&v| v != values[0]), "{format:?}: {values:?}");
                // What is packed again without its padding is the same, scales aside.
                let codes = format.code_words(channels);
                let width = if format == CacheFormat::Fp8 { 4 } else { 8 };
                let used = channels - (codes - 1) * width;
                assert!(used == width || row[codes - 1] >> (32 / width * used) == 0, "{format:?} of {channels}");
                let groups = channels.div_ceil(format.group());
                let used = groups - (format.scale_words(channels) - 1) * 4;
                assert!(used == 4 || row[row.len() - 1] >> (8 * used) == 0, "{format:?} of {channels}");
            }
        }
    }
}
