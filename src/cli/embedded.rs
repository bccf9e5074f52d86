//! The model that the binary carries, and the arguments of commands that may go without another.

use super::runtime::{Files, Opened};
use super::Device;
use crate::gpu::{DeviceOptions, Gpu};
use crate::{Error, Result};
use clap::Args;
use std::path::PathBuf;
use std::sync::Arc;

/// The files of a model that is part of the program.
#[derive(Debug, Clone, Copy)]
pub struct Embedded {
    /// Its `config.json`.
    pub config: &'static str,
    /// Its `model.safetensors`.
    pub weights: &'static [u8],
    /// Its `tokenizer.json`.
    pub tokenizer: &'static [u8],
}

/// Where the model comes from, if it is not the one inside, and where it runs.
#[derive(Debug, Args)]
pub(super) struct AnyModelArgs {
    /// Folder with config.json, safetensors files and tokenizer.json; the small model inside this program by default.
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// What runs the model: `auto` takes a GPU, a software one where there is no other, else the CPU, which keeps no sessions.
    #[arg(long, value_enum, default_value_t = Device::Auto, hide_possible_values = true)]
    device: Device,
    /// Prints what was chosen: adapter, its features and limits.
    #[arg(short, long)]
    pub verbose: bool,
}

impl AnyModelArgs {
    /// Opens the model's files. Standard error hears when it is the small one, unless it is `quiet`.
    pub fn open(&self, embedded: Option<Embedded>, quiet: bool) -> Result<Opened> {
        if let Some(folder) = &self.model {
            return Files::Folder(folder.clone()).open();
        }
        let Some(embedded) = embedded else {
            let allowed = "a folder with a model: this program has none inside".into();
            return Err(Error::Setting { setting: "model", found: "nothing".into(), allowed });
        };
        if !quiet {
            let megabytes = (embedded.weights.len() + embedded.tokenizer.len()) / 1_000_000;
            eprintln!(
                "cedra: no --model given, so the pocket model inside answers. It is small ({megabytes} MB): it finds names and \
                 numbers that a text states, and is often wrong"
            );
        }
        Files::Embedded(embedded).open()
    }

    /// What the model is, for a report.
    pub fn name(&self) -> String {
        self.model.as_ref().map_or("pocket".into(), |folder| folder.display().to_string())
    }

    /// The GPU to use, or none for the CPU.
    pub fn choose(&self) -> Result<Option<Arc<Gpu>>> {
        let gpu = match self.device {
            Device::Cpu => None,
            device => match Gpu::new_blocking(&DeviceOptions { software: true, ..DeviceOptions::default() }) {
                Err(Error::NoGpu { looked_for }) if device == Device::Auto => {
                    eprintln!("cedra: no usable GPU ({looked_for}): running on the CPU");
                    None
                }
                gpu => Some(gpu?),
            },
        };
        if self.verbose {
            eprintln!("cedra: {}", gpu.as_ref().map_or("CPU, one thread".into(), |gpu| gpu.describe()));
        }
        Ok(gpu.map(Arc::new))
    }
}
