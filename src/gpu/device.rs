//! Finding an adapter, opening the device, and keeping the first thing that goes wrong with it.

use super::counters::{Counters, Tally};
use super::pipeline::Pipeline;
use super::profile::Profile;
use super::shaders::{find, Needs, Shader, SHADERS};
use crate::{Error, Result};
use futures::FutureExt;
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Optional features of a device; each is asked for only if the adapter has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FeatureUse {
    /// `shader-f16`.
    pub f16: bool,
    /// Subgroup operations.
    pub subgroups: bool,
    /// `packed_4x8_integer_dot_product`.
    pub dot4: bool,
    /// Timestamps, for times per kernel.
    pub timestamps: bool,
}

impl FeatureUse {
    /// Everything that the adapter has.
    pub const ALL: FeatureUse = FeatureUse { f16: true, subgroups: true, dot4: true, timestamps: true };
    /// What kernels have a use for, and timestamps. A feature that no kernel needs is not asked for.
    pub fn of_kernels() -> FeatureUse {
        let any = |needed: fn(Needs) -> bool| SHADERS.iter().any(|shader| needed(shader.needs));
        FeatureUse {
            f16: any(|needs| needs.f16),
            subgroups: any(|needs| needs.subgroups),
            dot4: any(|needs| needs.dot4),
            timestamps: true,
        }
    }
    /// Nothing beyond what every WebGPU device has.
    pub const NONE: FeatureUse = FeatureUse { f16: false, subgroups: false, dot4: false, timestamps: false };
}

/// How to open a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceOptions {
    /// Accept an adapter that is a CPU. It is correct and slow.
    pub software: bool,
    /// Features to use where the adapter has them.
    pub features: FeatureUse,
    /// Ask for WebGPU's default limits instead of all that the adapter offers.
    pub default_limits: bool,
}

impl Default for DeviceOptions {
    /// A real GPU with the features that kernels use, and all limits that it offers.
    fn default() -> Self {
        Self { software: false, features: FeatureUse::of_kernels(), default_limits: false }
    }
}

/// The features that a device was opened with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features {
    /// `shader-f16`.
    pub f16: bool,
    /// Subgroup operations; they were tried, and lanes are numbered as the invocations of a workgroup are.
    pub subgroups: bool,
    /// `packed_4x8_integer_dot_product`.
    pub dot4: bool,
    /// Timestamps.
    pub timestamps: bool,
    /// Smallest and largest number of lanes in a subgroup, as the adapter says.
    pub subgroup_size: (u32, u32),
}

impl Features {
    /// Whether a variant with these needs runs.
    pub fn cover(&self, needs: Needs) -> bool {
        (self.f16 || !needs.f16) && (self.subgroups || !needs.subgroups) && (self.dot4 || !needs.dot4)
    }

    /// Of these, those that a variant needs.
    pub fn only(&self, needs: Needs) -> Features {
        Features {
            f16: self.f16 && needs.f16,
            subgroups: self.subgroups && needs.subgroups,
            dot4: self.dot4 && needs.dot4,
            ..*self
        }
    }

    /// The first of a kernel's variants that runs with these features; the last of them needs none.
    pub(crate) fn choose<'a>(&self, kernel: &str, variants: &[&'a str]) -> &'a str {
        let runs = |variant: &&&str| find(kernel, variant).is_some_and(|shader| self.cover(shader.needs));
        variants.iter().find(runs).unwrap_or(&variants[variants.len() - 1])
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let yes = |on| if on { "yes" } else { "no" };
        write!(f, "f16 {}, subgroups {}", yes(self.f16), yes(self.subgroups))?;
        if self.subgroups {
            let (min, max) = self.subgroup_size;
            write!(f, " ({min} to {max} lanes)")?;
        }
        write!(f, ", dot4 {}, timestamps {}", yes(self.dot4), yes(self.timestamps))
    }
}

/// Reason of a device that was given up on purpose; others are `unknown`.
const DESTROYED: &str = "destroyed";
/// Milliseconds, or what the browser makes of them, until a failed answer is not that of a lost device.
#[cfg(target_arch = "wasm32")]
const PATIENCE: u32 = 20;

#[cfg(not(target_arch = "wasm32"))]
type ScopeFuture = Pin<Box<dyn Future<Output = Option<wgpu::Error>> + Send>>;
#[cfg(target_arch = "wasm32")]
type ScopeFuture = Pin<Box<dyn Future<Output = Option<wgpu::Error>>>>;

