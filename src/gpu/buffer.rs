//! Device memory: counted by kind, checked against the device's limits, freed when the last handle goes.

use super::counters::Tally;
use super::device::Gpu;
use crate::{Error, Result};
use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

/// What a buffer is for: decides how it may be used, and under which heading it is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub enum MemoryKind {
    /// Packed weights.
    Weights,
    /// Session state: pages, rings, remainders, history.
    Cache,
    /// Activations and intermediate results.
    Scratch,
    /// Uniforms, and the step state that is a uniform to some kernels and storage to others.
    Params,
    /// Host-visible copies.
    Readback,
}

impl MemoryKind {
    /// Every kind, in the order of its declaration.
    pub const ALL: [MemoryKind; 5] = [Self::Weights, Self::Cache, Self::Scratch, Self::Params, Self::Readback];

    fn usages(self) -> wgpu::BufferUsages {
        use wgpu::BufferUsages as Usage;
        match self {
            Self::Weights | Self::Cache | Self::Scratch => Usage::STORAGE | Usage::COPY_SRC | Usage::COPY_DST,
            Self::Params => Usage::UNIFORM | Usage::STORAGE | Usage::COPY_SRC | Usage::COPY_DST,
            Self::Readback => Usage::MAP_READ | Usage::COPY_DST,
        }
    }
}

/// A handle to a device buffer. Clones share it; the memory is freed with the last of them.
#[derive(Clone)]
pub struct Buffer(Arc<Allocation>);

