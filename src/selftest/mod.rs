//! The self test: every kernel against its CPU twin, on the device at hand, in every variant that it runs.
//!
//! Shapes are small and awkward, so that a real GPU is through in a moment; data are the same each time. What a kernel may
//! not touch is poisoned and looked at. The kernels' own tests (`tests/kernels/`) try many shapes on the developers' devices;
//! this tries one or a few on the user's, whose compiler and driver nobody has seen.

mod caches;
mod drafting;
mod lab;
mod products;
mod selection;
mod streams;

use crate::gpu::{find, Gpu, SHADERS};
use crate::{Error, Result};
use lab::{Found, Lab};
use serde::Serialize;

/// What was found.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Whether every kernel does what its twin does.
    pub ok: bool,
    /// How long it took.
    pub milliseconds: f64,
    /// The adapter, its features and limits.
    pub adapter: String,
    /// Every variant that the device runs.
    pub kernels: Vec<KernelReport>,
}

/// What was found of one variant of one kernel.
#[derive(Debug, Clone, Serialize)]
pub struct KernelReport {
    /// The kernel.
    pub kernel: &'static str,
    /// The variant.
    pub variant: &'static str,
    /// The largest relative error; of kernels that have to be exact, how many values differ. Where a value is no number, or one
    /// beside the others that has to be exact is not, the largest that there is.
    pub worst: f64,
    /// What is allowed of it.
    pub allowed: f64,
    /// Whether it does what its twin does.
    pub ok: bool,
    /// The first thing that is wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Runs every kernel. What is wrong with one is in the report.
///
/// # Errors
/// Those of a device that does nothing any more: [`Error::DeviceLost`], and [`Error::Device`] for one that had failed before.
pub async fn run(gpu: &Gpu) -> Result<Report> {
    let started = now();
    let mut kernels = vec![];
    for shader in SHADERS.iter().filter(|shader| gpu.features().cover(shader.needs)) {
        kernels.push(run_one(gpu, shader.kernel, shader.variant).await?);
    }
    let ok = kernels.iter().all(|kernel| kernel.ok);
    Ok(Report { ok, milliseconds: now() - started, adapter: gpu.describe(), kernels })
}

/// Runs one variant of one kernel.
///
/// # Errors
/// As [`run`].
pub async fn run_one(gpu: &Gpu, kernel: &'static str, variant: &'static str) -> Result<KernelReport> {
    gpu.check()?;
    let dispatches = || gpu.counters().dispatches_by_kernel.get(&format!("{kernel}/{variant}")).copied();
    let before = dispatches();
    let features = find(kernel, variant).map_or(gpu.features(), |shader| gpu.features().only(shader.needs));
    let mut found = match check(&mut Lab::new(gpu, features), kernel, variant).await {
        Ok(found) => found,
        Err(lost @ Error::DeviceLost { .. }) => return Err(lost),
        Err(error) => Found::failed(error.to_string()),
    };
    if found.ok() && dispatches() == before {
        found = Found::failed("nothing has run it".into());
    }
    let ok = found.ok();
    let Found { worst, allowed, message } = found;
    Ok(KernelReport { kernel, variant, worst, allowed, ok, message })
}

async fn check(lab: &mut Lab<'_>, kernel: &str, variant: &str) -> Result<Found> {
    match (kernel, variant) {
        ("embed", "plain") => streams::embed(lab).await,
        ("lanes", "w128" | "w256") => streams::lanes(lab, variant).await,
        ("boundary", "r1" | "r1_sub") => streams::boundary(lab, 1).await,
        ("boundary", "r4" | "r4_sub") => streams::boundary(lab, 6).await,
        ("engram_gather", "plain") => streams::engram_gather(lab).await,
        ("engram_gate", "plain" | "sub") => streams::engram_gate(lab).await,
        ("tap", "plain") => streams::tap(lab).await,
        ("linear", "r1" | "r1_sub") => products::linear(lab, 1).await,
        ("linear", "r4") => products::linear(lab, 3).await,
        ("linear", "r8") => products::linear(lab, 11).await,
        ("route", "plain") => products::route(lab).await,
        ("group_rows", "plain") => products::group_rows(lab).await,
        ("experts_up", "r1" | "r1_sub") => products::experts_up(lab, 1).await,
        ("experts_up", "r4") => products::experts_up(lab, 5).await,
        ("experts_up", "r8") => products::experts_up(lab, 33).await,
        ("experts_down", "r1" | "r1_sub") => products::experts_down(lab, 1).await,
        ("experts_down", "r4") => products::experts_down(lab, 5).await,
        ("experts_down", "r8") => products::experts_down(lab, 33).await,
        ("cache_append", "window" | "reindex" | "full") => caches::cache_append(lab, variant).await,
        ("ring_commit", "plain") => caches::ring_commit(lab).await,
        ("latent_gather", "plain") => caches::latent_gather(lab).await,
        ("attend", "window1") => caches::attend(lab, 3, false).await,
        ("attend", "window4") => caches::attend(lab, 64, false).await,
        ("attend", "global1") => caches::attend(lab, 3, true).await,
        ("attend", "global4") => caches::attend(lab, 64, true).await,
        ("index_score", "plain" | "dot4") => selection::index_score(lab, variant).await,
        ("select" | "select_merge", "plain" | "source" | "restricted") => {
            selection::select(lab, variant, kernel == "select_merge").await
        }
        ("sample", "plain") => selection::sample(lab).await,
        ("draft_begin" | "draft_pick", "plain") | ("verify", "rows" | "judge") => drafting::round(lab).await,
        _ => Ok(Found::failed("there is no self test of it".into())),
    }
}

/// Milliseconds, from any moment on.
fn now() -> f64 {
    #[cfg(not(target_arch = "wasm32"))]
    let now = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0.0, |elapsed| elapsed.as_secs_f64() * 1e3);
    #[cfg(target_arch = "wasm32")]
    let now = js_sys::Date::now();
    now
}