/// An open device with its queue, its pipelines and its counters.
pub struct Gpu {
    pub(super) device: wgpu::Device,
    pub(super) queue: wgpu::Queue,
    adapter: wgpu::AdapterInfo,
    limits: wgpu::Limits,
    features: Features,
    fault: Arc<Fault>,
    /// Error scopes whose answer has not come yet: only in a browser.
    scopes: Mutex<Vec<(String, ScopeFuture)>>,
    pub(super) tally: Arc<Tally>,
    pub(super) pipelines: Mutex<HashMap<String, Arc<Pipeline>>>,
    pub(super) profile: Mutex<Option<Profile>>,
    /// See [`Gpu::substitute`].
    substitutes: Mutex<Vec<&'static Shader>>,
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe())
    }
}

/// What has gone wrong with the device.
#[derive(Default)]
struct Fault(Mutex<Failure>);

#[derive(Default)]
struct Failure {
    /// The first error that it reported.
    first: Option<String>,
    /// Why it is gone, and its words: that tells more than what followed from it.
    lost: Option<(&'static str, String)>,
}

impl Fault {
    fn raise(&self, message: String) {
        locked(&self.0).first.get_or_insert(message);
    }
    fn lose(&self, reason: &'static str, message: String) {
        locked(&self.0).lost.get_or_insert((reason, message));
    }
}

/// A lock that survives a panic of another holder: the data behind it are counters, caches and lists.
pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpu {
    /// Opens the best adapter: discrete before integrated before virtual; a CPU only when asked for. Subgroups are tried
    /// before they are used.
    ///
    /// # Errors
    /// [`Error::NoGpu`] says what was looked for and which adapters there are; [`Error::Device`] when the device refuses.
    pub async fn new(options: &DeviceOptions) -> Result<Gpu> {
        let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle());
        let mut adapters = instance.enumerate_adapters(wgpu::Backends::PRIMARY).await;
        adapters.sort_by_key(|adapter| preference(adapter.get_info().device_type));
        let chosen = adapters
            .iter()
            .position(|adapter| options.software || adapter.get_info().device_type != wgpu::DeviceType::Cpu);
        let Some(chosen) = chosen else {
            let found: Vec<_> = adapters.iter().map(|adapter| name(&adapter.get_info())).collect();
            return Err(no_gpu(&found));
        };
        let adapter = adapters.swap_remove(chosen);
        let info = adapter.get_info();

        let offered = adapter.features();
        let wanted = options.features;
        let language = instance.wgsl_language_features();
        let features = Features {
            f16: wanted.f16 && offered.contains(wgpu::Features::SHADER_F16),
            subgroups: wanted.subgroups && offers_subgroups(offered).await,
            dot4: wanted.dot4 && language.contains(wgpu::WgslLanguageFeatures::Packed4x8IntegerDotProduct),
            timestamps: wanted.timestamps && offered.contains(wgpu::Features::TIMESTAMP_QUERY),
            subgroup_size: (info.subgroup_min_size, info.subgroup_max_size),
        };
        let mut required = wgpu::Features::empty();
        required.set(wgpu::Features::SHADER_F16, features.f16);
        // Of a browser it cannot be asked this way.
        required.set(wgpu::Features::SUBGROUP, features.subgroups && offered.contains(wgpu::Features::SUBGROUP));
        required.set(wgpu::Features::TIMESTAMP_QUERY, features.timestamps);
        let limits = if options.default_limits { wgpu::Limits::default() } else { adapter.limits() };
        let (device, queue) = adapter
            .request_device(&wgpu::DeviceDescriptor {
                label: Some("cedra"),
                required_features: required,
                required_limits: limits.clone(),
                ..Default::default()
            })
            .await
            .map_err(|error| Error::Device { message: format!("{}: {error}", name(&info)) })?;

        let fault = Arc::new(Fault::default());
        let uncaptured = fault.clone();
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| uncaptured.raise(error.to_string())));
        let lost = fault.clone();
        device.set_device_lost_callback(move |reason, message| {
            let reason = match reason {
                wgpu::DeviceLostReason::Destroyed => DESTROYED,
                wgpu::DeviceLostReason::Unknown => "unknown",
            };
            lost.lose(reason, message);
        });
        let mut gpu = Gpu {
            device,
            queue,
            adapter: info,
            limits,
            features,
            fault,
            scopes: Mutex::default(),
            tally: Arc::default(),
            pipelines: Mutex::default(),
            profile: Mutex::default(),
            substitutes: Mutex::default(),
        };
        if features.subgroups {
            gpu.try_subgroups().await?;
        }
        Ok(gpu)
    }

    pub(super) fn set_subgroups(&mut self, on: bool) {
        self.features.subgroups = on;
    }

    /// [`Gpu::new`], blocking.
    ///
    /// # Errors
    /// As [`Gpu::new`].
    #[cfg(not(target_arch = "wasm32"))]
    pub fn new_blocking(options: &DeviceOptions) -> Result<Gpu> {
        pollster::block_on(Self::new(options))
    }

    /// The features in use.
    pub fn features(&self) -> Features {
        self.features
    }

    /// What the adapter says of itself.
    pub fn adapter(&self) -> &wgpu::AdapterInfo {
        &self.adapter
    }

    /// The limits in use.
    pub fn limits(&self) -> &wgpu::Limits {
        &self.limits
    }

    /// Whether a variant of a kernel exists and runs on this device.
    pub fn supports(&self, kernel: &str, variant: &str) -> bool {
        find(kernel, variant).is_some_and(|shader| self.features.cover(shader.needs))
    }

    /// Whether the adapter is a CPU.
    pub fn is_software(&self) -> bool {
        self.adapter.device_type == wgpu::DeviceType::Cpu
    }

    /// Adapter, features and limits, in one line.
    pub fn describe(&self) -> String {
        format!(
            "{}; {}; buffers to {} MiB, bindings to {} MiB",
            name(&self.adapter),
            self.features,
            self.limits.max_buffer_size >> 20,
            self.limits.max_storage_buffer_binding_size >> 20
        )
    }

    /// A snapshot of what was done and what is held.
    pub fn counters(&self) -> Counters {
        let mut by_kernel = std::collections::BTreeMap::new();
        for pipeline in locked(&self.pipelines).values() {
            let dispatches = pipeline.dispatches();
            if dispatches > 0 {
                *by_kernel.entry(pipeline.label().to_string()).or_insert(0) += dispatches;
            }
        }
        self.tally.snapshot(by_kernel)
    }

    /// Gives the device up at once, whoever still holds buffers of it. Everything fails from now on.
    pub fn destroy(&self) {
        self.device.destroy();
        self.fault.lose(DESTROYED, "given up by the program".into());
    }

    /// From now on this shader is made where the table's of its name would be: whoever tests the tests needs wrong ones.
    #[doc(hidden)]
    pub fn substitute(&self, shader: &'static Shader) {
        locked(&self.substitutes).push(shader);
    }

    /// The shader of this name: the table's, or one that stands in for it.
    pub(super) fn shader(&self, kernel: &str, variant: &str) -> Option<&'static Shader> {
        let named = |shader: &&&'static Shader| shader.kernel == kernel && shader.variant == variant;
        locked(&self.substitutes).iter().find(named).copied().or_else(|| find(kernel, variant))
    }

    /// Fails with the first error that the device has reported, if any, or because it is gone.
    ///
    /// # Errors
    /// [`Error::DeviceLost`], [`Error::Device`].
    pub fn check(&self) -> Result<()> {
        locked(&self.scopes).retain_mut(|(what, scope)| match scope.now_or_never() {
            None => true,
            Some(error) => {
                if let Some(error) = error {
                    self.fault.raise(said(what, &error));
                }
                false
            }
        });
        match &*locked(&self.fault.0) {
            Failure { lost: Some((reason, message)), .. } => {
                Err(Error::DeviceLost { reason, message: message.clone(), adapter: name(&self.adapter) })
            }
            Failure { first: Some(message), .. } => Err(Error::Device { message: message.clone() }),
            Failure { first: None, lost: None } => Ok(()),
        }
    }

    /// Waits until the device has answered for every buffer and pipeline made so far. Outside a browser it has. What it
    /// refused belongs to nobody here, so the device counts as failed: whoever can do without calls [`Gpu::settled`].
    ///
    /// # Errors
    /// [`Error::DeviceLost`], [`Error::Device`].
    pub async fn settle(&self) -> Result<()> {
        let scopes = std::mem::take(&mut *locked(&self.scopes));
        for (what, scope) in scopes {
            if let Some(error) = scope.await {
                self.fault.raise(said(&what, &error));
            }
        }
        self.check()
    }

    /// What `make` makes, once the device has answered for all of it. When it refuses a part, only `make` has failed: the
    /// device goes on.
    ///
    /// # Errors
    /// Those of `make`; [`Error::Device`] with what the device says, [`Error::DeviceLost`].
    pub async fn settled<T>(&self, make: impl FnOnce() -> Result<T>) -> Result<T> {
        // No task runs between these lines: what is in the list then is of `make`.
        let others = std::mem::take(&mut *locked(&self.scopes));
        let made = make();
        let own = std::mem::replace(&mut *locked(&self.scopes), others);
        let mut refused = None;
        for (what, scope) in own {
            if let Some(error) = scope.await {
                refused.get_or_insert(said(&what, &error));
            }
        }
        let made = made?;
        self.check()?;
        match refused {
            Some(message) => Err(Error::Device { message }),
            None => Ok(made),
        }
    }

    /// What has become of the device when one of its answers failed with `error`: a browser says so before it says that the
    /// device is gone.
    pub(super) async fn fate(&self, error: Error) -> Error {
        let known = |gpu: &Self| matches!(gpu.check(), Err(Error::DeviceLost { .. }));
        #[cfg(target_arch = "wasm32")]
        for _ in 0..PATIENCE {
            if known(self) {
                break;
            }
            super::wait::tick().await;
        }
        if known(self) {
            return self.check().err().unwrap_or(error);
        }
        error
    }

    /// Runs `make` and returns what the device says about it, naming it `what`.
    pub(super) fn scoped<T>(&self, what: &str, make: impl FnOnce() -> T) -> Result<T> {
        use wgpu::ErrorFilter::{Internal, OutOfMemory, Validation};
        let scopes = [Validation, OutOfMemory, Internal].map(|filter| self.device.push_error_scope(filter));
        let made = make();
        for scope in scopes.into_iter().rev() {
            let mut answer: ScopeFuture = Box::pin(scope.pop());
            match (&mut answer).now_or_never() {
                Some(None) => {}
                Some(Some(error)) => return Err(Error::Device { message: said(what, &error) }),
                None => locked(&self.scopes).push((what.into(), answer)),
            }
        }
        Ok(made)
    }
}

