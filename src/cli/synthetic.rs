//! `cedra bench --synthetic-cache`: what a token costs at contexts that nobody has the time to read.
//!
//! The caches hold random valid codes ([`Sequence::synthesize`]). Without `--model` the model is made up too: one layer of each
//! role at the attention widths of the release, with few and small experts and a small vocabulary.

use super::inspect::{index_flops, Inspection};
use crate::checkpoint::layout::{expected, TensorSpec};
use crate::checkpoint::{Checkpoint, Format};
use crate::gpu::{Gpu, MemoryKind};
use crate::layout::Layout;
use crate::model::synthetic::Random;
use crate::model::weights::Stored;
use crate::model::{Model, Options, Sequence};
use crate::sampling::{Request, Sampling};
use crate::text::{NgramTables, Tokenizer};
use crate::{Error, Result};
use safetensors::tensor::Dtype;
use serde::Serialize;
use serde_json::{json, Map, Value};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Contexts that are measured besides the one asked for, where they are shorter.
const CONTEXTS: [usize; 2] = [4096, 65_536];
/// Tokens that are made and not counted: a driver may compile a kernel when it first runs.
const WARM: usize = 1;
/// Tokens that are made with a timestamp around every dispatch.
const PROFILED: usize = 1;

/// What was measured.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    device: String,
    model: String,
    /// Longest context of the model, where it was raised to make room.
    #[serde(skip_serializing_if = "Option::is_none")]
    raised_from: Option<usize>,
    /// Tokens that were made at each context.
    generated: usize,
    contexts: Vec<AtContext>,
}

/// What a generated token costs at a context.
#[derive(Debug, Serialize)]
struct AtContext {
    context: usize,
    /// Slabs of pages.
    slabs: usize,
    submissions: f64,
    dispatches: f64,
    weight_bytes: f64,
    cache_bytes: f64,
    /// As `cedra inspect` counts them, index scores included.
    flops: u128,
    /// Of `flops`, those of index scores: products of 4-bit integers.
    index_flops: u128,
    seconds: f64,
    /// The same over those of the first context.
    over_first: OverFirst,
    memory: BTreeMap<MemoryKind, Memory>,
    /// Nanoseconds by kernel, where the device has timestamps; measured apart, a pass a dispatch.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    nanoseconds_by_kernel: BTreeMap<String, u64>,
}

/// Ratios to the first context.
#[derive(Debug, Serialize, Clone, Copy)]
struct OverFirst {
    bytes: f64,
    flops: f64,
    seconds: f64,
}

/// Bytes of a kind of device memory.
#[derive(Debug, Serialize)]
struct Memory {
    planned: u64,
    held: u64,
}

/// A model to measure.
pub(super) struct Subject {
    pub name: String,
    /// Longest context of the model, where it was raised.
    pub raised_from: Option<usize>,
    pub checkpoint: Checkpoint,
    pub ngrams: NgramTables,
}

/// Measures `generate` tokens a context: those of [`CONTEXTS`] that are shorter than `context`, and this one.
///
/// # Errors
/// [`Error::Setting`] for a context that no model can have, or without room for the tokens; those of the checkpoint and the
/// device.
pub(super) fn measure(gpu: &Arc<Gpu>, model: Option<&Path>, context: usize, generate: usize) -> Result<Report> {
    let needed = generate + WARM + PROFILED + 1;
    if generate == 0 || context < needed {
        let allowed = format!("at least {needed}, for {generate} tokens and those around them");
        return Err(Error::Setting { setting: "context", found: context.to_string(), allowed });
    }
    let subject = match model {
        Some(folder) => Subject::open(folder, context)?,
        None => Subject::made_up()?,
    };
    // A context that is too long shows before the shorter ones are measured.
    Layout::new(subject.checkpoint.config(), &Options { context, ..Options::default() })?;
    let mut contexts: Vec<AtContext> = vec![];
    let shorter = CONTEXTS.into_iter().filter(|&shorter| needed <= shorter && shorter < context);
    for context in shorter.chain([context]) {
        let mut at = subject.measure(gpu, context, generate)?;
        if let Some(first) = contexts.first() {
            at.over_first = OverFirst {
                bytes: (at.weight_bytes + at.cache_bytes) / (first.weight_bytes + first.cache_bytes),
                flops: at.flops as f64 / first.flops as f64,
                seconds: at.seconds / first.seconds,
            };
        }
        contexts.push(at);
    }
    let Subject { name, raised_from, .. } = subject;
    Ok(Report { device: gpu.describe(), model: name, raised_from, generated: generate, contexts })
}

