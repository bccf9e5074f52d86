//! A store in a browser's IndexedDB, for pages and workers of one origin.
//!
//! A transaction ends by itself as soon as nothing is asked of it. So everything that one writes is made before it begins,
//! all that it reads is asked for at once, and it writes in the very event that answers the last question: nothing else is
//! waited for in between. Which records nobody names any more follows from the lists of all sessions, read in the same
//! transaction: other tabs may have changed them.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::rc::Rc;

use futures::channel::oneshot;
use futures::future::{select, Either, LocalBoxFuture};
use js_sys::{Array, Function, Object, Promise, Reflect, Uint8Array};
use wasm_bindgen::prelude::*;
use wasm_bindgen::JsCast;
use wasm_bindgen_futures::JsFuture;
use web_sys::{DomException, IdbDatabase, IdbFactory, IdbObjectStore, IdbOpenDbRequest, IdbRequest, IdbTransaction};

use super::{absent, check_commit, check_records, Held, Listed, Record, RecordId, Store, Usage};
use crate::{Error, Result};

/// Bytes of each record, by its id in hexadecimal.
const RECORDS: &str = "records";
/// Their lengths, so that nobody reads them to know.
const SIZES: &str = "sizes";
/// Manifests, by the session's name.
const SESSIONS: &str = "sessions";
/// The ids that each session names, 16 bytes each, in order.
const NAMED: &str = "named";

/// The version of the database that this code reads and writes.
const FORMAT: u32 = 1;

#[wasm_bindgen]
extern "C" {
    /// A database whose transactions take options.
    type Database;
    #[wasm_bindgen(method, catch)]
    fn transaction(
        this: &Database,
        stores: &Array,
        mode: &str,
        options: &Object,
    ) -> std::result::Result<IdbTransaction, JsValue>;

    type Locks;
    #[wasm_bindgen(method, catch)]
    fn request(this: &Locks, name: &str, options: &Object, callback: &JsValue)
        -> std::result::Result<Promise, JsValue>;

    type Storage;
    #[wasm_bindgen(method, catch)]
    fn estimate(this: &Storage) -> std::result::Result<Promise, JsValue>;
}

/// Why a transaction came to nothing.
enum Failure {
    /// The browser's word.
    Browser(JsValue),
    /// Ours.
    Refused(Error),
}

impl From<JsValue> for Failure {
    fn from(value: JsValue) -> Self {
        Self::Browser(value)
    }
}

type Outcome<T> = std::result::Result<T, Failure>;

/// Sessions in a database of the browser.
pub struct IndexedDbStore {
    /// For messages.
    name: String,
    database: String,
    connection: RefCell<Option<Rc<Connection>>>,
    held: Rc<Held>,
    /// Tells others that somebody may be saving.
    _presence: Option<Lock>,
}

impl fmt::Debug for IndexedDbStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IndexedDbStore").field("name", &self.name).finish_non_exhaustive()
    }
}

impl IndexedDbStore {
    /// Opens the database, or makes it where there is none. Records that no session names go, unless another tab, or a store
    /// of this one, has it open.
    ///
    /// # Errors
    /// [`Error::Store`] when there is no IndexedDB, or it is denied, or the database is another program's.
    pub async fn open(database: &str) -> Result<Self> {
        let name = format!("indexeddb:{database}");
        let mut store = Self {
            name,
            database: database.into(),
            connection: RefCell::default(),
            held: Rc::default(),
            _presence: None,
        };
        store.connect().await.map_err(|failure| store.said(failure))?;
        if let Some(_alone) = Lock::take(&store.name, "exclusive", true).await {
            store.drop_orphans().await?;
        }
        store._presence = Lock::take(&store.name, "shared", false).await;
        Ok(store)
    }

    async fn connect(&self) -> Outcome<Rc<Connection>> {
        if let Some(connection) = &*self.connection.borrow() {
            if connection.open.get() {
                return Ok(connection.clone());
            }
        }
        let connection = Rc::new(Connection::open(&self.database).await?);
        *self.connection.borrow_mut() = Some(connection.clone());
        Ok(connection)
    }

