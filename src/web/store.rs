//! Stores.

use std::rc::Rc;

use js_sys::Promise;
use serde_json::{json, Value};
use wasm_bindgen::prelude::*;

use super::error::{promise, to_js};
use crate::snapshot::Manifest;
use crate::store::{IndexedDbStore, Listed, MemoryStore, Store};

#[wasm_bindgen(typescript_custom_section)]
const TYPES: &str = r#"
export interface SavedSession {
  name: string; tokens: number; bytes: number;
  /** Milliseconds since 1970. */
  savedAt: number;
  /** Why it cannot be read, if it cannot; its tokens are unknown then. */
  error?: string;
}
export interface StoreUsage { sessions: number; records: number; bytes: number; available?: number }
"#;

/// A place for sessions.
#[wasm_bindgen]
pub struct WasmStore {
    store: Rc<dyn Store>,
}

impl WasmStore {
    pub(super) fn store(&self) -> Rc<dyn Store> {
        self.store.clone()
    }
}

#[wasm_bindgen]
impl WasmStore {
    /// A database of the browser.
    #[wasm_bindgen(js_name = indexedDb, unchecked_return_type = "Promise<WasmStore>")]
    pub fn indexed_db(name: String) -> Promise {
        promise(async move { Ok(Self { store: Rc::new(IndexedDbStore::open(&name).await?) }.into()) })
    }

    /// Memory: gone with the page.
    pub fn memory() -> Self {
        Self { store: Rc::new(MemoryStore::new()) }
    }

    /// Where it is, for messages.
    #[wasm_bindgen(getter)]
    pub fn name(&self) -> String {
        self.store.name().into()
    }

    /// All sessions, by name.
    #[wasm_bindgen(unchecked_return_type = "Promise<Array<SavedSession>>")]
    pub fn list(&self) -> Promise {
        let store = self.store();
        promise(async move { Ok(to_js(&store.list().await?.iter().map(listed).collect())) })
    }

    /// What it holds.
    #[wasm_bindgen(unchecked_return_type = "Promise<StoreUsage>")]
    pub fn usage(&self) -> Promise {
        let store = self.store();
        promise(async move {
            let usage = store.usage().await?;
            let mut told = json!({ "sessions": usage.sessions, "records": usage.records, "bytes": usage.bytes });
            if let Some(available) = usage.available {
                told["available"] = available.into();
            }
            Ok(to_js(&told))
        })
    }
}

fn listed(entry: &Listed) -> Value {
    let Listed { session, manifest, bytes } = entry;
    match Manifest::parse(session, manifest) {
        Ok(manifest) => {
            json!({ "name": session, "tokens": manifest.tokens, "bytes": bytes, "savedAt": manifest.saved_at })
        }
        Err(error) => {
            json!({ "name": session, "tokens": 0, "bytes": bytes, "savedAt": 0, "error": error.to_string() })
        }
    }
}
