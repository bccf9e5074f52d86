//! `cedra session`: texts that outlive the process, in a store on disk.

use super::generate::{finish, print_json, read_text, PrefillArg, SamplingArgs, Voice, Written};
use super::interrupt::Interrupt;
use super::runtime::{self, Drafts, Opened};
use super::{progress, Device, ModelArgs};
use crate::checkpoint::Fingerprint;
use crate::gpu::Gpu;
use crate::model::Options;
use crate::reading::{Prefill, Replay};
use crate::reference::sequence::{check_room, check_tokens};
use crate::sampling::Request;
use crate::session::{Append as How, Engine, Rings, Session};
use crate::snapshot::{Manifest, RecordRef};
use crate::spec::{Counters, Draft};
use crate::store::{RecordId, RedbStore, Store, MAX_NAME};
use crate::Error;
use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use serde::Serialize;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

/// Texts that are kept: appended to, asked, cut, forked, and found again next week.
///
/// What reads or makes tokens needs a GPU; a software one will do. Ctrl-C stops it and keeps what is done.
#[derive(Debug, Args)]
pub(super) struct SessionCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Makes an empty session.
    New(New),
    /// Reads text into a session.
    Append(Append),
    /// Reads a question into a session and lets the model continue.
    Ask(Ask),
    /// Cuts a session back to its first tokens.
    Truncate(Truncate),
    /// Copies a session under another name; the two share what they have in common.
    Fork(Fork),
    /// Lists all sessions.
    List(List),
    /// Says what a session holds and what it takes to go on with it.
    Show(Show),
    /// Forgets a session.
    Delete(Delete),
}

/// Where sessions are.
#[derive(Debug, Clone, Args)]
struct StoreArgs {
    /// File that holds the sessions; `new` makes it when it is not there.
    #[arg(long, value_name = "PATH")]
    store: PathBuf,
}

/// Which session of which store, and the model that it is for.
#[derive(Debug, Args)]
struct Target {
    /// Name of the session.
    #[arg(value_parser = name_of_session)]
    name: String,
    #[command(flatten)]
    store: StoreArgs,
    /// Folder with config.json, safetensors files and tokenizer.json.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// What runs the model: `auto` and `gpu` take a GPU, a software one where there is no other. The CPU keeps no sessions.
    #[arg(long, value_enum, default_value_t = Device::Auto, hide_possible_values = true)]
    device: Device,
    /// Prints what was chosen: adapter, its features and limits.
    #[arg(short, long)]
    verbose: bool,
    /// What is kept of the window rings; by default as the save before did, and replay in a new session.
    #[arg(long, value_enum)]
    rings: Option<RingsArg>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum RingsArg {
    /// Nothing: they are computed again from the last window of tokens, approximately.
    Replay,
    /// All of them: the session goes on exactly as if it had never been away.
    Saved,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ReplayArg {
    /// The last window of tokens is read again, and sees nothing before it in the windows: approximate.
    Bounded,
    /// Everything that the windows depend on is computed again.
    Exact,
}

#[derive(Debug, Args)]
struct New {
    #[command(flatten)]
    target: Target,
}

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("input").required(true).args(["text", "file", "tokens"])))]
struct Append {
    #[command(flatten)]
    target: Target,
    /// The text.
    #[arg(long, value_name = "TEXT")]
    text: Option<String>,
    /// A file with the text; `-` reads standard input.
    #[arg(long, value_name = "F")]
    file: Option<PathBuf>,
    /// The text as token ids: 5,6,7.
    #[arg(long, value_name = "IDS")]
    tokens: Option<String>,
    /// How the text is read; what other sessions have of it is taken over when that is bounded.
    #[arg(long, value_enum, default_value_t = PrefillArg::Bounded)]
    prefill: PrefillArg,
    /// Prints one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct Ask {
    #[command(flatten)]
    target: Target,
    /// What is appended before the model continues.
    question: String,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// How the question is read.
    #[arg(long, value_enum, default_value_t = PrefillArg::Bounded)]
    prefill: PrefillArg,
    /// Prints one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct Truncate {
    #[command(flatten)]
    target: Target,
    /// Tokens that stay.
    length: usize,
    /// How the window rings are rebuilt.
    #[arg(long, value_enum, default_value_t = ReplayArg::Bounded)]
    replay: ReplayArg,
    /// Prints one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct Fork {
    /// Name of the session.
    name: String,
    /// Name of the copy.
    #[arg(value_parser = name_of_session)]
    copy: String,
    #[command(flatten)]
    store: StoreArgs,
}

