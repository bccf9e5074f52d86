//! One face for the two ways to run a model: a GPU, or plain loops on the CPU.

use super::{Device, Embedded, ModelArgs};
use crate::checkpoint::{Checkpoint, Fingerprint};
use crate::gpu::{DeviceOptions, Gpu};
use crate::model::{Model, Options, Sequence};
use crate::reading::Prefill;
use crate::sampling::Request;
use crate::spec::{Counters, Draft};
use crate::text::{NgramTables, Tokenizer};
use crate::{reference, Error, Result};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

/// What every command needs of a model that runs.
pub(super) trait Runtime {
    /// One line: what runs the model.
    fn description(&self) -> String;
    /// Reads tokens. `progress` hears how many of them are done.
    fn append(&mut self, tokens: &[u32], prefill: Prefill, progress: &mut dyn FnMut(usize)) -> Result<()>;
    /// Makes tokens until a stop id, `max_tokens` or an error.
    fn generate<'a>(&'a mut self, request: &Request) -> Result<Box<dyn Iterator<Item = Result<u32>> + 'a>>;
    /// What drafting did.
    fn draft_counters(&self) -> Counters;
    /// What was counted since the start, as JSON; null on the CPU.
    fn counters(&self) -> serde_json::Value;
}

/// Whether tokens are drafted, as far as a command says.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Drafts {
    /// What was asked for.
    pub asked: Option<Draft>,
    /// Whether the most likely tokens are taken.
    pub greedy: bool,
}

impl Drafts {
    /// What that means on a device; none is the CPU.
    pub fn on(self, gpu: Option<&Gpu>) -> Draft {
        self.asked.unwrap_or_else(|| Draft::usual(self.greedy, gpu.is_none_or(Gpu::is_software)))
    }
}

/// Where a model's files are.
#[derive(Debug, Clone)]
pub(super) enum Files {
    /// In a folder.
    Folder(PathBuf),
    /// In the program.
    Embedded(Embedded),
}

/// A model's files, opened and checked.
pub(super) struct Opened {
    files: Files,
    pub checkpoint: Checkpoint,
    pub tokenizer: Tokenizer,
    pub ngrams: NgramTables,
}

/// Opens a model folder; nothing is uploaded yet.
pub(super) fn open(args: &ModelArgs) -> Result<Opened> {
    Files::Folder(args.model.clone()).open()
}

impl Files {
    /// Opens the files; nothing is uploaded yet.
    pub fn open(self) -> Result<Opened> {
        let (checkpoint, tokenizer) = match &self {
            Self::Folder(folder) => (Checkpoint::open(folder)?, Tokenizer::open(folder)?),
            Self::Embedded(Embedded { config, weights, tokenizer }) => {
                let files = vec![("the embedded model".to_string(), *weights)];
                (Checkpoint::from_files(config, files)?, Tokenizer::from_bytes(tokenizer)?)
            }
        };
        let ngrams = NgramTables::new(checkpoint.config(), &tokenizer)?;
        Ok(Opened { files: self, checkpoint, tokenizer, ngrams })
    }
}

impl Opened {
    /// What sessions of this model carry.
    pub fn fingerprint(&self) -> Fingerprint {
        match &self.files {
            Files::Folder(folder) => {
                let tokenizer = std::fs::read(folder.join("tokenizer.json")).ok();
                Fingerprint::new(&self.checkpoint, tokenizer.as_deref())
            }
            Files::Embedded(embedded) => Fingerprint::new(&self.checkpoint, Some(embedded.tokenizer)),
        }
    }

