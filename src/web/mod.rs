//! What JavaScript sees of the crate: an engine, its sessions, the stores that they are kept in, conversations.
//!
//! Everything that takes time returns a promise. Calls on one session queue, in the order in which they were made; calls on
//! several go side by side. An error is an `Error` with a `code` that stays what it is, and the numbers in `data`. A panic is
//! one too: it rejects every promise that is open, and every call after it.

mod blob;
mod chat;
mod engine;
mod error;
mod figures;
mod options;
mod session;
mod store;
#[cfg(feature = "browser-tests")]
mod synthetic;

pub use chat::WasmReply;
pub use engine::WasmEngine;
pub use session::{WasmGeneration, WasmSession};
pub use store::WasmStore;

use wasm_bindgen::prelude::*;

/// Version of the crate.
#[wasm_bindgen]
pub fn version() -> String {
    env!("CARGO_PKG_VERSION").into()
}

/// Runs once, when the module is there.
#[wasm_bindgen(start)]
pub fn start() {
    error::watch_panics();
}

/// Puts the IndexedDB store through what every store must do. The database `name` must be empty, and is left so.
#[cfg(feature = "browser-tests")]
#[wasm_bindgen(unchecked_return_type = "Promise<void>")]
pub fn conformance(name: String) -> js_sys::Promise {
    use crate::store::{conformance, IndexedDbStore, Store};
    error::promise(async move {
        let mut open = || -> futures::future::LocalBoxFuture<'_, crate::Result<Box<dyn Store>>> {
            let name = name.clone();
            Box::pin(async move { Ok(Box::new(IndexedDbStore::open(&name).await?) as Box<dyn Store>) })
        };
        conformance::check(&mut open).await?;
        Ok(JsValue::UNDEFINED)
    })
}

/// Panics within a promise.
#[cfg(feature = "browser-tests")]
#[wasm_bindgen(unchecked_return_type = "Promise<never>")]
pub fn panics() -> js_sys::Promise {
    error::promise(async { panic!("as a test asked") })
}

/// Logits of the step that an engine ran last.
#[cfg(feature = "browser-tests")]
#[wasm_bindgen(unchecked_return_type = "Promise<Float32Array>")]
pub fn logits(engine: &WasmEngine) -> js_sys::Promise {
    let model = engine.model();
    error::promise(async move { Ok(js_sys::Float32Array::from(model.logits().await?.as_slice()).into()) })
}
