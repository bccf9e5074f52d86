//! `cedra bench --draft`: generation with and without drafts, by how many drafted tokens a round verifies.

use super::generate::read_text;
use super::runtime::Opened;
use crate::gpu::Gpu;
use crate::model::{Options, Sequence};
use crate::sampling::{Request, Sampling};
use crate::spec::Draft;
use crate::Error;
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// What was measured.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    device: String,
    context: usize,
    generated: usize,
    rows: Vec<Row>,
}

/// Generation with one choice; all but the first two by token.
#[derive(Debug, Serialize)]
struct Row {
    draft: String,
    rounds: u64,
    tokens_a_round: f64,
    /// Share of the drafted tokens at each place that were accepted, of those that were verified.
    accepted: Vec<f64>,
    submissions: f64,
    dispatches: f64,
    weight_bytes: f64,
    cache_bytes: f64,
    seconds: f64,
    /// Tokens a second, over those without drafts.
    speed: f64,
}

/// Reads a text and goes on with it, in every way that the model can draft.
pub(super) fn measure(
    opened: &Opened,
    gpu: Arc<Gpu>,
    text: Option<&Path>,
    prompt: &[u32],
    generate: usize,
) -> anyhow::Result<Report> {
    let prompt = match text {
        Some(path) => opened.text_ids(&read_text(path)?, true)?,
        None => prompt.to_vec(),
    };
    let options = Options { context: prompt.len() + generate + 1, draft: true, ..Options::default() };
    let mut origin = opened.gpu(gpu.clone(), options)?;
    let block = origin.model().block_size();
    if block == 0 {
        return Err(Error::Unsupported { what: "drafts of a model that has no draft stages".into() }.into());
    }
    origin.append(&prompt, &mut |_| {})?;
    let choices = [Draft::Off].into_iter().chain((0..=block).map(Draft::Tokens)).chain([Draft::Auto]);
    let mut rows: Vec<Row> = vec![];
    for draft in choices {
        // A driver may compile a kernel when it first runs: once unmeasured.
        run(&mut origin, draft, generate.min(2 * (1 + block)))?;
        let mut row = run(&mut origin, draft, generate)?;
        row.speed = rows.first().map_or(1.0, |plain| plain.seconds / row.seconds);
        rows.push(row);
    }
    Ok(Report { device: gpu.describe(), context: prompt.len(), generated: generate, rows })
}

fn run(origin: &mut Sequence, draft: Draft, generate: usize) -> anyhow::Result<Row> {
    let gpu = origin.gpu().clone();
    let mut sequence = origin.fork()?;
    sequence.set_draft(Draft::Off)?;
    sequence.set_draft(draft)?;
    let request = Request { max_tokens: generate, sampling: Sampling::default(), stop_ids: vec![] };
    let (before, started) = (gpu.counters(), Instant::now());
    let made = sequence.generate(&request)?.collect::<crate::Result<Vec<_>>>()?.len() as f64;
    let seconds = started.elapsed().as_secs_f64();
    let counted = gpu.counters() - before;
    let drafts = sequence.draft_counters();
    let places = drafts.verified.iter().zip(&drafts.accepted).filter(|(&verified, _)| verified > 0);
    Ok(Row {
        draft: draft.to_string(),
        rounds: drafts.rounds,
        tokens_a_round: made / drafts.rounds as f64,
        accepted: places.map(|(&verified, &accepted)| accepted as f64 / verified as f64).collect(),
        submissions: counted.submissions as f64 / made,
        dispatches: counted.dispatches as f64 / made,
        weight_bytes: counted.weight_bytes as f64 / made,
        cache_bytes: counted.cache_bytes as f64 / made,
        seconds: seconds / made,
        speed: 1.0,
    })
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{}", self.device)?;
        writeln!(
            f,
            "{} tokens behind {}; submissions, dispatches, bytes and time are a token's",
            self.generated, self.context
        )?;
        writeln!(
            f,
            "{:>6} {:>7} {:>13} {:>11} {:>10} {:>13} {:>12} {:>8} {:>6}  accepted by place",
            "draft",
            "rounds",
            "tokens/round",
            "submissions",
            "dispatches",
            "weight bytes",
            "cache bytes",
            "ms",
            "speed"
        )?;
        for row in &self.rows {
            let accepted: Vec<String> = row.accepted.iter().map(|share| format!("{share:.2}")).collect();
            writeln!(
                f,
                "{:>6} {:>7} {:>13.2} {:>11.2} {:>10.1} {:>13.0} {:>12.0} {:>8.2} {:>6.2}  {}",
                row.draft,
                row.rounds,
                row.tokens_a_round,
                row.submissions,
                row.dispatches,
                row.weight_bytes,
                row.cache_bytes,
                1e3 * row.seconds,
                row.speed,
                accepted.join(" ")
            )?;
        }
        Ok(())
    }
}
