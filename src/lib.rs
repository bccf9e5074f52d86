//! # Cedra
//!
//! A runtime for language models of the DeepSeek-V4.1 family: one set of WGSL shaders, in a browser tab and natively.
//!
//! Where things live, in order of knowledge (a module imports only from those above it):
//!
//! | module | what it knows |
//! |---|---|
//! | [`error`] | the one error type |
//! | [`formats`] | number formats: BF16, E4M3, E2M1, UE8M0, and the three cache formats made of them |
//! | [`sampling`] | how a request chooses tokens |
//! | [`spec`] | when to draft, and how many drafted tokens to verify |
//! | [`store`] | where sessions are kept: records by their hash, manifests by name; knows not what they mean |
//! | [`config`] | what a model is: parsed, validated, resolved into one [`config::LayerPlan`] a layer |
//! | [`reading`] | which rows of a text each layer runs |
//! | [`checkpoint`] | where weights come from: safetensors files in the released layout |
//! | [`snapshot`] | the bytes of a saved session: what a save writes, how a damaged one is mended; knows no device |
//! | [`text`] | tokenizer, streaming detokenizer, conversations, the Engram tables that follow from them |
//! | [`gpu`] | device, buffers, pipelines, recording, readback, counters; knows no model |
//! | [`kernels`] | one file per WGSL file: bindings, sizes, dispatch; knows `gpu`, no model |
//! | [`reference`](mod@reference) | the CPU twin of every kernel, and of the whole model: the executable specification |
//! | [`layout`](mod@layout) | widths, offsets and sizes of everything on the device besides weights |
//! | [`cache`] | a session's state on the device |
//! | [`model`] | the layers, wired from kernels; loading, prefill, decode |
//! | [`session`] | texts that are appended to, cut, forked, saved, and found again |
//! | [`selftest`] | every kernel against its twin, on the device at hand |
//! | `cli` | the `cedra` binary |
//! | `web` | what JavaScript sees of the crate |

pub mod cache;
pub mod checkpoint;
pub mod config;
pub mod error;
pub mod formats;
pub mod gpu;
pub mod kernels;
pub mod layout;
pub mod model;
pub mod reading;
pub mod reference;
pub mod sampling;
pub mod selftest;
pub mod session;
pub mod snapshot;
pub mod spec;
pub mod store;
pub mod text;

#[cfg(not(target_arch = "wasm32"))]
pub mod cli;
#[cfg(target_arch = "wasm32")]
pub mod web;

pub use error::{Error, Result};
