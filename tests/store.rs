//! Stores: one conformance suite for all, and what only a file can get wrong.

use std::path::Path;

use cedra::store::{conformance, MemoryContents, MemoryStore, Record, RecordId, RedbStore, Store};
use cedra::{Error, Result};
use futures::future::LocalBoxFuture;
use pollster::block_on;

fn boxed(store: impl Store + 'static) -> Box<dyn Store> {
    Box::new(store)
}

#[test]
fn memory_conforms() {
    let contents = MemoryContents::default();
    let mut open = move || -> LocalBoxFuture<'static, Result<Box<dyn Store>>> {
        let store = MemoryStore::open(&contents);
        Box::pin(async move { Ok(boxed(store)) })
    };
    block_on(conformance::check(&mut open)).unwrap();
}

#[test]
fn redb_conforms() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sessions.redb");
    let mut open = move || -> LocalBoxFuture<'static, Result<Box<dyn Store>>> {
        let store = RedbStore::open(&path);
        Box::pin(async move { store.map(boxed) })
    };
    block_on(conformance::check(&mut open)).unwrap();
}

#[test]
fn ids_are_the_first_half_of_the_hash() {
    // The published test vector of the empty input.
    assert_eq!(RecordId::of(b"").to_string(), "af1349b9f5f9a1a6a0404dea36dcc949");
    assert_eq!(Record::new(b"a".to_vec()).id(), RecordId::of(b"a"));
}

#[test]
fn a_file_has_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sessions.redb");
    let first = RedbStore::open(&path).unwrap();
    match RedbStore::open(&path) {
        Err(Error::StoreBusy { store }) => assert_eq!(store, path.display().to_string()),
        other => panic!("{other:?}"),
    }
    drop(first);
    RedbStore::open(&path).unwrap();
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing lies beside the file");
}

/// Opening is refused in words, and the file is what it was.
fn refuses(path: &Path, words: &str) {
    let before = std::fs::read(path).ok();
    match RedbStore::open(path) {
        Err(Error::Store { store, message }) => {
            assert_eq!(store, path.display().to_string());
            assert!(message.contains(words), "{message}");
        }
        other => panic!("{other:?}"),
    }
    assert!(std::fs::read(path).ok() == before, "the file has changed");
}

#[test]
fn files_that_are_no_store_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    refuses(&at("no folder/sessions.redb"), "");
    refuses(folder.path(), "");
    std::fs::write(at("empty"), b"").unwrap();
    refuses(&at("empty"), "");
    std::fs::write(at("text"), b"Dear diary, ".repeat(1000)).unwrap();
    refuses(&at("text"), "magic number");

    // Another program's database, and a store of another format.
    let table = |name| redb::TableDefinition::<&str, u32>::new(name);
    for (name, key, words) in [("accounts", "format", "no store of sessions"), ("cedra", "format", "format 7 found")] {
        let database = redb::Database::create(at(name)).unwrap();
        let transaction = database.begin_write().unwrap();
        transaction.open_table(table(name)).unwrap().insert(key, 7).unwrap();
        transaction.commit().unwrap();
        drop(database);
        refuses(&at(name), words);
    }

    // A store that was cut short.
    RedbStore::open(at("short")).unwrap();
    let whole = std::fs::read(at("short")).unwrap();
    std::fs::write(at("short"), &whole[..whole.len() / 2]).unwrap();
    refuses(&at("short"), "");
}

/// Whatever byte of the file is changed: an error of the store, or the right bytes, or bytes that their id gives away.
#[test]
fn damaged_files_give_errors_or_what_was_saved() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sessions.redb");
    let records: Vec<Record> = (0..40u8).map(|i| Record::new(vec![i; 100 * i as usize])).collect();
    let ids: Vec<RecordId> = records.iter().map(Record::id).collect();
    let store = RedbStore::open(&path).unwrap();
    block_on(store.put(&records)).unwrap();
    block_on(store.commit("session", b"manifest", &ids)).unwrap();
    drop(store);
    let whole = std::fs::read(&path).unwrap();
    let used: Vec<usize> = (0..whole.len()).filter(|&at| whole[at] != 0).collect();
    let (mut refused, mut seen) = (0, 0);
    for step in 0..400 {
        let at = used[step * used.len() / 400];
        let mut bytes = whole.clone();
        bytes[at] ^= 0x55;
        std::fs::write(&path, bytes).unwrap();
        let outcome = (|| -> Result<()> {
            let store = RedbStore::open(&path)?;
            block_on(store.list())?;
            block_on(store.usage())?;
            block_on(store.open("session"))?;
            for (id, record) in ids.iter().zip(&records) {
                let found = block_on(store.get(*id))?.unwrap_or_default();
                assert!(found == record.bytes() || RecordId::of(&found) != *id);
                seen += usize::from(found != record.bytes());
            }
            block_on(store.put(&records))?;
            block_on(store.commit("session", b"again", &ids))?;
            for (id, record) in ids.iter().zip(&records) {
                assert_eq!(block_on(store.get(*id))?.as_deref(), Some(record.bytes()), "a put mends the record");
            }
            block_on(store.delete("session"))?;
            Ok(())
        })();
        match outcome {
            Ok(()) => {}
            Err(Error::Store { .. } | Error::Session { .. }) => refused += 1,
            Err(other) => panic!("byte {at}: {other:?}"),
        }
    }
    assert!(refused > 0 && seen > 0, "{refused} refused, {seen} records seen damaged");
}
