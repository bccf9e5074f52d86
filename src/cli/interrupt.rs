//! Ctrl-C in commands that can stop half-way: the first time it asks them to stop and to keep what is done, the second time it
//! ends the process.

use signal_hook::{consts::SIGINT, flag};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// What a process that Ctrl-C ended returns, by custom: 128 and the signal's number.
pub(super) const EXIT_CODE: u8 = 130;

/// Ctrl-C as a request.
#[derive(Debug)]
pub(super) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// From now on the first Ctrl-C only asks.
    ///
    /// # Errors
    /// The system's.
    pub fn watch() -> io::Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        // Actions run in this order: the first Ctrl-C finds nothing asked yet.
        flag::register_conditional_shutdown(SIGINT, EXIT_CODE.into(), asked.clone())?;
        flag::register(SIGINT, asked.clone())?;
        Ok(Self(asked))
    }

    /// Whether the command shall stop.
    pub fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// What a command was doing when Ctrl-C stopped it, and what is kept.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Interrupted(pub String);