#[derive(Debug, Args)]
struct List {
    #[command(flatten)]
    store: StoreArgs,
    /// Prints one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct Show {
    /// Name of the session.
    name: String,
    #[command(flatten)]
    store: StoreArgs,
    /// Prints one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct Delete {
    /// Name of the session.
    name: String,
    #[command(flatten)]
    store: StoreArgs,
}

impl SessionCommand {
    pub(super) fn run(self) -> anyhow::Result<()> {
        match self.action {
            Action::New(command) => command.run(),
            Action::Append(command) => command.run(),
            Action::Ask(command) => command.run(),
            Action::Truncate(command) => command.run(),
            Action::Fork(command) => command.run(),
            Action::List(command) => command.run(),
            Action::Show(command) => command.run(),
            Action::Delete(command) => command.run(),
        }
    }
}

/// A name that a session can be given, and that a terminal can show in a line.
pub(super) fn name_of_session(name: &str) -> Result<String, String> {
    match name {
        "" => Err("a name has at least one letter".into()),
        _ if name.len() > MAX_NAME => Err(format!("{} bytes found, at most {MAX_NAME} allowed", name.len())),
        _ if name.contains(char::is_control) => Err("control characters are not allowed".into()),
        _ => Ok(name.into()),
    }
}

impl StoreArgs {
    /// The store, which has to be there.
    fn open(&self) -> crate::Result<Rc<dyn Store>> {
        if !self.store.try_exists().unwrap_or(true) {
            let message = "there is no such file; `cedra session new` makes one".into();
            return Err(Error::Store { store: self.store.display().to_string(), message });
        }
        open_store(&self.store)
    }
}

/// The store in a file, made where there is none.
pub(super) fn open_store(path: &Path) -> crate::Result<Rc<dyn Store>> {
    Ok(Rc::new(RedbStore::open(path)?))
}

/// What a session was when it was saved, if there is one.
pub(super) fn saved(store: &dyn Store, name: &str) -> crate::Result<Option<Manifest>> {
    let bytes = pollster::block_on(store.open(name))?;
    bytes.map(|bytes| Manifest::parse(name, &bytes)).transpose()
}

fn known(store: &dyn Store, name: &str) -> crate::Result<Manifest> {
    saved(store, name)?.ok_or_else(|| Error::NoSession { session: name.into() })
}

/// Refuses tokens that the session cannot read, before anything is loaded.
pub(super) fn check_read(opened: &Opened, manifest: Option<&Manifest>, tokens: &[u32]) -> crate::Result<()> {
    let config = opened.checkpoint.config();
    let length = manifest.map_or(0, |manifest| manifest.tokens as usize);
    check_tokens(tokens, config.vocab_size, length, config.max_position_embeddings)
}

/// Refuses another model's session, before anything is loaded.
fn check_model(name: &str, manifest: &Manifest, model: &Fingerprint) -> crate::Result<()> {
    for ((part, found), (_, allowed)) in manifest.fingerprint.parts().into_iter().zip(model.parts()) {
        if found != allowed {
            let (found, allowed) = (RecordId(found).to_string(), RecordId(allowed).to_string());
            return Err(Error::Fingerprint { session: name.into(), part, found, allowed });
        }
    }
    Ok(())
}

/// How a session is opened.
pub(super) struct Settings<'a> {
    pub model: ModelArgs,
    pub name: &'a str,
    /// What a save keeps of the rings; none for what the last save kept.
    pub rings: Option<Rings>,
    /// Whether standard error hears nothing of what was done.
    pub quiet: bool,
    /// Whether tokens are drafted.
    pub drafts: Drafts,
}

impl Settings<'_> {
    /// Refuses the CPU.
    pub fn need_gpu(&self) -> crate::Result<()> {
        if self.model.device != Device::Cpu {
            return Ok(());
        }
        let allowed = "auto or gpu: sessions need a GPU, a software one will do".into();
        Err(Error::Setting { setting: "device", found: "cpu".into(), allowed })
    }
}