impl Subject {
    /// A model's folder; its longest context is raised in memory when `context` is longer.
    pub fn open(folder: &Path, context: usize) -> Result<Self> {
        let mut checkpoint = Checkpoint::open(folder)?;
        let longest = checkpoint.config().max_position_embeddings;
        let raised_from = (context > longest).then_some(longest);
        if raised_from.is_some() {
            checkpoint = raised(folder, context)?;
        }
        let ngrams = NgramTables::new(checkpoint.config(), &Tokenizer::open(folder)?)?;
        Ok(Self { name: folder.display().to_string(), raised_from, checkpoint, ngrams })
    }

    /// The model that is made up.
    fn made_up() -> Result<Self> {
        let json = made_up_config().to_string();
        let config = crate::config::Config::from_json(&json)?;
        let checkpoint = Checkpoint::from_files(&json, vec![("synthetic weights".into(), weights(&config, 1))])?;
        let ngrams = NgramTables { token_map: vec![], pad: 0, layers: vec![] };
        let name = "made up: one layer of each role at the released attention widths".into();
        Ok(Self { name, raised_from: None, checkpoint, ngrams })
    }

    fn measure(&self, gpu: &Arc<Gpu>, context: usize, generate: usize) -> Result<AtContext> {
        let empty = gpu.counters().allocated;
        let options = Options { context, ..Options::default() };
        let model = Model::load_blocking(gpu.clone(), &self.checkpoint, &self.ngrams, &options, &mut |_, _| {})?;
        let mut sequence = Sequence::new(Arc::new(model))?;
        sequence.synthesize(context - generate - WARM - PROFILED, context as u64)?;
        let make = |sequence: &mut Sequence, max_tokens| -> Result<f64> {
            let request = Request { max_tokens, sampling: Sampling::default(), stop_ids: vec![] };
            let started = Instant::now();
            sequence.generate(&request)?.try_for_each(|token| token.map(drop))?;
            Ok(started.elapsed().as_secs_f64())
        };
        make(&mut sequence, WARM)?;
        let before = gpu.counters();
        let seconds = make(&mut sequence, generate)? / generate as f64;
        let spent = gpu.counters() - before;

        let model = sequence.model().clone();
        let plan = model.plan().at(model.layout(), sequence.paged()).by_kind();
        let held = |kind: &MemoryKind| spent.allocated[kind] - empty[kind];
        let memory = plan.iter().map(|(kind, &planned)| (*kind, Memory { planned, held: held(kind) })).collect();
        let mut nanoseconds_by_kernel = BTreeMap::new();
        if gpu.set_profiling(true).is_ok() {
            make(&mut sequence, PROFILED)?;
            for (kernel, time) in pollster::block_on(gpu.take_profile())? {
                nanoseconds_by_kernel.insert(kernel, time.nanoseconds / PROFILED as u64);
            }
            gpu.set_profiling(false)?;
        }
        let each = |count: u64| count as f64 / generate as f64;
        let config = self.checkpoint.config();
        Ok(AtContext {
            context,
            slabs: model.pool().slabs(0).len(),
            submissions: each(spent.submissions),
            dispatches: each(spent.dispatches),
            weight_bytes: each(spent.weight_bytes),
            cache_bytes: each(spent.cache_bytes),
            flops: Inspection::new(config, 0, Some(context))?.flops.decode,
            index_flops: index_flops(config, context),
            seconds,
            over_first: OverFirst { bytes: 1.0, flops: 1.0, seconds: 1.0 },
            memory,
            nanoseconds_by_kernel,
        })
    }
}

/// The model of a folder with another longest context. Its files are read, not mapped.
fn raised(folder: &Path, context: usize) -> Result<Checkpoint> {
    let path = folder.join("config.json");
    let text = std::fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
    let mut config: Value =
        serde_json::from_str(&text).map_err(|e| Error::malformed(&path, format!("not JSON: {e}")))?;
    let inner = if config["text_config"].is_object() { &mut config["text_config"] } else { &mut config };
    inner["max_position_embeddings"] = context.into();
    let mut files = vec![];
    for entry in std::fs::read_dir(folder).map_err(|e| Error::io(folder, e))? {
        let file = entry.map_err(|e| Error::io(folder, e))?.path();
        if file.extension().is_some_and(|extension| extension == "safetensors") {
            let bytes = std::fs::read(&file).map_err(|e| Error::io(&file, e))?;
            files.push((file.display().to_string(), bytes));
        }
    }
    Checkpoint::from_files(&config.to_string(), files)
}

