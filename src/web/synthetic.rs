//! Sessions as large as a test wants, without a model: their pages are made of numbers, and compared word by word.

use js_sys::Promise;
use serde_json::json;
use wasm_bindgen::prelude::*;

use super::error::{promise, to_js};
use crate::checkpoint::Fingerprint;
use crate::reading::Floors;
use crate::snapshot::{Generator, Geometry, Head, PagePart, Reader, Writer};
use crate::store::{IndexedDbStore, Store};
use crate::{Error, Result};

/// Words of a page: 256 KiB.
const PAGE_WORDS: u32 = 1 << 16;
const SESSION: &str = "synthetic";

fn fingerprint() -> Fingerprint {
    Fingerprint { config: [1; 16], weights: [2; 16], tokenizer: [3; 16] }
}

fn geometry() -> Geometry {
    let part = PagePart { layer: 0, ratio: 4, at: 0, latent_words: 1536, key_words: 512 };
    Geometry {
        page_tokens: 128,
        page_words: PAGE_WORDS,
        window: 128,
        layers: 1,
        head_dim: 512,
        history: 0,
        parts: vec![part],
    }
}

/// Words that nothing could guess or compress.
fn page(number: usize) -> impl Iterator<Item = u32> {
    let mut state = number as u64 + 1;
    (0..PAGE_WORDS).map(move |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    })
}

fn tokens(pages: usize) -> Vec<u32> {
    (0..128 * pages as u32).collect()
}

async fn save(store: &dyn Store, pages: usize) -> Result<JsValue> {
    let tokens = tokens(pages);
    let head = Head {
        fingerprint: fingerprint(),
        geometry: geometry(),
        tokens: &tokens,
        cached: tokens.len(),
        kept: tokens.len(),
        floors: Floors::default(),
        generator: Generator::default(),
        saved_at: 0,
    };
    let mut writer = Writer::new(store, SESSION, None, head)?;
    for number in 0..pages {
        writer.feed(&page(number).collect::<Vec<u32>>()).await?;
    }
    let (_, written) = writer.finish(None, None).await?;
    Ok(to_js(&json!({ "records": written.records, "bytes": written.bytes, "pages": written.pages })))
}

async fn compare(store: &dyn Store, pages: usize) -> Result<JsValue> {
    let mut reader = Reader::open(store, SESSION, &fingerprint(), &geometry()).await?;
    let other = |problem: String| Error::Session { session: SESSION.into(), problem };
    if reader.tokens != tokens(pages) {
        return Err(other(format!("another text of {} tokens", reader.tokens.len())));
    }
    let mut read = 0;
    while let Some(run) = reader.next_pages().await? {
        for (number, words) in (run.first..).zip(run.words.chunks_exact(PAGE_WORDS as usize)) {
            if !words.iter().copied().eq(page(number)) {
                return Err(other(format!("page {number} has other words")));
            }
            read += 1;
        }
    }
    Ok(to_js(&json!({ "pages": read, "whole": reader.pages_whole() })))
}

/// Saves a session of so many pages of 256 KiB in a database.
#[wasm_bindgen(js_name = saveSynthetic, unchecked_return_type = "Promise<{ records: number; bytes: number; pages: number }>")]
pub fn save_synthetic(database: String, pages: usize) -> Promise {
    promise(async move { Ok(save(&IndexedDbStore::open(&database).await?, pages).await?) })
}

/// Reads it back and compares every word.
#[wasm_bindgen(js_name = compareSynthetic, unchecked_return_type = "Promise<{ pages: number; whole: boolean }>")]
pub fn compare_synthetic(database: String, pages: usize) -> Promise {
    promise(async move { Ok(compare(&IndexedDbStore::open(&database).await?, pages).await?) })
}