    /// Runs a transaction: `ask` asks for what it reads, `answer` gets that and writes. A connection that has died is
    /// replaced once.
    async fn run<T: 'static, A>(
        &self,
        kind: Kind,
        ask: impl Fn(&Stores) -> std::result::Result<Vec<IdbRequest>, JsValue>,
        answer: impl Fn() -> A,
    ) -> Result<T>
    where
        A: FnOnce(&Stores, &[JsValue]) -> Outcome<T> + 'static,
    {
        let mut first = true;
        loop {
            let connection = self.connect().await.map_err(|failure| self.said(failure))?;
            match transact(&connection.database, kind, &ask, answer()).await {
                Ok(value) => return Ok(value),
                Err(Failure::Browser(error)) if first && (!connection.open.get() || has_died(&error)) => {
                    connection.open.set(false);
                    first = false;
                }
                Err(Failure::Browser(error)) if named(&error) == "QuotaExceededError" => {
                    let available = available().await;
                    return Err(Error::StoreFull { store: self.name.clone(), needed: None, available });
                }
                Err(failure) => return Err(self.said(failure)),
            }
        }
    }

    fn said(&self, failure: Failure) -> Error {
        match failure {
            Failure::Refused(error) => error,
            Failure::Browser(value) => Error::Store { store: self.name.clone(), message: words_of(&value) },
        }
    }

    /// Removes what was put and never named.
    async fn drop_orphans(&self) -> Result<()> {
        let ask = |stores: &Stores| Ok(vec![stores.sizes.get_all_keys()?, stores.named.get_all()?]);
        let answer = || {
            |stores: &Stores, found: &[JsValue]| {
                let named: BTreeSet<String> = list(&found[1]).flat_map(|ids| keys(&ids)).collect();
                for id in list(&found[0]).filter(|id| id.as_string().is_none_or(|id| !named.contains(&id))) {
                    stores.forget(&id)?;
                }
                Ok(())
            }
        };
        self.run(Kind::Write, ask, answer).await
    }
}

/// How a transaction is made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    /// The commit that names what is written makes it durable, too.
    Write,
    /// On the disk when it has ended.
    Commit,
}

/// The parts of the database in a transaction.
struct Stores {
    records: IdbObjectStore,
    sizes: IdbObjectStore,
    sessions: IdbObjectStore,
    named: IdbObjectStore,
}

impl Stores {
    fn of(transaction: &IdbTransaction) -> std::result::Result<Self, JsValue> {
        Ok(Self {
            records: transaction.object_store(RECORDS)?,
            sizes: transaction.object_store(SIZES)?,
            sessions: transaction.object_store(SESSIONS)?,
            named: transaction.object_store(NAMED)?,
        })
    }

    /// Removes a record.
    fn forget(&self, id: &JsValue) -> std::result::Result<(), JsValue> {
        self.records.delete(id)?;
        self.sizes.delete(id)?;
        Ok(())
    }

    /// Removes those records of `before` that no session, but `session`, names and nobody holds.
    fn release(
        &self,
        session: Option<&str>,
        before: impl Iterator<Item = String>,
        sessions: &BTreeMap<String, JsValue>,
        held: &Held,
    ) -> std::result::Result<(), JsValue> {
        let others = sessions.iter().filter(|(name, _)| Some(name.as_str()) != session);
        let named: HashSet<String> = others.flat_map(|(_, ids)| keys(ids)).collect();
        let holds = held.counts().keys().map(RecordId::to_string).collect::<HashSet<_>>();
        for id in before.filter(|id| !named.contains(id) && !holds.contains(id)) {
            self.forget(&id.into())?;
        }
        Ok(())
    }
}

