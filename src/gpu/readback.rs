//! Small results on their way to the host, several at a time, without a wait.

use super::buffer::{Buffer, MemoryKind};
use super::device::{locked, Gpu};
use super::recording::Recording;
use super::wait::Mapping;
use crate::Result;
use futures::channel::oneshot;
use futures::FutureExt;
use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

/// A ring of host-visible slots. A step records its copies into the next free slot; the slot is mapped once the step was
/// submitted, and its payload is taken several steps later, in order.
#[derive(Debug)]
pub struct ReadbackRing {
    free: Vec<Buffer>,
    flights: VecDeque<Flight>,
    bytes: u64,
}

/// A slot that is in use.
#[derive(Debug)]
struct Flight {
    slot: Buffer,
    bytes: u64,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
enum State {
    /// Recorded, not submitted.
    Recorded,
    /// Submitted; the receiver hears when it is mapped.
    Submitted(wgpu::SubmissionIndex, oneshot::Receiver<std::result::Result<(), wgpu::BufferAsyncError>>),
    /// The recording was dropped instead of submitted.
    Abandoned,
}

/// A recording's promise to say when it was submitted.
#[derive(Debug)]
pub(super) struct Ticket {
    slot: Buffer,
    state: Arc<Mutex<State>>,
}

impl Ticket {
    /// Starts mapping the slot.
    pub fn submitted(self, submission: wgpu::SubmissionIndex) {
        let (sender, receiver) = oneshot::channel();
        *locked(&self.state) = State::Submitted(submission, receiver);
        self.slot.raw().map_async(wgpu::MapMode::Read, .., move |result| {
            // The receiver is gone when the ring is.
            let _ = sender.send(result);
        });
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = locked(&self.state);
        if matches!(*state, State::Recorded) {
            *state = State::Abandoned;
        }
    }
}

impl ReadbackRing {
    /// `slots` slots of `bytes` bytes each.
    ///
    /// # Errors
    /// As [`Gpu::buffer`].
    pub fn new(gpu: &Gpu, slots: usize, bytes: u64) -> Result<Self> {
        let free = (0..slots)
            .map(|i| gpu.buffer(MemoryKind::Readback, &format!("readback slot {i}"), bytes))
            .collect::<Result<_>>()?;
        Ok(Self { free, flights: VecDeque::new(), bytes })
    }

    /// Payloads on their way.
    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Records copies of `(buffer, offset, bytes)` parts, one after the other, into the next free slot; offsets and sizes
    /// are multiples of 4. False when no slot is free: take a payload first.
    ///
    /// # Panics
    /// When the parts do not fit a slot.
    #[must_use]
    pub fn copy(&mut self, recording: &mut Recording, parts: &[(&Buffer, u64, u64)]) -> bool {
        self.drop_abandoned();
        let Some(slot) = self.free.pop() else { return false };
        let total: u64 = parts.iter().map(|(.., bytes)| bytes).sum();
        assert!(total <= self.bytes, "{total} bytes for a readback slot of {}", self.bytes);
        let mut at = 0;
        for &(buffer, offset, bytes) in parts {
            recording.copy(buffer, offset, &slot, at, bytes);
            at += bytes;
        }
        let state = Arc::new(Mutex::new(State::Recorded));
        recording.tickets.push(Ticket { slot: slot.clone(), state: state.clone() });
        self.flights.push_back(Flight { slot, bytes: total, state });
        true
    }

    /// The oldest payload if it has arrived. Never waits.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) when the device has failed, [`Error::DeviceLost`](crate::Error::DeviceLost).
    pub fn poll(&mut self, gpu: &Gpu) -> Result<Option<Vec<u8>>> {
        self.drop_abandoned();
        if self.flights.is_empty() {
            return Ok(None);
        }
        gpu.poll()?;
        self.take_arrived(gpu)
    }

    /// The oldest payload, waiting for it if it has not arrived (counted in `waits`). None when nothing was submitted.
    /// Outside a browser the future blocks its thread.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) when the device has failed, [`Error::DeviceLost`](crate::Error::DeviceLost).
    pub async fn oldest(&mut self, gpu: &Gpu) -> Result<Option<Vec<u8>>> {
        match self.wait_for_oldest(gpu).await {
            Ok(payload) => Ok(payload),
            Err(error) => Err(gpu.fate(error).await),
        }
    }

    async fn wait_for_oldest(&mut self, gpu: &Gpu) -> Result<Option<Vec<u8>>> {
        // What the device could not make is in no payload.
        gpu.settle().await?;
        if let Some(payload) = self.poll(gpu)? {
            return Ok(Some(payload));
        }
        let Some(flight) = self.flights.front() else { return Ok(None) };
        let submission = match &*locked(&flight.state) {
            State::Submitted(submission, _) => submission.clone(),
            State::Recorded | State::Abandoned => return Ok(None),
        };
        gpu.tally.waits.fetch_add(1, Relaxed);
        gpu.wait(Some(submission))?;
        let state = flight.state.clone();
        let mapping = futures::future::poll_fn(|context| match &mut *locked(&state) {
            State::Submitted(_, receiver) => receiver.poll_unpin(context),
            State::Recorded | State::Abandoned => std::task::Poll::Ready(Err(oneshot::Canceled)),
        });
        let arrived = gpu.answer(mapping).await;
        self.land(gpu, arrived).map(Some)
    }

    /// [`ReadbackRing::oldest`], blocking.
    ///
    /// # Errors
    /// As [`ReadbackRing::oldest`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn wait_oldest(&mut self, gpu: &Gpu) -> Result<Option<Vec<u8>>> {
        pollster::block_on(self.oldest(gpu))
    }

    fn take_arrived(&mut self, gpu: &Gpu) -> Result<Option<Vec<u8>>> {
        let Some(flight) = self.flights.front() else { return Ok(None) };
        let arrived = match &mut *locked(&flight.state) {
            State::Submitted(_, receiver) => receiver.try_recv(),
            State::Recorded | State::Abandoned => return Ok(None),
        };
        match arrived {
            Ok(None) => Ok(None),
            Ok(Some(result)) => self.land(gpu, Ok(result)).map(Some),
            Err(canceled) => self.land(gpu, Err(canceled)).map(Some),
        }
    }

    /// Reads the front slot, whose mapping ended in `arrived`, and frees it.
    fn land(&mut self, gpu: &Gpu, arrived: Mapping) -> Result<Vec<u8>> {
        let flight = self.flights.pop_front().expect("a payload has landed");
        let payload = gpu.mapped(arrived, flight.slot.raw(), flight.bytes)?;
        gpu.tally.readbacks.fetch_add(1, Relaxed);
        self.free.push(flight.slot);
        Ok(payload)
    }

    /// Frees slots whose recording was dropped.
    fn drop_abandoned(&mut self) {
        let free = &mut self.free;
        self.flights.retain(|flight| {
            let abandoned = matches!(*locked(&flight.state), State::Abandoned);
            if abandoned {
                free.push(flight.slot.clone());
            }
            !abandoned
        });
    }
}
