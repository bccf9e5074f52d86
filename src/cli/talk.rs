//! What `ask` and `chat` have in common: documents, the place where sessions are kept, a text on whatever runs the model, and a voice
//! that says an answer.

use super::interrupt::Interrupt;
use super::runtime::Drafts;
use crate::model::Finish;
use crate::reading::Replay;
use crate::reference;
use crate::sampling::Request;
use crate::session::Session;
use crate::store::Store;
use crate::text::{Delta, Reply, StopTexts, Talk, Tokenizer};
use crate::{Error, Result};
use anyhow::{anyhow, bail, Context};
use clap::Args;
use std::io::{IsTerminal, Read, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Where sessions are kept, if they are.
#[derive(Debug, Args)]
pub(super) struct KeepArgs {
    /// File that holds the sessions, made when it is not there; `sessions.cedra` in the user's data folder by default.
    #[arg(long, value_name = "PATH", conflicts_with = "no_store")]
    store: Option<PathBuf>,
    /// Keeps nothing.
    #[arg(long)]
    no_store: bool,
}

impl KeepArgs {
    /// The store's file; none when nothing is to be kept.
    pub fn path(&self) -> anyhow::Result<Option<PathBuf>> {
        if self.no_store {
            return Ok(None);
        }
        match &self.store {
            Some(path) => Ok(Some(path.clone())),
            None => default_store().map(Some),
        }
    }
}

/// The file in the user's data folder, which is made where there is none: for its owner alone, as sessions tell what was read.
fn default_store() -> anyhow::Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = if cfg!(windows) {
        set("LOCALAPPDATA")
    } else if cfg!(target_os = "macos") {
        set("HOME").map(|home| home.join("Library/Application Support"))
    } else {
        set("XDG_DATA_HOME").or_else(|| set("HOME").map(|home| home.join(".local/share")))
    };
    let base =
        base.ok_or_else(|| anyhow!("no data folder to keep sessions in: name a file with --store, or use --no-store"))?;
    let folder = base.join("cedra");
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(&folder).with_context(|| folder.display().to_string())?;
    Ok(folder.join("sessions.cedra"))
}

/// A text to be read.
pub(super) struct Document {
    /// Its file's name.
    pub title: String,
    /// The text, with plain line ends and nothing blank behind it.
    pub text: String,
}

impl Document {
    /// Reads a file; `-` is standard input.
    ///
    /// # Errors
    /// For a file that cannot be read, is no UTF-8 or has nothing to read; all name the file.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let (name, title, bytes) = if path.as_os_str() == "-" {
            let mut bytes = vec![];
            std::io::stdin().read_to_end(&mut bytes).context("standard input")?;
            ("standard input".to_string(), "standard input".to_string(), bytes)
        } else {
            let name = path.display().to_string();
            let title = path.file_name().map_or(name.clone(), |name| name.to_string_lossy().into_owned());
            (name.clone(), title, std::fs::read(path).context(name)?)
        };
        let text = String::from_utf8(bytes).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            anyhow!("{name}: found byte {:#04x} at {at}, allowed: text in UTF-8", error.as_bytes()[at])
        })?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text).replace("\r\n", "\n").trim_end().to_string();
        if text.is_empty() {
            bail!("{name}: there is nothing in it to read");
        }
        Ok(Self { title, text })
    }

    /// Several texts as one, each headed by its title.
    pub fn join(mut documents: Vec<Self>) -> Self {
        if documents.len() == 1 {
            return documents.remove(0);
        }
        let texts: Vec<String> = documents.iter().map(|Self { title, text }| format!("# {title}\n\n{text}")).collect();
        let title = format!("{}+{}", documents[0].title, documents.len() - 1);
        Self { title, text: texts.join("\n\n") }
    }
}

/// The store in a file, made where there is none.
pub(super) fn open_store(path: &Path) -> anyhow::Result<Rc<dyn Store>> {
    super::session::open_store(path).map_err(|error| match error {
        Error::StoreBusy { .. } => anyhow!("{error}; --no-store does without"),
        error => error.into(),
    })
}

/// Texts that end an answer.
#[derive(Debug, Args)]
pub(super) struct StopArgs {
    /// Ends the answer before this text; may be given several times.
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    stop: Vec<String>,
}

