//! What every [`Store`] must do, as one function that a test of any kind can run.

use futures::future::LocalBoxFuture;

use super::{Listed, Record, RecordId, Store, Usage, MAX_NAME, MAX_RECORD};
use crate::{Error, Result};

/// Makes a store, or opens the same one again once the last is dropped.
pub type Open<'a> = dyn FnMut() -> LocalBoxFuture<'a, Result<Box<dyn Store>>> + 'a;

/// Puts a store that is empty at first through all that sessions ask of it, and leaves it empty.
///
/// # Panics
/// When the store does something else, with what it was.
///
/// # Errors
/// The store's, where none is due.
pub async fn check(open: &mut Open<'_>) -> Result<()> {
    let store = open().await?;
    assert!(!store.name().is_empty(), "a store has a name");
    empty(&*store).await?;
    sessions(&*store).await?;
    refusals(&*store).await?;
    sharing(&*store).await?;
    interleaved(&*store).await?;
    released(&*store).await?;
    large(&*store).await?;
    drop(store);
    reopened(open).await
}

/// A record of its own for every text.
fn record(text: &str) -> Record {
    Record::new(text.as_bytes().to_vec())
}

fn ids(records: &[Record]) -> Vec<RecordId> {
    records.iter().map(Record::id).collect()
}

async fn save(store: &dyn Store, session: &str, manifest: &str, records: &[Record]) -> Result<()> {
    store.put(records).await?;
    store.commit(session, manifest.as_bytes(), &ids(records)).await
}

/// Sessions, records and bytes.
async fn totals(store: &dyn Store) -> Result<(usize, usize, u64)> {
    let Usage { sessions, records, bytes, .. } = store.usage().await?;
    Ok((sessions, records, bytes))
}

async fn has(store: &dyn Store, record: &Record) -> Result<bool> {
    let found = store.get(record.id()).await?;
    assert!(found.as_ref().is_none_or(|found| found == record.bytes()), "{record:?} has other bytes");
    Ok(found.is_some())
}

async fn empty(store: &dyn Store) -> Result<()> {
    assert_eq!(totals(store).await?, (0, 0, 0));
    assert_eq!(store.list().await?, []);
    assert_eq!(store.open("a").await?, None);
    assert_eq!(store.get(record("a").id()).await?, None);
    assert!(!store.delete("a").await?);
    Ok(())
}

/// One session through its life, under names of all kinds.
async fn sessions(store: &dyn Store) -> Result<()> {
    let longest = "n".repeat(MAX_NAME);
    let mut names = [" ", "a", "A", "a/b\\c", "..", "\u{0}\n\"'%", "Gruß 文 🦀", "null", longest.as_str()];
    let [first, second, third] = ["first", "second", "third"].map(record);
    for name in names {
        let context = |what: &str| format!("session {name:?}: {what}");
        save(store, name, "one", &[first.clone(), second.clone()]).await?;
        assert_eq!(store.open(name).await?.as_deref(), Some("one".as_bytes()), "{}", context("the manifest"));
        assert_eq!(totals(store).await?, (1, 2, 11), "{}", context("what is used"));
        save(store, name, "two", &[second.clone(), third.clone()]).await?;
        assert_eq!(store.open(name).await?.as_deref(), Some("two".as_bytes()), "{}", context("the next manifest"));
        assert!(!has(store, &first).await?, "{}", context("a record that nothing names is gone"));
        assert!(has(store, &second).await? && has(store, &third).await?, "{}", context("its records"));
        assert!(store.delete(name).await?, "{}", context("deleted"));
        assert_eq!(store.open(name).await?, None, "{}", context("open after delete"));
        assert_eq!(totals(store).await?, (0, 0, 0), "{}", context("what is used after delete"));
    }
    // All at once, in order of their names. A session may name nothing, have an empty manifest, or name a record twice.
    for name in names {
        save(store, name, "", &[]).await?;
    }
    store.put(std::slice::from_ref(&first)).await?;
    store.commit("a", b"m", &[first.id(), first.id()]).await?;
    names.sort_unstable();
    let listed = names.map(|name| {
        let (manifest, bytes) = if name == "a" { ("m", 5) } else { ("", 0) };
        Listed { session: name.into(), manifest: manifest.into(), bytes }
    });
    assert_eq!(store.list().await?, listed);
    for name in names {
        assert!(store.delete(name).await? && !store.delete(name).await?, "session {name:?} is deleted once");
    }
    assert_eq!(totals(store).await?, (0, 0, 0));
    Ok(())
}

