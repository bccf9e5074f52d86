//! A store in one file, for native programs: an embedded database with durable transactions and one process at a time.
//!
//! Calls block while the disk works; the futures are ready when first polled.

use std::any::Any;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use ::redb::{
    Builder, Database, DatabaseError, Durability, ReadableDatabase, ReadableTable, TableDefinition, TableError,
    WriteTransaction,
};
use futures::future::LocalBoxFuture;

use super::{absent, check_commit, check_records, Held, Listed, Record, RecordId, Store, Usage};
use crate::{Error, Result};

/// `format`: version of these tables.
const ABOUT: TableDefinition<'_, &str, u32> = TableDefinition::new("cedra");
/// Bytes of each record.
const RECORDS: TableDefinition<'_, &[u8; 16], &[u8]> = TableDefinition::new("records");
/// Of each record: sessions that name it, and its length, so that nobody reads it to know.
const USES: TableDefinition<'_, &[u8; 16], (u64, u64)> = TableDefinition::new("uses");
/// Of each session: its manifest, and the ids that it names, 16 bytes each, in order.
const SESSIONS: TableDefinition<'_, &str, (&[u8], &[u8])> = TableDefinition::new("sessions");

/// The version that this code reads and writes.
const FORMAT: u32 = 1;
/// Bytes of the file that the database keeps in memory.
const CACHE_BYTES: usize = 32 << 20;

type Outcome<T> = std::result::Result<T, ::redb::Error>;

/// Sessions in a file.
pub struct RedbStore {
    name: String,
    path: PathBuf,
    /// None after the file could not be written or read: the database does no more then, and is opened again.
    database: Mutex<Option<Database>>,
    held: Held,
}

impl std::fmt::Debug for RedbStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedbStore").field("name", &self.name).finish_non_exhaustive()
    }
}

impl RedbStore {
    /// Opens the file, or makes it where there is none. Records that no session names go.
    ///
    /// # Errors
    /// [`Error::StoreBusy`] when a process has it open, [`Error::Store`] when it cannot be read, is no store, or one of
    /// another format: it stays as it is then.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let database = match path.try_exists() {
            Ok(true) => open_file(&name, path),
            Ok(false) => create(&name, path),
            Err(e) => Err(failed(&name, e)),
        }?;
        let database = Mutex::new(Some(database));
        let store = Self { name, path: path.into(), database, held: Held::default() };
        store.run(drop_orphans)?;
        Ok(store)
    }

    fn run<T>(&self, work: impl FnOnce(&Database) -> Outcome<T>) -> Result<T> {
        let mut place = self.database.lock().unwrap_or_else(PoisonError::into_inner);
        let database = match place.take() {
            Some(database) => database,
            None => open_file(&self.name, &self.path)?,
        };
        let mut died = false;
        let done = guarded(&self.name, || {
            let done = work(&database);
            died = matches!(done, Err(::redb::Error::Io(_) | ::redb::Error::PreviousIo));
            done
        });
        if !died {
            *place = Some(database);
        }
        done
    }
}

/// Removes what was put and never named.
fn drop_orphans(database: &Database) -> Outcome<()> {
    let transaction = database.begin_read()?;
    let mut orphans = vec![];
    for entry in transaction.open_table(USES)?.iter()? {
        let (id, uses) = entry?;
        if uses.value().0 == 0 {
            orphans.push(*id.value());
        }
    }
    if orphans.is_empty() {
        return Ok(());
    }
    let transaction = durable(database)?;
    {
        let (mut records, mut uses) = (transaction.open_table(RECORDS)?, transaction.open_table(USES)?);
        for id in &orphans {
            records.remove(id)?;
            uses.remove(id)?;
        }
    }
    Ok(transaction.commit()?)
}

/// A transaction that is on the disk when its commit returns. The file can be opened at once after a crash.
fn durable(database: &Database) -> Outcome<WriteTransaction> {
    let mut transaction = database.begin_write()?;
    transaction.set_durability(Durability::Immediate)?;
    transaction.set_quick_repair(true);
    Ok(transaction)
}

/// One session more or less names these records; one that nobody names or holds goes.
fn count(held: &Held, transaction: &WriteTransaction, ids: &BTreeSet<RecordId>, more: bool) -> Outcome<()> {
    let (mut records, mut uses) = (transaction.open_table(RECORDS)?, transaction.open_table(USES)?);
    for id in ids {
        let found = uses.get(&id.0)?.map(|found| found.value());
        let Some((count, bytes)) = found else { continue };
        let count = if more { count + 1 } else { count.saturating_sub(1) };
        if count == 0 && !held.contains(id) {
            uses.remove(&id.0)?;
            records.remove(&id.0)?;
        } else {
            uses.insert(&id.0, (count, bytes))?;
        }
    }
    Ok(())
}