/// Layers: window, Full of ratio 2, Reuse, Full of ratio 1 (the candidate source), Reindex, Reuse. Attention and selection are
/// as wide as the release's; experts, their number and the vocabulary are not, and there is no Engram.
fn made_up_config() -> Value {
    json!({
        "model_type": "deepseek_v41_text",
        "vocab_size": 1024,
        "hidden_size": 5120,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 64,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "swiglu_limit": 10.0,
        "max_position_embeddings": 1_048_576,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65_536,
        },
        "compress_rope_theta": 160_000.0,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 128,
        "compress_ratios": [0, 2, 2, 1, 1, 1],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 4],
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
        "hc_mult": 4,
    })
}

/// Random weights of a config as one safetensors file, in the formats of the release.
fn weights(config: &crate::config::Config, seed: u64) -> Vec<u8> {
    let (mut header, mut parts, mut end) = (Map::new(), vec![], 0);
    for spec in expected(config).into_iter().filter(|spec| spec.required) {
        let format = Stored::from(&spec).format;
        let (dtype, shape, scales) = spec.stored(format);
        let mut add = |name: String, dtype: Dtype, shape: &[usize]| {
            let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            let offsets = [end, end + bytes];
            header.insert(name, json!({ "dtype": dtype, "shape": shape, "data_offsets": offsets }));
            end += bytes;
            bytes
        };
        let codes = add(spec.name.clone(), dtype, &shape);
        let scales = match (scales, spec.scale_name()) {
            (Some(shape), Some(name)) => add(name, Dtype::F8_E8M0, &shape),
            _ => 0,
        };
        parts.push((spec, format, codes, scales));
    }
    let header = Value::Object(header).to_string();
    let mut file = Vec::with_capacity(8 + header.len() + end);
    file.extend((header.len() as u64).to_le_bytes());
    file.extend(header.as_bytes());
    let random = &mut Random::new(seed);
    for (spec, format, codes, scales) in parts {
        tensor(random, &spec, format, codes, &mut file);
        // A scale that keeps sums over a row near 1: E2M1 codes are about 3, E4M3 codes about 0.6.
        let down = spec.shape.last().map_or(0, |channels| channels.ilog2() / 2);
        let down = if format == Format::Fp4 { down + 1 } else { down };
        file.resize(file.len() + scales, 127 - down as u8);
    }
    file
}

