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
    /// What is drafted when nobody says: nothing where tokens are drawn, since a seed fixes the text then as long as nothing is
    /// drafted; and nothing on a software device, which takes longer to compile the kernels than most texts do.
    pub fn usual(greedy: bool, software: bool) -> Self {
        match greedy && !software {
            true => Self::Auto,
            false => Self::Off,
        }
    }

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

impl std::str::FromStr for Draft {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match (text, text.parse()) {
            ("auto", _) => Ok(Self::Auto),
            ("off", _) => Ok(Self::Off),
            (_, Ok(tokens)) => Ok(Self::Tokens(tokens)),
            _ => {
                let allowed = "auto, off, or a number of tokens".into();
                Err(Error::Setting { setting: "draft", found: text.into(), allowed })
            }
        }
    }
}

impl std::fmt::Display for Draft {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Off => f.write_str("off"),
            Self::Tokens(tokens) => tokens.fmt(f),
        }
    }
}

/// What drafting did so far.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Counters {
    /// Rounds, each of which makes a token at least.
    pub rounds: u64,
    /// Of them, those that drafted.
    pub drafted: u64,
    /// Tokens that rounds made.
    pub tokens: u64,
    /// Rounds whose time was measured, and seconds that they took together.
    pub timed: u64,
    /// See `timed`.
    pub seconds: f64,
    /// Drafted tokens that were verified, by their place in the block; those behind the end of a text do not count.
    pub verified: Vec<u64>,
    /// Of them, those that were accepted.
    pub accepted: Vec<u64>,
}

/// What a round did.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Round {
    /// Tokens that it made.
    pub tokens: usize,
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
        let now = js_sys::Reflect::get(&js_sys::global(), &"performance".into());
        let now = now.and_then(|performance| {
            let clock: js_sys::Function = js_sys::Reflect::get(&performance, &"now".into())?.into();
            clock.call0(&performance)
        });
        now.ok().and_then(|now| now.as_f64()).unwrap_or_else(js_sys::Date::now) / 1e3
    }
}
