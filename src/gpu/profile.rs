//! Times per kernel, from timestamps around every dispatch. For measuring only: a pass per dispatch costs time itself.

use super::device::{locked, Gpu};
use super::pipeline::Pipeline;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Time spent in one kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KernelTime {
    /// Dispatches.
    pub dispatches: u64,
    /// Nanoseconds in all of them.
    pub nanoseconds: u64,
}

/// Submissions whose timestamps have not been read yet.
#[derive(Default)]
pub(super) struct Profile {
    pub pending: Vec<Resolved>,
}

/// Query sets of one submission: two timestamps a dispatch.
pub(super) struct Timestamps {
    sets: Vec<wgpu::QuerySet>,
    pipelines: Vec<Arc<Pipeline>>,
}

/// The timestamps of one submission in host-visible buffers, one a query set.
pub(super) struct Resolved {
    buffers: Vec<wgpu::Buffer>,
    pipelines: Vec<Arc<Pipeline>>,
}

/// Dispatches that one query set holds.
const PER_SET: usize = wgpu::QUERY_SET_MAX_QUERIES as usize / 2;

impl Timestamps {
    /// Room for `dispatches` dispatches; none for none.
    pub fn new(device: &wgpu::Device, dispatches: usize) -> Option<Self> {
        let sets: Vec<_> = (0..dispatches)
            .step_by(PER_SET)
            .map(|first| {
                device.create_query_set(&wgpu::QuerySetDescriptor {
                    label: None,
                    ty: wgpu::QueryType::Timestamp,
                    count: 2 * (dispatches - first).min(PER_SET) as u32,
                })
            })
            .collect();
        (!sets.is_empty()).then(|| Self { sets, pipelines: Vec::with_capacity(dispatches) })
    }

    /// The timestamps of the next dispatch.
    pub fn next(&mut self, pipeline: Arc<Pipeline>) -> wgpu::ComputePassTimestampWrites<'_> {
        let index = self.pipelines.len();
        self.pipelines.push(pipeline);
        let first = 2 * (index % PER_SET) as u32;
        wgpu::ComputePassTimestampWrites {
            query_set: &self.sets[index / PER_SET],
            beginning_of_pass_write_index: Some(first),
            end_of_pass_write_index: Some(first + 1),
        }
    }

    /// Records the copies to the host.
    pub fn resolve(self, device: &wgpu::Device, encoder: &mut wgpu::CommandEncoder) -> Resolved {
        let buffers = self
            .sets
            .iter()
            .map(|set| {
                let size = u64::from(set.count()) * 8;
                let buffer = |usage| {
                    let label = Some("timestamps");
                    device.create_buffer(&wgpu::BufferDescriptor { label, size, usage, mapped_at_creation: false })
                };
                let ticks = buffer(wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC);
                let staging = buffer(wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST);
                encoder.resolve_query_set(set, 0..set.count(), &ticks, 0);
                encoder.copy_buffer_to_buffer(&ticks, 0, &staging, 0, size);
                staging
            })
            .collect();
        Resolved { buffers, pipelines: self.pipelines }
    }
}

impl Gpu {
    /// Turns times per kernel on or off; turning them on forgets the earlier ones.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the device has no timestamps.
    pub fn set_profiling(&self, on: bool) -> Result<()> {
        if on && !self.features().timestamps {
            return Err(Error::Unsupported { what: "times per kernel: the device has no timestamps".into() });
        }
        *locked(&self.profile) = on.then(Profile::default);
        Ok(())
    }

    /// Times by `kernel/variant` of everything submitted since profiling was turned on or this was last called. Waits
    /// for the device.
    ///
    /// # Errors
    /// [`Error::Device`] when the device has failed.
    pub async fn take_profile(&self) -> Result<BTreeMap<String, KernelTime>> {
        let pending = match &mut *locked(&self.profile) {
            Some(profile) => std::mem::take(&mut profile.pending),
            None => Vec::new(),
        };
        let period = f64::from(self.queue.get_timestamp_period());
        let mut times: BTreeMap<String, KernelTime> = BTreeMap::new();
        for submission in pending {
            let mut ticks: Vec<u64> = Vec::new();
            for buffer in &submission.buffers {
                let bytes = self.map(buffer).await?;
                ticks.extend(bytes.chunks_exact(8).map(|tick| u64::from_le_bytes(tick.try_into().expect("8 bytes"))));
            }
            for (pipeline, pair) in submission.pipelines.iter().zip(ticks.chunks_exact(2)) {
                let time = times.entry(pipeline.label().to_string()).or_default();
                time.dispatches += 1;
                time.nanoseconds += (pair[1].saturating_sub(pair[0]) as f64 * period) as u64;
            }
        }
        Ok(times)
    }
}
