//! Ctrl-C, and the request to end, in commands that can stop half-way: the first time it asks them to stop and to keep what is
//! done, the second time it ends the process.

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;

/// A signal as a request.
#[derive(Debug)]
pub(super) struct Interrupt {
    asked: Arc<AtomicBool>,
    /// The signal that asked last.
    signal: Arc<AtomicUsize>,
}

/// What a process that a signal ended returns, by custom.
fn exit_code(signal: i32) -> u8 {
    128 + signal as u8
}

impl Interrupt {
    /// From now on the first signal only asks.
    ///
    /// # Errors
    /// The system's.
    pub fn watch() -> io::Result<Self> {
        let interrupt = Self { asked: Arc::default(), signal: Arc::default() };
        let Self { asked, signal } = &interrupt;
        for number in [SIGINT, SIGTERM] {
            // Actions run in this order: the first signal finds nothing asked yet.
            flag::register_conditional_shutdown(number, exit_code(number).into(), asked.clone())?;
            flag::register_usize(number, signal.clone(), number as usize)?;
            flag::register(number, asked.clone())?;
        }
        Ok(interrupt)
    }

    /// Whether the command shall stop.
    pub fn asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// Whether it was asked to end, and not only to stop what it does.
    pub fn ends(&self) -> bool {
        self.asked() && self.signal.load(Ordering::Relaxed) == SIGTERM as usize
    }

    /// Something begins that can be stopped.
    pub fn begin(&self) {
        self.asked.store(false, Ordering::Relaxed);
    }

    /// Nothing is under way that could be stopped: whoever asks now ends the process.
    pub fn idle(&self) {
        self.asked.store(true, Ordering::Relaxed);
    }

    /// What a command returns that was stopped.
    pub fn stopped(&self, what: String) -> Interrupted {
        Interrupted { what, code: exit_code(self.signal.load(Ordering::Relaxed) as i32) }
    }
}

/// What a command was doing when a signal stopped it, and what is kept.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub(super) struct Interrupted {
    what: String,
    /// What the process returns.
    pub code: u8,
}
