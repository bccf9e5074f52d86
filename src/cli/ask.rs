//! `cedra ask`: a question about files that are read once.

use super::embedded::{AnyModelArgs, Embedded};
use super::generate::{print_json, SamplingArgs};
use super::interrupt::Interrupt;
use super::session::{count, saved};
use super::talk::{is_typed, open_store, Body, Document, Done, KeepArgs, Speech, StopArgs};
use crate::checkpoint::Fingerprint;
use crate::model::Options;
use crate::reference::sequence::{check_room, Sequence};
use crate::session::{Engine, Rings, Session};
use crate::spec::Draft;
use crate::store::{hash16, RecordId, Store};
use crate::Error;
use anyhow::{anyhow, bail, Context};
use clap::Args;
use std::ffi::OsString;
use std::path::PathBuf;
use std::rc::Rc;

/// Answers a question about files.
///
/// Reads the files, answers, and keeps what was read, so that the next question about the same files reads nothing but the question.
/// Without a file, and for the file `-`, standard input is read. Every question is asked about the files alone; `cedra chat` is for
/// those that follow from each other. Ctrl-C stops it and keeps what was read.
#[derive(Debug, Args)]
#[command(override_usage = "cedra ask [OPTIONS] [FILE]... QUESTION")]
pub(super) struct Ask {
    /// Files to read, and the question, which comes last.
    #[arg(required = true, value_name = "FILE... QUESTION")]
    words: Vec<OsString>,
    #[command(flatten)]
    model: AnyModelArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    stop: StopArgs,
    #[command(flatten)]
    keep: KeepArgs,
    /// Prints one JSON object: answer, ids, what was read.
    #[arg(long)]
    json: bool,
}

impl Ask {
    pub(super) fn run(self, embedded: Option<Embedded>) -> anyhow::Result<()> {
        let request = self.sampling.request(vec![])?;
        let (files, question) = files_and_question(self.words)?;
        let documents = files.iter().map(|file| Document::read(file)).collect::<anyhow::Result<Vec<_>>>()?;
        let document = Document::join(documents);

        let quiet = self.json;
        let opened = self.model.open(embedded, quiet)?;
        let (tokenizer, config) = (&opened.tokenizer, opened.checkpoint.config());
        let speech = Speech::new(tokenizer, request, self.sampling.drafts(), self.stop)?;
        let text = speech.talk.load(tokenizer, &[], &document.title, &document.text)?;
        let asked = speech.talk.ask(tokenizer, &text, &question)?;
        let (length, more) = (text.len(), asked.len() + speech.request.max_tokens);
        check_room(length, more, config.max_position_embeddings).with_context(|| {
            let tokens = count(length, "token");
            format!("{} has {tokens}, question and answer may take {more}", document.title)
        })?;

        let interrupt = Interrupt::watch()?;
        interrupt.idle();
        let path = self.keep.path()?;
        let (place, device) = match self.model.choose()? {
            Some(gpu) => {
                let store = path.as_deref().map(open_store).transpose()?;
                let device = gpu.describe();
                let draft = speech.drafts.on(Some(&gpu)) != Draft::Off;
                let options = Options { context: length + more, draft, ..Options::default() };
                let engine = Engine::new(opened.load(gpu, options)?, opened.fingerprint());
                let name = name_of(&files, &document.title, engine.fingerprint())?;
                (Place::Device { engine, kept: store.map(|store| (store, name)) }, device)
            }
            None => {
                if path.is_some() && !quiet {
                    eprintln!("cedra: nothing is kept: that needs a GPU, a software one will do");
                }
                (Place::Cpu(Box::new(opened.cpu()?)), "CPU, one thread".into())
            }
        };
        let session = place.session().map(str::to_owned);
        interrupt.begin();
        if self.model.verbose {
            eprintln!("cedra: reading {}", count(length, "token"));
        }
        let (mut body, known) = place.read(&text, &interrupt)?;
        let kept = if session.is_some() { "; what was read is kept" } else { "" };
        let done = match body.read(&asked, &interrupt) {
            Err(Error::Stopped { .. }) => {
                return Err(interrupt.stopped(format!("stopped before the answer{kept}")).into())
            }
            done => done?,
        };
        let done =
            Done { read: known.read + done.read, replayed: known.replayed + done.replayed, reused: known.reused };
        if !quiet {
            let (Done { read, reused, replayed }, all) = (done, body.tokens().len());
            eprintln!("cedra: {} read, {reused} reused, {replayed} replayed; {all} in all", count(read, "token"));
        }
        let answer = body.answer(tokenizer, &speech, quiet, &interrupt)?;
        if self.json {
            print_json(&serde_json::json!({
                "question": question,
                "answer": answer.text,
                "ids": answer.ids,
                "finish": answer.finish,
                "tokens": {
                    "document": length,
                    "question": asked.len(),
                    "answer": answer.ids.len(),
                    "read": done.read,
                    "reused": done.reused,
                    "replayed": done.replayed,
                },
                "model": self.model.name(),
                "device": device,
                "session": session,
                "store": session.as_ref().and(path.as_ref()).map(|path| path.display().to_string()),
            }))?;
        }
        if answer.finish == "interrupted" && interrupt.asked() {
            let made = count(answer.ids.len(), "token");
            return Err(interrupt.stopped(format!("stopped after {made} of the answer{kept}")).into());
        }
        Ok(())
    }
}

