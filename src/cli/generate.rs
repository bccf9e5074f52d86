//! `cedra generate`: a prompt in, text out.

use super::ModelArgs;
use crate::sampling::{Request, Sampling};
use anyhow::Context;
use clap::{ArgGroup, Args};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::Instant;

/// Generates text from a prompt.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("input").required(true).args(["prompt", "prompt_file", "tokens"])))]
pub(super) struct Generate {
    #[command(flatten)]
    model: ModelArgs,
    /// The prompt.
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// A file with the prompt; `-` reads standard input.
    #[arg(long, value_name = "F")]
    prompt_file: Option<PathBuf>,
    /// The prompt as token ids: 5,6,7.
    #[arg(long, value_name = "IDS")]
    tokens: Option<String>,
    /// Tokens to make at most.
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_tokens: usize,
    /// Divides the logits; 0 always takes the most likely token.
    #[arg(long, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true)]
    temperature: f32,
    /// Keeps the smallest set of tokens whose probability reaches P.
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f32,
    /// Keeps the K most likely tokens; 0 keeps all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: u32,
    /// The same seed, settings and text give the same tokens.
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Prints one JSON object: ids, text, timings, counters.
    #[arg(long)]
    json: bool,
}

impl Generate {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let request = Request {
            max_tokens: self.max_tokens,
            sampling: Sampling { temperature: self.temperature, top_p: self.top_p, top_k: self.top_k, seed: self.seed },
            stop_ids: vec![],
        };
        request.validate(usize::MAX)?;

        let started = Instant::now();
        let opened = super::runtime::open(&self.model)?;
        let config = opened.checkpoint.config();
        let prompt = match (&self.prompt, &self.prompt_file, &self.tokens) {
            (Some(text), _, _) => opened.prompt_ids(text)?,
            (_, Some(path), _) => opened.prompt_ids(&read_prompt(path)?)?,
            (_, _, Some(ids)) => super::parse_ids(ids)?,
            _ => unreachable!("clap asks for one of the three"),
        };
        let request = Request { stop_ids: vec![config.eos_token_id], ..request };
        crate::reference::sequence::check_room(prompt.len(), self.max_tokens, config.max_position_embeddings)?;
        let mut runtime = opened.start(&self.model, prompt.len() + self.max_tokens)?;
        let load_seconds = started.elapsed().as_secs_f64();

        let reading = Instant::now();
        let bar = progress_bar(self.json, prompt.len() as u64, "reading");
        runtime.append(&prompt, &mut |done| bar.set_position(done as u64))?;
        bar.finish_and_clear();

        let mut out = std::io::stdout().lock();
        let mut text = String::new();
        let mut ids = Vec::new();
        let mut decoder = opened.tokenizer.stream();
        let mut first = None;
        let finish = {
            let mut tokens = runtime.generate(&request)?;
            for id in &mut tokens {
                let id = id?;
                first.get_or_insert_with(|| reading.elapsed().as_secs_f64());
                ids.push(id);
                let piece = decoder.push(id)?;
                if !self.json {
                    out.write_all(piece.as_bytes())?;
                    out.flush()?;
                }
                text.push_str(&piece);
            }
            let tail = decoder.finish();
            if !self.json {
                writeln!(out, "{tail}")?;
            }
            text.push_str(&tail);
            if ids.len() == self.max_tokens {
                "length"
            } else {
                "stop"
            }
        };
        let total = reading.elapsed().as_secs_f64();
        let first = first.unwrap_or(total);
        if self.json {
            let decode_seconds = total - first;
            let report = serde_json::json!({
                "prompt_ids": prompt,
                "ids": ids,
                "text": text,
                "finish": finish,
                "device": runtime.description(),
                "timings": {
                    "load_seconds": load_seconds,
                    "first_token_seconds": first,
                    "decode_seconds": decode_seconds,
                    "decode_tokens_per_second":
                        if ids.len() > 1 { (ids.len() - 1) as f64 / decode_seconds } else { 0.0 },
                },
                "counters": runtime.counters(),
            });
            serde_json::to_writer_pretty(&mut out, &report)?;
            writeln!(out)?;
        }
        Ok(())
    }
}

fn read_prompt(path: &std::path::Path) -> anyhow::Result<String> {
    if path.as_os_str() == "-" {
        return std::io::read_to_string(std::io::stdin()).context("standard input");
    }
    std::fs::read_to_string(path).with_context(|| path.display().to_string())
}

/// A bar on a terminal, nothing when piped.
pub(super) fn progress_bar(hidden: bool, length: u64, what: &'static str) -> ProgressBar {
    if hidden || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style =
        ProgressStyle::with_template("{msg} {bar:30} {pos}/{len} {per_sec}, {eta} left").expect("a valid template");
    ProgressBar::new(length).with_style(style).with_message(what)
}
