//! Measures what a model can do: packed caches, bounded prefill, selection and candidates as the config says. By default on the CPU,
//! which computes what a GPU does and is faster than a software one; `gpu` behind it asks the questions and drafts on the device path.
//!
//!     cargo run --release --example measure -- models/pocket TASKS.jsonl RESULTS.jsonl [gpu]
//!
//! A line of TASKS is an object with one of these as `task`, and a line of RESULTS is the same object with what was found:
//!
//! | task | fields | what is added |
//! |---|---|---|
//! | `questions` | `document`, `questions` (each with `question`), `tokens`, `turns` | `answer_made` in each question, `document_tokens`, seconds |
//! | `text` | `text` | `nats`, `predicted` tokens, `bytes` |
//! | `modes` | `document`, `following` | predictions of `following` that agree, by pairs of modes |
//! | `draft` | `messages` or `text`, `tokens` | `rounds`, and by place in the block `verified` and `accepted` |
//!
//! Every question is asked behind the document alone, or with `turns` behind the questions and answers before it. The document is
//! read once. `tools/pocket/cases.py` makes tasks, and `tools/pocket/report.py` tables of results. A result that is there already is
//! kept: an interrupted run goes on where it stopped.

use anyhow::{bail, Context};
use cedra::checkpoint::{Checkpoint, Fingerprint};
use cedra::config::Config;
use cedra::gpu::{DeviceOptions, Gpu};
use cedra::reading::{Prefill, Replay};
use cedra::reference::model::{LogitRows, Model, Options, State};
use cedra::reference::sample::greedy;
use cedra::reference::sequence::Sequence;
use cedra::sampling::{Request, Sampling};
use cedra::session::{Engine, Session};
use cedra::spec::{Counters, Draft};
use cedra::text::{Chat, NgramTables, Tokenizer};
use serde_json::{json, Value};
use std::io::Write;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

struct Measure {
    config: Config,
    tokenizer: Tokenizer,
    device: Device,
}

/// What computes.
enum Device {
    Cpu(Arc<Model>),
    Gpu(Rc<Engine>),
}

/// A text that a model has read.
enum Body {
    Cpu(Box<Sequence>),
    Gpu(Box<Session>),
}

impl Body {
    fn tokens(&self) -> &[u32] {
        match self {
            Self::Cpu(sequence) => sequence.tokens(),
            Self::Gpu(session) => session.tokens(),
        }
    }

    fn read(&mut self, ids: &[u32]) -> cedra::Result<()> {
        match self {
            Self::Cpu(sequence) => sequence.append(ids, &mut |_| {}),
            Self::Gpu(session) => session.append(ids).map(drop),
        }
    }

    fn fork(&mut self) -> cedra::Result<Self> {
        Ok(match self {
            Self::Cpu(sequence) => Self::Cpu(Box::new(sequence.fork())),
            Self::Gpu(session) => Self::Gpu(Box::new(session.fork()?)),
        })
    }

    fn truncate(&mut self, length: usize) -> cedra::Result<()> {
        match self {
            Self::Cpu(sequence) => sequence.truncate(length, Replay::Bounded),
            Self::Gpu(session) => session.truncate(length, Replay::Bounded),
        }
    }

    fn write(&mut self, request: &Request, draft: Draft) -> cedra::Result<Vec<u32>> {
        match self {
            Self::Cpu(sequence) => {
                sequence.set_draft(draft)?;
                sequence.generate(request)?.collect()
            }
            Self::Gpu(session) => {
                session.set_draft(draft)?;
                session.generate(request)?.collect()
            }
        }
    }

