//! Sessions, and the tokens that they make.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::ops::{ControlFlow, Deref, DerefMut};
use std::rc::Rc;

use futures::channel::oneshot;
use js_sys::{Promise, Uint32Array, Uint8Array};
use serde_json::{json, Value};
use wasm_bindgen::prelude::*;

use super::engine::Place;
use super::error::{promise, set, to_js};
use super::options::{choose, whole, Options, Signal};
use super::store::WasmStore;
use crate::model::Finish;
use crate::reading::{Prefill, Replay};
use crate::sampling::{Request, Sampling};
use crate::session::{Append, Rings, Session, Written};
use crate::spec::{Counters, Draft};
use crate::text::Pieces;
use crate::Error;

#[wasm_bindgen(typescript_custom_section)]
const TYPES: &str = r#"
export interface AppendOptions {
  /** Which rows the layers run. */
  prefill?: "bounded" | "exact" | "full";
  /** Whether an empty session takes over a prefix that the engine knows; it does unless told otherwise. */
  reuse?: boolean;
  /** Hears how many tokens are done, of how many. */
  onProgress?: (done: number, total: number) => void;
  signal?: AbortSignal;
}
export interface Appended { reused: number; replayed: number }
export interface GenerateOptions {
  /** 128 where none is given. */
  maxTokens?: number;
  /** 0, which takes the most likely token, where none is given. */
  temperature?: number;
  topP?: number;
  topK?: number;
  seed?: bigint | number;
  /** Tokens that are guessed for each pass to verify. */
  draft?: "auto" | "off" | number;
  /** Tokens that end the text. The model's end of text where none are given. */
  stopIds?: Uint32Array;
  signal?: AbortSignal;
}
export interface Piece {
  ids: Uint32Array;
  /** 1 for each of them that had been drafted, else 0. */
  drafted: Uint8Array;
  /** Whole characters. */
  text: string;
  done: boolean;
  /** Why it ended; nothing when another call on the session has ended it. */
  finish?: "stop" | "length";
}
export interface DraftCounters {
  rounds: number; drafted: number; tokens: number; secondsARound: number | null; verified: number[]; accepted: number[];
}
export interface Written {
  records: number; bytes: number;
  /** Tokens of the text that was saved. */
  tokens: number;
}
"#;

/// Tokens that a generation makes where nothing else was asked for.
const MAX_TOKENS: usize = 128;

/// Calls on a session, one after the other.
#[derive(Default)]
struct Queue {
    last: RefCell<Option<oneshot::Receiver<()>>>,
}

impl Queue {
    /// A place in the queue, taken now: what comes before it ends before the future does.
    fn enter(&self) -> impl Future<Output = oneshot::Sender<()>> {
        let (end, next) = oneshot::channel();
        let before = self.last.replace(Some(next));
        async move {
            if let Some(before) = before {
                // Nothing is ever sent: a turn ends when its sender is dropped.
                let _ = before.await;
            }
            end
        }
    }
}

/// What can be seen of a session while a call on it goes on.
#[derive(Default)]
struct Seen {
    tokens: Vec<u32>,
    remaining: usize,
    reused: usize,
    replayed: usize,
    layer_rows: Vec<(u64, u64)>,
    drafts: Counters,
}

impl Seen {
    /// A text is cut or goes on: it does not change otherwise.
    fn update(&mut self, session: &Session) {
        let tokens = session.tokens();
        self.tokens.truncate(tokens.len());
        self.tokens.extend_from_slice(&tokens[self.tokens.len()..]);
        (self.remaining, self.reused, self.replayed) = (session.remaining(), session.reused(), session.replayed());
        self.drafts = session.draft_counters().cloned().unwrap_or_default();
        self.layer_rows = session.layer_rows().iter().map(|rows| (rows.whole, rows.part)).collect();
    }
}