/// A session on its device, and where it is kept.
pub(super) struct Place {
    opened: Rc<Opened>,
    store: Rc<dyn Store>,
    session: Session,
    name: String,
    rings: Rings,
    quiet: bool,
    verbose: bool,
    /// Tokens of the session when it was opened.
    before: usize,
    /// Tokens that were read.
    read: usize,
    interrupt: Option<Interrupt>,
    /// What Ctrl-C cut short.
    cut: Option<String>,
}

/// What a command did to a session, and what a save wrote.
#[derive(Debug, Serialize)]
pub(super) struct Kept {
    name: String,
    tokens: usize,
    read: usize,
    reused: usize,
    replayed: usize,
    records_written: usize,
    bytes_written: u64,
}

impl Place {
    /// Loads the model, and the session that `manifest` describes, or an empty one, with room for `more` tokens.
    pub fn new(
        settings: &Settings<'_>,
        opened: Opened,
        store: Rc<dyn Store>,
        manifest: Option<&Manifest>,
        more: usize,
    ) -> anyhow::Result<Self> {
        let Settings { model, name, rings, quiet, drafts } = settings;
        let length = manifest.map_or(0, |manifest| manifest.tokens as usize);
        check_room(length, more, opened.checkpoint.config().max_position_embeddings)?;
        let fingerprint = opened.fingerprint();
        if let Some(manifest) = manifest {
            check_model(name, manifest, &fingerprint)?;
        }
        let gpu = runtime::choose(&ModelArgs { device: Device::Gpu, ..model.clone() })?.expect("a GPU was asked for");
        let started = Instant::now();
        let draft = drafts.on(Some(&gpu));
        let options = Options { context: (length + more).max(1), draft: draft != Draft::Off, ..Options::default() };
        let loaded = opened.load(gpu, options)?;
        let engine = Engine::new(loaded, fingerprint);
        engine.attach(&store)?;
        let mut session = if manifest.is_some() { engine.open(&store, name)? } else { engine.session()? };
        session.set_draft(draft)?;
        if model.verbose {
            eprintln!("cedra: loaded in {:.1} s", started.elapsed().as_secs_f64());
        }
        let saved = manifest.is_some_and(|manifest| manifest.rings);
        Ok(Self {
            opened: Rc::new(opened),
            store,
            session,
            name: (*name).into(),
            rings: rings.unwrap_or(if saved { Rings::Saved } else { Rings::Replay }),
            quiet: *quiet,
            verbose: model.verbose,
            before: length,
            read: 0,
            interrupt: None,
            cut: None,
        })
    }

    /// What drafting did.
    pub fn draft_counters(&self) -> crate::Result<Counters> {
        Ok(self.session.draft_counters()?.clone())
    }