/// How answers are made.
pub(super) struct Speech {
    pub talk: Talk,
    pub request: Request,
    pub drafts: Drafts,
    pub stops: StopTexts,
}

impl Speech {
    /// # Errors
    /// For a vocabulary without the tokens that conversations need.
    pub fn new(tokenizer: &Tokenizer, request: Request, drafts: Drafts, stop: StopArgs) -> Result<Self> {
        let talk = Talk::new(tokenizer)?;
        let request = Request { stop_ids: talk.stop_ids(), ..request };
        Ok(Self { talk, request, drafts, stops: StopTexts::new(stop.stop) })
    }
}

/// A text, and what runs the model.
pub(super) enum Body {
    /// A session on a GPU.
    Device(Box<Session>),
    /// Plain loops.
    Cpu(Box<reference::sequence::Sequence>),
}

/// What reading did.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Done {
    /// Tokens that were read.
    pub read: usize,
    /// Tokens that were known from before.
    pub reused: usize,
    /// Tokens that the session held which were computed again because windows are not kept.
    pub replayed: usize,
}

impl Body {
    pub fn device(session: Session) -> Self {
        Self::Device(Box::new(session))
    }

    pub fn tokens(&self) -> &[u32] {
        match self {
            Self::Device(session) => session.tokens(),
            Self::Cpu(sequence) => sequence.tokens(),
        }
    }

    pub fn remaining(&self) -> usize {
        match self {
            Self::Device(session) => session.remaining(),
            Self::Cpu(sequence) => sequence.remaining(),
        }
    }

    /// Reads tokens. A device can stop half-way, with [`Error::Stopped`]; on the CPU who asks ends the process.
    pub fn read(&mut self, ids: &[u32], interrupt: &Interrupt) -> Result<Done> {
        let bar = super::progress::reading(ids.len());
        match self {
            Self::Device(session) => {
                let replayed = session.replayed();
                let reused = session.append_as(ids, Default::default(), &mut |done| {
                    bar.set_position(done as u64);
                    match interrupt.asked() {
                        true => ControlFlow::Break(()),
                        false => ControlFlow::Continue(()),
                    }
                })?;
                let reused = reused.reused;
                Ok(Done { read: ids.len() - reused, reused, replayed: session.replayed() - replayed })
            }
            Self::Cpu(sequence) => {
                // Plain loops have no place to stop.
                interrupt.idle();
                sequence.append(ids, &mut |done| bar.set_position(done as u64))?;
                interrupt.begin();
                Ok(Done { read: ids.len(), ..Done::default() })
            }
        }
    }

    /// Goes back to the first `length` tokens.
    pub fn truncate(&mut self, length: usize) -> Result<()> {
        match self {
            Self::Device(session) => session.truncate(length, Replay::Bounded),
            Self::Cpu(sequence) => sequence.truncate(length, Replay::Bounded),
        }
    }

    /// The same text again.
    pub fn fork(&mut self) -> Result<Self> {
        match self {
            Self::Device(session) => session.fork().map(Self::device),
            Self::Cpu(sequence) => Ok(Self::Cpu(Box::new(sequence.fork()))),
        }
    }

    /// Makes tokens until the request or `hear` ends it; why the request did, where it did.
    fn write(
        &mut self,
        request: &Request,
        drafts: Drafts,
        hear: &mut dyn FnMut(u32) -> anyhow::Result<ControlFlow<()>>,
    ) -> anyhow::Result<Option<Finish>> {
        match self {
            Self::Device(session) => {
                let draft = drafts.on(Some(session.engine().model().gpu()));
                let mut writing = pollster::block_on(session.generate_drafting_async(request, draft))?;
                while let Some(id) = writing.next().transpose()? {
                    if hear(id)?.is_break() {
                        drop(writing);
                        pollster::block_on(session.settle_async())?;
                        return Ok(None);
                    }
                }
                Ok(writing.finish())
            }
            Self::Cpu(sequence) => {
                let mut made = 0;
                sequence.set_draft(drafts.on(None))?;
                for id in sequence.generate(request)? {
                    made += 1;
                    if hear(id?)?.is_break() {
                        return Ok(None);
                    }
                }
                Ok(Some(if made == request.max_tokens { Finish::Length } else { Finish::Stop }))
            }
        }
    }