/// What reads, and where it is kept.
enum Place {
    Device {
        engine: Rc<Engine>,
        /// The store, and the session's name in it.
        kept: Option<(Rc<dyn Store>, String)>,
    },
    Cpu(Box<Sequence>),
}

impl Place {
    /// The name that what is read is kept by.
    fn session(&self) -> Option<&str> {
        match self {
            Self::Device { kept: Some((_, name)), .. } => Some(name),
            _ => None,
        }
    }

    /// The text `ids`: as it is kept, or read, and then kept. What a reading that is stopped has read is kept, too.
    fn read(self, ids: &[u32], interrupt: &Interrupt) -> anyhow::Result<(Body, Done)> {
        let (engine, kept) = match self {
            Self::Cpu(sequence) => {
                let mut body = Body::Cpu(sequence);
                let done = body.read(ids, interrupt)?;
                return Ok((body, done));
            }
            Self::Device { engine, kept } => (engine, kept),
        };
        if let Some((store, name)) = &kept {
            if let Some(session) = known(&engine, store, name, ids)? {
                return Ok((Body::device(session), Done { reused: ids.len(), ..Done::default() }));
            }
            engine.attach(store)?;
        }
        let mut body = Body::device(engine.session()?);
        let done = body.read(ids, interrupt);
        if let (Ok(_) | Err(Error::Stopped { .. }), Some((store, name)), Body::Device(session)) =
            (&done, &kept, &mut body)
        {
            session.save(store, name, Rings::Saved)?;
        }
        match done {
            Err(Error::Stopped { .. }) => {
                let (read, kept) = (body.tokens().len(), if kept.is_some() { "; they are kept" } else { "" });
                Err(interrupt.stopped(format!("stopped after {read} of {}{kept}", count(ids.len(), "token"))).into())
            }
            done => Ok((body, done?)),
        }
    }
}

/// The session of this name, if there is one, and it is this text and nothing else. What is damaged is read again.
fn known(engine: &Rc<Engine>, store: &Rc<dyn Store>, name: &str, ids: &[u32]) -> crate::Result<Option<Session>> {
    let open = || match saved(&**store, name)? {
        Some(manifest) if manifest.tokens as usize == ids.len() => engine.open(store, name).map(Some),
        _ => Ok(None),
    };
    match open() {
        Ok(session) => Ok(session.filter(|session| session.tokens() == ids)),
        Err(Error::Session { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The files to read, and the question about them.
fn files_and_question(mut words: Vec<OsString>) -> anyhow::Result<(Vec<PathBuf>, String)> {
    let last = words.pop().expect("clap asks for one");
    let question = last.into_string().map_err(|question| anyhow!("question {question:?}: allowed is text in UTF-8"))?;
    if question.trim().is_empty() {
        bail!("the question is empty: it comes last, behind the files");
    }
    if !words.is_empty() {
        return Ok((words.into_iter().map(PathBuf::from).collect(), question));
    }
    if is_typed() {
        bail!("nothing to read about `{question}`: the question comes last, behind files, or behind a pipe into this command");
    }
    Ok((vec!["-".into()], question))
}

/// The name that what is read of these files by this model is kept by: when they change it stays, and what is kept changes.
fn name_of(files: &[PathBuf], title: &str, model: &Fingerprint) -> anyhow::Result<String> {
    let mut place = vec![];
    for file in files {
        let path = if file.as_os_str() == "-" {
            file.clone()
        } else {
            file.canonicalize().with_context(|| file.display().to_string())?
        };
        place.extend_from_slice(path.as_os_str().as_encoded_bytes());
        place.push(0);
    }
    model.parts().iter().for_each(|(_, hash)| place.extend_from_slice(hash));
    let title: String = title.chars().filter(|c| !c.is_control()).take(64).collect();
    let place = RecordId(hash16(&place)).to_string();
    Ok(format!("{title}@{}", &place[..8]))
}