struct Allocation {
    raw: wgpu::Buffer,
    kind: MemoryKind,
    label: String,
    bytes: u64,
    tally: Arc<Tally>,
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` ({:?}, {} bytes)", self.label(), self.kind(), self.bytes())
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // In a browser a dropped handle frees its memory only at the next garbage collection.
        self.raw.destroy();
        self.tally.free(self.kind, Buffer::allocated(self.bytes));
    }
}

impl Buffer {
    /// Bytes that a buffer of `bytes` bytes takes on the device: the next multiple of 16, at least 16.
    pub const fn allocated(bytes: u64) -> u64 {
        if bytes == 0 {
            16
        } else {
            bytes.next_multiple_of(16)
        }
    }
    /// Bytes as asked for.
    pub fn bytes(&self) -> u64 {
        self.0.bytes
    }
    /// What it is for.
    pub fn kind(&self) -> MemoryKind {
        self.0.kind
    }
    /// Its name in messages.
    pub fn label(&self) -> &str {
        &self.0.label
    }
    pub(super) fn raw(&self) -> &wgpu::Buffer {
        &self.0.raw
    }
    pub(super) fn is(&self, other: &Buffer) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Gpu {
    /// A buffer of `bytes` bytes (rounded up as [`Buffer::allocated`] says), zeroed.
    ///
    /// It may be larger than the device can bind at once: then it is bound in ranges.
    ///
    /// # Errors
    /// [`Error::DeviceLimit`] when the device allows no buffer of this size, [`Error::Device`] when it has no memory left.
    /// In a browser the latter is reported later, by [`Gpu::settle`], `submit` or `read`.
    pub fn buffer(&self, kind: MemoryKind, label: &str, bytes: u64) -> Result<Buffer> {
        self.check()?;
        let size = Buffer::allocated(bytes);
        let allowed = self.limits().max_buffer_size;
        if size > allowed {
            return Err(Error::DeviceLimit { what: format!("buffer `{label}`"), needed: size, allowed });
        }
        let raw = self.scoped(&format!("buffer `{label}` of {size} bytes"), || {
            self.device.create_buffer(&wgpu::BufferDescriptor {
                label: Some(label),
                size,
                usage: kind.usages(),
                mapped_at_creation: false,
            })
        })?;
        self.tally.allocate(kind, size);
        Ok(Buffer(Arc::new(Allocation { raw, kind, label: label.into(), bytes, tally: self.tally.clone() })))
    }

    /// A [`MemoryKind::Params`] buffer that holds `value`.
    ///
    /// # Errors
    /// As [`Gpu::buffer`].
    pub fn uniform<T: bytemuck::Pod>(&self, label: &str, value: &T) -> Result<Buffer> {
        let buffer = self.buffer(MemoryKind::Params, label, std::mem::size_of::<T>() as u64)?;
        self.upload(&buffer, 0, bytemuck::bytes_of(value));
        Ok(buffer)
    }

    /// Writes `data` at `offset`, before anything that is submitted later. `offset` is a multiple of 4; a last partial
    /// word is completed with zeros.
    ///
    /// # Panics
    /// When `data` does not fit.
    pub fn upload(&self, buffer: &Buffer, offset: u64, data: &[u8]) {
        assert!(
            offset.is_multiple_of(4) && offset + data.len() as u64 <= buffer.bytes(),
            "upload of {} bytes at {offset} into {buffer:?}",
            data.len()
        );
        let whole = data.len() & !3;
        self.queue.write_buffer(buffer.raw(), offset, &data[..whole]);
        if whole < data.len() {
            let mut word = [0; 4];
            word[..data.len() - whole].copy_from_slice(&data[whole..]);
            self.queue.write_buffer(buffer.raw(), offset + whole as u64, &word);
        }
    }

    /// Sets every word of a buffer, its padding too. With `0xFFFF_FFFF`, a NaN, it poisons memory that must not be read
    /// before it is written.
    pub fn fill(&self, buffer: &Buffer, word: u32) {
        const CHUNK: u64 = 1 << 20;
        const FLUSH: u64 = 64 << 20;
        let size = Buffer::allocated(buffer.bytes());
        let pattern: Vec<u8> = word.to_le_bytes().repeat(size.min(CHUNK) as usize / 4);
        let mut offset = 0;
        while offset < size {
            let bytes = (size - offset).min(CHUNK);
            self.queue.write_buffer(buffer.raw(), offset, &pattern[..bytes as usize]);
            offset += bytes;
            if offset % FLUSH == 0 {
                // The queue holds a copy of what was written until the next submission.
                self.queue.submit([]);
            }
        }
    }

    /// The bytes of a buffer, after everything submitted so far. It waits for the device, so nothing in a generation
    /// loop calls it; counted in `blocking_readbacks`. Outside a browser the future blocks its thread.
    ///
    /// # Errors
    /// [`Error::Device`] when the device has failed; [`Error::DeviceLimit`] when no copy of this size can be made.
    pub async fn read(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        self.read_range(buffer, 0, buffer.bytes()).await
    }

    /// As [`Gpu::read`], `bytes` bytes from `offset`, which is a multiple of 4.
    ///
    /// # Errors
    /// As [`Gpu::read`].
    ///
    /// # Panics
    /// When the range is not inside the buffer.
    pub async fn read_range(&self, buffer: &Buffer, offset: u64, bytes: u64) -> Result<Vec<u8>> {
        let mut data = self.read_parts(&[(buffer, offset, bytes.next_multiple_of(4))]).await?;
        data.truncate(bytes as usize);
        Ok(data)
    }

    /// As [`Gpu::read`], several ranges `(buffer, offset, bytes)` one after the other in one copy; offsets and sizes are
    /// multiples of 4.
    ///
    /// # Errors
    /// As [`Gpu::read`].
    ///
    /// # Panics
    /// When a range is not inside its buffer.
    pub async fn read_parts(&self, parts: &[(&Buffer, u64, u64)]) -> Result<Vec<u8>> {
        self.settle().await?;
        let total = parts.iter().map(|(.., bytes)| bytes).sum();
        let label = parts.first().map_or("nothing", |(buffer, ..)| buffer.label());
        let staging = self.buffer(MemoryKind::Readback, &format!("copy of {label}"), total)?;
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut at = 0;
        for &(buffer, offset, bytes) in parts {
            assert!(
                [offset, bytes].iter().all(|n| n.is_multiple_of(4))
                    && offset + bytes <= Buffer::allocated(buffer.bytes()),
                "read of {bytes} bytes at {offset} from {buffer:?}"
            );
            if bytes > 0 {
                encoder.copy_buffer_to_buffer(buffer.raw(), offset, staging.raw(), at, bytes);
            }
            at += bytes;
        }
        self.queue.submit([encoder.finish()]);
        self.tally.submissions.fetch_add(1, Relaxed);
        self.tally.blocking_readbacks.fetch_add(1, Relaxed);
        self.check()?;
        let mut data = self.map(staging.raw()).await?;
        data.truncate(total as usize);
        Ok(data)
    }

    /// [`Gpu::read`], blocking.
    ///
    /// # Errors
    /// As [`Gpu::read`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn read_blocking(&self, buffer: &Buffer) -> Result<Vec<u8>> {
        pollster::block_on(self.read(buffer))
    }
}
