//! `cedra generate`: a prompt in, text out.

use super::runtime::{Drafts, Opened};
use super::session::{check_read, name_of_session, open_store, saved, Kept, Place, Settings};
use super::{progress, ModelArgs};
use crate::reading::Prefill;
use crate::reference::sequence::check_room;
use crate::sampling::{Request, Sampling};
use crate::spec::{Counters, Draft};
use crate::text::{StreamDecoder, Tokenizer};
use anyhow::Context;
use clap::{ArgGroup, Args, ValueEnum};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// How tokens are drawn, and how many.
#[derive(Debug, Clone, Args)]
pub(super) struct SamplingArgs {
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
    /// Tokens that the model's draft stages guess for each pass to verify: a number, `off`, or `auto`, which measures what pays.
    /// Greedy text is the same with every choice, and drawn text as likely. `auto` on a GPU that is no software one and at
    /// temperature 0, else `off`.
    #[arg(long, value_name = "auto|off|N")]
    draft: Option<Draft>,
}

impl SamplingArgs {
    /// The request that they make.
    pub(super) fn request(&self, stop_ids: Vec<u32>) -> crate::Result<Request> {
        let Self { max_tokens, temperature, top_p, top_k, seed, .. } = *self;
        let request = Request { max_tokens, sampling: Sampling { temperature, top_p, top_k, seed }, stop_ids };
        request.validate(usize::MAX)?;
        Ok(request)
    }

    /// What they say of drafts.
    pub(super) fn drafts(&self) -> Drafts {
        Drafts { asked: self.draft, greedy: self.temperature == 0.0 }
    }
}

/// Which rows the layers run when a text is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum PrefillArg {
    /// The decoder half reads the last window of tokens only: approximate, at half the work.
    Bounded,
    /// What a full reading leaves, at the least work that leaves exactly that.
    Exact,
    /// Every layer reads every token.
    Full,
}

impl From<PrefillArg> for Prefill {
    fn from(arg: PrefillArg) -> Self {
        match arg {
            PrefillArg::Bounded => Self::Bounded,
            PrefillArg::Exact => Self::Exact,
            PrefillArg::Full => Self::Full,
        }
    }
}

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
    #[command(flatten)]
    sampling: SamplingArgs,
    /// How the prompt is read.
    #[arg(long, value_enum, default_value_t = PrefillArg::Bounded)]
    prefill: PrefillArg,
    /// Keeps the text as a session of this name, and goes on with it if there is one; needs a GPU, a software one will do.
    #[arg(long, value_name = "NAME", requires = "store", value_parser = name_of_session)]
    session: Option<String>,
    /// File that holds the sessions; made when it is not there.
    #[arg(long, value_name = "PATH", requires = "session")]
    store: Option<PathBuf>,
    /// Prints one JSON object: ids, text, timings, counters.
    #[arg(long)]
    json: bool,
}

impl Generate {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let request = self.sampling.request(vec![])?;
        let started = Instant::now();
        let opened = super::runtime::open(&self.model)?;
        let config = opened.checkpoint.config();
        let request = Request { stop_ids: vec![config.eos_token_id], ..request };
        if let (Some(name), Some(store)) = (&self.session, &self.store) {
            return self.go_on(opened, name, store, &request, started);
        }
        let prompt = self.prompt(&opened, true)?;
        check_room(prompt.len(), request.max_tokens, config.max_position_embeddings)?;
        let mut runtime = opened.start(&self.model, prompt.len() + request.max_tokens, self.sampling.drafts())?;
        let load_seconds = started.elapsed().as_secs_f64();