    /// Reads tokens, and says what did not have to be read. Ctrl-C ends it early.
    pub fn read(&mut self, tokens: &[u32], prefill: Prefill) -> anyhow::Result<()> {
        let interrupt = self.interrupt.insert(Interrupt::watch()?);
        if self.verbose {
            eprintln!("cedra: reading {} tokens", tokens.len());
        }
        let bar = progress::reading(tokens.len());
        let how = How { prefill, reuse: prefill == Prefill::Bounded };
        let done = self.session.append_as(tokens, how, &mut |done| {
            bar.set_position(done as u64);
            if interrupt.asked() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        drop(bar);
        let (length, reused) = (self.session.len(), self.session.reused());
        self.read = length - self.before - reused;
        match done {
            Err(Error::Stopped { .. }) => {
                self.cut = Some(format!("stopped after {} of {} tokens", length - self.before, tokens.len()));
            }
            done => drop(done?),
        }
        if !self.quiet {
            let (read, replayed) = (self.read, self.session.replayed());
            eprintln!("cedra: {} read, {reused} reused, {replayed} replayed; {length} in all", count(read, "token"));
        }
        Ok(())
    }

    /// Lets the model continue, and saves. Ctrl-C ends it early, and so does a reader of the text who goes away; tokens that were
    /// on their way then are part of the text, and written, too.
    pub fn answer(&mut self, request: &Request) -> anyhow::Result<(Written, Kept)> {
        if self.cut.is_some() {
            return Ok((Written::default(), self.save()?));
        }
        let opened = self.opened.clone();
        let mut voice = Voice::new(&opened.tokenizer, self.quiet);
        let before = self.session.len();
        let mut writing = self.session.generate(request)?;
        loop {
            if self.interrupt.as_ref().is_some_and(Interrupt::asked) {
                self.cut = Some(format!("stopped after {} of {} tokens", voice.tokens(), request.max_tokens));
                break;
            }
            let Some(id) = writing.next().transpose()? else { break };
            if !voice.say(id)? {
                break;
            }
        }
        drop(writing);
        pollster::block_on(self.session.settle_async())?;
        let kept = self.keep()?;
        let unsaid = self.session.tokens()[before + voice.tokens()..].iter();
        for &id in unsaid.take_while(|id| !request.stop_ids.contains(id)) {
            voice.say(id)?;
        }
        let written = voice.end()?;
        self.tell(&kept);
        Ok((written, kept))
    }

    /// Saves the session, and says so.
    pub fn save(&mut self) -> crate::Result<Kept> {
        let kept = self.keep()?;
        self.tell(&kept);
        Ok(kept)
    }

    fn keep(&mut self) -> crate::Result<Kept> {
        let written = self.session.save(&self.store, &self.name, self.rings)?;
        Ok(Kept {
            name: self.name.clone(),
            tokens: written.tokens,
            read: self.read,
            reused: self.session.reused(),
            replayed: self.session.replayed(),
            records_written: written.records,
            bytes_written: written.bytes,
        })
    }

    fn tell(&self, kept: &Kept) {
        if !self.quiet {
            let Kept { name, tokens, records_written, bytes_written, .. } = kept;
            let records = count(*records_written, "new record");
            eprintln!("cedra: `{name}` saved with {}: {records}, {bytes_written} bytes", count(*tokens, "token"));
        }
    }

    /// Why a generation ended.
    pub fn finish(&self, written: &Written, request: &Request) -> &'static str {
        if self.cut.is_some() {
            "interrupted"
        } else {
            finish(written, request)
        }
    }

    /// The end of a command.
    ///
    /// # Errors
    /// [`Interrupted`](super::interrupt::Interrupted) when Ctrl-C has cut it short.
    pub fn end(self) -> anyhow::Result<()> {
        let (Some(cut), Some(interrupt)) = (&self.cut, &self.interrupt) else { return Ok(()) };
        let (name, before) = (&self.name, self.before);
        let now = count(self.session.len(), "token");
        Err(interrupt.stopped(format!("{cut}; `{name}` has {now} now, it had {before}")).into())
    }

    /// The device.
    pub fn gpu(&self) -> &Gpu {
        self.session.engine().model().gpu()
    }
}

impl Target {
    fn settings(&self, quiet: bool) -> Settings<'_> {
        let rings = self.rings.map(|rings| match rings {
            RingsArg::Replay => Rings::Replay,
            RingsArg::Saved => Rings::Saved,
        });
        let model = ModelArgs { model: self.model.clone(), device: self.device, verbose: self.verbose };
        Settings { model, name: &self.name, rings, quiet, drafts: Drafts::default() }
    }

    /// The model's files, the store, and what was saved of the session.
    fn open(&self) -> crate::Result<(Opened, Rc<dyn Store>, Manifest)> {
        let settings = self.settings(true);
        settings.need_gpu()?;
        let store = self.store.open()?;
        let manifest = known(&*store, &self.name)?;
        Ok((runtime::open(&settings.model)?, store, manifest))
    }
}

impl New {
    fn run(self) -> anyhow::Result<()> {
        let Target { name, store, .. } = &self.target;
        let settings = self.target.settings(false);
        settings.need_gpu()?;
        let opened = runtime::open(&settings.model)?;
        let store = open_store(&store.store)?;
        if saved(&*store, name)?.is_some() {
            return Err(Error::SessionExists { session: name.clone() }.into());
        }
        Place::new(&settings, opened, store, None, 0)?.save()?;
        Ok(())
    }
}