struct State {
    place: Rc<Place>,
    queue: Queue,
    /// Saves, one after the other, beside the other calls.
    saves: Queue,
    /// Saves that have not ended.
    saving: Cell<usize>,
    /// Once it is to be closed, no call is taken any more.
    closing: Cell<bool>,
    /// Taken by the call whose turn it is.
    session: RefCell<Option<Session>>,
    seen: RefCell<Seen>,
    /// Number of the call that changed the session last: a generation goes on as long as it is its own.
    call: Cell<u64>,
}

impl State {
    /// Waits until the calls made before have ended.
    fn turn(self: &Rc<Self>) -> impl Future<Output = Result<Turn, Error>> + 'static {
        let (turn, closing) = (self.last_turn(), self.closing.get());
        async move {
            let turn = turn.await?;
            if closing {
                return Err(Error::Closed);
            }
            Ok(turn)
        }
    }

    /// As [`State::turn`], for what was asked for before the session was to be closed.
    fn last_turn(self: &Rc<Self>) -> impl Future<Output = Result<Turn, Error>> + 'static {
        let (state, enter) = (self.clone(), self.queue.enter());
        async move {
            let end = enter.await;
            let session = state.session.borrow_mut().take().ok_or(Error::Closed)?;
            Ok(Turn { state, session: Some(session), _end: end })
        }
    }
}

/// A session that is a call's own, for as long as it lasts.
struct Turn {
    state: Rc<State>,
    /// There until it is put back.
    session: Option<Session>,
    _end: oneshot::Sender<()>,
}

impl Turn {
    /// From now on a generation of before is over.
    fn begin(&self) -> u64 {
        let number = self.state.call.get() + 1;
        self.state.call.set(number);
        number
    }

    /// Gives the session up.
    fn close(mut self) {
        if let Some(mut session) = self.session.take() {
            session.close();
            self.state.seen.take();
        }
    }
}

impl Deref for Turn {
    type Target = Session;
    fn deref(&self) -> &Session {
        self.session.as_ref().expect("there until it is put back")
    }
}

impl DerefMut for Turn {
    fn deref_mut(&mut self) -> &mut Session {
        self.session.as_mut().expect("there until it is put back")
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            self.state.seen.borrow_mut().update(&session);
            *self.state.session.borrow_mut() = Some(session);
        }
    }
}

/// A text on the device. Calls queue; a call other than `next` and `save` ends a generation that is open.
#[wasm_bindgen]
pub struct WasmSession {
    state: Rc<State>,
}

impl WasmSession {
    pub(super) fn new(place: Rc<Place>, session: Session) -> Self {
        let mut seen = Seen::default();
        seen.update(&session);
        let state = State {
            place,
            queue: Queue::default(),
            saves: Queue::default(),
            saving: Cell::new(0),
            closing: Cell::new(false),
            session: RefCell::new(Some(session)),
            seen: RefCell::new(seen),
            call: Cell::new(0),
        };
        Self { state: Rc::new(state) }
    }

    /// A turn that changes nothing: a generation goes on after it.
    pub(super) fn turn(&self) -> impl Future<Output = Result<impl Deref<Target = Session>, Error>> + 'static {
        self.state.turn()
    }

    /// A call that has the session to itself.
    fn call<F: Future<Output = Result<JsValue, JsValue>>>(&self, work: impl FnOnce(Turn) -> F + 'static) -> Promise {
        let turn = self.state.turn();
        promise(async move {
            let turn = turn.await?;
            turn.begin();
            work(turn).await
        })
    }
}

#[wasm_bindgen]
impl WasmSession {
    /// Tokens of the text.
    #[wasm_bindgen(getter)]
    pub fn length(&self) -> usize {
        self.state.seen.borrow().tokens.len()
    }

    /// Tokens that still fit.
    #[wasm_bindgen(getter)]
    pub fn remaining(&self) -> usize {
        self.state.seen.borrow().remaining
    }

    /// Tokens that were taken over from other sessions.
    #[wasm_bindgen(getter)]
    pub fn reused(&self) -> usize {
        self.state.seen.borrow().reused
    }