/// One transaction on `database`, as [`IndexedDbStore::run`] says.
async fn transact<T: 'static>(
    database: &IdbDatabase,
    kind: Kind,
    ask: impl Fn(&Stores) -> std::result::Result<Vec<IdbRequest>, JsValue>,
    answer: impl FnOnce(&Stores, &[JsValue]) -> Outcome<T> + 'static,
) -> Outcome<T> {
    let names = [RECORDS, SIZES, SESSIONS, NAMED].map(JsValue::from_str).iter().collect::<Array>();
    let durability = if kind == Kind::Commit { "strict" } else { "relaxed" };
    let options = object(&[("durability", durability.into())]);
    let mode = if kind == Kind::Read { "readonly" } else { "readwrite" };
    let transaction = database.unchecked_ref::<Database>().transaction(&names, mode, &options)?;

    let (sender, ended) = oneshot::channel();
    let sender = Rc::new(Cell::new(Some(sender)));
    let end = |result: fn(&IdbTransaction) -> std::result::Result<(), JsValue>| {
        let (sender, transaction) = (sender.clone(), transaction.clone());
        Closure::<dyn FnMut()>::new(move || {
            if let Some(sender) = sender.take() {
                // The receiver is gone when nobody waits for the end.
                let _ = sender.send(result(&transaction));
            }
        })
    };
    let complete = end(|_| Ok(()));
    let abort = end(|transaction| Err(transaction.error().map_or(JsValue::UNDEFINED, JsValue::from)));
    transaction.set_oncomplete(Some(complete.as_ref().unchecked_ref()));
    transaction.set_onabort(Some(abort.as_ref().unchecked_ref()));

    let stores = Stores::of(&transaction)?;
    let requests = ask(&stores)?;
    let outcome = Rc::new(RefCell::new(None));
    // Requests are answered in order: with the last, all are.
    let last = requests.last().cloned();
    let answered = Closure::once({
        let (transaction, outcome) = (transaction.clone(), outcome.clone());
        move || {
            let found = requests.iter().map(IdbRequest::result).collect::<std::result::Result<Vec<_>, _>>();
            let result = found.map_err(Failure::from).and_then(|found| answer(&stores, &found));
            if result.is_err() {
                // Aborting fails only when it has ended already.
                let _ = transaction.abort();
            }
            *outcome.borrow_mut() = Some(result);
        }
    });
    if let Some(last) = &last {
        last.set_onsuccess(Some(answered.as_ref().unchecked_ref()));
    }
    let _handlers = Handlers { transaction: &transaction, last };
    let ended = ended.await;
    let outcome = outcome.borrow_mut().take();
    match (outcome, ended) {
        (Some(Err(failure)), _) => Err(failure),
        (_, Ok(Err(error))) => Err(Failure::Browser(error)),
        (Some(Ok(value)), Ok(Ok(()))) => Ok(value),
        _ => Err(Failure::Browser("the transaction ended without an answer".into())),
    }
}

/// Takes handlers off before their closures go.
struct Handlers<'a> {
    transaction: &'a IdbTransaction,
    last: Option<IdbRequest>,
}

impl Drop for Handlers<'_> {
    fn drop(&mut self) {
        self.transaction.set_oncomplete(None);
        self.transaction.set_onabort(None);
        if let Some(last) = &self.last {
            last.set_onsuccess(None);
        }
    }
}

/// An open database. It gives way to whoever wants to delete it, and notices when the browser closes it.
struct Connection {
    database: IdbDatabase,
    open: Rc<Cell<bool>>,
    _gone: [Closure<dyn FnMut()>; 2],
}

