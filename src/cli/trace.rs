//! `cedra trace`: every intermediate of one forward, under the names of the recorded reference.

use super::{Device, ModelArgs};
use crate::model::Options;
use crate::reference;
use crate::reference::model::LogitRows;
use anyhow::{bail, Context};
use clap::{Args, ValueEnum};
use std::ops::Range;
use std::path::PathBuf;

/// Writes every intermediate of one forward to a safetensors file.
#[derive(Debug, Args)]
pub(super) struct Trace {
    #[command(flatten)]
    model: ModelArgs,
    /// A file with token ids, separated by commas or white space.
    #[arg(long, value_name = "F")]
    tokens: PathBuf,
    /// The file to write.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Whether cache rows are rounded to their packed formats; `off` on the CPU only.
    #[arg(long, value_enum, default_value_t = Switch::On)]
    cache_quant: Switch,
    /// Layers to write: `a..b`, without b.
    #[arg(long, value_name = "a..b", value_parser = parse_layers)]
    layers: Option<Range<usize>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

impl Trace {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let text = std::fs::read_to_string(&self.tokens).with_context(|| self.tokens.display().to_string())?;
        let tokens = super::parse_ids(&text)?;
        let opened = super::runtime::open(&self.model)?;
        let count = opened.checkpoint.config().num_hidden_layers;
        let layers = self.layers.clone().unwrap_or(0..count);
        if layers.end > count || layers.is_empty() {
            bail!("setting `layers`: found {}..{}, allowed: a..b within 0..{count}", layers.start, layers.end);
        }
        let quantised = self.cache_quant == Switch::On;
        if !quantised && self.model.device == Device::Gpu {
            bail!("setting `cache-quant`: found off, allowed: on, for on a GPU the caches exist in packed form only");
        }
        let gpu = if quantised { super::runtime::choose(&self.model)? } else { None };
        let trace = match gpu {
            Some(gpu) => {
                let rows = tokens.len().max(1);
                let options =
                    Options { context: rows, chunk: rows, all_logits: true, poison: true, ..Options::default() };
                opened.gpu(gpu, options)?.trace(&tokens, layers.clone())?
            }
            None => {
                let options = reference::model::Options { cache_quant: quantised, ..Default::default() };
                let model = reference::model::Model::load(&opened.checkpoint, &opened.ngrams, options)?;
                let mut trace = reference::trace::Trace::new();
                model.forward(&mut model.state(), &tokens, LogitRows::All, Some(&mut trace))?;
                trace
            }
        };
        let kept = trace.filter(|name| match name.strip_prefix("layer_").and_then(|rest| rest.split_once('.')) {
            Some((index, _)) => index.parse().is_ok_and(|index| layers.contains(&index)),
            None => true,
        });
        kept.write(&self.out)?;
        Ok(())
    }
}

fn parse_layers(text: &str) -> Result<Range<usize>, String> {
    let bounds = text.split_once("..").and_then(|(a, b)| Some(a.trim().parse().ok()?..b.trim().parse().ok()?));
    bounds.ok_or_else(|| format!("`{text}` is not a range such as 4..6"))
}