    /// Rows that were computed again because windows are not kept.
    #[wasm_bindgen(getter)]
    pub fn replayed(&self) -> usize {
        self.state.seen.borrow().replayed
    }

    /// The text.
    #[wasm_bindgen(getter)]
    pub fn tokens(&self) -> Uint32Array {
        self.state.seen.borrow().tokens.as_slice().into()
    }

    /// Rows that each layer has run, whole and in part.
    #[wasm_bindgen(getter, js_name = layerRows, unchecked_return_type = "Array<{ whole: number; part: number }>")]
    pub fn layer_rows(&self) -> JsValue {
        let seen = self.state.seen.borrow();
        let rows: Value = seen.layer_rows.iter().map(|(whole, part)| json!({ "whole": whole, "part": part })).collect();
        to_js(&rows)
    }

    /// What drafting did since it was chosen.
    #[wasm_bindgen(getter, unchecked_return_type = "DraftCounters")]
    pub fn drafts(&self) -> JsValue {
        let seen = self.state.seen.borrow();
        let Counters { rounds, drafted, tokens, timed, seconds, verified, accepted } = &seen.drafts;
        to_js(&json!({
            "rounds": rounds,
            "drafted": drafted,
            "tokens": tokens,
            "secondsARound": if *timed > 0 { Some(seconds / *timed as f64) } else { None },
            "verified": verified,
            "accepted": accepted,
        }))
    }

    /// Reads tokens. An empty session takes over the longest prefix that the engine knows, and reads the rest. A signal stops
    /// it after the chunk that is being read: the text then holds what was read.
    #[wasm_bindgen(unchecked_return_type = "Promise<Appended>")]
    pub fn append(
        &self,
        ids: Vec<u32>,
        #[wasm_bindgen(unchecked_param_type = "AppendOptions | undefined")] options: JsValue,
    ) -> Promise {
        self.call(move |mut session| async move {
            let options = Options::new(options);
            let choices = [("bounded", Prefill::Bounded), ("exact", Prefill::Exact), ("full", Prefill::Full)];
            let default = Append::default();
            let how = Append {
                prefill: options.choice("prefill", &choices)?.unwrap_or(default.prefill),
                reuse: options.flag("reuse")?.unwrap_or(default.reuse),
            };
            let (progress, signal) = (options.callback("onProgress")?, options.signal()?);
            let total = ids.len();
            if signal.aborted() {
                return Err(Error::Stopped { read: 0, of: total }.into());
            }
            let tell = |done: usize| match &progress {
                Some(progress) => progress.call2(&JsValue::UNDEFINED, &done.into(), &total.into()).err(),
                None => None,
            };
            let mut thrown = None;
            let done = session
                .append_async(&ids, how, &mut |done| {
                    thrown = tell(done);
                    if thrown.is_some() || signal.aborted() {
                        ControlFlow::Break(())
                    } else {
                        ControlFlow::Continue(())
                    }
                })
                .await;
            match (thrown, done) {
                (Some(error), _) => Err(error),
                (None, Err(error)) => Err(error.into()),
                (None, Ok(appended)) => match tell(total) {
                    Some(error) => Err(error),
                    None => Ok(to_js(&json!({ "reused": appended.reused, "replayed": appended.replayed }))),
                },
            }
        })
    }

