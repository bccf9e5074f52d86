//! `cedra chat`: a conversation in a terminal, or with whatever standard input says.

use super::embedded::{AnyModelArgs, Embedded};
use super::generate::SamplingArgs;
use super::interrupt::Interrupt;
use super::runtime::{Drafts, Opened};
use super::session::{ago, count, name_of_session, saved};
use super::talk::{is_typed, open_store, Body, Document, KeepArgs, Speech, StopArgs};
use crate::gpu::Gpu;
use crate::model::Options;
use crate::reference::sequence::{check_room, Sequence};
use crate::session::{Engine, Rings};
use crate::snapshot::Manifest;
use crate::spec::Draft;
use crate::store::{MemoryStore, Store};
use crate::Error;
use anyhow::{anyhow, bail, Context};
use clap::Args;
use rustyline::error::ReadlineError;
use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

/// Longest context that is asked for: scratch memory for it is planned before anything is read.
const MOST_CONTEXT: usize = 131_072;

/// Talks in the terminal.
///
/// A line is said to the model, which answers; one that begins with `/` is a command, and `/help` lists them. Conversations are kept as
/// they grow. Ctrl-C stops an answer, Ctrl-D ends the program. Lines may come from a pipe as well; the exit code is 1 when one of
/// them failed.
#[derive(Debug, Args)]
pub(super) struct Chat {
    #[command(flatten)]
    model: AnyModelArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    stop: StopArgs,
    #[command(flatten)]
    keep: KeepArgs,
    /// Goes on with this session, or begins it; by default a new one with a number for a name.
    #[arg(long, value_name = "NAME", value_parser = name_of_session)]
    session: Option<String>,
}

const HELP: &str = "\
/load FILE      reads a file into the conversation
/undo           takes back the last question and its answer, or the files that were loaded behind them
/fork [NAME]    goes on in a copy; this conversation stays as it is
/sessions       lists the conversations that are kept
/switch NAME    goes on with another one
/save [NAME]    keeps this one, and under another name from now on
/help           lists the commands
/quit           ends the program; Ctrl-D does, too
Everything else is said to the model. Ctrl-C stops a reading or an answer.";

impl Chat {
    pub(super) fn run(self, embedded: Option<Embedded>) -> anyhow::Result<()> {
        let request = self.sampling.request(vec![])?;
        let path = self.keep.path()?;
        let opened = self.model.open(embedded, false)?;
        let speech = Speech::new(&opened.tokenizer, request, self.sampling.drafts(), self.stop)?;
        let interrupt = Interrupt::watch()?;
        interrupt.idle();
        let shelf = match self.model.choose()? {
            Some(gpu) => Shelf::on_device(&opened, gpu, speech.drafts, path.as_deref())?,
            None => {
                if path.is_some() {
                    eprintln!("cedra: nothing is kept: that needs a GPU, a software one will do");
                }
                Shelf::Cpu { empty: opened.cpu()?.into(), texts: BTreeMap::new() }
            }
        };
        let name = self.session.map_or_else(|| shelf.free_name("chat"), Ok)?;
        let body = if shelf.has(&name)? { shelf.open(&name)? } else { shelf.empty()? };
        let mut room = Room { opened, speech, interrupt, shelf, name, body };
        if !room.body.tokens().is_empty() {
            eprintln!("cedra: `{}` has {}", room.name, count(room.body.tokens().len(), "token"));
        }
        match is_typed() {
            true => room.talk(),
            false => room.obey(),
        }
    }
}

/// Where conversations are kept.
enum Shelf {
    Device {
        engine: Rc<Engine>,
        store: Rc<dyn Store>,
    },
    /// The CPU keeps them as long as the process lives.
    Cpu {
        empty: Box<Sequence>,
        texts: BTreeMap<String, Sequence>,
    },
}

impl Shelf {
    fn on_device(opened: &Opened, gpu: Arc<Gpu>, drafts: Drafts, path: Option<&Path>) -> anyhow::Result<Self> {
        let store: Rc<dyn Store> = match path {
            Some(path) => open_store(path)?,
            None => Rc::new(MemoryStore::new()),
        };
        let context = opened.checkpoint.config().max_position_embeddings.min(MOST_CONTEXT);
        let draft = drafts.on(Some(&gpu)) != Draft::Off;
        let options = Options { context, draft, ..Options::default() };
        let engine = Engine::new(opened.load(gpu, options)?, opened.fingerprint());
        engine.attach(&store)?;
        Ok(Self::Device { engine, store })
    }

    /// An empty text.
    fn empty(&self) -> crate::Result<Body> {
        match self {
            Self::Device { engine, .. } => engine.session().map(Body::device),
            Self::Cpu { empty, .. } => Ok(Body::Cpu(Box::new(empty.fork()))),
        }
    }

    fn open(&self, name: &str) -> crate::Result<Body> {
        match self {
            Self::Device { engine, store } => engine.open(store, name).map(Body::device),
            Self::Cpu { texts, .. } => {
                let text = texts.get(name).ok_or_else(|| Error::NoSession { session: name.into() })?;
                Ok(Body::Cpu(Box::new(text.fork())))
            }
        }
    }

