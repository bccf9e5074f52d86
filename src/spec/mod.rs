//! When to draft, and how many drafted tokens to verify. Knows times and confidences, no model.

mod schedule;

pub use schedule::{Outlook, Plan, Scheduler};

use crate::{Error, Result};

/// How many drafted tokens a round verifies at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Draft {
    /// As many as pay, by what rounds were measured to take; none while drafting does not pay.
    Auto,
    /// None, and nothing is drafted.
    Off,
    /// This many, in every round.
    Tokens(usize),
}

impl Draft {
    /// Refuses more tokens than a block has; `block` is 0 for a model that has no draft stages.
    ///
    /// # Errors
    /// [`Error::Setting`].
    pub fn validate(self, block: usize) -> Result<()> {
        let Self::Tokens(tokens) = self else { return Ok(()) };
        if block == 0 {
            let allowed = "auto or off: the model has no draft stages".into();
            return Err(Error::Setting { setting: "draft", found: tokens.to_string(), allowed });
        }
        if tokens > block {
            let allowed = format!("auto, off, or at most {block} tokens");
            return Err(Error::Setting { setting: "draft", found: tokens.to_string(), allowed });
        }
        Ok(())
    }
}

/// What drafting did so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counters {
    /// Rounds, each of which makes a token at least.
    pub rounds: u64,
    /// Of them, those that drafted.
    pub drafted: u64,
    /// Drafted tokens that were verified, by their place in the block.
    pub verified: Vec<u64>,
    /// Of them, those that were accepted.
    pub accepted: Vec<u64>,
}

/// What a round did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Round {
    /// Drafted tokens that it verified.
    pub verified: usize,
    /// Of them, those that were accepted, from the first on.
    pub accepted: usize,
    /// How long it took, if that was measured.
    pub seconds: Option<f64>,
}

/// Seconds since some moment: what rounds are timed with.
pub fn seconds() -> f64 {
    #[cfg(not(target_arch = "wasm32"))]
    {
        static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
        START.get_or_init(std::time::Instant::now).elapsed().as_secs_f64()
    }
    #[cfg(target_arch = "wasm32")]
    {
        js_sys::Date::now() / 1e3
    }
}