    /// Begins to make tokens. What is made is in the text, whether or not it is asked for.
    #[wasm_bindgen(unchecked_return_type = "Promise<WasmGeneration>")]
    pub fn generate(
        &self,
        #[wasm_bindgen(unchecked_param_type = "GenerateOptions | undefined")] options: JsValue,
    ) -> Promise {
        let state = self.state.clone();
        self.call(move |mut session| async move {
            let options = Options::new(options);
            let default = Sampling::default();
            let eos = session.engine().model().config().eos_token_id;
            let request = Request {
                max_tokens: options.whole("maxTokens")?.unwrap_or(MAX_TOKENS),
                sampling: Sampling {
                    temperature: options.number("temperature")?.unwrap_or(default.temperature),
                    top_p: options.number("topP")?.unwrap_or(default.top_p),
                    top_k: options.whole("topK")?.map_or(default.top_k, |k| k as u32),
                    seed: options.wide("seed")?.unwrap_or(default.seed),
                },
                stop_ids: options.ids("stopIds")?.unwrap_or_else(|| vec![eos]),
            };
            let gpu = session.engine().model().gpu().clone();
            let usual = Draft::usual(request.sampling.temperature == 0.0, gpu.is_software());
            let draft = options.draft()?.unwrap_or(usual);
            let signal = options.signal()?;
            if signal.aborted() {
                return Err(Error::Stopped { read: 0, of: request.max_tokens }.into());
            }
            drop(session.generate_drafting_async(&request, draft).await?);
            let generation = Making {
                call: session.state.call.get(),
                signal,
                max_tokens: request.max_tokens,
                made: Cell::new(0),
                pieces: RefCell::default(),
                over: Cell::new(false),
                finish: Cell::new(None),
            };
            Ok(WasmGeneration { state, making: Rc::new(generation) }.into())
        })
    }

    /// Goes back to the first `length` tokens.
    #[wasm_bindgen(unchecked_return_type = "Promise<void>")]
    pub fn truncate(
        &self,
        #[wasm_bindgen(unchecked_param_type = "number")] length: JsValue,
        #[wasm_bindgen(unchecked_param_type = "\"bounded\" | \"exact\" | undefined")] replay: JsValue,
    ) -> Promise {
        self.call(move |mut session| async move {
            let choices = [("bounded", Replay::Bounded), ("exact", Replay::Exact)];
            let replay = if replay.is_undefined() { Replay::default() } else { choose("replay", &replay, &choices)? };
            session.truncate_async(whole("length", &length)?, replay).await?;
            Ok(JsValue::UNDEFINED)
        })
    }

    /// A second session with the same text.
    #[wasm_bindgen(unchecked_return_type = "Promise<WasmSession>")]
    pub fn fork(&self) -> Promise {
        let place = self.state.place.clone();
        self.call(move |mut session| async move {
            let fork = session.fork_async().await?;
            Ok(WasmSession::new(place, fork).into())
        })
    }

    /// Saves the session as it is at this call's turn: what is new since the last save to this store. Only for a moment does it
    /// have the session to itself; a generation goes on, and so does whatever is called next. Until it is done the store has what
    /// it had. Saves that are called while one is being written come after it, with the text of then.
    #[wasm_bindgen(unchecked_return_type = "Promise<Written>")]
    pub fn save(
        &self,
        store: &WasmStore,
        name: String,
        #[wasm_bindgen(unchecked_param_type = "\"replay\" | \"saved\" | undefined")] rings: JsValue,
    ) -> Promise {
        let (store, state) = (store.store(), self.state.clone());
        let ready = state.saves.enter();
        // The order of calls is kept where nothing is in the way of it.
        let first = (state.saving.get() == 0).then(|| state.turn());
        state.saving.set(state.saving.get() + 1);
        let closing = state.closing.get();
        promise(async move {
            let _end = ready.await;
            let done = async {
                let choices = [("replay", Rings::Replay), ("saved", Rings::Saved)];
                let rings = if rings.is_undefined() { Rings::default() } else { choose("rings", &rings, &choices)? };
                let mut turn = match first {
                    Some(turn) => turn.await?,
                    None if closing => return Err(Error::Closed.into()),
                    None => state.last_turn().await?,
                };
                let snapshot = turn.snapshot_async(rings).await?;
                drop(turn);
                Ok(snapshot.write_async(&store, &name).await?)
            };
            let done: Result<Written, JsValue> = done.await;
            state.saving.set(state.saving.get() - 1);
            let Written { records, bytes, tokens, .. } = done?;
            Ok(to_js(&json!({ "records": records, "bytes": bytes, "tokens": tokens })))
        })
    }

