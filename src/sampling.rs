//! How a request chooses tokens: settings, checked once, read by the device kernel and its CPU twin alike.

use crate::{Error, Result};

/// Sampling settings of one generation. The default is greedy.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f32,
    /// Keeps the smallest set of tokens whose probability reaches this, in (0, 1].
    pub top_p: f32,
    /// Keeps this many most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Seed of the generator: the same seed, settings and text give the same tokens.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0 }
    }
}

impl Sampling {
    /// Refuses settings that mean nothing.
    ///
    /// # Errors
    /// [`Error::Setting`] names the setting, its value and what is allowed.
    pub fn validate(&self) -> Result<()> {
        let setting = |setting, found: f32, allowed: &str| {
            Err(Error::Setting { setting, found: found.to_string(), allowed: allowed.into() })
        };
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            return setting("temperature", self.temperature, "a finite number, 0 or more");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return setting("top-p", self.top_p, "more than 0, at most 1");
        }
        Ok(())
    }
}

/// The generator of random numbers, part of a text's state: generations with the same seed draw one after the other from it,
/// another seed starts anew. So a text can be left and continued without a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Generator {
    /// Its seed.
    pub seed: u64,
    /// Tokens drawn so far.
    pub drawn: u32,
}

impl Generator {
    /// The generator of the next generation: this one, or a new one when the seed is another.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        match seed == self.seed {
            true => self,
            false => Self { seed, drawn: 0 },
        }
    }
}

/// What one generation is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// Tokens to make at most; at least 1.
    pub max_tokens: usize,
    /// How they are chosen.
    pub sampling: Sampling,
    /// Tokens that end the text; they are not part of it.
    pub stop_ids: Vec<u32>,
}

/// Stop ids that the device compares each sampled token with.
pub const MAX_STOP_IDS: usize = 16;

impl Request {
    /// Refuses a request that means nothing.
    ///
    /// # Errors
    /// [`Error::Setting`] or [`Error::TokenId`].
    pub fn validate(&self, vocabulary: usize) -> Result<()> {
        self.sampling.validate()?;
        if self.max_tokens == 0 {
            return Err(Error::Setting { setting: "max-tokens", found: "0".into(), allowed: "1 or more".into() });
        }
        if self.stop_ids.len() > MAX_STOP_IDS {
            return Err(Error::Setting {
                setting: "stop ids",
                found: format!("{} ids", self.stop_ids.len()),
                allowed: format!("at most {MAX_STOP_IDS}"),
            });
        }
        match self.stop_ids.iter().find(|&&id| id as usize >= vocabulary) {
            Some(&id) => Err(Error::TokenId { id, vocabulary }),
            None => Ok(()),
        }
    }
}
