//! Errors as JavaScript sees them, and promises that end whatever happens.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;

use js_sys::{Function, Promise, Reflect};
use serde_json::{json, Value};
use wasm_bindgen::prelude::*;

use crate::Error;

/// The code of an error, and the numbers inside.
fn told(error: &Error) -> (&'static str, Value) {
    match error {
        Error::Io { path, .. } => ("IO", json!({ "path": path })),
        Error::Malformed { path, problem } => ("MALFORMED", json!({ "path": path, "problem": problem })),
        Error::Config { field, found, allowed } => {
            ("CONFIG", json!({ "field": field, "found": found, "allowed": allowed }))
        }
        Error::Tensor { tensor, found, allowed } => {
            ("TENSOR", json!({ "tensor": tensor, "found": found, "allowed": allowed }))
        }
        Error::Tokenizer { found, allowed } => ("TOKENIZER", json!({ "found": found, "allowed": allowed })),
        Error::TokenId { id, vocabulary } => ("TOKEN_ID", json!({ "id": id, "vocabulary": vocabulary })),
        Error::EmptyPrompt => ("EMPTY_PROMPT", json!({})),
        Error::Context { needed, allowed } => ("CONTEXT", json!({ "needed": needed, "allowed": allowed })),
        Error::Setting { setting, found, allowed } => {
            ("SETTING", json!({ "setting": setting, "found": found, "allowed": allowed }))
        }
        Error::Argument { field, found, allowed } => {
            ("ARGUMENT", json!({ "field": field, "found": found, "allowed": allowed }))
        }
        Error::NonFinite { position } => ("NON_FINITE", json!({ "position": position })),
        Error::NoGpu { looked_for } => ("NO_GPU", json!({ "lookedFor": looked_for })),
        Error::DeviceLimit { what, needed, allowed } => {
            ("DEVICE_LIMIT", json!({ "what": what, "needed": needed, "allowed": allowed }))
        }
        Error::DeviceLost { reason, message, adapter } => {
            ("DEVICE_LOST", json!({ "reason": reason, "message": message, "adapter": adapter }))
        }
        Error::Device { message } => ("DEVICE", json!({ "message": message })),
        Error::Fingerprint { session, part, found, allowed } => {
            ("FINGERPRINT", json!({ "session": session, "part": part, "found": found, "allowed": allowed }))
        }
        Error::Session { session, problem } => ("SESSION_DAMAGED", json!({ "session": session, "problem": problem })),
        Error::NoSession { session } => ("NO_SESSION", json!({ "session": session })),
        Error::SessionExists { session } => ("SESSION_EXISTS", json!({ "session": session })),
        Error::Closed => ("SESSION_CLOSED", json!({})),
        Error::OtherEngine => ("OTHER_ENGINE", json!({})),
        Error::Stopped { read, of } => ("ABORTED", json!({ "done": read, "of": of })),
        Error::Store { store, message } => ("STORE", json!({ "store": store, "message": message })),
        Error::StoreFull { store, needed, available } => {
            ("STORE_FULL", json!({ "store": store, "needed": needed, "available": available }))
        }
        Error::StoreBusy { store } => ("SESSION_BUSY", json!({ "store": store })),
        Error::Unsupported { what } => ("UNSUPPORTED", json!({ "what": what })),
    }
}

impl From<Error> for JsValue {
    fn from(error: Error) -> Self {
        let (code, data) = told(&error);
        let made = made(code, &error.to_string(), &data);
        if let Error::Io { source, .. } = &error {
            set(&made, "cause", &js_sys::Error::new(&source.to_string()));
        }
        made
    }
}

/// The error of a call that its signal ended; `reason` is the signal's.
pub(super) fn aborted(reason: &JsValue) -> JsValue {
    let made = made("ABORTED", "aborted", &json!({}));
    set(&made, "cause", reason);
    made
}

fn made(code: &str, message: &str, data: &Value) -> JsValue {
    let error = js_sys::Error::new(message);
    set(&error, "code", &code.into());
    set(&error, "data", &to_js(data));
    error.into()
}

/// Sets a field of an object of our own.
pub(super) fn set(object: &JsValue, field: &str, value: &JsValue) {
    // Objects that we have made take any field.
    let _ = Reflect::set(object, &field.into(), value);
}

/// A plain object.
pub(super) fn to_js(value: &Value) -> JsValue {
    js_sys::JSON::parse(&value.to_string()).unwrap_or_default()
}

thread_local! {
    /// What rejects the promises that are open.
    static OPEN: RefCell<BTreeMap<u64, Function>> = const { RefCell::new(BTreeMap::new()) };
    static NEXT: Cell<u64> = const { Cell::new(0) };
    /// The words of the first panic.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// From now on a panic rejects the promises that are open: nothing runs in the module after it, so nothing else would.
pub(super) fn watch_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let words = panic.to_string();
        // The panic may have come while one of the two was in use.
        let _ =
            PANIC.try_with(|first| first.try_borrow_mut().map(|mut first| first.get_or_insert(words.clone()).len()));
        let open = OPEN.try_with(|open| open.try_borrow_mut().map(|mut open| std::mem::take(&mut *open)));
        if let Ok(Ok(open)) = open {
            for reject in open.values() {
                // Rejecting a promise does not fail.
                let _ = reject.call1(&JsValue::UNDEFINED, &panicked(&words));
            }
        }
    }));
}

fn panicked(words: &str) -> JsValue {
    made("INTERNAL", &format!("cedra has failed and cannot go on: {words}"), &json!({}))
}

/// Fails once the module has panicked.
pub(super) fn alive() -> Result<(), JsValue> {
    PANIC.with(|panic| panic.borrow().as_deref().map_or(Ok(()), |words| Err(panicked(words))))
}

/// A promise of what `work` comes to.
pub(super) fn promise(work: impl Future<Output = Result<JsValue, JsValue>> + 'static) -> Promise {
    let mut work = Some(work);
    Promise::new(&mut |resolve, reject| {
        let Some(work) = work.take() else { return };
        // Settling a promise does not fail.
        if let Err(error) = alive() {
            let _ = reject.call1(&JsValue::UNDEFINED, &error);
            return;
        }
        let number = NEXT.with(|next| next.replace(next.get() + 1));
        OPEN.with(|open| open.borrow_mut().insert(number, reject.clone()));
        wasm_bindgen_futures::spawn_local(async move {
            let result = work.await;
            OPEN.with(|open| open.borrow_mut().remove(&number));
            let _ = match result {
                Ok(value) => resolve.call1(&JsValue::UNDEFINED, &value),
                Err(error) => reject.call1(&JsValue::UNDEFINED, &error),
            };
        });
    })
}