    fn save(&mut self, body: &mut Body, name: &str) -> crate::Result<()> {
        match (self, body) {
            (Self::Device { store, .. }, Body::Device(session)) => session.save(store, name, Rings::Saved).map(drop),
            (Self::Cpu { texts, .. }, Body::Cpu(text)) => {
                texts.insert(name.into(), text.fork());
                Ok(())
            }
            _ => unreachable!("a text is where its shelf is"),
        }
    }

    fn has(&self, name: &str) -> crate::Result<bool> {
        match self {
            // One that is damaged is there, too.
            Self::Device { store, .. } => Ok(!matches!(saved(&**store, name), Ok(None))),
            Self::Cpu { texts, .. } => Ok(texts.contains_key(name)),
        }
    }

    /// A name that nothing has: the stem with a number.
    fn free_name(&self, stem: &str) -> crate::Result<String> {
        for number in 1.. {
            let name = format!("{stem}-{number}");
            if !self.has(&name)? {
                return Ok(name);
            }
        }
        unreachable!("a store has fewer sessions than there are numbers")
    }

    /// What is kept: names, and what is known of each.
    fn list(&self) -> crate::Result<Vec<(String, String)>> {
        match self {
            Self::Device { store, .. } => {
                let listed = pollster::block_on(store.list())?;
                let known = listed.into_iter().map(|entry| {
                    let known = match Manifest::parse(&entry.session, &entry.manifest) {
                        Ok(Manifest { tokens, saved_at, .. }) => format!("{tokens:>9} tokens  {}", ago(saved_at)),
                        Err(error) => format!("cannot be read: {error}"),
                    };
                    (entry.session, known)
                });
                Ok(known.collect())
            }
            Self::Cpu { texts, .. } => {
                Ok(texts.iter().map(|(name, text)| (name.clone(), format!("{:>9} tokens", text.len()))).collect())
            }
        }
    }
}

/// Whether the conversation goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Line,
    Quit,
}

/// A conversation.
struct Room {
    opened: Opened,
    speech: Speech,
    interrupt: Interrupt,
    shelf: Shelf,
    name: String,
    body: Body,
}

impl Room {
    /// With a person.
    fn talk(&mut self) -> anyhow::Result<()> {
        let mut editor = rustyline::DefaultEditor::new()?;
        eprintln!("cedra: `{}`; /help lists commands, Ctrl-D ends", self.name);
        loop {
            let line = match editor.readline("> ") {
                Ok(line) => line,
                // What was typed goes, and nothing else.
                Err(ReadlineError::Interrupted) => continue,
                Err(ReadlineError::Eof) => return Ok(()),
                Err(error) => return Err(error.into()),
            };
            // A history that forgets is no reason to stop talking.
            let _ = editor.add_history_entry(&line);
            match self.line(&line) {
                Ok(Next::Line) => {}
                Ok(Next::Quit) => return Ok(()),
                Err(error) => self.complain(error)?,
            }
        }
    }

    /// With a pipe.
    fn obey(&mut self) -> anyhow::Result<()> {
        let (mut lines, mut failed) = (0, 0);
        for line in std::io::stdin().lock().lines() {
            lines += 1;
            match self.line(&line.context("standard input")?) {
                Ok(Next::Line) => {}
                Ok(Next::Quit) => break,
                Err(error) => {
                    failed += 1;
                    self.complain(error)?;
                }
            }
        }
        match failed {
            0 => Ok(()),
            failed => bail!("{failed} of {} failed", count(lines, "line")),
        }
    }

    /// Says what went wrong with a line. The conversation is as it was, and goes on, unless there is nothing left to go on with.
    fn complain(&mut self, error: anyhow::Error) -> anyhow::Result<()> {
        let over = matches!(error.downcast_ref(), Some(Error::DeviceLost { .. } | Error::Device { .. }));
        if over || super::is_broken_pipe(&error) || error.is::<super::interrupt::Interrupted>() {
            return Err(error);
        }
        eprintln!("cedra: {}", super::message(&error));
        Ok(())
    }

    fn line(&mut self, line: &str) -> anyhow::Result<Next> {
        let line = line.trim();
        let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let alone = |next: Next| match rest {
            "" => Ok(next),
            rest => Err(anyhow!("{command}: found `{rest}` behind it, allowed: nothing")),
        };
        match command {
            "" => {}
            "/load" if rest.is_empty() => bail!("/load: found nothing behind it, allowed: a file"),
            "/load" => self.load(Path::new(rest))?,
            "/undo" => {
                alone(Next::Line)?;
                self.undo()?;
            }
            "/fork" => self.fork(rest)?,
            "/sessions" => {
                alone(Next::Line)?;
                self.sessions()?;
            }
            "/switch" => self.switch(rest)?,
            "/save" => self.save(rest)?,
            "/help" => {
                alone(Next::Line)?;
                writeln!(std::io::stdout(), "{HELP}")?;
            }
            "/quit" => return alone(Next::Quit),
            _ if command.starts_with('/') => bail!("{command}: no such command; /help lists them"),
            _ => self.ask(line)?,
        }
        Ok(Next::Line)
    }