/// Appends the `bytes` bytes of a tensor: codes of any value, or numbers of a size that fits what they are for.
fn tensor(random: &mut Random, spec: &TensorSpec, format: Format, bytes: usize, file: &mut Vec<u8>) {
    let norm = spec.shape.len() == 1 && spec.name.ends_with("norm.weight") || spec.name.ends_with("_scale");
    let fan_in = spec.shape.last().map_or(1.0, |&channels| channels as f32);
    let size = if spec.shape.len() == 1 || spec.name == "embed.weight" { 0.5 } else { (3.0 / fan_in).sqrt() };
    let end = file.len() + bytes;
    let value = |random: &mut Random| if norm { 1.0 } else { size * random.value() };
    match format {
        Format::F32 => (0..bytes / 4).for_each(|_| file.extend(value(random).to_le_bytes())),
        Format::Bf16 => (0..bytes / 2).for_each(|_| file.extend(half::bf16::from_f32(value(random)).to_le_bytes())),
        Format::F16 => (0..bytes / 2).for_each(|_| file.extend(half::f16::from_f32(value(random)).to_le_bytes())),
        // Without the top bit of its exponent no E4M3 code is NaN.
        Format::Fp8Block | Format::Fp8Row => {
            (0..bytes.div_ceil(8)).for_each(|_| file.extend((random.bits() & 0xbfbf_bfbf_bfbf_bfbf).to_le_bytes()))
        }
        Format::Fp4 => (0..bytes.div_ceil(8)).for_each(|_| file.extend(random.bits().to_le_bytes())),
    }
    file.truncate(end);
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.device)?;
        writeln!(f, "{}; caches of random codes, {} tokens made at each context", self.model, self.generated)?;
        if let Some(longest) = self.raised_from {
            writeln!(f, "the model is made for {longest} tokens: its positions were allowed to go on in memory")?;
        }
        let column = |f: &mut fmt::Formatter<'_>, name: &str, value: &dyn Fn(&AtContext) -> String| {
            let cells = self.contexts.iter().map(|at| format!("{:>18}", value(at)));
            writeln!(f, "{name:<28}{}", cells.collect::<String>())
        };
        column(f, "context", &|at| at.context.to_string())?;
        column(f, "a token: weight bytes", &|at| format!("{:.0}", at.weight_bytes))?;
        column(f, "  cache bytes", &|at| format!("{:.0}", at.cache_bytes))?;
        column(f, "  dispatches", &|at| format!("{:.2}", at.dispatches))?;
        column(f, "  submissions", &|at| format!("{:.2}", at.submissions))?;
        column(f, "  FLOPs", &|at| format!("{:.4} G", at.flops as f64 / 1e9))?;
        column(f, "    of index scores", &|at| format!("{:.4} G", at.index_flops as f64 / 1e9))?;
        column(f, "  milliseconds", &|at| format!("{:.1}", 1e3 * at.seconds))?;
        column(f, "over the first: bytes", &|at| format!("{:.3}", at.over_first.bytes))?;
        column(f, "  FLOPs", &|at| format!("{:.3}", at.over_first.flops))?;
        column(f, "  time", &|at| format!("{:.3}", at.over_first.seconds))?;
        column(f, "slabs of pages", &|at| at.slabs.to_string())?;
        let kinds: Vec<MemoryKind> = self.contexts.iter().flat_map(|at| at.memory.keys().copied()).collect();
        for kind in kinds.iter().copied().collect::<std::collections::BTreeSet<_>>() {
            let name = format!("{kind:?}").to_lowercase();
            column(f, &format!("{name} bytes, planned"), &|at| at.memory[&kind].planned.to_string())?;
            column(f, "  held", &|at| at.memory[&kind].held.to_string())?;
        }
        let mut kernels: BTreeMap<&String, u64> = BTreeMap::new();
        for (kernel, &time) in self.contexts.iter().flat_map(|at| &at.nanoseconds_by_kernel) {
            kernels.insert(kernel, time);
        }
        let mut kernels: Vec<_> = kernels.into_iter().collect();
        kernels.sort_by_key(|&(_, time)| std::cmp::Reverse(time));
        for (kernel, _) in kernels {
            let time = |at: &AtContext| at.nanoseconds_by_kernel.get(kernel).copied().unwrap_or(0);
            column(f, &format!("us in {kernel}"), &|at| format!("{:.1}", time(at) as f64 / 1e3))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Candidates, Config, Role};

    /// The model that is made up has the release's attention, and every role once.
    #[test]
    fn made_up_attention_is_the_released_one() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/reference/released-config.json");
        let (ours, released) = (Config::from_json(&made_up_config().to_string()).unwrap(), Config::open(path).unwrap());
        let adapted = Config {
            vocab_size: ours.vocab_size,
            num_hidden_layers: ours.num_hidden_layers,
            moe_intermediate_size: ours.moe_intermediate_size,
            n_routed_experts: ours.n_routed_experts,
            num_experts_per_tok: ours.num_experts_per_tok,
            engram: None,
            dspark: None,
            image_token_id: None,
            layers: ours.layers.clone(),
            ..released
        };
        assert_eq!(ours, adapted);
        let roles: Vec<_> = ours.layers.iter().map(|layer| (layer.role, layer.ratio)).collect();
        use Role::*;
        assert_eq!(roles, [(Window, 0), (Full, 2), (Reuse, 2), (Full, 1), (Reindex, 1), (Reuse, 1)]);
        assert_eq!(ours.layers[3].candidates, Candidates::Source);
        assert_eq!(ours.layers[4].candidates, Candidates::Restricted);
    }

    /// Weights are a whole checkpoint, in the release's formats, and finite.
    #[test]
    fn made_up_weights_are_a_checkpoint() {
        let mut json = made_up_config();
        for (field, value) in [("hidden_size", 96), ("q_lora_rank", 40), ("head_dim", 64), ("o_lora_rank", 16)] {
            json[field] = value.into();
        }
        let json = json.to_string();
        let config = Config::from_json(&json).unwrap();
        let file = ("weights".to_string(), weights(&config, 3));
        let checkpoint = Checkpoint::from_files(&json, vec![file]).unwrap();
        for spec in expected(&config) {
            let tensor = checkpoint.tensor(&spec.name).unwrap();
            assert_eq!(tensor.format, Stored::from(&spec).format, "{}", spec.name);
            let values = tensor.to_f32();
            let square = values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32;
            assert!(square > 1e-4 && square < 2.0, "{}: mean square {square}", spec.name);
        }
    }
}
