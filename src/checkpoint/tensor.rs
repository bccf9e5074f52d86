//! One tensor of a checkpoint: packed bytes, and what they mean.

use std::fmt;

use half::f16;

use crate::formats::{bf16_to_f32, e2m1_to_f32, e4m3_to_f32, ue8m0_to_f32};

/// How a weight is stored (`numerics.md` §14). The numbers are those that the shaders use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Format {
    /// 32-bit floats.
    F32 = 0,
    /// BF16.
    Bf16 = 1,
    /// IEEE half precision.
    F16 = 2,
    /// E4M3, one UE8M0 scale for each block of 32 rows and 32 channels.
    Fp8Block = 3,
    /// E4M3, one UE8M0 scale for each row and 32 channels.
    Fp8Row = 4,
    /// E2M1, two channels a byte with the even one in the low nibble, one UE8M0 scale for each row and 32 channels.
    Fp4 = 5,
}

impl Format {
    /// Bytes of a row of `channels`, without scales.
    pub fn row_bytes(self, channels: usize) -> usize {
        match self {
            Self::F32 => channels * 4,
            Self::Bf16 | Self::F16 => channels * 2,
            Self::Fp8Block | Self::Fp8Row => channels,
            Self::Fp4 => channels.div_ceil(2),
        }
    }
}

/// A tensor of a [`Checkpoint`](super::Checkpoint).
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    /// Full name.
    pub name: &'a str,
    /// Logical shape: `[channels]` or `[rows, channels]`, however the channels are packed.
    pub shape: &'a [usize],
    /// How it is stored.
    pub format: Format,
    /// Its bytes, row after row.
    pub data: &'a [u8],
    /// UE8M0 bytes of a packed format, and their shape.
    pub scales: Option<(&'a [u8], [usize; 2])>,
}

impl Tensor<'_> {
    /// Number of rows; a vector is one row.
    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len() - 1].iter().product()
    }

    /// Channels of a row.
    pub fn channels(&self) -> usize {
        self.shape[self.shape.len() - 1]
    }

    /// Replaces the content of `row` by row `r`, dequantised: exact, short of results below the smallest f32.
    ///
    /// # Panics
    /// When the tensor has no row `r`.
    pub fn row_f32(&self, r: usize, row: &mut Vec<f32>) {
        row.clear();
        self.append_row(r, row);
    }

    /// All rows, dequantised.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut all = Vec::with_capacity(self.rows() * self.channels());
        for r in 0..self.rows() {
            self.append_row(r, &mut all);
        }
        all
    }

    fn append_row(&self, r: usize, out: &mut Vec<f32>) {
        let (channels, width) = (self.channels(), self.format.row_bytes(self.channels()));
        let bytes = &self.data[r * width..][..width];
        let scale_row = match self.format {
            Format::Fp8Block => r / 32,
            _ => r,
        };
        let scale = |chunk: usize| {
            self.scales.map_or(1.0, |(scales, [_, columns])| ue8m0_to_f32(scales[scale_row * columns + chunk]))
        };
        match self.format {
            Format::F32 => {
                out.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])));
            }
            Format::Bf16 => {
                out.extend(bytes.chunks_exact(2).map(|b| bf16_to_f32(u16::from_le_bytes([b[0], b[1]]))));
            }
            Format::F16 => {
                out.extend(bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()));
            }
            Format::Fp8Block | Format::Fp8Row => {
                for (i, chunk) in bytes.chunks(32).enumerate() {
                    let s = scale(i);
                    out.extend(chunk.iter().map(|&code| e4m3_to_f32(code) * s));
                }
            }
            Format::Fp4 => {
                for c in (0..channels).step_by(32) {
                    let s = scale(c / 32);
                    let nibble = |c: usize| bytes[c / 2] >> (c % 2 * 4) & 15;
                    out.extend((c..channels.min(c + 32)).map(|c| e2m1_to_f32(nibble(c)) * s));
                }
            }
        }
    }
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, shape, format, data, .. } = self;
        write!(f, "{name} {shape:?} {format:?} ({} bytes)", data.len())
    }
}
