//! How often a workgroup waits for its other invocations in a generated token, by kernel, without subgroups and with subgroups
//! of some sizes: a table.
//!
//!     cargo run --release --example barriers -- models/pocket 512
//!
//! Dispatches are counted while the device makes a token behind as many as are asked for. The barriers of a dispatch are those
//! that one workgroup passes, one behind the other; they follow from the loops of its shader. Of the kernels that have
//! variants with subgroups all are in the table, and `attend`, which has the most of the others.

use anyhow::{bail, ensure, Context};
use cedra::checkpoint::Checkpoint;
use cedra::config::Config;
use cedra::gpu::{DeviceOptions, Gpu, Pipeline};
use cedra::model::{Model, Options, Sequence};
use cedra::sampling::{Request, Sampling};
use cedra::text::{NgramTables, Tokenizer};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Lanes of a subgroup; 1: without.
const WIDTHS: [u64; 5] = [1, 4, 8, 32, 64];

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, context] = &arguments[..] else { bail!("usage: barriers MODEL TOKENS") };
    let context: usize = context.parse().with_context(|| format!("`{context}` is no number of tokens"))?;
    let checkpoint = Checkpoint::open(folder)?;
    let config = checkpoint.config();
    let tables = NgramTables::new(config, &Tokenizer::open(folder)?)?;
    let gpu = Arc::new(Gpu::new_blocking(&DeviceOptions { software: true, ..DeviceOptions::default() })?);
    let options = Options { context: context + 8, ..Options::default() };
    let model = Model::load_blocking(gpu.clone(), &checkpoint, &tables, &options, &mut |_, _| {})?;
    let mut sequence = Sequence::new(Arc::new(model))?;
    let prompt: Vec<u32> = (0..context as u64).map(|i| (i * 2_654_435_761 % config.vocab_size as u64) as u32).collect();
    sequence.append(&prompt, &mut |_| {})?;
    let mut make = |tokens| -> anyhow::Result<()> {
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let request = Request { max_tokens: tokens, sampling, stop_ids: vec![] };
        ensure!(sequence.generate(&request)?.filter(Result::is_ok).count() == tokens, "the text ended early");
        Ok(())
    };
    // A first token compiles, and ends the reading.
    make(1)?;
    let before = dispatches(&gpu);
    make(4)?;
    let mut kernels: BTreeMap<String, (f64, [f64; WIDTHS.len()])> = BTreeMap::new();
    for (key, (pipeline, count)) in dispatches(&gpu) {
        let each = (count - before.get(&key).map_or(0, |(_, count)| *count)) as f64 / 4.0;
        let kernel = pipeline.shader().kernel;
        for (i, &width) in WIDTHS.iter().enumerate() {
            let Some(barriers) = barriers(&pipeline, config, context as u64, width) else { continue };
            let row = kernels.entry(kernel.into()).or_default();
            row.0 += if i == 0 { each } else { 0.0 };
            row.1[i] += each * barriers;
        }
    }
    println!(
        "| kernel | dispatches | {} |",
        WIDTHS.map(|w| if w == 1 { "plain".into() } else { format!("{w} lanes") }).join(" | ")
    );
    println!("|---|---{}|", "|---".repeat(WIDTHS.len()));
    let total = kernels
        .values()
        .fold((0.0, [0.0; WIDTHS.len()]), |(n, sums), (m, row)| (n + m, std::array::from_fn(|i| sums[i] + row[i])));
    for (kernel, (count, row)) in kernels.into_iter().chain([("together".into(), total)]) {
        println!("| {kernel} | {count:.0} | {} |", row.map(|barriers| format!("{barriers:.0}")).join(" | "));
    }
    Ok(())
}

/// Dispatches so far, by what tells pipelines apart.
fn dispatches(gpu: &Gpu) -> BTreeMap<String, (Arc<Pipeline>, u64)> {
    let pipelines = gpu.pipelines().into_iter();
    pipelines
        .map(|pipeline| (format!("{pipeline:?} {:?}", pipeline.overrides()), (pipeline.clone(), pipeline.dispatches())))
        .collect()
}

/// What a workgroup of a dispatch passes on average, of a row; none for kernels that are not counted.
fn barriers(pipeline: &Pipeline, config: &Config, position: u64, width: u64) -> Option<f64> {
    let constant = |name: &str| {
        let found = pipeline.overrides().iter().find(|(key, _)| key == name);
        found.map_or(0, |(_, value)| *value as u64)
    };
    let streams = config.hc_mult as u64;
    // A tree over lanes, one level a barrier where it goes through shared memory, and before its sum is read there.
    let tree = |lanes: u64| if lanes > width { (lanes / width).ilog2() as u64 + 1 } else { 0 };
    let four = |lanes: u64| if lanes > width { tree(lanes) + 1 } else { 0 };
    let fits = streams.is_power_of_two() && streams <= width;
    let comb = if fits { 1 } else { 2 * config.hc_sinkhorn_iters as u64 };
    Some(match pipeline.shader().kernel {
        "linear" => four(constant("LANES")) + if constant("NORM") == 1 { tree(constant("LANES")) } else { 0 },
        "experts_up" => four(constant("LANES")) + tree(constant("LANES")),
        "experts_down" => four(constant("LANES")),
        "engram_gate" => 3 + comb + streams * ((256 / width).ilog2() as u64 + 1),
        "boundary" => {
            // Two a layer and one at the end, which makes no mix. The first finishes none, and those behind an Engram expand
            // nothing.
            let layers = config.layers.len() as u64;
            let engrams = config.layers.iter().filter(|layer| layer.engram.is_some()).count() as u64;
            let all = 2 * layers + 1;
            let projections = 1 + 2 * (streams * (streams + 2) + 1).div_ceil(16);
            let sum = 1 + (all - 1) * 3 + (all - 1 - engrams) * comb + (all - 1) * projections;
            return Some(sum as f64 / all as f64);
        }
        "attend" => {
            let window = (config.sliding_window as u64).min(position + 1).div_ceil(32);
            let globals = pipeline.shader().variant.starts_with("global");
            let selected = if globals { (config.index_topk as u64).min(position).div_ceil(32) } else { 0 };
            3 + 3 * (window + selected)
        }
        _ => return None,
    } as f64)
}