impl Append {
    fn run(self) -> anyhow::Result<()> {
        let (opened, store, manifest) = self.target.open()?;
        let text = |text: &str| text_ids(&opened, &manifest, text);
        let tokens = match (&self.text, &self.file, &self.tokens) {
            (Some(given), ..) => text(given)?,
            (_, Some(path), _) => text(&read_text(path)?)?,
            (.., Some(ids)) => super::parse_ids(ids)?,
            _ => unreachable!("clap asks for one of the three"),
        };
        check_read(&opened, Some(&manifest), &tokens)?;
        let settings = self.target.settings(self.json);
        let mut place = Place::new(&settings, opened, store, Some(&manifest), tokens.len())?;
        place.read(&tokens, self.prefill.into())?;
        let kept = place.save()?;
        if self.json {
            print_json(&serde_json::to_value(kept)?)?;
        }
        place.end()
    }
}

impl Ask {
    fn run(self) -> anyhow::Result<()> {
        let request = self.sampling.request(vec![])?;
        let (opened, store, manifest) = self.target.open()?;
        let request = Request { stop_ids: vec![opened.checkpoint.config().eos_token_id], ..request };
        let tokens = text_ids(&opened, &manifest, &self.question)?;
        check_read(&opened, Some(&manifest), &tokens)?;
        let settings = Settings { drafts: self.sampling.drafts(), ..self.target.settings(self.json) };
        let mut place = Place::new(&settings, opened, store, Some(&manifest), tokens.len() + request.max_tokens)?;
        place.read(&tokens, self.prefill.into())?;
        let (written, kept) = place.answer(&request)?;
        if self.json {
            print_json(&serde_json::json!({
                "ids": written.ids,
                "text": written.text,
                "finish": place.finish(&written, &request),
                "session": kept,
            }))?;
        }
        place.end()
    }
}

/// Ids of text that a session reads next. Nothing is not a text, not even at the beginning, which has a token of its own.
fn text_ids(opened: &Opened, manifest: &Manifest, text: &str) -> crate::Result<Vec<u32>> {
    if text.is_empty() {
        return Err(Error::EmptyPrompt);
    }
    opened.text_ids(text, manifest.tokens == 0)
}

impl Truncate {
    fn run(self) -> anyhow::Result<()> {
        let (opened, store, manifest) = self.target.open()?;
        if self.length > manifest.tokens as usize {
            let (found, allowed) = (self.length.to_string(), format!("0 to {}", manifest.tokens));
            return Err(Error::Setting { setting: "length", found, allowed }.into());
        }
        let replay = match self.replay {
            ReplayArg::Bounded => Replay::Bounded,
            ReplayArg::Exact => Replay::Exact,
        };
        let mut place = Place::new(&self.target.settings(self.json), opened, store, Some(&manifest), 0)?;
        place.session.truncate(self.length, replay)?;
        if !self.json {
            eprintln!("cedra: {} left, {} replayed", count(self.length, "token"), place.session.replayed());
        }
        let kept = place.save()?;
        if self.json {
            print_json(&serde_json::to_value(kept)?)?;
        }
        Ok(())
    }
}

impl Fork {
    fn run(self) -> anyhow::Result<()> {
        let store = self.store.open()?;
        Ok(pollster::block_on(crate::snapshot::fork(&*store, &self.name, &self.copy))?)
    }
}

/// Rows that are computed again before a session goes on: as [`Reading::replay`](crate::reading::Reading::replay) plans them.
fn replayed(manifest: &Manifest) -> usize {
    let Manifest { geometry, .. } = manifest;
    let (length, kept) = (manifest.tokens as usize, manifest.kept.min(manifest.tokens) as usize);
    if manifest.rings || length == 0 {
        return 0;
    }
    let end = if kept + 1 < length { kept } else { length };
    let open = geometry.parts.iter().map(|part| kept - kept % part.ratio as usize).min().unwrap_or(end);
    let start = end.saturating_sub(geometry.window as usize).min(open);
    kept.min(length - 1).saturating_sub(start)
}

