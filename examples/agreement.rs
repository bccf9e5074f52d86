//! How far the approximate modes are from the exact ones: a table of how often they would choose the same next token, and of
//! how much their distributions differ, by length of the text that was read.
//!
//!     cargo run --release --example agreement -- models/pocket README.md 64,256,1024
//!
//! At each length the text before it is read in every mode, and the text after it is what comes next, whatever the model would
//! say: each of its tokens is one prediction. On the CPU, which computes what a GPU does.

use anyhow::{bail, Context};
use cedra::checkpoint::Checkpoint;
use cedra::reading::{Prefill, Replay};
use cedra::reference::model::{LogitRows, Model, Options, State};
use cedra::reference::sample::greedy;
use cedra::text::{NgramTables, Tokenizer};
use std::path::Path;

/// Predictions compared at each length.
const FOLLOWING: usize = 32;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, file, lengths] = &arguments[..] else { bail!("usage: agreement MODEL TEXT LENGTH,LENGTH,...") };
    let checkpoint = Checkpoint::open(folder)?;
    let tokenizer = Tokenizer::open(folder)?;
    let tables = NgramTables::new(checkpoint.config(), &tokenizer)?;
    let model = Model::load(&checkpoint, &tables, Options::default())?;
    let text = std::fs::read_to_string(file).with_context(|| file.clone())?;
    let tokens = [vec![model.config.bos_token_id], tokenizer.encode_with_special(&text)?].concat();

    let name = |path: &str| Path::new(path).file_name().map_or(path.into(), |name| name.to_string_lossy().into_owned());
    println!("{} on {}, window {}:\n", name(folder), name(file), model.config.sliding_window);
    println!("| tokens | bounded against exact | | replay against never left | | replay against exact | |");
    println!("|---|---|---|---|---|---|---|");
    for length in lengths.split(',') {
        let length: usize = length.trim().parse().with_context(|| format!("`{length}` is not a length"))?;
        if length == 0 || length + FOLLOWING > tokens.len() {
            eprintln!("{length} tokens: left out, the text has {}", tokens.len());
            continue;
        }
        let (read, following) = tokens[..length + FOLLOWING - 1].split_at(length);
        let exact = predictions(&model, read_as(&model, read, Prefill::Exact)?, read, following)?;
        let left = read_as(&model, read, Prefill::Bounded)?;
        // All that a store keeps of a text: its tokens and global entries.
        let mut restored = left.clone();
        model.rebuild(&mut restored, read, left.position, Replay::Bounded)?;
        let bounded = predictions(&model, left, read, following)?;
        let replayed = predictions(&model, restored, read, following)?;
        let columns = [(&bounded, &exact), (&replayed, &bounded), (&replayed, &exact)];
        let columns = columns.map(|(a, b)| format!("{} of {FOLLOWING} | KL {:.1e}", same(a, b), divergence(b, a)));
        println!("| {length} | {} |", columns.join(" | "));
    }
    Ok(())
}

/// The state behind a text, whose last token waits.
fn read_as(model: &Model, tokens: &[u32], prefill: Prefill) -> cedra::Result<State> {
    let mut state = model.state();
    model.append(&mut state, tokens, prefill, &mut |_| {})?;
    Ok(state)
}

/// Logits of the last token of a text, and of those that follow it.
fn predictions(model: &Model, mut state: State, read: &[u32], following: &[u32]) -> cedra::Result<Vec<Vec<f32>>> {
    let rows = [&read[read.len() - 1..], following].concat();
    model.forward(&mut state, &rows, LogitRows::All, None)
}

/// Predictions whose best token is the same.
fn same(a: &[Vec<f32>], b: &[Vec<f32>]) -> usize {
    a.iter().zip(b).filter(|(a, b)| greedy(a) == greedy(b)).count()
}

/// Mean Kullback-Leibler divergence of the distributions of `q` from those of `p`, in nats.
fn divergence(p: &[Vec<f32>], q: &[Vec<f32>]) -> f64 {
    let of_row = |(p, q): (&Vec<f32>, &Vec<f32>)| -> f64 {
        let (p, q) = (log_softmax(p), log_softmax(q));
        p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
    };
    p.iter().zip(q).map(of_row).sum::<f64>() / p.len() as f64
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().fold(f64::NEG_INFINITY, |max, &l| max.max(l as f64));
    let sum: f64 = logits.iter().map(|&l| (l as f64 - max).exp()).sum();
    logits.iter().map(|&l| l as f64 - max - sum.ln()).collect()
}
