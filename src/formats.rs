//! Number formats of weights and caches (`numerics.md` §7 and §14): scalar conversions, and the three cache formats.
//!
//! A *packed row* is how a vector lies in a cache, as little-endian `u32` words: all codes, then all scales, each part
//! padded with zero bytes to whole words.
//!
//! | format | codes | scales | 512 channels |
//! |---|---|---|---|
//! | FP8 (window ring) | E4M3, one byte a channel | UE8M0 per 32 | 528 bytes |
//! | NVFP4 (latent) | E2M1, low nibble = even channel | E4M3 per 16 | 288 bytes |
//! | MXFP4 (index key) | E2M1, low nibble = even channel | UE8M0 per 32 | 272 bytes (128 channels: 68) |

/// Magnitudes of the eight E2M1 codes.
pub const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// BF16 bits to f32 (exact).
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// E4M3 code to f32 (exact; 0x7f and 0xff are NaN).
pub fn e4m3_to_f32(code: u8) -> f32 {
    let (exponent, mantissa) = ((code >> 3) & 15, code & 7);
    let magnitude = match (exponent, mantissa) {
        (15, 7) => f32::NAN,
        (0, m) => m as f32 * 2f32.powi(-9),
        (e, m) => f32::from_bits(((e as u32 + 120) << 23) | ((m as u32) << 20)),
    };
    if code & 0x80 != 0 {
        -magnitude
    } else {
        magnitude
    }
}

/// The nearest E4M3 code of a value that is already clamped to ±448, ties to even.
pub fn f32_to_e4m3(value: f32) -> u8 {
    let sign = ((value.to_bits() >> 24) & 0x80) as u8;
    let a = value.abs();
    // Below 2^-6 the grid is 2^-9; above, eight steps an octave. Scaling by a power of two is exact.
    if a < 2f32.powi(-6) {
        return sign | (a * 512.0).round_ties_even() as u8;
    }
    let bits = a.to_bits();
    let rounded = bits + 0x7ffff + ((bits >> 20) & 1);
    sign | (((rounded >> 20) as i32 - (120 << 3)).clamp(0, 0x7e) as u8)
}

/// E2M1 code (0..16, bit 3 is the sign) to f32 (exact).
pub fn e2m1_to_f32(code: u8) -> f32 {
    let m = E2M1[(code & 7) as usize];
    if code & 8 != 0 {
        -m
    } else {
        m
    }
}

/// The nearest E2M1 code of a value, saturating at ±6, ties to the even code.
pub fn f32_to_e2m1(value: f32) -> u8 {
    let a = value.abs();
    let code = if a <= 0.25 {
        0
    } else if a < 0.75 {
        1
    } else if a <= 1.25 {
        2
    } else if a < 1.75 {
        3
    } else if a <= 2.5 {
        4
    } else if a < 3.5 {
        5
    } else if a <= 5.0 {
        6
    } else {
        7
    };
    code | if value.is_sign_negative() { 8 } else { 0 }
}

/// UE8M0 byte to f32: 2^(b - 127); 0 is the subnormal 2^-127, 255 is NaN.
pub fn ue8m0_to_f32(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        b => f32::from_bits((b as u32) << 23),
    }
}

/// The UE8M0 byte of the smallest power of two that is at least `value` (positive, normal).
pub fn ue8m0_ceil(value: f32) -> u8 {
    let bits = value.to_bits();
    ((bits >> 23) + (bits & 0x7f_ffff != 0) as u32) as u8
}

/// A cache format: how many channels share a scale, and what the codes and scales are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheFormat {
    /// Window keys.
    Fp8,
    /// Latents of the global cache.
    Nvfp4,
    /// Index keys and queries.
    Mxfp4,
}