    fn draft_counters(&self) -> cedra::Result<&Counters> {
        match self {
            Self::Cpu(sequence) => Ok(sequence.draft_counters()),
            Self::Gpu(session) => session.draft_counters(),
        }
    }
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (folder, tasks, results, gpu) = match &arguments[..] {
        [folder, tasks, results] => (folder, tasks, results, false),
        [folder, tasks, results, device] if device == "gpu" => (folder, tasks, results, true),
        _ => bail!("usage: measure MODEL TASKS RESULTS [gpu]"),
    };
    let checkpoint = Checkpoint::open(folder)?;
    let tokenizer = Tokenizer::open(folder)?;
    let tables = NgramTables::new(checkpoint.config(), &tokenizer)?;
    let config = checkpoint.config().clone();
    let device = if gpu {
        let gpu = Arc::new(Gpu::new_blocking(&DeviceOptions { software: true, ..DeviceOptions::default() })?);
        eprintln!("{}", gpu.describe());
        let draft = config.dspark.is_some();
        let options = cedra::model::Options { context: config.max_position_embeddings, draft, ..Default::default() };
        let model = cedra::model::Model::load_blocking(gpu, &checkpoint, &tables, &options, &mut |_, _| {})?;
        Device::Gpu(Engine::new(Arc::new(model), Fingerprint::new(&checkpoint, None)))
    } else {
        Device::Cpu(Arc::new(Model::load(&checkpoint, &tables, Options::default())?))
    };
    let measure = Measure { config, tokenizer, device };

    let tasks = std::fs::read_to_string(tasks).with_context(|| tasks.clone())?;
    let done = std::fs::read_to_string(results).unwrap_or_default().lines().count();
    let mut out =
        std::fs::OpenOptions::new().create(true).append(true).open(results).with_context(|| results.clone())?;
    let count = tasks.lines().count();
    for (number, line) in tasks.lines().enumerate().skip(done) {
        let mut task: Value = serde_json::from_str(line).with_context(|| format!("task {number}"))?;
        let started = Instant::now();
        measure.run(&mut task).with_context(|| format!("task {number}"))?;
        task["seconds"] = json!(started.elapsed().as_secs_f64());
        writeln!(out, "{task}")?;
        eprintln!("{} of {count}: {} in {:.1} s", number + 1, task["task"], started.elapsed().as_secs_f64());
    }
    Ok(())
}

fn text<'a>(task: &'a Value, field: &str) -> anyhow::Result<&'a str> {
    task[field].as_str().with_context(|| format!("`{field}` is {}, text is needed", task[field]))
}

impl Measure {
    fn run(&self, task: &mut Value) -> anyhow::Result<()> {
        match text(task, "task")?.to_owned().as_str() {
            "questions" => self.questions(task),
            "text" => self.text(task),
            "modes" => self.modes(task),
            "draft" => self.draft(task),
            other => bail!("`{other}` is no task: questions, text, modes and draft are"),
        }
    }

    fn prompt(&self, messages: &Value) -> anyhow::Result<Vec<u32>> {
        let request = json!({"messages": messages, "thinking": {"type": "disabled"}});
        Ok(Chat::from_json(&request.to_string())?.encode(&self.tokenizer)?)
    }

    fn plain(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        Ok([vec![self.config.bos_token_id], self.tokenizer.encode_with_special(text)?].concat())
    }

    fn request(&self, max_tokens: usize) -> Request {
        Request { max_tokens, sampling: Sampling::default(), stop_ids: vec![self.config.eos_token_id] }
    }

    fn empty(&self) -> cedra::Result<Body> {
        Ok(match &self.device {
            Device::Cpu(model) => Body::Cpu(Box::new(Sequence::new(model.clone()))),
            Device::Gpu(engine) => Body::Gpu(Box::new(engine.session()?)),
        })
    }

    /// What only the CPU is asked for.
    fn cpu(&self) -> anyhow::Result<&Model> {
        match &self.device {
            Device::Cpu(model) => Ok(model),
            Device::Gpu(_) => bail!("text and modes are measured on the CPU: they need the logits of every row"),
        }
    }

    fn questions(&self, task: &mut Value) -> anyhow::Result<()> {
        let document = text(task, "document")?.to_owned();
        let tokens = task["tokens"].as_u64().unwrap_or(32) as usize;
        let turns = task["turns"].as_bool().unwrap_or(false);
        let mut questions = task["questions"].as_array().context("`questions` is no list")?.clone();
        let mut messages = vec![];
        // What all prompts begin with is read once; an empty question shows how far that is.
        let mut read = self.empty()?;
        let shared = self.prompt(&json!([{"role": "user", "content": format!("{document}\n\n")}]))?;
        let shared = &shared[..shared.len().saturating_sub(3)];
        read.read(shared)?;
        task["document_tokens"] = json!(shared.len());
        for question in &mut questions {
            let asked = text(question, "question")?;
            let content = if messages.is_empty() { format!("{document}\n\n{asked}") } else { asked.to_owned() };
            messages.push(json!({"role": "user", "content": content}));
            let prompt = self.prompt(&json!(messages))?;
            let mut body = read.fork()?;
            let known = body.tokens().iter().zip(&prompt).take_while(|(a, b)| a == b).count();
            body.truncate(known)?;
            body.read(&prompt[known..])?;
            let answer = self.tokenizer.decode(&body.write(&self.request(tokens), Draft::Off)?)?;
            question["answer_made"] = json!(answer);
            match turns {
                true => {
                    messages.push(json!({"role": "assistant", "content": answer}));
                    read = body;
                }
                false => messages.clear(),
            }
        }
        task["document"] = json!(null);
        task["questions"] = json!(questions);
        Ok(())
    }

