//! Files whose bytes are elsewhere, and tensors that may lie in them.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use futures::future::LocalBoxFuture;

use super::{Format, Tensor};
use crate::{Error, Result};

/// `Send` and `Sync` where there are threads.
#[cfg(not(target_arch = "wasm32"))]
pub trait Shared: Send + Sync {}
#[cfg(not(target_arch = "wasm32"))]
impl<T: Send + Sync> Shared for T {}
/// `Send` and `Sync` where there are threads.
#[cfg(target_arch = "wasm32")]
pub trait Shared {}
#[cfg(target_arch = "wasm32")]
impl<T> Shared for T {}

/// A file that is read in pieces.
pub trait Source: fmt::Debug + Shared {
    /// Its length in bytes.
    fn bytes(&self) -> u64;

    /// The bytes in `range`, all of them; the range lies in the file.
    ///
    /// # Errors
    /// What the source has to say, as [`Error::Io`] at best.
    fn read(&self, range: Range<u64>) -> LocalBoxFuture<'_, Result<Vec<u8>>>;
}

/// A run of bytes of a file.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Bytes<'a> {
    /// In memory, or mapped.
    Here(&'a [u8]),
    /// To be read.
    There {
        source: &'a dyn Source,
        /// Where in the file they begin.
        start: u64,
        length: u64,
    },
}

impl<'a> Bytes<'a> {
    pub fn len(&self) -> u64 {
        match self {
            Self::Here(bytes) => bytes.len() as u64,
            Self::There { length, .. } => *length,
        }
    }

    /// The bytes in `range`, which lies in the run.
    pub async fn read(&self, range: Range<u64>) -> Result<Cow<'a, [u8]>> {
        match *self {
            Self::Here(bytes) => Ok(Cow::Borrowed(&bytes[range.start as usize..range.end as usize])),
            Self::There { .. } if range.is_empty() => Ok(Cow::Borrowed(&[])),
            Self::There { source, start, .. } => {
                let wanted = range.end - range.start;
                let bytes = source.read(start + range.start..start + range.end).await?;
                // Whoever asked relies on the length.
                match bytes.len() as u64 == wanted {
                    true => Ok(Cow::Owned(bytes)),
                    false => {
                        let short = format!("{} bytes read of {wanted} at {}", bytes.len(), start + range.start);
                        Err(Error::io(format!("{source:?}"), std::io::Error::other(short)))
                    }
                }
            }
        }
    }
}

/// A tensor of a [`Checkpoint`](super::Checkpoint) wherever its bytes are: read in pieces, or fetched as a [`Tensor`].
#[derive(Debug, Clone, Copy)]
pub struct Weight<'a> {
    /// Full name.
    pub name: &'a str,
    /// Logical shape, as [`Tensor::shape`].
    pub shape: &'a [usize],
    /// How it is stored.
    pub format: Format,
    pub(crate) data: Bytes<'a>,
    /// UE8M0 bytes of a packed format, and their shape.
    pub(crate) scales: Option<(Bytes<'a>, [usize; 2])>,
}

impl<'a> From<Tensor<'a>> for Weight<'a> {
    fn from(tensor: Tensor<'a>) -> Self {
        let Tensor { name, shape, format, data, scales } = tensor;
        let scales = scales.map(|(scales, shape)| (Bytes::Here(scales), shape));
        Self { name, shape, format, data: Bytes::Here(data), scales }
    }
}

impl<'a> Weight<'a> {
    /// Number of rows; a vector is one row.
    pub fn rows(&self) -> usize {
        self.shape[..self.shape.len() - 1].iter().product()
    }

    /// Channels of a row.
    pub fn channels(&self) -> usize {
        self.shape[self.shape.len() - 1]
    }

    /// All of it.
    ///
    /// # Errors
    /// The source's.
    pub async fn fetch(&self) -> Result<Fetched<'a>> {
        let data = self.data.read(0..self.data.len()).await?;
        let scales = match self.scales {
            Some((scales, [_, columns])) => {
                let bytes = scales.read(0..scales.len()).await?;
                check_scales(self.name, &bytes, columns, 0)?;
                Some(bytes)
            }
            None => None,
        };
        Ok(Fetched { weight: *self, data, scales })
    }
}

/// A [`Weight`] that was read.
#[derive(Debug)]
pub struct Fetched<'a> {
    weight: Weight<'a>,
    data: Cow<'a, [u8]>,
    scales: Option<Cow<'a, [u8]>>,
}

impl Fetched<'_> {
    /// The tensor.
    pub fn tensor(&self) -> Tensor<'_> {
        let Weight { name, shape, format, scales, .. } = self.weight;
        let scales = self.scales.as_deref().zip(scales.map(|(_, shape)| shape));
        Tensor { name, shape, format, data: &self.data, scales }
    }
}

/// Refuses scales of the tensor `weight` that are no powers of two; `first_row` is the row of the first byte.
pub(crate) fn check_scales(weight: &str, bytes: &[u8], columns: usize, first_row: usize) -> Result<()> {
    let Some(at) = bytes.iter().position(|&byte| byte == 255) else { return Ok(()) };
    let name = weight.strip_suffix(".weight").map_or(weight.into(), |stem| format!("{stem}.scale"));
    let found = format!("byte 255 (NaN) at [{}, {}]", first_row + at / columns, at % columns);
    Err(Error::tensor(name, found, "bytes 0..=254, the powers of two 2^-127..=2^127"))
}