        let reading = Instant::now();
        let bar = progress::reading(prompt.len());
        runtime.append(&prompt, self.prefill.into(), &mut |done| bar.set_position(done as u64))?;
        drop(bar);
        let written = {
            let mut voice = Voice::new(&opened.tokenizer, self.json);
            for token in runtime.generate(&request)? {
                if !voice.say(token?)? {
                    break;
                }
            }
            voice.end()?
        };
        let (device, counters, draft) = (runtime.description(), runtime.counters(), runtime.draft_counters());
        self.report(&Outcome {
            prompt: &prompt,
            written: &written,
            finish: finish(&written, &request),
            load_seconds,
            reading,
            device: &device,
            counters,
            draft,
            session: None,
        })
    }

    /// Goes on with a session, or begins it, and keeps it.
    fn go_on(
        &self,
        opened: Opened,
        name: &str,
        store: &Path,
        request: &Request,
        started: Instant,
    ) -> anyhow::Result<()> {
        let drafts = self.sampling.drafts();
        let settings = Settings { model: self.model.clone(), name, rings: None, quiet: self.json, drafts };
        settings.need_gpu()?;
        let store = open_store(store)?;
        let manifest = saved(&*store, name)?;
        let prompt = self.prompt(&opened, manifest.as_ref().is_none_or(|manifest| manifest.tokens == 0))?;
        check_read(&opened, manifest.as_ref(), &prompt)?;
        let mut place = Place::new(&settings, opened, store, manifest.as_ref(), prompt.len() + request.max_tokens)?;
        let load_seconds = started.elapsed().as_secs_f64();
        let reading = Instant::now();
        place.read(&prompt, self.prefill.into())?;
        let (written, kept) = place.answer(request)?;
        let gpu = place.gpu();
        self.report(&Outcome {
            prompt: &prompt,
            finish: place.finish(&written, request),
            written: &written,
            load_seconds,
            reading,
            device: &gpu.describe(),
            counters: serde_json::to_value(gpu.counters())?,
            draft: place.draft_counters()?,
            session: Some(kept),
        })?;
        place.end()
    }

    /// The prompt's ids; at the beginning of a text they begin with its token.
    fn prompt(&self, opened: &Opened, first: bool) -> anyhow::Result<Vec<u32>> {
        let text = |text: &str| opened.text_ids(text, first);
        match (&self.prompt, &self.prompt_file, &self.tokens) {
            (Some(given), _, _) => Ok(text(given)?),
            (_, Some(path), _) => Ok(text(&read_text(path)?)?),
            (_, _, Some(ids)) => super::parse_ids(ids),
            _ => unreachable!("clap asks for one of the three"),
        }
    }

    fn report(&self, outcome: &Outcome<'_>) -> anyhow::Result<()> {
        if !self.json {
            return Ok(());
        }
        let Outcome { written, reading, .. } = outcome;
        let ids = &written.ids;
        let first = written.first.map_or(0.0, |first| first.duration_since(*reading).as_secs_f64());
        let decode_seconds = written.last.map_or(0.0, |last| last.duration_since(*reading).as_secs_f64()) - first;
        let mut report = serde_json::json!({
            "prompt_ids": outcome.prompt,
            "ids": ids,
            "text": written.text,
            "finish": outcome.finish,
            "device": outcome.device,
            "timings": {
                "load_seconds": outcome.load_seconds,
                "first_token_seconds": first,
                "decode_seconds": decode_seconds,
                "decode_tokens_per_second":
                    if ids.len() > 1 { (ids.len() - 1) as f64 / decode_seconds } else { 0.0 },
            },
            "counters": outcome.counters,
            "draft": outcome.draft,
        });
        if let Some(kept) = &outcome.session {
            report["session"] = serde_json::to_value(kept)?;
        }
        print_json(&report)
    }
}

/// What the report of a generation is made of.
struct Outcome<'a> {
    prompt: &'a [u32],
    written: &'a Written,
    finish: &'static str,
    load_seconds: f64,
    reading: Instant,
    device: &'a str,
    counters: serde_json::Value,
    draft: Counters,
    session: Option<Kept>,
}

/// What a generation wrote, and when.
#[derive(Debug, Default)]
pub(super) struct Written {
    pub ids: Vec<u32>,
    pub text: String,
    first: Option<Instant>,
    last: Option<Instant>,
}

/// Why a generation that nobody stopped ended.
pub(super) fn finish(written: &Written, request: &Request) -> &'static str {
    if written.ids.len() == request.max_tokens {
        "length"
    } else {
        "stop"
    }
}

/// Writes the text of tokens as they are made.
pub(super) struct Voice<'a> {
    decoder: StreamDecoder<'a>,
    out: Box<dyn Write>,
    /// Whether someone still reads what is written.
    heard: bool,
    written: Written,
}

impl<'a> Voice<'a> {
    /// To standard output, or to nobody, who hears all of it.
    pub fn new(tokenizer: &'a Tokenizer, silent: bool) -> Self {
        let out: Box<dyn Write> = if silent { Box::new(std::io::sink()) } else { Box::new(std::io::stdout()) };
        Self { decoder: tokenizer.stream(), out, heard: true, written: Written::default() }
    }

    /// Tokens so far.
    pub fn tokens(&self) -> usize {
        self.written.ids.len()
    }

    /// Writes what a token adds to the text. False when the reader went away (`cedra … | head`): nobody needs more.
    pub fn say(&mut self, id: u32) -> anyhow::Result<bool> {
        let now = Instant::now();
        self.written.first.get_or_insert(now);
        self.written.last = Some(now);
        self.written.ids.push(id);
        let piece = self.decoder.push(id)?;
        self.heard = self.heard && is_heard(self.out.write_all(piece.as_bytes()).and_then(|()| self.out.flush()))?;
        self.written.text.push_str(&piece);
        Ok(self.heard)
    }

    /// Ends the line.
    pub fn end(mut self) -> anyhow::Result<Written> {
        let tail = self.decoder.finish();
        if self.heard {
            is_heard(writeln!(self.out, "{tail}"))?;
        }
        self.written.text.push_str(&tail);
        Ok(self.written)
    }
}

/// Whether someone reads what was written.
pub(super) fn is_heard(written: std::io::Result<()>) -> std::io::Result<bool> {
    match written {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        written => written.map(|()| true),
    }
}

/// The text of a file; `-` is standard input.
pub(super) fn read_text(path: &Path) -> anyhow::Result<String> {
    if path.as_os_str() == "-" {
        return std::io::read_to_string(std::io::stdin()).context("standard input");
    }
    std::fs::read_to_string(path).with_context(|| path.display().to_string())
}

/// Prints one JSON object.
pub(super) fn print_json(report: &serde_json::Value) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, report)?;
    Ok(writeln!(out)?)
}
