//! What buffers hold at one moment, on its way to the host while other work goes on.

use super::buffer::{Buffer, MemoryKind};
use super::device::Gpu;
use super::recording::Recording;
use super::wait::Mapping;
use crate::Result;
use futures::channel::oneshot;
use std::sync::atomic::Ordering::Relaxed;

/// Parts of buffers as they were when everything submitted before was done, whatever is written to them later.
#[derive(Debug)]
pub struct Copied {
    staging: Buffer,
    bytes: u64,
    arrival: oneshot::Receiver<std::result::Result<(), wgpu::BufferAsyncError>>,
}

impl Gpu {
    /// Submits a copy of several ranges `(buffer, offset, bytes)`, one after the other; offsets and sizes are multiples of 4.
    /// Waits for nothing: what is submitted next is not held up by whoever takes the bytes.
    ///
    /// # Errors
    /// As [`Gpu::buffer`] and [`Gpu::submit`].
    ///
    /// # Panics
    /// When a range is not inside its buffer.
    pub fn copy_out(&self, parts: &[(&Buffer, u64, u64)]) -> Result<Copied> {
        let bytes = parts.iter().map(|(.., bytes)| bytes).sum();
        let label = parts.first().map_or("nothing", |(buffer, ..)| buffer.label());
        let staging = self.buffer(MemoryKind::Readback, &format!("copy of {label}"), bytes)?;
        let mut recording = Recording::new();
        let mut at = 0;
        for &(buffer, offset, bytes) in parts {
            recording.copy(buffer, offset, &staging, at, bytes);
            at += bytes;
        }
        self.submit(recording)?;
        let (sender, arrival) = oneshot::channel();
        staging.raw().map_async(wgpu::MapMode::Read, .., move |result| {
            // The receiver is gone when nobody wants the bytes any more.
            let _ = sender.send(result);
        });
        Ok(Copied { staging, bytes, arrival })
    }
}

impl Copied {
    /// The bytes, once they have arrived; counted in `readbacks`. Other futures of the thread have their turn meanwhile.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) when the device has failed.
    pub async fn bytes(self, gpu: &Gpu) -> Result<Vec<u8>> {
        let Self { staging, bytes, arrival } = self;
        let arrived: Mapping = gpu.awaited(arrival).await?;
        gpu.tally.readbacks.fetch_add(1, Relaxed);
        gpu.mapped(arrived, staging.raw(), bytes)
    }
}