    /// Does something that a signal can stop. What is asked to end ends behind it.
    fn interruptible<T>(&mut self, work: impl FnOnce(&mut Self) -> anyhow::Result<T>) -> anyhow::Result<T> {
        self.interrupt.begin();
        let done = work(self);
        if self.interrupt.ends() {
            return Err(self.interrupt.stopped(format!("asked to end; `{}` is kept", self.name)).into());
        }
        self.interrupt.idle();
        done
    }

    /// Reads ids, all of them or none, where there is room for them and a token more.
    fn read(&mut self, what: &str, ids: &[u32]) -> anyhow::Result<()> {
        let before = self.body.tokens().len();
        let context = before + self.body.remaining();
        check_room(before, ids.len() + 1, context).with_context(|| format!("{what} does not fit"))?;
        match self.body.read(ids, &self.interrupt) {
            Ok(done) => {
                let all = self.body.tokens().len();
                let read = count(done.read, "token");
                eprintln!("cedra: {read} read, {} reused, {} replayed; {all} in all", done.reused, done.replayed);
                Ok(())
            }
            Err(error) => {
                self.body.truncate(before)?;
                let stopped = matches!(error, Error::Stopped { .. });
                Err(error).with_context(|| {
                    if stopped {
                        format!("{what} is not part of the conversation")
                    } else {
                        what.into()
                    }
                })
            }
        }
    }

    fn load(&mut self, file: &Path) -> anyhow::Result<()> {
        let document = Document::read(file)?;
        let talk = &self.speech.talk;
        let ids = talk.load(&self.opened.tokenizer, self.body.tokens(), &document.title, &document.text)?;
        self.interruptible(|room| {
            room.read(&file.display().to_string(), &ids)?;
            room.keep()
        })
    }

    fn ask(&mut self, question: &str) -> anyhow::Result<()> {
        let ids = self.speech.talk.ask(&self.opened.tokenizer, self.body.tokens(), question)?;
        self.interruptible(|room| {
            let before = room.body.tokens().len();
            room.read("the question", &ids)?;
            let answer = room.body.answer(&room.opened.tokenizer, &room.speech, false, &room.interrupt);
            if answer.is_err() && room.body.tokens().len() > before {
                room.body.truncate(before)?;
            }
            if answer?.finish == "interrupted" {
                eprintln!("cedra: stopped; the answer ends here");
            }
            room.keep()
        })
    }

    fn undo(&mut self) -> anyhow::Result<()> {
        let tokens = self.body.tokens();
        let length = self.speech.talk.undo(&self.opened.tokenizer, tokens)?;
        let length = length.ok_or_else(|| anyhow!("/undo: nothing was said that could be taken back"))?;
        let less = count(tokens.len() - length, "token");
        self.body.truncate(length)?;
        eprintln!("cedra: {less} taken back, {length} left");
        self.keep()
    }

    /// A name that a command gives to a conversation, which none has so far.
    fn new_name(&self, name: &str) -> anyhow::Result<String> {
        let name = name_of_session(name).map_err(|error| anyhow!("`{name}`: {error}"))?;
        match self.shelf.has(&name)? {
            true => Err(Error::SessionExists { session: name }.into()),
            false => Ok(name),
        }
    }

    fn fork(&mut self, name: &str) -> anyhow::Result<()> {
        let name = if name.is_empty() { self.shelf.free_name(&self.name)? } else { self.new_name(name)? };
        let mut copy = self.body.fork()?;
        self.shelf.save(&mut copy, &name)?;
        eprintln!("cedra: `{name}` goes on, `{}` stays as it is", self.name);
        (self.body, self.name) = (copy, name);
        Ok(())
    }

    fn switch(&mut self, name: &str) -> anyhow::Result<()> {
        if name.is_empty() {
            bail!("/switch: found nothing behind it, allowed: a name; /sessions lists them");
        }
        self.body = self.shelf.open(name)?;
        self.name = name.into();
        eprintln!("cedra: `{name}` has {}", count(self.body.tokens().len(), "token"));
        Ok(())
    }

    fn save(&mut self, name: &str) -> anyhow::Result<()> {
        if !name.is_empty() && name != self.name {
            let name = self.new_name(name)?;
            self.shelf.save(&mut self.body, &name)?;
            self.name = name;
        } else {
            self.keep()?;
        }
        eprintln!("cedra: `{}` saved with {}", self.name, count(self.body.tokens().len(), "token"));
        Ok(())
    }

    fn keep(&mut self) -> anyhow::Result<()> {
        let name = &self.name;
        self.shelf.save(&mut self.body, name).with_context(|| format!("`{name}` is not saved"))
    }

    fn sessions(&self) -> anyhow::Result<()> {
        let mut out = std::io::stdout().lock();
        for (name, known) in self.shelf.list()? {
            let here = if name == self.name { "*" } else { " " };
            writeln!(out, "{here} {name:24} {known}")?;
        }
        Ok(())
    }
}