/// What is refused changes nothing.
async fn refusals(store: &dyn Store) -> Result<()> {
    let [here, never] = ["here", "never put"].map(record);
    save(store, "kept", "before", std::slice::from_ref(&here)).await?;
    match store.commit("kept", b"after", &[here.id(), never.id()]).await {
        Err(Error::Session { session, problem }) => {
            assert_eq!(session, "kept");
            assert!(problem.contains(&never.id().to_string()), "{problem}");
        }
        other => panic!("a commit that names an absent record: {other:?}"),
    }
    for name in [String::new(), "n".repeat(MAX_NAME + 1)] {
        let refused = store.commit(&name, b"", &[]).await;
        assert!(matches!(refused, Err(Error::Setting { setting: "session name", .. })), "{refused:?}");
        assert_eq!(store.open(&name).await?, None);
        assert!(!store.delete(&name).await?);
    }
    let refused = store.commit("kept", &vec![0; MAX_RECORD + 1], &[]).await;
    assert!(matches!(refused, Err(Error::Store { .. })), "a manifest that is too large: {refused:?}");
    let records = [record("beside"), Record::new(vec![1; MAX_RECORD + 1])];
    let refused = store.put(&records).await;
    assert!(matches!(refused, Err(Error::Store { .. })), "a record that is too large: {refused:?}");
    assert!(!has(store, &records[0]).await?, "a put is all or nothing");
    assert_eq!(store.open("kept").await?.as_deref(), Some("before".as_bytes()));
    assert_eq!(totals(store).await?, (1, 1, 4));
    assert!(store.delete("kept").await?);
    Ok(())
}

/// Sessions that name the same records keep them once, and until the last is gone.
async fn sharing(store: &dyn Store) -> Result<()> {
    let [both, left, right] = ["both", "left", "right"].map(record);
    save(store, "left", "l", &[both.clone(), left.clone()]).await?;
    save(store, "right", "r", &[both.clone(), right.clone()]).await?;
    // A fork puts nothing.
    store.commit("fork", b"l", &ids(&[both.clone(), left.clone()])).await?;
    assert_eq!(totals(store).await?, (3, 3, 13));
    assert_eq!(store.list().await?.iter().map(|listed| listed.bytes).collect::<Vec<_>>(), [8, 8, 9]);
    store.delete("left").await?;
    assert!(has(store, &left).await? && has(store, &both).await?, "the fork names them");
    store.commit("fork", b"f", &[both.id()]).await?;
    assert!(!has(store, &left).await? && has(store, &both).await?);
    store.delete("right").await?;
    assert!(has(store, &both).await? && !has(store, &right).await?);
    store.delete("fork").await?;
    assert_eq!(totals(store).await?, (0, 0, 0));
    Ok(())
}

/// Two sessions are saved at a time: what one has put is there until it commits, whatever the other does.
async fn interleaved(store: &dyn Store) -> Result<()> {
    let [mine, ours] = ["mine", "ours"].map(record);
    store.put(&[mine.clone(), ours.clone()]).await?;
    save(store, "other", "o", std::slice::from_ref(&ours)).await?;
    save(store, "other", "o", &[]).await?;
    store.delete("other").await?;
    store.commit("session", b"s", &ids(&[mine.clone(), ours.clone()])).await?;
    assert!(has(store, &mine).await? && has(store, &ours).await?);
    store.delete("session").await?;
    assert_eq!(totals(store).await?, (0, 0, 0));
    Ok(())
}

/// What a save that failed has put goes, unless a session names it or another save has put it, too.
async fn released(store: &dyn Store) -> Result<()> {
    let [mine, shared, named] = ["mine", "shared", "named"].map(record);
    save(store, "session", "s", std::slice::from_ref(&named)).await?;
    store.put(&[mine.clone(), shared.clone(), named.clone()]).await?;
    store.put(std::slice::from_ref(&shared)).await?;
    store.release(&ids(&[mine.clone(), shared.clone(), named.clone(), record("never put")])).await?;
    assert!(!has(store, &mine).await? && has(store, &shared).await? && has(store, &named).await?);
    store.delete("session").await?;
    assert!(!has(store, &named).await?, "a record that was given up holds no longer");
    store.release(&[shared.id()]).await?;
    store.release(&[]).await?;
    assert_eq!(totals(store).await?, (0, 0, 0));
    Ok(())
}

/// The largest record and manifest, and one without bytes.
async fn large(store: &dyn Store) -> Result<()> {
    let bytes: Vec<u8> = (0..MAX_RECORD).map(|i| (i % 251) as u8).collect();
    let records = [Record::new(bytes.clone()), Record::new(vec![])];
    store.put(&records).await?;
    store.commit("large", &bytes, &ids(&records)).await?;
    assert!(has(store, &records[0]).await? && has(store, &records[1]).await?);
    assert!(store.open("large").await? == Some(bytes), "the largest manifest");
    assert_eq!(totals(store).await?, (1, 2, MAX_RECORD as u64));
    store.delete("large").await?;
    Ok(())
}

/// What was committed is there when the store is opened again, and nothing else.
async fn reopened(open: &mut Open<'_>) -> Result<()> {
    let [kept, replaced, orphan] = ["kept", "replaced", "orphan"].map(record);
    let store = open().await?;
    assert_eq!(totals(&*store).await?, (0, 0, 0));
    save(&*store, "session", "one", &[kept.clone(), replaced.clone()]).await?;
    save(&*store, "session", "two", std::slice::from_ref(&kept)).await?;
    store.put(&[orphan.clone(), kept.clone()]).await?;
    drop(store);
    let store = open().await?;
    assert_eq!(store.open("session").await?.as_deref(), Some("two".as_bytes()));
    assert!(has(&*store, &kept).await? && !has(&*store, &replaced).await? && !has(&*store, &orphan).await?);
    assert_eq!(totals(&*store).await?, (1, 1, 4));
    store.delete("session").await?;
    drop(store);
    empty(&*open().await?).await
}