impl CacheFormat {
    /// Channels that share one scale.
    pub fn group(self) -> usize {
        match self {
            Self::Fp8 | Self::Mxfp4 => 32,
            Self::Nvfp4 => 16,
        }
    }
    /// `u32` words of codes of a row of `channels`.
    pub fn code_words(self, channels: usize) -> usize {
        match self {
            Self::Fp8 => channels.div_ceil(4),
            Self::Nvfp4 | Self::Mxfp4 => channels.div_ceil(8),
        }
    }
    /// `u32` words of scales of a row of `channels`.
    pub fn scale_words(self, channels: usize) -> usize {
        channels.div_ceil(self.group()).div_ceil(4)
    }
    /// `u32` words of a packed row of `channels`.
    pub fn row_words(self, channels: usize) -> usize {
        self.code_words(channels) + self.scale_words(channels)
    }
    /// Scale byte of a group whose largest magnitude is `amax`.
    pub fn scale_byte(self, amax: f32) -> u8 {
        match self {
            Self::Fp8 => ue8m0_ceil(amax.max(1e-4) * (1.0 / 448.0)),
            Self::Nvfp4 => f32_to_e4m3((amax / 6.0).clamp(2f32.powi(-9), 448.0)),
            Self::Mxfp4 => ue8m0_ceil(amax.max(6.0 * 2f32.powi(-126)) * (1.0 / 6.0)),
        }
    }
    /// Scale of a scale byte.
    pub fn scale(self, byte: u8) -> f32 {
        match self {
            Self::Nvfp4 => e4m3_to_f32(byte),
            Self::Fp8 | Self::Mxfp4 => ue8m0_to_f32(byte),
        }
    }
    /// Code of a value under a scale.
    pub fn encode(self, value: f32, scale: f32) -> u8 {
        match self {
            Self::Fp8 => f32_to_e4m3((value / scale).clamp(-448.0, 448.0)),
            Self::Nvfp4 | Self::Mxfp4 => f32_to_e2m1((value / scale).clamp(-6.0, 6.0)),
        }
    }
    /// Packs a row.
    pub fn pack(self, row: &[f32]) -> Vec<u32> {
        let mut words = vec![0u32; self.row_words(row.len())];
        let scales_at = self.code_words(row.len());
        for (g, group) in row.chunks(self.group()).enumerate() {
            let byte = self.scale_byte(group.iter().fold(0f32, |m, v| m.max(v.abs())));
            words[scales_at + g / 4] |= (byte as u32) << (g % 4 * 8);
            let scale = self.scale(byte);
            for (i, &v) in group.iter().enumerate() {
                let (c, code) = (g * self.group() + i, self.encode(v, scale) as u32);
                match self {
                    Self::Fp8 => words[c / 4] |= code << (c % 4 * 8),
                    Self::Nvfp4 | Self::Mxfp4 => words[c / 8] |= code << (c % 8 * 4),
                }
            }
        }
        words
    }
    /// Unpacks a row of `channels` values.
    pub fn unpack(self, words: &[u32], channels: usize) -> Vec<f32> {
        let scales_at = self.code_words(channels);
        (0..channels)
            .map(|c| {
                let g = c / self.group();
                let scale = self.scale((words[scales_at + g / 4] >> (g % 4 * 8)) as u8);
                scale
                    * match self {
                        Self::Fp8 => e4m3_to_f32((words[c / 4] >> (c % 4 * 8)) as u8),
                        Self::Nvfp4 | Self::Mxfp4 => e2m1_to_f32((words[c / 8] >> (c % 8 * 4)) as u8 & 15),
                    }
            })
            .collect()
    }
    /// Quantises and dequantises a row.
    pub fn round_trip(self, row: &[f32]) -> Vec<f32> {
        self.unpack(&self.pack(row), row.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The nearest code by search, ties to the even one.
    fn nearest(value: f32, decode: fn(u8) -> f32, codes: u8) -> u8 {
        let distance = |code: &u8| (decode(*code) as f64 - value.abs() as f64).abs();
        let best = (0..codes).min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a % 2).cmp(&(b % 2))));
        best.unwrap() | if value.is_sign_negative() { codes.next_power_of_two() } else { 0 }
    }

    /// Every code, every midpoint, and the neighbours of both.
    fn probes(decode: fn(u8) -> f32, codes: u8) -> Vec<f32> {
        let mut probes = Vec::new();
        for code in 0..codes {
            let (this, next) = (decode(code), decode(if code + 1 < codes { code + 1 } else { code }));
            for v in [this, (this + next) / 2.0] {
                probes.extend([v, v.next_up(), if v > 0.0 { v.next_down() } else { v }]);
            }
        }
        let negative: Vec<f32> = probes.iter().map(|v| -v).collect();
        probes.extend(negative);
        probes
    }

    #[test]
    fn e4m3_rounds_to_nearest_even() {
        for v in probes(e4m3_to_f32, 127).into_iter().map(|v| v.clamp(-448.0, 448.0)) {
            assert_eq!(f32_to_e4m3(v), nearest(v, e4m3_to_f32, 127), "{v:e}");
        }
        assert!((0..=255u8).filter(|code| code & 127 != 127).all(|code| f32_to_e4m3(e4m3_to_f32(code)) == code));
    }

    #[test]
    fn e2m1_rounds_to_nearest_even_and_saturates() {
        for v in probes(e2m1_to_f32, 8) {
            assert_eq!(f32_to_e2m1(v), nearest(v, e2m1_to_f32, 8), "{v}");
        }
        assert_eq!([f32_to_e2m1(1e9), f32_to_e2m1(-7.0)], [7, 15]);
    }

    #[test]
    fn powers_of_two_stay_and_anything_above_goes_up() {
        for byte in 1..254u8 {
            let power = ue8m0_to_f32(byte);
            assert_eq!([ue8m0_ceil(power), ue8m0_ceil(power.next_up())], [byte, byte + 1]);
        }
        assert_eq!(ue8m0_to_f32(0), 2f32.powi(-127));
    }

    #[test]
    fn rows_of_any_width_survive_packing() {
        for format in [CacheFormat::Fp8, CacheFormat::Nvfp4, CacheFormat::Mxfp4] {
            for channels in [1, 15, 16, 17, 31, 33, 44, 128, 130] {
                let row: Vec<f32> = (0..channels).map(|c| (c as f32 * 0.7).sin() * 3.0).collect();
                let once = format.round_trip(&row);
                assert_eq!(format.pack(&row).len(), format.row_words(channels));
                let error = row.iter().zip(&once).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
                assert!(error <= if format == CacheFormat::Fp8 { 0.13 } else { 0.7 }, "{format:?} {channels}: {error}");
            }
            // The smallest scales: a row of zeros, and one of tiny numbers.
            assert!(format.round_trip(&[0.0, -0.0, 1e-30]).iter().all(|v| v.abs() <= 2e-30));
        }
        let words = [CacheFormat::Fp8, CacheFormat::Nvfp4, CacheFormat::Mxfp4].map(|f| f.row_words(512) * 4);
        assert_eq!((words, CacheFormat::Mxfp4.row_words(128) * 4), ([528, 288, 272], 68));
    }
}
