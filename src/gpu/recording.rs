//! A list of dispatches and copies, encoded and sent as one submission.

use super::buffer::Buffer;
use super::device::{locked, Gpu};
use super::pipeline::Bound;
use super::profile::Timestamps;
use super::readback::Ticket;
use crate::{Error, Result};
use std::sync::atomic::Ordering::Relaxed;

/// What a dispatch reads, in bytes, for the counters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Weights.
    pub weights: u64,
    /// Session state.
    pub cache: u64,
}

impl Traffic {
    /// Neither weights nor cache.
    pub const NONE: Traffic = Traffic { weights: 0, cache: 0 };
}

/// Commands in order; each sees the writes of those before it.
#[derive(Debug, Default)]
pub struct Recording {
    commands: Vec<Command>,
    pub(super) tickets: Vec<Ticket>,
}

#[derive(Debug)]
enum Command {
    Dispatch { bound: Bound, grid: [u32; 3], traffic: Traffic },
    Copy { source: Buffer, source_offset: u64, target: Buffer, target_offset: u64, bytes: u64 },
}

impl Recording {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Dispatches recorded so far.
    pub fn dispatches(&self) -> usize {
        self.commands.iter().filter(|command| matches!(command, Command::Dispatch { .. })).count()
    }

    /// Runs `grid` workgroups. A grid with a zero records nothing.
    pub fn dispatch(&mut self, bound: &Bound, grid: [u32; 3], traffic: Traffic) {
        if !grid.contains(&0) {
            self.commands.push(Command::Dispatch { bound: bound.clone(), grid, traffic });
        }
    }

    /// Copies `bytes` bytes. Offsets and size are multiples of 4; the buffers differ.
    ///
    /// # Panics
    /// When a range is not inside its buffer.
    pub fn copy(&mut self, source: &Buffer, source_offset: u64, target: &Buffer, target_offset: u64, bytes: u64) {
        assert!(
            [source_offset, target_offset, bytes].iter().all(|n| n.is_multiple_of(4))
                && source_offset + bytes <= Buffer::allocated(source.bytes())
                && target_offset + bytes <= Buffer::allocated(target.bytes())
                && !source.is(target),
            "copy of {bytes} bytes from {source_offset} of {source:?} to {target_offset} of {target:?}"
        );
        if bytes > 0 {
            let (source, target) = (source.clone(), target.clone());
            self.commands.push(Command::Copy { source, source_offset, target, target_offset, bytes });
        }
    }
}

impl Gpu {
    /// Makes sure that a recording can be submitted: compiles what it needs, and checks its grids.
    ///
    /// # Errors
    /// As [`Gpu::submit`].
    pub fn prepare(&self, recording: &Recording) -> Result<()> {
        self.check()?;
        let most = self.limits().max_compute_workgroups_per_dimension;
        for command in &recording.commands {
            if let Command::Dispatch { bound, grid, .. } = command {
                if grid.iter().any(|&n| n > most) {
                    let label = bound.pipeline().label();
                    let message = format!("{label}: grid {grid:?}, at most {most} workgroups a dimension are allowed");
                    return Err(Error::Device { message });
                }
                self.compile(bound.pipeline())?;
            }
        }
        Ok(())
    }

    /// Sends a recording as one submission. Consecutive dispatches share a pass; with profiling on, each has its own.
    ///
    /// # Errors
    /// [`Error::Device`] when a grid is too large, a kernel does not compile, or with the first error that the device has
    /// reported.
    pub fn submit(&self, recording: Recording) -> Result<()> {
        self.prepare(&recording)?;

        let mut profile = locked(&self.profile);
        let mut timestamps = match &*profile {
            Some(_) => Timestamps::new(&self.device, recording.dispatches()),
            None => None,
        };
        let mut encoder = self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        let mut pass: Option<wgpu::ComputePass<'static>> = None;
        let mut current: Option<&Bound> = None;
        for command in &recording.commands {
            match command {
                Command::Copy { source, source_offset, target, target_offset, bytes } => {
                    pass = None;
                    encoder.copy_buffer_to_buffer(source.raw(), *source_offset, target.raw(), *target_offset, *bytes);
                }
                Command::Dispatch { bound, grid, traffic } => {
                    if timestamps.is_some() {
                        pass = None;
                    }
                    let pass = pass.get_or_insert_with(|| {
                        current = None;
                        let writes = timestamps.as_mut().map(|timestamps| timestamps.next(bound.pipeline().clone()));
                        let descriptor = wgpu::ComputePassDescriptor { label: None, timestamp_writes: writes };
                        encoder.begin_compute_pass(&descriptor).forget_lifetime()
                    });
                    if current.is_none_or(|last| !std::sync::Arc::ptr_eq(last.pipeline(), bound.pipeline())) {
                        pass.set_pipeline(self.compile(bound.pipeline())?);
                    }
                    current = Some(bound);
                    pass.set_bind_group(0, bound.group(), &[]);
                    pass.dispatch_workgroups(grid[0], grid[1], grid[2]);
                    bound.pipeline().count_dispatch();
                    self.tally.dispatches.fetch_add(1, Relaxed);
                    self.tally.weight_bytes.fetch_add(traffic.weights, Relaxed);
                    self.tally.cache_bytes.fetch_add(traffic.cache, Relaxed);
                }
            }
        }
        drop(pass);
        if let (Some(profile), Some(timestamps)) = (&mut *profile, timestamps) {
            profile.pending.push(timestamps.resolve(&self.device, &mut encoder));
        }
        let submission = self.queue.submit([encoder.finish()]);
        self.tally.submissions.fetch_add(1, Relaxed);
        self.check()?;
        for ticket in recording.tickets {
            ticket.submitted(submission.clone());
        }
        Ok(())
    }
}