    fn text(&self, task: &mut Value) -> anyhow::Result<()> {
        let (text, model) = (text(task, "text")?.to_owned(), self.cpu()?);
        let tokens = self.plain(&text)?;
        let mut state = model.state();
        let mut nats = 0.0;
        for rows in tokens.windows(2).collect::<Vec<_>>().chunks(256) {
            let read: Vec<u32> = rows.iter().map(|pair| pair[0]).collect();
            let logits = model.forward(&mut state, &read, LogitRows::All, None)?;
            nats -= rows.iter().zip(&logits).map(|(pair, row)| log_softmax(row)[pair[1] as usize]).sum::<f64>();
        }
        task["text"] = json!(null);
        task["nats"] = json!(nats);
        task["predicted"] = json!(tokens.len() - 1);
        task["bytes"] = json!(text.len());
        Ok(())
    }

    /// Bounded against exact prefill, and a text that was opened without its rings against one that was never left.
    fn modes(&self, task: &mut Value) -> anyhow::Result<()> {
        let (model, tokens) = (self.cpu()?, self.plain(text(task, "document")?)?);
        let following = self.tokenizer.encode_with_special(text(task, "following")?)?;
        let predictions = |mut state: State| -> cedra::Result<Vec<Vec<f32>>> {
            let rows = [&tokens[tokens.len() - 1..], &following[..following.len() - 1]].concat();
            model.forward(&mut state, &rows, LogitRows::All, None)
        };
        let read = |prefill| -> cedra::Result<State> {
            let mut state = model.state();
            model.append(&mut state, &tokens, prefill, &mut |_| {})?;
            Ok(state)
        };
        let exact = predictions(read(Prefill::Exact)?)?;
        let left = read(Prefill::Bounded)?;
        let mut restored = left.clone();
        model.rebuild(&mut restored, &tokens, left.position, Replay::Bounded)?;
        let bounded = predictions(left)?;
        let restored = predictions(restored)?;
        task["document"] = json!(null);
        task["tokens"] = json!(tokens.len());
        task["predictions"] = json!(following.len());
        task["bounded_as_exact"] = json!(same(&bounded, &exact));
        task["restored_as_never_left"] = json!(same(&restored, &bounded));
        task["restored_as_exact"] = json!(same(&restored, &exact));
        Ok(())
    }

    fn draft(&self, task: &mut Value) -> anyhow::Result<()> {
        let prompt = match task["messages"].is_null() {
            true => self.plain(text(task, "text")?)?,
            false => self.prompt(&task["messages"])?,
        };
        let tokens = task["tokens"].as_u64().context("`tokens` is no number")? as usize;
        let mut body = self.empty()?;
        body.read(&prompt)?;
        let made = body.write(
            &self.request(tokens),
            Draft::Tokens(self.config.dspark.as_ref().map_or(0, |draft| draft.block_size)),
        )?;
        let counters = body.draft_counters()?;
        task["made"] = json!(made.len());
        (task["text"], task["messages"]) = (json!(null), json!(null));
        task["rounds"] = json!(counters.rounds);
        task["verified"] = json!(counters.verified);
        task["accepted"] = json!(counters.accepted);
        Ok(())
    }
}

/// Predictions whose best token is the same.
fn same(a: &[Vec<f32>], b: &[Vec<f32>]) -> usize {
    a.iter().zip(b).filter(|(a, b)| greedy(a) == greedy(b)).count()
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().fold(f64::NEG_INFINITY, |max, &l| max.max(l as f64));
    let sum: f64 = logits.iter().map(|&l| (l as f64 - max).exp()).sum();
    logits.iter().map(|&l| l as f64 - max - sum.ln()).collect()
}