    /// Gives everything back once the calls made before have ended; calls made after are refused.
    pub fn close(&self) {
        let (state, saved) = (self.state.clone(), self.state.saves.enter());
        state.closing.set(true);
        wasm_bindgen_futures::spawn_local(async move {
            drop(saved.await);
            // A session that is closed already stays so.
            if let Ok(turn) = state.last_turn().await {
                turn.begin();
                turn.close();
            }
        });
    }
}

/// A generation in progress.
struct Making {
    /// The call that began it.
    call: u64,
    signal: Signal,
    max_tokens: usize,
    made: Cell<usize>,
    pieces: RefCell<Pieces>,
    over: Cell<bool>,
    finish: Cell<Option<Finish>>,
}

impl Making {
    /// The last piece, or one after it.
    fn ended(&self, ids: &[(u32, bool)], text: String) -> JsValue {
        self.over.set(true);
        let text = text + &self.pieces.take().finish();
        piece(ids, &text, true, self.finish.get())
    }

    /// Makes tokens until there is text to show, or no more of it.
    async fn next(&self, turn: Turn) -> Result<JsValue, JsValue> {
        let place = turn.state.place.clone();
        let mut session = turn;
        let (mut ids, mut text) = (vec![], String::new());
        loop {
            if self.over.get() || session.state.call.get() != self.call {
                return Ok(self.ended(&ids, text));
            }
            if self.signal.aborted() {
                self.over.set(true);
                session.settle_async().await?;
                return Err(Error::Stopped { read: self.made.get(), of: self.max_tokens }.into());
            }
            let Some(mut writing) = session.writing() else { return Ok(self.ended(&ids, text)) };
            match writing.next_token().await {
                Ok(Some(id)) => {
                    self.made.set(self.made.get() + 1);
                    ids.push((id, writing.drafted()));
                    text += &self.pieces.borrow_mut().push(place.tokenizer.bytes(id)?);
                    if !text.is_empty() {
                        return Ok(piece(&ids, &text, false, None));
                    }
                }
                Ok(None) => {
                    self.finish.set(writing.finish());
                    drop(writing);
                    return Ok(self.ended(&ids, text));
                }
                Err(error) => {
                    self.over.set(true);
                    return Err(error.into());
                }
            }
        }
    }
}

/// `ids` with whether they had been drafted.
fn piece(ids: &[(u32, bool)], text: &str, done: bool, finish: Option<Finish>) -> JsValue {
    let piece: JsValue = js_sys::Object::new().into();
    let (ids, drafted): (Vec<u32>, Vec<u8>) = ids.iter().map(|&(id, drafted)| (id, u8::from(drafted))).unzip();
    set(&piece, "ids", &Uint32Array::from(&ids[..]));
    set(&piece, "drafted", &Uint8Array::from(&drafted[..]));
    set(&piece, "text", &text.into());
    set(&piece, "done", &done.into());
    if let Some(finish) = finish {
        let finish = match finish {
            Finish::Stop => "stop",
            Finish::Length => "length",
        };
        set(&piece, "finish", &finish.into());
    }
    piece
}

/// Tokens being made.
#[wasm_bindgen]
pub struct WasmGeneration {
    state: Rc<State>,
    making: Rc<Making>,
}

#[wasm_bindgen]
impl WasmGeneration {
    /// The next piece of text. After the last, which says that it is, pieces are empty.
    #[wasm_bindgen(unchecked_return_type = "Promise<Piece>")]
    pub fn next(&self) -> Promise {
        let (turn, making) = (self.state.turn(), self.making.clone());
        promise(async move { making.next(turn.await?).await })
    }

    /// Ends it; the text keeps what was made.
    #[wasm_bindgen(js_name = "return", unchecked_return_type = "Promise<void>")]
    pub fn end(&self) -> Promise {
        let (turn, making) = (self.state.turn(), self.making.clone());
        promise(async move {
            let mut session = turn.await?;
            let mine = session.state.call.get() == making.call;
            if mine && !making.over.replace(true) {
                session.settle_async().await?;
            }
            Ok(JsValue::UNDEFINED)
        })
    }
}