fn said(what: &str, error: &wgpu::Error) -> String {
    match error {
        wgpu::Error::OutOfMemory { .. } => format!("{what}: out of memory"),
        error => format!("{what}: {error}"),
    }
}

#[cfg(not(target_arch = "wasm32"))]
async fn offers_subgroups(offered: wgpu::Features) -> bool {
    offered.contains(wgpu::Features::SUBGROUP)
}

/// Whether the browser's adapter has subgroups, which wgpu does not say. It does not ask for them either: the npm package
/// does that, and without it the device refuses the first shader that needs them.
#[cfg(target_arch = "wasm32")]
async fn offers_subgroups(_: wgpu::Features) -> bool {
    use js_sys::{Function, Promise, Reflect};
    use wasm_bindgen::{JsCast, JsValue};
    async fn has() -> std::result::Result<bool, JsValue> {
        let get = |object: &JsValue, name: &str| Reflect::get(object, &name.into());
        let gpu = get(&get(&js_sys::global(), "navigator")?, "gpu")?;
        let asked: Promise = get(&gpu, "requestAdapter")?.dyn_into::<Function>()?.call0(&gpu)?.dyn_into()?;
        let features = get(&wasm_bindgen_futures::JsFuture::from(asked).await?, "features")?;
        let has = get(&features, "has")?.dyn_into::<Function>()?.call1(&features, &"subgroups".into())?;
        Ok(has.is_truthy())
    }
    has().await.unwrap_or(false)
}