impl Connection {
    async fn open(name: &str) -> Outcome<Self> {
        let factory = Reflect::get(&js_sys::global(), &"indexedDB".into())?;
        let factory: IdbFactory = factory.dyn_into().map_err(|_| JsValue::from("there is no IndexedDB here"))?;
        let request = factory.open_with_u32(name, FORMAT)?;
        let make = Closure::<dyn FnMut()>::new({
            let request = request.clone();
            move || {
                if let Ok(database) = request.result() {
                    let database: IdbDatabase = database.unchecked_into();
                    // What cannot be made is missed below.
                    let _ = [RECORDS, SIZES, SESSIONS, NAMED].map(|store| database.create_object_store(store));
                }
            }
        });
        request.set_onupgradeneeded(Some(make.as_ref().unchecked_ref()));
        let database: IdbDatabase = opened(&request).await?.unchecked_into();
        request.set_onupgradeneeded(None);

        let open = Rc::new(Cell::new(true));
        let changed = Closure::<dyn FnMut()>::new({
            let (open, database) = (open.clone(), database.clone());
            move || {
                open.set(false);
                database.close();
            }
        });
        let closed = Closure::<dyn FnMut()>::new({
            let open = open.clone();
            move || open.set(false)
        });
        database.set_onversionchange(Some(changed.as_ref().unchecked_ref()));
        database.set_onclose(Some(closed.as_ref().unchecked_ref()));
        let names = database.object_store_names();
        let connection = Self { database, open, _gone: [changed, closed] };
        match [RECORDS, SIZES, SESSIONS, NAMED].iter().all(|store| names.contains(store)) {
            true => Ok(connection),
            false => Err(Failure::Browser("a database of another program".into())),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.database.set_onversionchange(None);
        self.database.set_onclose(None);
        self.database.close();
    }
}

/// The database of a request to open it.
async fn opened(request: &IdbOpenDbRequest) -> std::result::Result<JsValue, JsValue> {
    let (sender, answer) = oneshot::channel();
    let sender = Rc::new(Cell::new(Some(sender)));
    let done = Closure::<dyn FnMut()>::new(move || {
        if let Some(sender) = sender.take() {
            // The receiver is gone when nobody waits.
            let _ = sender.send(());
        }
    });
    let handler = Some(done.as_ref().unchecked_ref());
    request.set_onsuccess(handler);
    request.set_onerror(handler);
    // The sender lives as long as the handlers.
    let _ = answer.await;
    request.set_onsuccess(None);
    request.set_onerror(None);
    match request.error()? {
        Some(error) => Err(error.into()),
        None => request.result(),
    }
}

/// A Web Lock, held until it is dropped.
struct Lock {
    release: Function,
}

impl Lock {
    /// None where there are no locks, or it is taken and `if_available` is set.
    async fn take(name: &str, mode: &str, if_available: bool) -> Option<Self> {
        let locks: Locks = navigator("locks")?.unchecked_into();
        let mut release = None;
        let held = Promise::new(&mut |resolve, _| release = Some(resolve));
        let (sender, granted) = oneshot::channel();
        let callback = Closure::once_into_js(move |lock: JsValue| {
            let granted = !lock.is_null();
            // The receiver is gone when the request has failed.
            let _ = sender.send(granted);
            if granted {
                JsValue::from(held)
            } else {
                JsValue::UNDEFINED
            }
        });
        let options = object(&[("mode", mode.into()), ("ifAvailable", if_available.into())]);
        let request = JsFuture::from(locks.request(&format!("cedra {name}"), &options, &callback).ok()?);
        match select(granted, request).await {
            Either::Left((Ok(true), _)) => release.map(|release| Self { release }),
            _ => None,
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Resolving a promise does not fail.
        let _ = self.release.call0(&JsValue::UNDEFINED);
    }
}

fn navigator(part: &str) -> Option<JsValue> {
    let navigator = Reflect::get(&js_sys::global(), &"navigator".into()).ok().filter(|value| value.is_object())?;
    Reflect::get(&navigator, &part.into()).ok().filter(|value| value.is_object())
}

/// Bytes that the browser would still take, where it says so.
async fn available() -> Option<u64> {
    let storage: Storage = navigator("storage")?.unchecked_into();
    let estimate = JsFuture::from(storage.estimate().ok()?).await.ok()?;
    let number = |field: &str| Reflect::get(&estimate, &field.into()).ok()?.as_f64();
    Some((number("quota")? - number("usage")?).max(0.0) as u64)
}

fn object(fields: &[(&str, JsValue)]) -> Object {
    let object = Object::new();
    for (name, value) in fields {
        // A fresh object takes any field.
        let _ = Reflect::set(&object, &(*name).into(), value);
    }
    object
}

fn list(value: &JsValue) -> impl Iterator<Item = JsValue> {
    value.unchecked_ref::<Array>().to_vec().into_iter()
}

fn bytes(value: &JsValue) -> Vec<u8> {
    value.dyn_ref::<Uint8Array>().map_or(vec![], Uint8Array::to_vec)
}

/// The keys of the records that a list of ids names.
fn keys(ids: &JsValue) -> Vec<String> {
    bytes(ids).chunks_exact(16).map(|id| RecordId(id.try_into().expect("16 bytes")).to_string()).collect()
}

/// Sessions with the lists of their records.
fn sessions(names: &JsValue, ids: &JsValue) -> BTreeMap<String, JsValue> {
    list(names).filter_map(|name| name.as_string()).zip(list(ids)).collect()
}

fn named(error: &JsValue) -> String {
    error.dyn_ref::<DomException>().map(DomException::name).unwrap_or_default()
}

/// Whether an error may be the connection's: closed, or cut off in the middle of a transaction, which then says little or nothing.
/// The next one starts from the beginning.
fn has_died(error: &JsValue) -> bool {
    error.is_undefined() || ["InvalidStateError", "AbortError", "UnknownError"].contains(&named(error).as_str())
}

fn words_of(error: &JsValue) -> String {
    if let Some(error) = error.dyn_ref::<DomException>() {
        return format!("{}: {}", error.name(), error.message());
    }
    error.as_string().unwrap_or_else(|| format!("{error:?}"))
}

impl Store for IndexedDbStore {
    fn name(&self) -> &str {
        &self.name
    }

