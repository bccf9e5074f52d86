//! `cedra bench`: prefill and decode, timed and counted.

use super::{Device, ModelArgs};
use crate::checkpoint::layout::expected;
use crate::checkpoint::Checkpoint;
use crate::gpu::Counters;
use crate::model::{Options, Sequence};
use crate::sampling::{Request, Sampling};
use crate::Error;
use anyhow::Context;
use clap::Args;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

/// Measures prefill and decode, and counts what they read.
#[derive(Debug, Args)]
pub(super) struct Bench {
    /// Folder with config.json, safetensors files and tokenizer.json.
    #[arg(long, value_name = "DIR", required_unless_present = "synthetic_cache")]
    model: Option<PathBuf>,
    /// What runs the model: `auto` takes a GPU where there is one, else the CPU.
    #[arg(long, value_enum, default_value_t = Device::Auto)]
    device: Device,
    /// Prints what was chosen: adapter, its features and limits.
    #[arg(short, long)]
    verbose: bool,
    /// Tokens of the prompt, 512 by default; of a synthetic cache, 1048576 by default.
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Tokens to generate after it, 32 by default; after a synthetic cache 4.
    #[arg(long, value_name = "N")]
    generate: Option<usize>,
    /// Reads nothing: measures generation at 4096, 65536 and N tokens of random cache, of a model that is made up when none is
    /// given. On a GPU, a software one will do.
    #[arg(long)]
    synthetic_cache: bool,
    /// Measures what it costs to go on with saved sessions of these lengths, beside reading their texts anew. On a GPU, a
    /// software one will do.
    #[arg(long, value_name = "N,N", value_delimiter = ',', conflicts_with_all = ["synthetic_cache", "context", "generate"])]
    restore: Vec<usize>,
    /// Measures generation with and without drafts, by how many drafted tokens a round verifies. On a GPU, a software one will do.
    #[arg(long, conflicts_with_all = ["synthetic_cache", "restore"])]
    draft: bool,
    /// With `--draft`: a file with the text to go on with; how many drafted tokens stand depends on it.
    #[arg(long, value_name = "F", requires = "draft", conflicts_with = "context")]
    text: Option<PathBuf>,
    /// Prints one JSON object.
    #[arg(long)]
    json: bool,
}

/// What was measured.
#[derive(Debug, Serialize)]
struct Report {
    device: String,
    context: usize,
    generated: usize,
    load_seconds: f64,
    prefill_tokens_per_second: f64,
    decode_tokens_per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill: Option<Phase>,
    #[serde(skip_serializing_if = "Option::is_none")]
    decode: Option<Phase>,
}

/// What a phase did on the device, a token.
#[derive(Debug, Serialize)]
struct Phase {
    submissions: f64,
    dispatches: f64,
    readbacks: f64,
    blocking_readbacks: f64,
    weight_bytes: f64,
    cache_bytes: f64,
    /// Weight bytes of the checkpoint that the phase must read once, over those that the dispatches read.
    needed_over_read: f64,
    /// Nanoseconds a token by kernel, where the device has timestamps; measured apart, a pass a dispatch.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    nanoseconds_by_kernel: BTreeMap<String, u64>,
}

impl Phase {
    /// Of a phase with so many tokens; nothing of one without any.
    fn new(
        counters: &Counters,
        tokens: usize,
        needed: f64,
        nanoseconds_by_kernel: BTreeMap<String, u64>,
    ) -> Option<Self> {
        let each = |count: u64| count as f64 / tokens as f64;
        (tokens > 0).then(|| Self {
            submissions: each(counters.submissions),
            dispatches: each(counters.dispatches),
            readbacks: each(counters.readbacks),
            blocking_readbacks: each(counters.blocking_readbacks),
            weight_bytes: each(counters.weight_bytes),
            cache_bytes: each(counters.cache_bytes),
            needed_over_read: needed / counters.weight_bytes as f64,
            nanoseconds_by_kernel,
        })
    }
}

