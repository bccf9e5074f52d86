//! A store that ends with the process: for tests, and for a browser that refuses anything better.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::future::LocalBoxFuture;

use super::{absent, check_commit, check_records, Held, Listed, Record, RecordId, Store, Usage};
use crate::Result;

/// What a [`MemoryStore`] holds: outlives it, and can be opened again.
#[derive(Debug, Clone, Default)]
pub struct MemoryContents(Arc<Mutex<Contents>>);

#[derive(Debug, Default)]
struct Contents {
    records: BTreeMap<RecordId, Kept>,
    sessions: BTreeMap<String, Session>,
}

#[derive(Debug)]
struct Kept {
    bytes: Vec<u8>,
    /// Sessions that name it.
    uses: usize,
}

#[derive(Debug)]
struct Session {
    manifest: Vec<u8>,
    records: BTreeSet<RecordId>,
}

impl Contents {
    /// One session less names these records.
    fn release(&mut self, records: &BTreeSet<RecordId>, held: &Held) {
        for id in records {
            if let Some(kept) = self.records.get_mut(id) {
                kept.uses -= 1;
                if kept.uses == 0 && !held.contains(id) {
                    self.records.remove(id);
                }
            }
        }
    }
}

/// Sessions in memory.
#[derive(Debug, Default)]
pub struct MemoryStore {
    contents: MemoryContents,
    held: Held,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// On contents of before. Records that no session names go.
    pub fn open(contents: &MemoryContents) -> Self {
        let store = Self { contents: contents.clone(), held: Held::default() };
        store.contents().records.retain(|_, kept| kept.uses > 0);
        store
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for MemoryStore {
    fn name(&self) -> &str {
        "memory"
    }

    fn put<'a>(&'a self, records: &'a [Record]) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(async move {
            check_records(self.name(), records)?;
            let mut contents = self.contents();
            for record in records {
                let fresh = || Kept { bytes: record.bytes.clone(), uses: 0 };
                contents.records.entry(record.id).or_insert_with(fresh);
            }
            self.held.put(records);
            Ok(())
        })
    }

    fn release<'a>(&'a self, records: &'a [RecordId]) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let mut contents = self.contents();
            self.held.named(records);
            let kept =
                |id: &RecordId| self.held.contains(id) || contents.records.get(id).is_none_or(|kept| kept.uses > 0);
            let gone: Vec<RecordId> = records.iter().copied().filter(|id| !kept(id)).collect();
            gone.iter().for_each(|id| drop(contents.records.remove(id)));
            Ok(())
        })
    }

    fn commit<'a>(
        &'a self,
        session: &'a str,
        manifest: &'a [u8],
        records: &'a [RecordId],
    ) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(async move {
            check_commit(self.name(), session, manifest)?;
            let mut contents = self.contents();
            if let Some(id) = records.iter().find(|id| !contents.records.contains_key(id)) {
                return Err(absent(session, *id));
            }
            let records: BTreeSet<RecordId> = records.iter().copied().collect();
            for id in &records {
                contents.records.get_mut(id).expect("seen above").uses += 1;
            }
            self.held.named(&records);
            let now = Session { manifest: manifest.into(), records };
            if let Some(before) = contents.sessions.insert(session.into(), now) {
                contents.release(&before.records, &self.held);
            }
            Ok(())
        })
    }

    fn open<'a>(&'a self, session: &'a str) -> LocalBoxFuture<'a, Result<Option<Vec<u8>>>> {
        Box::pin(async move { Ok(self.contents().sessions.get(session).map(|session| session.manifest.clone())) })
    }

    fn get(&self, id: RecordId) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>>> {
        Box::pin(async move { Ok(self.contents().records.get(&id).map(|kept| kept.bytes.clone())) })
    }

    fn list(&self) -> LocalBoxFuture<'_, Result<Vec<Listed>>> {
        Box::pin(async move {
            let contents = self.contents();
            let listed = contents.sessions.iter().map(|(name, session)| Listed {
                session: name.clone(),
                manifest: session.manifest.clone(),
                bytes: session.records.iter().map(|id| contents.records[id].bytes.len() as u64).sum(),
            });
            Ok(listed.collect())
        })
    }

    fn delete<'a>(&'a self, session: &'a str) -> LocalBoxFuture<'a, Result<bool>> {
        Box::pin(async move {
            let mut contents = self.contents();
            let Some(session) = contents.sessions.remove(session) else { return Ok(false) };
            contents.release(&session.records, &self.held);
            Ok(true)
        })
    }

    fn usage(&self) -> LocalBoxFuture<'_, Result<Usage>> {
        Box::pin(async move {
            let contents = self.contents();
            Ok(Usage {
                sessions: contents.sessions.len(),
                records: contents.records.len(),
                bytes: contents.records.values().map(|kept| kept.bytes.len() as u64).sum(),
                available: None,
            })
        })
    }
}
