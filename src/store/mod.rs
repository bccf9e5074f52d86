//! Where sessions are kept: an embedded database natively, IndexedDB in a browser, memory everywhere; one conformance
//! suite for all.
//!
//! A store knows sessions by name. Each has a manifest, bytes that the store does not look into, and the records that the
//! manifest names. A record is known by the hash of its bytes, so that identity, checksum and sharing are one thing: two
//! sessions with the same record keep it once. What the bytes mean is the business of [`snapshot`](crate::snapshot).
//!
//! A save puts the records that are new, then commits: from that moment, and not before, the session is what the new manifest
//! says, whatever happens to the process.

pub mod conformance;
#[cfg(target_arch = "wasm32")]
mod indexeddb;
mod memory;
#[cfg(not(target_arch = "wasm32"))]
mod redb;

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use futures::future::LocalBoxFuture;

use crate::{Error, Result};

#[cfg(not(target_arch = "wasm32"))]
pub use self::redb::RedbStore;
#[cfg(target_arch = "wasm32")]
pub use indexeddb::IndexedDbStore;
pub use memory::{MemoryContents, MemoryStore};

/// Most bytes of a record, and of a manifest: larger values make databases slow or fail.
pub const MAX_RECORD: usize = 8 << 20;
/// Most bytes of a session's name.
pub const MAX_NAME: usize = 1024;

/// What a record is known by: the first 16 bytes of the BLAKE3 hash of its bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordId(pub [u8; 16]);

impl RecordId {
    /// Of these bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(hash16(bytes))
    }
}

impl fmt::Display for RecordId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for RecordId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The first 16 bytes of the BLAKE3 hash.
pub(crate) fn hash16(bytes: &[u8]) -> [u8; 16] {
    *blake3::hash(bytes).as_bytes().first_chunk().expect("a hash has 32 bytes")
}

/// Bytes to keep, with their id.
#[derive(Clone, PartialEq, Eq)]
pub struct Record {
    id: RecordId,
    bytes: Vec<u8>,
}

impl Record {
    /// Hashes the bytes.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { id: RecordId::of(&bytes), bytes }
    }
    /// What they are known by.
    pub fn id(&self) -> RecordId {
        self.id
    }
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bytes)", self.id, self.bytes.len())
    }
}

/// A session in a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub session: String,
    /// Its manifest.
    pub manifest: Vec<u8>,
    /// Bytes of the records that it names, whoever else names them.
    pub bytes: u64,
}

/// What a store holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Sessions.
    pub sessions: usize,
    /// Records, each counted once.
    pub records: usize,
    /// Bytes of the records.
    pub bytes: u64,
    /// Bytes that still fit, where the store knows.
    pub available: Option<u64>,
}

/// A place for sessions. Methods take `&self`: several sessions of one process may be saved and read at a time.
///
/// A record that was put stays until a commit has named it and no session names it any more, or it is
/// [released](Store::release). One that no commit has named goes when the store is next opened, too: a process that dies while
/// it saves leaves nothing behind.
pub trait Store: fmt::Debug {
    /// Where the store is, for messages.
    fn name(&self) -> &str;

    /// Takes records. One that is there already, whole, is not written again.
    ///
    /// # Errors
    /// [`Error::Store`] when a record is larger than [`MAX_RECORD`] (nothing is written then) or the store fails.
    fn put<'a>(&'a self, records: &'a [Record]) -> LocalBoxFuture<'a, Result<()>>;

    /// Gives up records that were put: no commit of whoever put them will name them. Those that no session names go, unless
    /// somebody else has put them, too.
    ///
    /// # Errors
    /// [`Error::Store`]; the records go later then.
    fn release<'a>(&'a self, records: &'a [RecordId]) -> LocalBoxFuture<'a, Result<()>>;

    /// Makes `manifest` the session's, naming `records`, and lets go of what no session names any more: all of it or none,
    /// and for good once it returns.
    ///
    /// # Errors
    /// [`Error::Session`] when a record is not there, [`Error::Setting`] for a name that is empty or longer than
    /// [`MAX_NAME`], [`Error::Store`] when the manifest is larger than [`MAX_RECORD`] or the store fails.
    fn commit<'a>(
        &'a self,
        session: &'a str,
        manifest: &'a [u8],
        records: &'a [RecordId],
    ) -> LocalBoxFuture<'a, Result<()>>;

    /// The session's manifest, if there is such a session.
    ///
    /// # Errors
    /// [`Error::Store`].
    fn open<'a>(&'a self, session: &'a str) -> LocalBoxFuture<'a, Result<Option<Vec<u8>>>>;

    /// A record's bytes as the store has them: whoever reads them compares their hash.
    ///
    /// # Errors
    /// [`Error::Store`].
    fn get(&self, id: RecordId) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>>>;

    /// All sessions, by name.
    ///
    /// # Errors
    /// [`Error::Store`].
    fn list(&self) -> LocalBoxFuture<'_, Result<Vec<Listed>>>;

    /// Forgets a session and the records that only it names; for good once it returns. Whether there was one.
    ///
    /// # Errors
    /// [`Error::Store`].
    fn delete<'a>(&'a self, session: &'a str) -> LocalBoxFuture<'a, Result<bool>>;

    /// What the store holds.
    ///
    /// # Errors
    /// [`Error::Store`].
    fn usage(&self) -> LocalBoxFuture<'_, Result<Usage>>;
}

/// Records that were put and that no commit has named since: not to be let go of, whatever other sessions do. Two sessions
/// that put the same record hold it twice.
#[derive(Debug, Default)]
struct Held(Mutex<HashMap<RecordId, usize>>);

impl Held {
    fn counts(&self) -> MutexGuard<'_, HashMap<RecordId, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// The records were put.
    fn put(&self, records: &[Record]) {
        let mut counts = self.counts();
        for id in records.iter().map(Record::id).collect::<BTreeSet<_>>() {
            *counts.entry(id).or_default() += 1;
        }
    }
    /// A commit has named the records, or none will.
    fn named<'a>(&self, records: impl IntoIterator<Item = &'a RecordId>) {
        let mut counts = self.counts();
        for id in records {
            if let Some(count) = counts.get_mut(id) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(id);
                }
            }
        }
    }
    fn contains(&self, id: &RecordId) -> bool {
        self.counts().contains_key(id)
    }
}

/// Refuses records that are too large.
fn check_records(store: &str, records: &[Record]) -> Result<()> {
    let large = records.iter().find(|record| record.bytes.len() > MAX_RECORD);
    large.map_or(Ok(()), |record| check_size(store, "record", record.bytes.len()))
}

/// Refuses names and manifests that no store takes.
fn check_commit(store: &str, session: &str, manifest: &[u8]) -> Result<()> {
    if !(1..=MAX_NAME).contains(&session.len()) {
        let found = format!("{} bytes", session.len());
        return Err(Error::Setting { setting: "session name", found, allowed: format!("1 to {MAX_NAME} bytes") });
    }
    check_size(store, "manifest", manifest.len())
}

fn check_size(store: &str, what: &str, bytes: usize) -> Result<()> {
    if bytes <= MAX_RECORD {
        return Ok(());
    }
    let message = format!("{what} of {bytes} bytes found, {MAX_RECORD} allowed");
    Err(Error::Store { store: store.into(), message })
}

/// The refusal of a commit that names a record that is not there.
fn absent(session: &str, id: RecordId) -> Error {
    Error::Session { session: session.into(), problem: format!("record {id} is not in the store, nothing was saved") }
}