/// Lower is better.
fn preference(kind: wgpu::DeviceType) -> u32 {
    match kind {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    }
}

fn name(info: &wgpu::AdapterInfo) -> String {
    let name = if info.name.is_empty() { "unnamed adapter" } else { &info.name };
    let kind = match info.device_type {
        wgpu::DeviceType::DiscreteGpu => "discrete GPU",
        wgpu::DeviceType::IntegratedGpu => "integrated GPU",
        wgpu::DeviceType::VirtualGpu => "virtual GPU",
        wgpu::DeviceType::Other => "GPU",
        wgpu::DeviceType::Cpu => "software",
    };
    format!("{name} ({kind}, {:?})", info.backend)
}

fn no_gpu(found: &[String]) -> Error {
    let looked_for = "looked for a Vulkan, Metal, DX12 or WebGPU adapter that is not software";
    Error::NoGpu {
        looked_for: match found {
            [] => format!("{looked_for}; found none"),
            found => format!("{looked_for}; found only {}; allow software to use it, slowly", found.join(", ")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::no_gpu;

    #[test]
    fn no_gpu_says_what_was_looked_for_and_found() {
        assert_eq!(
            no_gpu(&[]).to_string(),
            "no usable GPU: looked for a Vulkan, Metal, DX12 or WebGPU adapter that is not software; found none"
        );
        assert_eq!(
            no_gpu(&["llvmpipe (software, Vulkan)".into()]).to_string(),
            "no usable GPU: looked for a Vulkan, Metal, DX12 or WebGPU adapter that is not software; \
             found only llvmpipe (software, Vulkan); allow software to use it, slowly"
        );
    }
}