impl Bench {
    pub(super) fn run(self) -> anyhow::Result<()> {
        if self.generate == Some(0) {
            return Err(Error::Setting { setting: "generate", found: "0".into(), allowed: "1 or more".into() }.into());
        }
        if self.synthetic_cache || !self.restore.is_empty() {
            return self.without_reading();
        }
        let folder = self.model.clone().context("clap asks for a model")?;
        let started = Instant::now();
        let (context, generate) = (self.context.unwrap_or(512), self.generate.unwrap_or(32));
        let args = ModelArgs { model: folder, device: self.device, verbose: self.verbose };
        let opened = super::runtime::open(&args)?;
        let config = opened.checkpoint.config();
        // Ids that spread over the vocabulary and repeat no n-gram soon; the first is the beginning of a text.
        let vocabulary = config.vocab_size as u64;
        let mut prompt: Vec<u32> = (0..context as u64).map(|i| (i * 2_654_435_761 % vocabulary) as u32).collect();
        if let Some(first) = prompt.first_mut() {
            *first = config.bos_token_id;
        }
        if self.draft {
            let args = ModelArgs { device: need_gpu(self.device, "drafts")?, ..args };
            let gpu = super::runtime::choose(&args)?.context("a GPU, a software one will do")?;
            return self.print(&super::drafts::measure(&opened, gpu, self.text.as_deref(), &prompt, generate)?);
        }
        let sampling = Sampling::default();
        let request = Request { max_tokens: generate, sampling, stop_ids: vec![] };
        let context = context + 2 * generate + 1;
        let report = match super::runtime::choose(&args)? {
            Some(gpu) => {
                let sequence = opened.gpu(gpu, Options { context, ..Options::default() })?;
                gpu_report(sequence, &opened.checkpoint, &prompt, &request, started)?
            }
            None => {
                let mut sequence = opened.cpu()?;
                let load_seconds = started.elapsed().as_secs_f64();
                let reading = Instant::now();
                sequence.append(&prompt, &mut |_| {})?;
                let prefill_seconds = reading.elapsed().as_secs_f64();
                let writing = Instant::now();
                let generated = sequence.generate(&request)?.collect::<crate::Result<Vec<_>>>()?.len();
                let decode_seconds = writing.elapsed().as_secs_f64();
                Report {
                    device: "CPU, one thread".into(),
                    context: prompt.len(),
                    generated,
                    load_seconds,
                    prefill_tokens_per_second: prompt.len() as f64 / prefill_seconds,
                    decode_tokens_per_second: generated as f64 / decode_seconds,
                    prefill: None,
                    decode: None,
                }
            }
        };
        let mut out = std::io::stdout().lock();
        if self.json {
            serde_json::to_writer_pretty(&mut out, &report)?;
            writeln!(out)?;
            return Ok(());
        }
        writeln!(out, "{}", report.device)?;
        writeln!(out, "prefill  {:>10.1} tokens/s over {} tokens", report.prefill_tokens_per_second, report.context)?;
        writeln!(out, "decode   {:>10.1} tokens/s over {} tokens", report.decode_tokens_per_second, report.generated)?;
        for (name, phase) in [("prefill", &report.prefill), ("decode", &report.decode)] {
            let Some(phase) = phase else { continue };
            writeln!(
                out,
                "{name}, a token: {:.2} submissions, {:.1} dispatches, {:.2} readbacks ({:.2} blocking), {:.0} weight bytes, \
                 {:.0} cache bytes; needed over read {:.3}",
                phase.submissions,
                phase.dispatches,
                phase.readbacks,
                phase.blocking_readbacks,
                phase.weight_bytes,
                phase.cache_bytes,
                phase.needed_over_read,
            )?;
            let mut kernels: Vec<_> = phase.nanoseconds_by_kernel.iter().collect();
            kernels.sort_by_key(|&(_, &nanoseconds)| std::cmp::Reverse(nanoseconds));
            for (kernel, nanoseconds) in kernels {
                writeln!(out, "  {:>10.1} us a token in {kernel}", *nanoseconds as f64 / 1e3)?;
            }
        }
        Ok(())
    }

    /// Synthetic caches and restores.
    fn without_reading(self) -> anyhow::Result<()> {
        let what = if self.synthetic_cache { "a synthetic cache" } else { "sessions" };
        let device = need_gpu(self.device, what)?;
        let model = self.model.clone().unwrap_or_default();
        let args = ModelArgs { model: model.clone(), device, verbose: self.verbose };
        let gpu = super::runtime::choose(&args)?.context("a GPU, a software one will do")?;
        if self.synthetic_cache {
            let (context, generate) = (self.context.unwrap_or(1 << 20), self.generate.unwrap_or(4));
            return self.print(&super::synthetic::measure(&gpu, self.model.as_deref(), context, generate)?);
        }
        self.print(&super::restore::measure(&gpu, &model, &self.restore)?)
    }

