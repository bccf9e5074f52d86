//! Files that a page has: read in pieces, never whole.

use std::collections::BTreeMap;
use std::ops::Range;

use futures::future::LocalBoxFuture;
use js_sys::{Map, Uint8Array};
use wasm_bindgen::prelude::*;
use wasm_bindgen::JsCast;
use wasm_bindgen_futures::JsFuture;
use web_sys::Blob;

use crate::checkpoint::Source;
use crate::{Error, Result};

/// The files of a model, by name.
pub(super) struct Files(BTreeMap<String, Blob>);

impl Files {
    pub fn new(files: &Map) -> Result<Self> {
        let mut blobs = BTreeMap::new();
        let mut other = None;
        files.for_each(&mut |value, name| match (name.as_string(), value.dyn_into::<Blob>()) {
            (Some(name), Ok(blob)) => drop(blobs.insert(name, blob)),
            (name, _) => other = Some(name.unwrap_or_default()),
        });
        match other {
            Some(name) => Err(Error::malformed(name, "not a Blob")),
            None => Ok(Self(blobs)),
        }
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    /// A file to be read in pieces.
    pub fn open(&self, name: &str) -> Result<Box<dyn Source>> {
        let blob = self.0.get(name).ok_or_else(|| Error::io(name, std::io::ErrorKind::NotFound.into()))?;
        Ok(Box::new(BlobSource { name: name.into(), blob: blob.clone() }))
    }

    /// All bytes of a small file.
    pub async fn read(&self, name: &str) -> Result<Vec<u8>> {
        let file = self.open(name)?;
        file.read(0..file.bytes()).await
    }

    /// The text of a small file.
    pub async fn text(&self, name: &str) -> Result<String> {
        String::from_utf8(self.read(name).await?).map_err(|error| Error::malformed(name, error.to_string()))
    }
}

#[derive(Debug)]
struct BlobSource {
    name: String,
    blob: Blob,
}

impl Source for BlobSource {
    fn bytes(&self) -> u64 {
        self.blob.size() as u64
    }

    fn read(&self, range: Range<u64>) -> LocalBoxFuture<'_, Result<Vec<u8>>> {
        Box::pin(async move {
            let failed = |error: JsValue| {
                let words = error.dyn_ref::<js_sys::Error>().map(|error| String::from(error.message()));
                let words = words.unwrap_or_else(|| format!("{error:?}"));
                Error::io(&self.name, std::io::Error::other(words))
            };
            let part = self.blob.slice_with_f64_and_f64(range.start as f64, range.end as f64).map_err(failed)?;
            let buffer = JsFuture::from(part.array_buffer()).await.map_err(failed)?;
            Ok(Uint8Array::new(&buffer).to_vec())
        })
    }
}
