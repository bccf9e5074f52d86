//! The bytes of a saved session: a manifest and the records that it names. Every byte is described in
//! `docs/session-format.md`.
//!
//! [`Writer`] saves a session: it writes pages that are new, and once only; [`Saved`] is what it needs to know of the save
//! before. [`Reader`] opens one, streams its pages a record at a time, and mends what can be mended. Every token is kept
//! twice, in a token record and beside the page that was made of it, so that one of them may be lost; a page, a window
//! ring or a remainder that is lost follows from the tokens again. What cannot be mended is refused, and nothing is made up.
//!
//! This is host data only: words of pages and rings go in and come out as the device packs them.

mod bytes;
mod manifest;
mod reader;
mod records;
mod writer;

pub use crate::sampling::Generator;
pub use manifest::{Geometry, Manifest, PagePart, PageRun, RecordRef, TokenRun};
pub use reader::{Pages, Reader};
pub use records::{DraftWindow, State};
pub use writer::{Head, Saved, Writer, Written};

use crate::store::Store;
use crate::{Error, Result};

/// Makes session `to` what session `from` is in the store. No record is copied.
///
/// # Errors
/// [`Error::NoSession`], [`Error::SessionExists`], those of [`Manifest::parse`] and the store's.
pub async fn fork(store: &dyn Store, from: &str, to: &str) -> Result<()> {
    let bytes = store.open(from).await?.ok_or_else(|| Error::NoSession { session: from.into() })?;
    let manifest = Manifest::parse(from, &bytes)?;
    if store.open(to).await?.is_some() {
        return Err(Error::SessionExists { session: to.into() });
    }
    store.commit(to, &bytes, &manifest.records()).await
}
