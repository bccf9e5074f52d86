//! Reading what JavaScript passes in.

use std::future::Future;

use futures::channel::oneshot;
use futures::future::{select, Either};
use js_sys::{BigInt, Function, Reflect, Uint32Array};
use wasm_bindgen::prelude::*;
use wasm_bindgen::JsCast;
use web_sys::AbortSignal;

use super::error::aborted;
use crate::spec::Draft;
use crate::Error;

/// The largest integer that a JavaScript number holds with all before it.
const MAX_SAFE: f64 = 9_007_199_254_740_991.0;

/// An object with options, or none.
pub(super) struct Options(JsValue);

impl Options {
    pub fn new(value: JsValue) -> Self {
        Self(value)
    }

    fn get(&self, field: &'static str) -> Result<Option<JsValue>, JsValue> {
        if self.0.is_undefined() || self.0.is_null() {
            return Ok(None);
        }
        if !self.0.is_object() {
            return Err(refused("options", &self.0, "an object").into());
        }
        let value = Reflect::get(&self.0, &field.into())?;
        Ok(Some(value).filter(|value| !value.is_undefined() && !value.is_null()))
    }

    fn parse<T>(
        &self,
        field: &'static str,
        allowed: &str,
        parse: impl FnOnce(&JsValue) -> Option<T>,
    ) -> Result<Option<T>, JsValue> {
        let Some(value) = self.get(field)? else { return Ok(None) };
        parse(&value).map(Some).ok_or_else(|| refused(field, &value, allowed).into())
    }

    pub fn number(&self, field: &'static str) -> Result<Option<f32>, JsValue> {
        self.parse(field, "a number", |value| value.as_f64().map(|number| number as f32))
    }

    pub fn whole(&self, field: &'static str) -> Result<Option<usize>, JsValue> {
        self.get(field)?.map(|value| whole(field, &value)).transpose()
    }

    pub fn flag(&self, field: &'static str) -> Result<Option<bool>, JsValue> {
        self.parse(field, "true or false", JsValue::as_bool)
    }

    /// A whole number of 64 bits: a bigint, or a number.
    pub fn wide(&self, field: &'static str) -> Result<Option<u64>, JsValue> {
        self.parse(field, "a whole number from 0 to 2^64 - 1", |value| match value.dyn_ref::<BigInt>() {
            Some(wide) => u64::try_from(wide.clone()).ok(),
            None => value.as_f64().filter(|n| n.fract() == 0.0 && (0.0..=MAX_SAFE).contains(n)).map(|n| n as u64),
        })
    }

    pub fn ids(&self, field: &'static str) -> Result<Option<Vec<u32>>, JsValue> {
        self.parse(field, "a Uint32Array", |value| value.dyn_ref::<Uint32Array>().map(Uint32Array::to_vec))
    }

    pub fn choice<T: Copy>(&self, field: &'static str, choices: &[(&str, T)]) -> Result<Option<T>, JsValue> {
        self.get(field)?.map(|value| choose(field, &value, choices)).transpose()
    }

    /// `"auto"`, `"off"` or a number of tokens.
    pub fn draft(&self) -> Result<Option<Draft>, JsValue> {
        self.parse("draft", "\"auto\", \"off\" or a number of tokens", |value| match value.as_string() {
            Some(word) => word.parse().ok().filter(|draft| !matches!(draft, Draft::Tokens(_))),
            None => value.as_f64().filter(|n| n.fract() == 0.0 && *n >= 0.0).map(|n| Draft::Tokens(n as usize)),
        })
    }

    pub fn callback(&self, field: &'static str) -> Result<Option<Function>, JsValue> {
        self.parse(field, "a function", |value| value.dyn_ref::<Function>().cloned())
    }

    pub fn signal(&self) -> Result<Signal, JsValue> {
        let signal = self.parse("signal", "an AbortSignal", |value| value.dyn_ref::<AbortSignal>().cloned())?;
        Ok(Signal(signal))
    }
}

/// A whole number that a length or a count can be.
pub(super) fn whole(setting: &'static str, value: &JsValue) -> Result<usize, JsValue> {
    let number = value.as_f64().filter(|n| n.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(n));
    number.map(|n| n as usize).ok_or_else(|| refused(setting, value, "a whole number, 0 or more").into())
}

/// One of some words.
pub(super) fn choose<T: Copy>(setting: &'static str, value: &JsValue, choices: &[(&str, T)]) -> Result<T, JsValue> {
    let word = value.as_string();
    let found = choices.iter().find(|(name, _)| word.as_deref() == Some(name));
    found.map(|(_, choice)| *choice).ok_or_else(|| {
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        refused(setting, value, &names.join(" or ")).into()
    })
}

fn refused(setting: &'static str, value: &JsValue, allowed: &str) -> Error {
    let found = js_sys::JSON::stringify(value).map_or_else(|_| format!("{value:?}"), String::from);
    Error::Setting { setting, found, allowed: allowed.into() }
}

/// An `AbortSignal`, or none.
#[derive(Clone)]
pub(super) struct Signal(Option<AbortSignal>);

impl Signal {
    pub fn aborted(&self) -> bool {
        self.0.as_ref().is_some_and(AbortSignal::aborted)
    }

    /// `work`, dropped as soon as the signal says so.
    pub async fn race<T>(&self, work: impl Future<Output = Result<T, JsValue>>) -> Result<T, JsValue> {
        let Some(signal) = &self.0 else { return work.await };
        let reason = || aborted(&Reflect::get(signal, &"reason".into()).unwrap_or_default());
        if signal.aborted() {
            return Err(reason());
        }
        let (sender, heard) = oneshot::channel();
        let listener = Closure::once(move || {
            // The receiver is gone when the work is done.
            let _ = sender.send(());
        });
        signal.add_event_listener_with_callback("abort", listener.as_ref().unchecked_ref())?;
        let work = std::pin::pin!(work);
        let first = select(work, heard).await;
        signal.remove_event_listener_with_callback("abort", listener.as_ref().unchecked_ref())?;
        match first {
            Either::Left((done, _)) => done,
            Either::Right(_) => Err(reason()),
        }
    }
}
