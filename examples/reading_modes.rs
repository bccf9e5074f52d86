//! What each way of reading a prompt costs: rows that each layer runs, and the time of them all.
//!
//!     cargo run --release --example reading_modes -- models/pocket 2048
//!
//! The prompt is random tokens. Times are the better of two readings after one that is not counted; on a GPU, a software one
//! will do.

use anyhow::{bail, Context};
use cedra::checkpoint::Checkpoint;
use cedra::gpu::{DeviceOptions, Gpu};
use cedra::model::synthetic::Random;
use cedra::model::{Model, Options, Sequence};
use cedra::reading::Prefill;
use cedra::text::{NgramTables, Tokenizer};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, length] = &arguments[..] else { bail!("usage: reading_modes MODEL TOKENS") };
    let length: usize = length.parse().with_context(|| format!("`{length}` is not a length"))?;
    let checkpoint = Checkpoint::open(folder)?;
    let tables = NgramTables::new(checkpoint.config(), &Tokenizer::open(folder)?)?;
    let gpu = Arc::new(Gpu::new_blocking(&DeviceOptions { software: true, ..DeviceOptions::default() })?);
    let options = Options { context: length, ..Options::default() };
    let model = Arc::new(Model::load_blocking(gpu.clone(), &checkpoint, &tables, &options, &mut |_, _| {})?);
    let tokens = Random::new(1).tokens(model.config().vocab_size, length);

    println!("{folder}, {length} tokens, window {}; {}\n", model.config().sliding_window, gpu.describe());
    println!("| | rows whole (in part), by layer | rows whole, all layers | over full | seconds | over full |");
    println!("|---|---|---|---|---|---|");
    let mut full = None;
    for (name, prefill) in [("full", Prefill::Full), ("exact", Prefill::Exact), ("bounded", Prefill::Bounded)] {
        let mut seconds = f64::INFINITY;
        let mut rows = vec![];
        for counted in [false, true, true] {
            let mut sequence = Sequence::new(model.clone())?;
            let started = Instant::now();
            sequence.append_as(&tokens, prefill, &mut |_| ControlFlow::Continue(()))?;
            if counted {
                seconds = seconds.min(started.elapsed().as_secs_f64());
            }
            rows = sequence.layer_rows();
        }
        let whole: u64 = rows.iter().map(|rows| rows.whole).sum();
        let (all, longest) = *full.get_or_insert((whole, seconds));
        let rows: Vec<_> = rows
            .iter()
            .map(|rows| match rows.part {
                0 => rows.whole.to_string(),
                part => format!("{} ({part})", rows.whole),
            })
            .collect();
        println!(
            "| {name} | {} | {whole} | {:.2} | {seconds:.2} | {:.2} |",
            rows.join(", "),
            whole as f64 / all as f64,
            seconds / longest
        );
    }
    Ok(())
}