    fn print(&self, report: &(impl Serialize + std::fmt::Display)) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        if self.json {
            serde_json::to_writer_pretty(&mut out, report)?;
            return Ok(writeln!(out)?);
        }
        Ok(write!(out, "{report}")?)
    }
}

/// What is not measured on the CPU.
fn need_gpu(device: Device, what: &str) -> crate::Result<Device> {
    match device {
        Device::Cpu => Err(Error::Unsupported { what: format!("{what} on the CPU") }),
        _ => Ok(Device::Gpu),
    }
}

fn gpu_report(
    mut sequence: Sequence,
    checkpoint: &Checkpoint,
    prompt: &[u32],
    request: &Request,
    started: Instant,
) -> anyhow::Result<Report> {
    let gpu = sequence.gpu().clone();
    let load_seconds = started.elapsed().as_secs_f64();
    // A driver may compile a kernel when it first runs: every chunk size of the prompt and a few steps, unmeasured.
    sequence.append(prompt, &mut |_| {})?;
    sequence.generate(&Request { max_tokens: 2, ..request.clone() })?.try_for_each(|token| token.map(drop))?;
    sequence.clear()?;
    let before = gpu.counters();
    let reading = Instant::now();
    sequence.append(prompt, &mut |_| {})?;
    let prefill_seconds = reading.elapsed().as_secs_f64();
    let read = gpu.counters();
    let writing = Instant::now();
    let generated = sequence.generate(request)?.collect::<crate::Result<Vec<_>>>()?.len();
    let decode_seconds = writing.elapsed().as_secs_f64();
    let written = gpu.counters();

    let (mut reading_kernels, mut writing_kernels) = (BTreeMap::new(), BTreeMap::new());
    if gpu.set_profiling(true).is_ok() {
        let times = |tokens: usize| -> crate::Result<_> {
            let times = pollster::block_on(gpu.take_profile())?;
            Ok(times.into_iter().map(|(kernel, time)| (kernel, time.nanoseconds / tokens.max(1) as u64)).collect())
        };
        let profiled = sequence.generate(request)?.collect::<crate::Result<Vec<_>>>()?.len();
        writing_kernels = times(profiled)?;
        sequence.clear()?;
        sequence.append(prompt, &mut |_| {})?;
        reading_kernels = times(prompt.len() - 1)?;
        gpu.set_profiling(false)?;
    }
    let [whole, active] = needed_bytes(checkpoint)?;
    let tokens = prompt.len() - 1;
    Ok(Report {
        device: gpu.describe(),
        context: prompt.len(),
        generated,
        load_seconds,
        prefill_tokens_per_second: tokens as f64 / prefill_seconds,
        decode_tokens_per_second: generated as f64 / decode_seconds,
        prefill: Phase::new(&(read.clone() - before), tokens, whole, reading_kernels),
        decode: Phase::new(&(written - read), generated, active * generated as f64, writing_kernels),
    })
}

/// Bytes of the checkpoint's backbone that a prompt of any length must read once (without head and lookup tables), and that a
/// generated token must read: all but the experts that were not chosen and the tables' other rows.
fn needed_bytes(checkpoint: &Checkpoint) -> crate::Result<[f64; 2]> {
    let config = checkpoint.config();
    let (mut whole, mut active) = (0.0, 0.0);
    for spec in expected(config).iter().filter(|spec| spec.required) {
        let tensor = checkpoint.tensor(&spec.name)?;
        let bytes = (tensor.data.len() + tensor.scales.map_or(0, |(scales, _)| scales.len())) as f64;
        let rows = tensor.rows() as f64;
        if spec.name == "embed.weight" {
            active += bytes / rows;
        } else if spec.name.ends_with("engram.embed.weight") {
            active += bytes / rows * config.engram.as_ref().map_or(0.0, |engram| engram.rows_per_token() as f64);
        } else if spec.name.contains(".experts.") {
            whole += bytes;
            active += bytes * config.num_experts_per_tok as f64 / config.n_routed_experts as f64;
        } else if spec.name == "head.weight" {
            active += bytes;
        } else if !spec.name.ends_with("bias_vl") {
            whole += bytes;
            active += bytes;
        }
    }
    Ok([whole, active])
}