fn put_now(database: &Database, new: &[Record]) -> Outcome<()> {
    let mut transaction = database.begin_write()?;
    // The commit that names them makes them durable, too.
    transaction.set_durability(Durability::None)?;
    {
        let (mut records, mut uses) = (transaction.open_table(RECORDS)?, transaction.open_table(USES)?);
        for record in new {
            let whole = records.get(&record.id.0)?.is_some_and(|found| found.value() == record.bytes);
            if !whole {
                records.insert(&record.id.0, record.bytes.as_slice())?;
            }
            let count = uses.get(&record.id.0)?.map_or(0, |found| found.value().0);
            uses.insert(&record.id.0, (count, record.bytes.len() as u64))?;
        }
    }
    Ok(transaction.commit()?)
}

/// Removes those of the records that no session names and nobody holds.
fn release_now(database: &Database, held: &Held, ids: &[RecordId]) -> Outcome<()> {
    let mut transaction = database.begin_write()?;
    // What goes is named by nothing: it may come back with a crash, and goes when the store is next opened.
    transaction.set_durability(Durability::None)?;
    {
        let (mut records, mut uses) = (transaction.open_table(RECORDS)?, transaction.open_table(USES)?);
        for id in ids {
            let unnamed = uses.get(&id.0)?.is_some_and(|found| found.value().0 == 0);
            if unnamed && !held.contains(id) {
                uses.remove(&id.0)?;
                records.remove(&id.0)?;
            }
        }
    }
    Ok(transaction.commit()?)
}

/// The first record that is missing, if one is: then nothing has changed.
fn commit_now(
    database: &Database,
    held: &Held,
    session: &str,
    manifest: &[u8],
    ids: &BTreeSet<RecordId>,
) -> Outcome<Option<RecordId>> {
    let transaction = durable(database)?;
    let before = {
        let uses = transaction.open_table(USES)?;
        for id in ids {
            if uses.get(&id.0)?.is_none() {
                return Ok(Some(*id));
            }
        }
        let list: Vec<u8> = ids.iter().flat_map(|id| id.0).collect();
        let mut sessions = transaction.open_table(SESSIONS)?;
        let before = sessions.insert(session, (manifest, list.as_slice()))?;
        before.map(|before| parse_ids(before.value().1))
    };
    count(held, &transaction, ids, true)?;
    count(held, &transaction, &before.unwrap_or_default(), false)?;
    transaction.commit()?;
    Ok(None)
}

fn delete_now(database: &Database, held: &Held, session: &str) -> Outcome<bool> {
    let transaction = durable(database)?;
    let removed = {
        let mut sessions = transaction.open_table(SESSIONS)?;
        let removed = sessions.remove(session)?;
        removed.map(|removed| parse_ids(removed.value().1))
    };
    let Some(ids) = removed else { return Ok(false) };
    count(held, &transaction, &ids, false)?;
    transaction.commit()?;
    Ok(true)
}

fn list_now(database: &Database) -> Outcome<Vec<Listed>> {
    let transaction = database.begin_read()?;
    let (sessions, uses) = (transaction.open_table(SESSIONS)?, transaction.open_table(USES)?);
    let mut listed = vec![];
    for entry in sessions.iter()? {
        let (name, session) = entry?;
        let (manifest, ids) = session.value();
        let mut bytes = 0;
        for id in parse_ids(ids) {
            bytes += uses.get(&id.0)?.map_or(0, |found| found.value().1);
        }
        listed.push(Listed { session: name.value().into(), manifest: manifest.into(), bytes });
    }
    Ok(listed)
}

fn usage_now(database: &Database) -> Outcome<Usage> {
    let transaction = database.begin_read()?;
    let mut usage = Usage::default();
    for entry in transaction.open_table(SESSIONS)?.iter()? {
        entry?;
        usage.sessions += 1;
    }
    for entry in transaction.open_table(USES)?.iter()? {
        usage.records += 1;
        usage.bytes += entry?.1.value().1;
    }
    Ok(usage)
}

fn parse_ids(list: &[u8]) -> BTreeSet<RecordId> {
    list.chunks_exact(16).map(|id| RecordId(id.try_into().expect("16 bytes"))).collect()
}

/// Runs `work` on the database. A damaged file may also make it panic: that is a failure of the store like any other.
fn guarded<T, E: Into<::redb::Error>>(name: &str, work: impl FnOnce() -> std::result::Result<T, E>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(e)) => match e.into() {
            ::redb::Error::DatabaseAlreadyOpen => Err(Error::StoreBusy { store: name.into() }),
            ::redb::Error::Io(e) if is_full(&e) => {
                Err(Error::StoreFull { store: name.into(), needed: None, available: None })
            }
            other => Err(failed(name, other)),
        },
        Err(panic) => Err(failed(name, format!("damaged: {}", words_of(panic.as_ref())))),
    }
}

/// Whether the system has said that there is no room: on the disk, of the user's quota, or for a file of this size.
fn is_full(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge)
}