impl Show {
    fn run(self) -> anyhow::Result<()> {
        let store = self.store.open()?;
        let manifest = known(&*store, &self.name)?;
        let sum = |records: &mut dyn Iterator<Item = RecordRef>| -> u64 {
            records.map(|record| u64::from(record.bytes)).sum()
        };
        // Kinds of records as `docs/session-format.md` names them.
        let bytes = [
            ("tokens", sum(&mut manifest.token_runs.iter().map(|run| run.record))),
            ("pages", sum(&mut manifest.page_runs.iter().map(|run| run.record))),
            ("end", sum(&mut manifest.tail.into_iter())),
            ("state", sum(&mut manifest.state.into_iter())),
        ];
        let (pages, begun) = (manifest.pages(), usize::from(manifest.begun()));
        let parts = manifest.fingerprint.parts().map(|(part, hash)| (part, RecordId(hash).to_string()));
        if self.json {
            let object = |pairs: &mut dyn Iterator<Item = (&str, serde_json::Value)>| -> serde_json::Value {
                pairs.map(|(key, value)| (key.to_owned(), value)).collect::<serde_json::Map<_, _>>().into()
            };
            return print_json(&serde_json::json!({
                "name": self.name,
                "tokens": manifest.tokens,
                "pages": pages,
                "begun_pages": begun,
                "bytes": object(&mut bytes.into_iter().map(|(kind, bytes)| (kind, bytes.into()))),
                "rings_saved": manifest.rings,
                "replayed_by_a_restore": replayed(&manifest),
                "saved_at": manifest.saved_at,
                "fingerprint": object(&mut parts.into_iter().map(|(part, hash)| (part, hash.into()))),
            }));
        }
        let mut out = std::io::stdout().lock();
        let mut row = |what: &str, value: String| writeln!(out, "{what:24} {value}");
        row("tokens", manifest.tokens.to_string())?;
        row("pages", format!("{pages} complete, {begun} begun"))?;
        for (kind, bytes) in bytes {
            row(&format!("bytes of {kind}"), bytes.to_string())?;
        }
        row("window rings", if manifest.rings { "saved" } else { "not saved" }.into())?;
        row("replayed by a restore", count(replayed(&manifest), "token"))?;
        row("saved", ago(manifest.saved_at))?;
        for (part, hash) in parts {
            row(&format!("fingerprint of {part}"), hash)?;
        }
        Ok(())
    }
}

impl List {
    fn run(self) -> anyhow::Result<()> {
        let store = self.store.open()?;
        let listed = pollster::block_on(store.list())?;
        let usage = pollster::block_on(store.usage())?;
        let rows = listed.iter().map(|entry| (entry, Manifest::parse(&entry.session, &entry.manifest)));
        if self.json {
            let sessions: Vec<_> = rows
                .map(|(entry, manifest)| match manifest {
                    Ok(manifest) => serde_json::json!({
                        "name": entry.session,
                        "tokens": manifest.tokens,
                        "bytes": entry.bytes,
                        "saved_at": manifest.saved_at,
                    }),
                    Err(error) => serde_json::json!({ "name": entry.session, "error": error.to_string() }),
                })
                .collect();
            let report = serde_json::json!({ "sessions": sessions, "records": usage.records, "bytes": usage.bytes });
            return print_json(&report);
        }
        let mut out = std::io::stdout().lock();
        for (entry, manifest) in rows {
            let (name, bytes) = (&entry.session, entry.bytes);
            match manifest {
                Ok(Manifest { tokens, saved_at, .. }) => {
                    writeln!(out, "{name:24} {tokens:>9} tokens {bytes:>12} bytes  {}", ago(saved_at))?;
                }
                Err(error) => writeln!(out, "{name:24} cannot be read: {error}")?,
            }
        }
        let (sessions, records) = (count(usage.sessions, "session"), count(usage.records, "record"));
        Ok(writeln!(out, "{sessions}, {records}, {} bytes", usage.bytes)?)
    }
}

impl Delete {
    fn run(self) -> anyhow::Result<()> {
        let store = self.store.open()?;
        match pollster::block_on(store.delete(&self.name))? {
            true => Ok(()),
            false => Err(Error::NoSession { session: self.name }.into()),
        }
    }
}

/// A number of things.
pub(super) fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// How long ago a time in Unix milliseconds was.
pub(super) fn ago(time: u64) -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let seconds = now.saturating_sub(time / 1000);
    let units = [(86_400, "days"), (3_600, "hours"), (60, "minutes"), (1, "seconds")];
    match units.iter().find(|(size, _)| seconds >= 2 * size) {
        Some((size, unit)) => format!("{} {unit} ago", seconds / size),
        None => "just now".into(),
    }
}