    fn put<'a>(&'a self, records: &'a [Record]) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(async move {
            check_records(&self.name, records)?;
            if records.is_empty() {
                return Ok(());
            }
            let new: Rc<Vec<(JsValue, Uint8Array)>> = Rc::new(
                records
                    .iter()
                    .map(|record| (record.id.to_string().into(), Uint8Array::from(record.bytes.as_slice())))
                    .collect(),
            );
            // Held before they are there: another session must not let go of them in between.
            self.held.put(records);
            let ask = |stores: &Stores| new.iter().map(|(id, _)| stores.records.get(id)).collect();
            let answer = || {
                let new = new.clone();
                move |stores: &Stores, found: &[JsValue]| {
                    for ((id, content), found) in new.iter().zip(found) {
                        let found = found.dyn_ref::<Uint8Array>();
                        if found.is_none_or(|found| found.to_vec() != content.to_vec()) {
                            stores.records.put_with_key(content, id)?;
                            stores.sizes.put_with_key(&content.length().into(), id)?;
                        }
                    }
                    Ok(())
                }
            };
            let done = self.run(Kind::Write, ask, answer).await;
            if done.is_err() {
                self.held.named(&records.iter().map(Record::id).collect::<BTreeSet<_>>());
            }
            done
        })
    }

    fn release<'a>(&'a self, records: &'a [RecordId]) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(async move {
            self.held.named(records);
            if records.is_empty() {
                return Ok(());
            }
            let ids: Rc<Vec<String>> = Rc::new(records.iter().map(RecordId::to_string).collect());
            let ask = |stores: &Stores| Ok(vec![stores.named.get_all_keys()?, stores.named.get_all()?]);
            let answer = || {
                let (ids, held) = (ids.clone(), self.held.clone());
                move |stores: &Stores, found: &[JsValue]| {
                    Ok(stores.release(None, ids.iter().cloned(), &sessions(&found[0], &found[1]), &held)?)
                }
            };
            self.run(Kind::Write, ask, answer).await
        })
    }

    fn commit<'a>(
        &'a self,
        session: &'a str,
        manifest: &'a [u8],
        records: &'a [RecordId],
    ) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(async move {
            check_commit(&self.name, session, manifest)?;
            let ids: BTreeSet<RecordId> = records.iter().copied().collect();
            let list_of_ids: Vec<u8> = ids.iter().flat_map(|id| id.0).collect();
            let ask = |stores: &Stores| {
                Ok(vec![stores.sizes.get_all_keys()?, stores.named.get_all_keys()?, stores.named.get_all()?])
            };
            let answer = || {
                let (ids, held, session) = (ids.clone(), self.held.clone(), session.to_string());
                let (manifest, named) = (Uint8Array::from(manifest), Uint8Array::from(list_of_ids.as_slice()));
                move |stores: &Stores, found: &[JsValue]| {
                    let there: HashSet<String> = list(&found[0]).filter_map(|id| id.as_string()).collect();
                    if let Some(id) = ids.iter().find(|id| !there.contains(&id.to_string())) {
                        return Err(Failure::Refused(absent(&session, *id)));
                    }
                    let now: HashSet<String> = ids.iter().map(RecordId::to_string).collect();
                    let sessions = sessions(&found[1], &found[2]);
                    let before = sessions.get(&session).map_or(vec![], keys);
                    let left = before.into_iter().filter(|id| !now.contains(id));
                    stores.release(Some(&session), left, &sessions, &held)?;
                    let key = JsValue::from_str(&session);
                    stores.sessions.put_with_key(&manifest, &key)?;
                    stores.named.put_with_key(&named, &key)?;
                    Ok(())
                }
            };
            self.run(Kind::Commit, ask, answer).await?;
            self.held.named(&ids);
            Ok(())
        })
    }

    fn open<'a>(&'a self, session: &'a str) -> LocalBoxFuture<'a, Result<Option<Vec<u8>>>> {
        Box::pin(async move {
            let ask = |stores: &Stores| Ok(vec![stores.sessions.get(&session.into())?]);
            self.run(Kind::Read, ask, || first).await
        })
    }

    fn get(&self, id: RecordId) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>>> {
        Box::pin(async move {
            let ask = |stores: &Stores| Ok(vec![stores.records.get(&id.to_string().into())?]);
            self.run(Kind::Read, ask, || first).await
        })
    }

    fn list(&self) -> LocalBoxFuture<'_, Result<Vec<Listed>>> {
        Box::pin(async move {
            let ask = |stores: &Stores| {
                let Stores { sizes, sessions, named, .. } = stores;
                Ok(vec![
                    sessions.get_all_keys()?,
                    sessions.get_all()?,
                    named.get_all()?,
                    sizes.get_all_keys()?,
                    sizes.get_all()?,
                ])
            };
            let answer = || {
                |_: &Stores, found: &[JsValue]| {
                    let lengths = list(&found[4]).map(|length| length.as_f64().unwrap_or_default() as u64);
                    let sizes: BTreeMap<String, u64> =
                        list(&found[3]).filter_map(|id| id.as_string()).zip(lengths).collect();
                    let names = list(&found[0]).filter_map(|name| name.as_string());
                    let mut listed: Vec<Listed> = names
                        .zip(list(&found[1]))
                        .zip(list(&found[2]))
                        .map(|((session, manifest), ids)| Listed {
                            session,
                            manifest: bytes(&manifest),
                            bytes: keys(&ids).iter().filter_map(|id| sizes.get(id)).sum(),
                        })
                        .collect();
                    // The database's order is that of UTF-16.
                    listed.sort_by(|a, b| a.session.cmp(&b.session));
                    Ok(listed)
                }
            };
            self.run(Kind::Read, ask, answer).await
        })
    }

    fn delete<'a>(&'a self, session: &'a str) -> LocalBoxFuture<'a, Result<bool>> {
        Box::pin(async move {
            let ask = |stores: &Stores| Ok(vec![stores.named.get_all_keys()?, stores.named.get_all()?]);
            let answer = || {
                let (held, session) = (self.held.clone(), session.to_string());
                move |stores: &Stores, found: &[JsValue]| {
                    let sessions = sessions(&found[0], &found[1]);
                    let Some(ids) = sessions.get(&session) else { return Ok(false) };
                    stores.release(Some(&session), keys(ids).into_iter(), &sessions, &held)?;
                    let key = JsValue::from_str(&session);
                    stores.sessions.delete(&key)?;
                    stores.named.delete(&key)?;
                    Ok(true)
                }
            };
            self.run(Kind::Commit, ask, answer).await
        })
    }

    fn usage(&self) -> LocalBoxFuture<'_, Result<Usage>> {
        Box::pin(async move {
            let ask = |stores: &Stores| Ok(vec![stores.sessions.count()?, stores.sizes.get_all()?]);
            let answer = || {
                |_: &Stores, found: &[JsValue]| {
                    let lengths: Vec<f64> = list(&found[1]).filter_map(|length| length.as_f64()).collect();
                    Ok(Usage {
                        sessions: found[0].as_f64().unwrap_or_default() as usize,
                        records: lengths.len(),
                        bytes: lengths.iter().sum::<f64>() as u64,
                        available: None,
                    })
                }
            };
            let usage: Usage = self.run(Kind::Read, ask, answer).await?;
            Ok(Usage { available: available().await, ..usage })
        })
    }
}

/// The bytes that were asked for, if they are there.
fn first(_: &Stores, found: &[JsValue]) -> Outcome<Option<Vec<u8>>> {
    Ok(found[0].dyn_ref::<Uint8Array>().map(Uint8Array::to_vec))
}