    /// Lets the model answer. The text holds what was said of it then, and no more, and the token that ended it if that is the end of
    /// an answer.
    pub fn answer(
        &mut self,
        tokenizer: &Tokenizer,
        speech: &Speech,
        silent: bool,
        interrupt: &Interrupt,
    ) -> anyhow::Result<Answer> {
        let request = Request { max_tokens: speech.request.max_tokens.min(self.remaining()), ..speech.request.clone() };
        let start = self.tokens().len();
        let mut speaker = Speaker::new(speech, silent);
        let finish = self.write(&request, speech.drafts, &mut |id| {
            speaker.say(tokenizer, id)?;
            let goes_on = speaker.heard && !speaker.stopped && !interrupt.asked();
            Ok(if goes_on { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        // Tokens that were on their way when it was stopped belong to nobody.
        let said = start + speaker.ids.len();
        let ended = self.tokens().get(said).is_some_and(|&id| finish == Some(Finish::Stop) && speech.talk.ends(id));
        let keep = if speaker.stopped { start + speaker.whole } else { said + usize::from(ended) };
        if self.tokens().len() > keep {
            self.truncate(keep)?;
        }
        speaker.end()?;
        if speaker.stopped {
            let rest = tokenizer.encode(&speaker.text[speaker.whole_text..])?;
            match self.read(&rest, interrupt) {
                Ok(_) | Err(Error::EmptyPrompt | Error::Stopped { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let finish = match finish {
            _ if speaker.stopped => "stop",
            Some(Finish::Length) => "length",
            Some(Finish::Stop) => "stop",
            None => "interrupted",
        };
        Ok(Answer { text: speaker.text, ids: speaker.ids, finish })
    }
}

/// What was said.
pub(super) struct Answer {
    pub text: String,
    pub ids: Vec<u32>,
    /// `stop`, `length` or `interrupted`.
    pub finish: &'static str,
}

/// Says an answer as it is made.
struct Speaker {
    reply: Reply,
    stops: StopTexts,
    out: Box<dyn Write>,
    /// Whether someone still reads what is said.
    heard: bool,
    /// Whether a stop text was found.
    stopped: bool,
    ids: Vec<u32>,
    text: String,
    /// Tokens whose text was said when nothing was held back, and how long the text was then.
    whole: usize,
    whole_text: usize,
}

impl Speaker {
    fn new(speech: &Speech, silent: bool) -> Self {
        let out: Box<dyn Write> = if silent { Box::new(std::io::sink()) } else { Box::new(std::io::stdout()) };
        let (reply, stops) = (speech.talk.reply(), speech.stops.clone());
        Self {
            reply,
            stops,
            out,
            heard: true,
            stopped: false,
            ids: vec![],
            text: String::new(),
            whole: 0,
            whole_text: 0,
        }
    }

    fn say(&mut self, tokenizer: &Tokenizer, id: u32) -> anyhow::Result<()> {
        self.ids.push(id);
        for delta in self.reply.push(tokenizer, id)? {
            self.tell(&delta)?;
        }
        if !self.stopped && self.stops.is_clear() && self.reply.is_clear() {
            (self.whole, self.whole_text) = (self.ids.len(), self.text.len());
        }
        Ok(())
    }

    fn tell(&mut self, delta: &Delta) -> anyhow::Result<()> {
        // Without reasoning and tools a reply says things, and does nothing else.
        if let (Delta::Content(piece), false) = (delta, self.stopped) {
            let (piece, stopped) = self.stops.push(piece);
            self.stopped = stopped;
            self.show(&piece)?;
        }
        Ok(())
    }

    fn show(&mut self, piece: &str) -> anyhow::Result<()> {
        self.text.push_str(piece);
        let shown = self.out.write_all(piece.as_bytes()).and_then(|()| self.out.flush());
        self.heard = self.heard && super::generate::is_heard(shown)?;
        Ok(())
    }

    /// What was held back, and the end of the line.
    fn end(&mut self) -> anyhow::Result<()> {
        for delta in self.reply.finish() {
            self.tell(&delta)?;
        }
        if !self.stopped {
            let rest = self.stops.finish();
            self.show(&rest)?;
        }
        if self.heard {
            super::generate::is_heard(writeln!(self.out))?;
        }
        Ok(())
    }
}

/// Whether a person types what standard input says.
pub(super) fn is_typed() -> bool {
    std::io::stdin().is_terminal()
}