fn words_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("the database gave up")
}

fn failed(name: &str, message: impl ToString) -> Error {
    Error::Store { store: name.into(), message: message.to_string() }
}

fn builder() -> Builder {
    let mut builder = Builder::new();
    builder.set_cache_size(CACHE_BYTES);
    builder
}

/// Opens a file that is there. Another program's database is looked at only: opening it to write would change it.
fn open_file(name: &str, path: &Path) -> Result<Database> {
    match guarded(name, || Outcome::Ok(builder().open_read_only(path)))? {
        Ok(database) => check_format(name, &database)?,
        // A process died with the file open: it is whole again once it is opened to write.
        Err(DatabaseError::RepairAborted) => {}
        Err(e) => guarded(name, || Err(e))?,
    }
    let database = guarded(name, || builder().open(path))?;
    check_format(name, &database)?;
    Ok(database)
}

/// Refuses databases that are no store, or one of another format.
fn check_format(name: &str, database: &impl ReadableDatabase) -> Result<()> {
    let format = guarded(name, || -> Outcome<_> {
        match database.begin_read()?.open_table(ABOUT) {
            Ok(about) => Ok(about.get("format")?.map(|format| format.value())),
            Err(TableError::Storage(e)) => Err(e.into()),
            Err(_) => Ok(None),
        }
    })?;
    match format {
        Some(FORMAT) => Ok(()),
        Some(other) => Err(failed(name, format!("format {other} found, {FORMAT} allowed"))),
        None => Err(failed(name, "a database, but no store of sessions")),
    }
}

/// Makes the file under another name beside its place and moves it there when it is whole: a crash leaves no half a store.
/// Whoever makes it holds its lock all the while, so nobody else moves a file to the same place.
fn create(name: &str, path: &Path) -> Result<Database> {
    let mut beside = path.as_os_str().to_os_string();
    beside.push(".cedra-new");
    let beside = PathBuf::from(beside);
    let database = match guarded(name, || builder().create(&beside)) {
        Err(Error::Store { .. }) if beside.is_file() => {
            // Left by a process that died here.
            std::fs::remove_file(&beside).map_err(|e| failed(name, e))?;
            guarded(name, || builder().create(&beside))
        }
        other => other,
    }?;
    guarded(name, || -> Outcome<()> {
        let transaction = database.begin_write()?;
        transaction.open_table(RECORDS)?;
        transaction.open_table(USES)?;
        transaction.open_table(SESSIONS)?;
        transaction.open_table(ABOUT)?.insert("format", FORMAT)?;
        Ok(transaction.commit()?)
    })?;
    if path.exists() {
        // Another process was first.
        drop(database);
        std::fs::remove_file(&beside).map_err(|e| failed(name, e))?;
        return open_file(name, path);
    }
    std::fs::rename(&beside, path).map_err(|e| failed(name, e))?;
    #[cfg(unix)]
    {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(|e| failed(name, e))?;
    }
    Ok(database)
}

impl Store for RedbStore {
    fn name(&self) -> &str {
        &self.name
    }

    fn put<'a>(&'a self, records: &'a [Record]) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(async move {
            check_records(&self.name, records)?;
            self.run(|database| put_now(database, records))?;
            self.held.put(records);
            Ok(())
        })
    }

    fn release<'a>(&'a self, records: &'a [RecordId]) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(async move {
            self.held.named(records);
            self.run(|database| release_now(database, &self.held, records))
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
            let ids = records.iter().copied().collect();
            if let Some(id) = self.run(|database| commit_now(database, &self.held, session, manifest, &ids))? {
                return Err(absent(session, id));
            }
            self.held.named(&ids);
            Ok(())
        })
    }

    fn open<'a>(&'a self, session: &'a str) -> LocalBoxFuture<'a, Result<Option<Vec<u8>>>> {
        Box::pin(async move {
            self.run(|database| {
                let sessions = database.begin_read()?.open_table(SESSIONS)?;
                let found = sessions.get(session)?;
                Ok(found.map(|found| found.value().0.to_vec()))
            })
        })
    }

    fn get(&self, id: RecordId) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>>> {
        Box::pin(async move {
            self.run(|database| {
                let records = database.begin_read()?.open_table(RECORDS)?;
                let found = records.get(&id.0)?;
                Ok(found.map(|found| found.value().to_vec()))
            })
        })
    }

    fn list(&self) -> LocalBoxFuture<'_, Result<Vec<Listed>>> {
        Box::pin(async move { self.run(list_now) })
    }

    fn delete<'a>(&'a self, session: &'a str) -> LocalBoxFuture<'a, Result<bool>> {
        Box::pin(async move { self.run(|database| delete_now(database, &self.held, session)) })
    }

    fn usage(&self) -> LocalBoxFuture<'_, Result<Usage>> {
        Box::pin(async move { self.run(usage_now) })
    }
}