    /// Ids of a text: control tokens that it spells are control tokens. At the beginning of a session it begins with the
    /// beginning-of-text token.
    pub fn text_ids(&self, text: &str, first: bool) -> Result<Vec<u32>> {
        let mut ids = self.tokenizer.encode_with_special(text)?;
        let bos = self.checkpoint.config().bos_token_id;
        if first && ids.first() != Some(&bos) {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// Loads the model on the device that was asked for.
    pub fn start(&self, args: &ModelArgs, context: usize, drafts: Drafts) -> Result<Box<dyn Runtime>> {
        let gpu = choose(args)?;
        let draft = drafts.on(gpu.as_deref());
        if let Some(gpu) = gpu {
            let options = Options { context, draft: draft != Draft::Off, ..Options::default() };
            let mut sequence = self.gpu(gpu, options)?;
            sequence.set_draft(draft)?;
            return Ok(Box::new(sequence));
        }
        let mut sequence = self.cpu()?;
        sequence.set_draft(draft)?;
        Ok(Box::new(sequence))
    }

    /// Loads the model on a GPU, with an empty text.
    pub fn gpu(&self, gpu: Arc<Gpu>, options: Options) -> Result<Sequence> {
        Sequence::new(self.load(gpu, options)?)
    }

    /// Loads the model on a GPU.
    pub fn load(&self, gpu: Arc<Gpu>, options: Options) -> Result<Arc<Model>> {
        let bar = super::progress::loading();
        let progress = &mut |bytes, total| {
            bar.set_length(total);
            bar.set_position(bytes);
        };
        Ok(Arc::new(Model::load_blocking(gpu, &self.checkpoint, &self.ngrams, &options, progress)?))
    }

    /// Loads the model for the CPU.
    pub fn cpu(&self) -> Result<reference::sequence::Sequence> {
        let options = reference::model::Options::default();
        let model = reference::model::Model::load(&self.checkpoint, &self.ngrams, options)?;
        Ok(reference::sequence::Sequence::new(model))
    }
}

/// The GPU that a command shall use, or none for the CPU.
pub(super) fn choose(args: &ModelArgs) -> Result<Option<Arc<Gpu>>> {
    let options = DeviceOptions { software: args.device == Device::Gpu, ..DeviceOptions::default() };
    let gpu = match args.device {
        Device::Cpu => None,
        Device::Gpu => Some(Gpu::new_blocking(&options)?),
        Device::Auto => match Gpu::new_blocking(&options) {
            Ok(gpu) => Some(gpu),
            Err(Error::NoGpu { looked_for }) => {
                eprintln!("cedra: no usable GPU ({looked_for}): running on the CPU");
                None
            }
            Err(error) => return Err(error),
        },
    };
    if args.verbose {
        match &gpu {
            Some(gpu) => eprintln!("cedra: {}", gpu.describe()),
            None => eprintln!("cedra: CPU, one thread"),
        }
    }
    Ok(gpu.map(Arc::new))
}

impl Runtime for Sequence {
    fn description(&self) -> String {
        self.gpu().describe()
    }
    fn append(&mut self, tokens: &[u32], prefill: Prefill, progress: &mut dyn FnMut(usize)) -> Result<()> {
        self.append_as(tokens, prefill, &mut |done| {
            progress(done);
            ControlFlow::Continue(())
        })
    }
    fn generate<'a>(&'a mut self, request: &Request) -> Result<Box<dyn Iterator<Item = Result<u32>> + 'a>> {
        Ok(Box::new(Sequence::generate(self, request)?))
    }
    fn draft_counters(&self) -> Counters {
        Sequence::draft_counters(self).clone()
    }
    fn counters(&self) -> serde_json::Value {
        serde_json::to_value(self.gpu().counters()).expect("counters are plain numbers")
    }
}

impl Runtime for reference::sequence::Sequence {
    fn description(&self) -> String {
        "CPU, one thread".into()
    }
    fn append(&mut self, tokens: &[u32], prefill: Prefill, progress: &mut dyn FnMut(usize)) -> Result<()> {
        self.set_prefill(prefill);
        reference::sequence::Sequence::append(self, tokens, progress)
    }
    fn generate<'a>(&'a mut self, request: &Request) -> Result<Box<dyn Iterator<Item = Result<u32>> + 'a>> {
        Ok(Box::new(reference::sequence::Sequence::generate(self, request)?))
    }
    fn draft_counters(&self) -> Counters {
        reference::sequence::Sequence::draft_counters(self).clone()
    }
    fn counters(&self) -> serde_json::Value {
        serde_json::Value::Null
    }
}
