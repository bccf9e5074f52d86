//! What the device was asked to do, and the memory that is held.

use super::buffer::MemoryKind;
use std::collections::BTreeMap;
use std::ops::Sub;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A snapshot. `later - earlier` is what happened in between; the levels `allocated` and `buffers` stay those of `later`.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counters {
    /// Command buffers sent to the queue.
    pub submissions: u64,
    /// Dispatches in them.
    pub dispatches: u64,
    /// Dispatches by `kernel/variant`.
    pub dispatches_by_kernel: BTreeMap<String, u64>,
    /// Whole-buffer reads that the host waited for.
    pub blocking_readbacks: u64,
    /// Payloads that came back beside other work: from readback rings, and copies for what is saved.
    pub readbacks: u64,
    /// Times that the host waited for a readback ring, because it ran too far ahead.
    pub waits: u64,
    /// Bytes of weights that the dispatches read, as their [`Traffic`](super::Traffic) says.
    pub weight_bytes: u64,
    /// Bytes of cache that the dispatches read, as their [`Traffic`](super::Traffic) says.
    pub cache_bytes: u64,
    /// Level: bytes held on the device, by kind.
    pub allocated: BTreeMap<MemoryKind, u64>,
    /// Level: buffers held.
    pub buffers: u64,
}

impl Counters {
    /// Bytes held on the device, all kinds together.
    pub fn allocated_bytes(&self) -> u64 {
        self.allocated.values().sum()
    }
}

impl Sub for Counters {
    type Output = Counters;
    fn sub(self, earlier: Counters) -> Counters {
        let mut by_kernel = self.dispatches_by_kernel;
        for (kernel, count) in earlier.dispatches_by_kernel {
            if let Some(dispatches) = by_kernel.get_mut(&kernel) {
                *dispatches -= count;
            }
        }
        by_kernel.retain(|_, dispatches| *dispatches > 0);
        Counters {
            submissions: self.submissions - earlier.submissions,
            dispatches: self.dispatches - earlier.dispatches,
            dispatches_by_kernel: by_kernel,
            blocking_readbacks: self.blocking_readbacks - earlier.blocking_readbacks,
            readbacks: self.readbacks - earlier.readbacks,
            waits: self.waits - earlier.waits,
            weight_bytes: self.weight_bytes - earlier.weight_bytes,
            cache_bytes: self.cache_bytes - earlier.cache_bytes,
            allocated: self.allocated,
            buffers: self.buffers,
        }
    }
}

/// The live numbers behind [`Counters`]; dispatches by kernel are counted in the pipelines.
#[derive(Default)]
pub(super) struct Tally {
    pub submissions: AtomicU64,
    pub dispatches: AtomicU64,
    pub blocking_readbacks: AtomicU64,
    pub readbacks: AtomicU64,
    pub waits: AtomicU64,
    pub weight_bytes: AtomicU64,
    pub cache_bytes: AtomicU64,
    allocated: [AtomicU64; MemoryKind::ALL.len()],
    buffers: AtomicU64,
}

impl Tally {
    pub fn allocate(&self, kind: MemoryKind, bytes: u64) {
        self.allocated[kind as usize].fetch_add(bytes, Relaxed);
        self.buffers.fetch_add(1, Relaxed);
    }

    pub fn free(&self, kind: MemoryKind, bytes: u64) {
        self.allocated[kind as usize].fetch_sub(bytes, Relaxed);
        self.buffers.fetch_sub(1, Relaxed);
    }

    pub fn snapshot(&self, dispatches_by_kernel: BTreeMap<String, u64>) -> Counters {
        Counters {
            submissions: self.submissions.load(Relaxed),
            dispatches: self.dispatches.load(Relaxed),
            dispatches_by_kernel,
            blocking_readbacks: self.blocking_readbacks.load(Relaxed),
            readbacks: self.readbacks.load(Relaxed),
            waits: self.waits.load(Relaxed),
            weight_bytes: self.weight_bytes.load(Relaxed),
            cache_bytes: self.cache_bytes.load(Relaxed),
            allocated: MemoryKind::ALL
                .iter()
                .map(|&kind| (kind, self.allocated[kind as usize].load(Relaxed)))
                .collect(),
            buffers: self.buffers.load(Relaxed),
        }
    }
}
