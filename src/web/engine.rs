//! The engine.

use std::rc::Rc;
use std::sync::Arc;

use js_sys::{Map, Promise, Uint32Array};
use serde_json::{json, Value};
use wasm_bindgen::prelude::*;

use super::blob::Files;
use super::error::{alive, promise, to_js};
use super::options::Options;
use super::session::WasmSession;
use super::store::WasmStore;
use crate::checkpoint::{Checkpoint, Fingerprint};
use crate::config::{Config, Role};
use crate::gpu::{DeviceOptions, FeatureUse, Gpu, MemoryKind};
use crate::layout::Layout;
use crate::model::{MemoryPlan, Model};
use crate::session::Engine;
use crate::store::RecordId;
use crate::text::{NgramTables, Tokenizer};
use crate::Error;

#[wasm_bindgen(typescript_custom_section)]
const TYPES: &str = r#"
export interface LoadOptions {
  /** Tokens that a session holds. */
  context?: number;
  /** Most rows that are read at a time. */
  chunk?: number;
  /** Whether the draft stages are loaded, where the model has some: unless told otherwise they are, but for software devices. */
  draft?: boolean;
  /** Hears the bytes that are on the device, and how many there will be. */
  onProgress?: (loaded: number, total: number) => void;
  signal?: AbortSignal;
}
export interface MemoryPlan {
  weights: number; cache: number; pages: number; slab: number; scratch: number; params: number; readback: number; total: number;
}
export interface EngineInfo {
  adapter: { name: string; software: boolean; description: string };
  /** What is used of the device: that which a kernel has a use for, the browser gives, and works as it should. */
  features: { f16: boolean; subgroups: boolean; dot4: boolean; timestamps: boolean };
  limits: { maxBufferSize: number; maxStorageBufferBindingSize: number; maxComputeWorkgroupStorageSize: number;
    maxComputeInvocationsPerWorkgroup: number; maxStorageBuffersPerShaderStage: number };
  model: { vocabulary: number; hidden: number; heads: number; headDim: number; experts: number; expertsPerToken: number;
    window: number; maxContext: number; decoder: number; bos: number; eos: number;
    fingerprint: { config: string; weights: string; tokenizer: string } };
  context: number;
  chunk: number;
  memory: MemoryPlan;
  layers: Array<{ index: number; role: "window" | "full" | "reindex" | "reuse"; ratio: number; part: "encoder" | "decoder"; engram: boolean }>;
}
export interface SelfTestReport {
  ok: boolean; milliseconds: number; adapter: string;
  kernels: Array<{ kernel: string; variant: string; worst: number; allowed: number; ok: boolean; message?: string }>;
}
export interface Counters {
  submissions: number; dispatches: number; dispatchesByKernel: Record<string, number>; blockingReadbacks: number; readbacks: number;
  waits: number; weightBytes: number; cacheBytes: number; buffers: number;
  allocated: { weights: number; cache: number; scratch: number; params: number; readback: number };
}
"#;

/// A model on the device, and its tokenizer.
pub(super) struct Place {
    pub engine: Rc<Engine>,
    pub tokenizer: Tokenizer,
    bos: u32,
}

/// A model on the device.
#[wasm_bindgen]
pub struct WasmEngine {
    pub(super) place: Rc<Place>,
}

#[cfg(feature = "browser-tests")]
impl WasmEngine {
    pub(super) fn model(&self) -> Arc<Model> {
        self.place.engine.model().clone()
    }
}

#[wasm_bindgen]
impl WasmEngine {
    /// Loads the model that some files are: `config.json`, `tokenizer.json` and the weights. Weights go to the device in
    /// pieces and never lie in memory whole.
    #[wasm_bindgen(unchecked_return_type = "Promise<WasmEngine>")]
    pub fn load(
        #[wasm_bindgen(unchecked_param_type = "Map<string, Blob>")] files: Map,
        #[wasm_bindgen(unchecked_param_type = "LoadOptions | undefined")] options: JsValue,
    ) -> Promise {
        promise(async move {
            let options = Options::new(options);
            let signal = options.signal()?;
            let place = signal.race(load(&files, &options)).await?;
            Ok(Self { place: Rc::new(place) }.into())
        })
    }

    /// Device memory by kind, in bytes, of a model with one session of `context` tokens. Needs no device.
    ///
    /// # Errors
    /// Those of the config, and of a model that no device could hold.
    #[wasm_bindgen(unchecked_return_type = "MemoryPlan")]
    pub fn plan(
        #[wasm_bindgen(js_name = configJson)] config_json: &str,
        context: JsValue,
        draft: bool,
    ) -> Result<JsValue, JsValue> {
        alive()?;
        let config = Config::from_json(config_json)?;
        let context = super::options::whole("context", &context)?;
        let options = crate::model::Options { context, draft, ..Default::default() };
        Ok(to_js(&plan(&MemoryPlan::of_config(&config, &options)?)))
    }

    /// The buffer of such a model that a device with these limits could not hold, if there is one.
    ///
    /// # Errors
    /// As [`WasmEngine::plan`].
    #[wasm_bindgen(unchecked_return_type = "{ what: string; needed: number; allowed: number } | undefined")]
    pub fn exceeded(
        #[wasm_bindgen(js_name = configJson)] config_json: &str,
        context: JsValue,
        #[wasm_bindgen(
            unchecked_param_type = "{ readonly maxBufferSize: number; readonly maxStorageBufferBindingSize: number }"
        )]
        limits: JsValue,
        draft: bool,
    ) -> Result<JsValue, JsValue> {
        alive()?;
        let config = Config::from_json(config_json)?;
        let context = super::options::whole("context", &context)?;
        let options = crate::model::Options { context, draft, ..Default::default() };
        let field =
            |name: &str| js_sys::Reflect::get(&limits, &name.into()).map(|value| value.as_f64().unwrap_or(0.0) as u64);
        let limits = wgpu::Limits {
            max_buffer_size: field("maxBufferSize")?,
            max_storage_buffer_binding_size: field("maxStorageBufferBindingSize")?,
            ..wgpu::Limits::default()
        };
        let plan = MemoryPlan::of_config(&config, &options)?;
        match plan.check(&config, &Layout::new(&config, &options)?, &limits) {
            Ok(()) => Ok(JsValue::UNDEFINED),
            Err(Error::DeviceLimit { what, needed, allowed }) => {
                Ok(to_js(&json!({ "what": what, "needed": needed, "allowed": allowed })))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Adapter, features, limits, the model and its layers.
    #[wasm_bindgen(getter, unchecked_return_type = "EngineInfo")]
    pub fn info(&self) -> JsValue {
        to_js(&info(&self.place.engine))
    }

    /// What the device has done and holds.
    #[wasm_bindgen(getter, unchecked_return_type = "Counters")]
    pub fn counters(&self) -> JsValue {
        let counters = self.place.engine.model().gpu().counters();
        let held = |kind| counters.allocated.get(&kind).copied().unwrap_or(0);
        to_js(&json!({
            "submissions": counters.submissions,
            "dispatches": counters.dispatches,
            "dispatchesByKernel": counters.dispatches_by_kernel,
            "blockingReadbacks": counters.blocking_readbacks,
            "readbacks": counters.readbacks,
            "waits": counters.waits,
            "weightBytes": counters.weight_bytes,
            "cacheBytes": counters.cache_bytes,
            "buffers": counters.buffers,
            "allocated": {
                "weights": held(MemoryKind::Weights),
                "cache": held(MemoryKind::Cache),
                "scratch": held(MemoryKind::Scratch),
                "params": held(MemoryKind::Params),
                "readback": held(MemoryKind::Readback),
            },
        }))
    }

    /// Ids of a text. With `special`, control tokens that it spells become what they are; else they stay text.
    ///
    /// # Errors
    /// The tokenizer's.
    pub fn encode(&self, text: &str, special: bool) -> Result<Uint32Array, JsValue> {
        alive()?;
        let tokenizer = &self.place.tokenizer;
        let ids = if special { tokenizer.encode_with_special(text)? } else { tokenizer.encode(text)? };
        Ok(ids.as_slice().into())
    }

    /// Text of some ids.
    ///
    /// # Errors
    /// For an id that the vocabulary does not have.
    pub fn decode(&self, ids: Vec<u32>) -> Result<String, JsValue> {
        alive()?;
        Ok(self.place.tokenizer.decode(&ids)?)
    }

    /// The token that a text begins with.
    #[wasm_bindgen(getter)]
    pub fn bos(&self) -> u32 {
        self.place.bos
    }

    /// An empty session, once the device has its memory.
    #[wasm_bindgen(unchecked_return_type = "Promise<WasmSession>")]
    pub fn session(&self) -> Promise {
        let place = self.place.clone();
        promise(async move {
            let session = place.engine.session_async().await?;
            Ok(WasmSession::new(place, session).into())
        })
    }

    /// Fails when the device is lost or has failed, which nothing but another engine mends.
    ///
    /// # Errors
    /// The device's.
    pub fn check(&self) -> Result<(), JsValue> {
        alive()?;
        Ok(self.place.engine.model().gpu().check()?)
    }

    /// Runs every kernel on the engine's device, against its CPU twin.
    #[wasm_bindgen(js_name = selfTest, unchecked_return_type = "Promise<SelfTestReport>")]
    pub fn self_test(&self) -> Promise {
        let gpu = self.place.engine.model().gpu().clone();
        promise(async move { Ok(to_js(&json!(crate::selftest::run(&gpu).await?))) })
    }

    /// A session that was saved.
    #[wasm_bindgen(unchecked_return_type = "Promise<WasmSession>")]
    pub fn open(&self, store: &WasmStore, name: String) -> Promise {
        let (place, store) = (self.place.clone(), store.store());
        promise(async move {
            let session = place.engine.open_async(&store, &name).await?;
            Ok(WasmSession::new(place, session).into())
        })
    }

    /// Lets texts take over prefixes of the sessions in a store.
    #[wasm_bindgen(unchecked_return_type = "Promise<void>")]
    pub fn attach(&self, store: &WasmStore) -> Promise {
        let (place, store) = (self.place.clone(), store.store());
        promise(async move {
            place.engine.attach_async(&store).await?;
            Ok(JsValue::UNDEFINED)
        })
    }

    /// Forgets a saved session; whether there was one.
    #[wasm_bindgen(unchecked_return_type = "Promise<boolean>")]
    pub fn remove(&self, store: &WasmStore, name: String) -> Promise {
        let (place, store) = (self.place.clone(), store.store());
        promise(async move { Ok(place.engine.delete_async(&store, &name).await?.into()) })
    }
}

async fn load(files: &Map, options: &Options) -> Result<Place, JsValue> {
    let progress = options.callback("onProgress")?;
    let files = Files::new(files)?;
    let config_json = files.text("config.json").await?;
    let index = "model.safetensors.index.json";
    let index = if files.has(index) { Some(files.text(index).await?) } else { None };
    let checkpoint = Checkpoint::from_sources(&config_json, index.as_deref(), |name| files.open(name)).await?;
    let config = checkpoint.config();
    let default = crate::model::Options::default();
    let context = options.whole("context")?.unwrap_or(default.context.min(config.max_position_embeddings));
    let chunk = options.whole("chunk")?.unwrap_or(default.chunk);
    let tokenizer_json = files.read("tokenizer.json").await?;
    let tokenizer = Tokenizer::from_bytes(&tokenizer_json)?;
    let tables = NgramTables::new(config, &tokenizer)?;
    let fingerprint = Fingerprint::read(&checkpoint, Some(&tokenizer_json)).await?;
    drop(tokenizer_json);

    // A page takes the adapter that the browser has, be it software. Nothing asks for times there.
    let features = FeatureUse { timestamps: false, ..FeatureUse::of_kernels() };
    let gpu = Gpu::new(&DeviceOptions { software: true, features, ..DeviceOptions::default() }).await?;
    let draft = options.flag("draft")?.unwrap_or(!gpu.is_software());
    let chosen = crate::model::Options { context, chunk, draft, ..default };
    let mut thrown = None;
    let mut heard = |loaded: u64, total: u64| {
        if let (Some(progress), None) = (&progress, &thrown) {
            thrown = progress.call2(&JsValue::UNDEFINED, &(loaded as f64).into(), &(total as f64).into()).err();
        }
    };
    let model = Model::load(Arc::new(gpu), &checkpoint, &tables, &chosen, &mut heard).await?;
    if let Some(error) = thrown {
        return Err(error);
    }
    // What the device could not allocate is known before anything is computed.
    model.gpu().settle().await?;
    let bos = config.bos_token_id;
    Ok(Place { engine: Engine::new(Arc::new(model), fingerprint), tokenizer, bos })
}

fn plan(plan: &MemoryPlan) -> Value {
    json!({
        "weights": plan.weights,
        "cache": plan.cache,
        "pages": plan.pages,
        "slab": plan.slab,
        "scratch": plan.scratch,
        "params": plan.params,
        "readback": plan.readback,
        "total": plan.total(),
    })
}

fn info(engine: &Engine) -> Value {
    let model = engine.model();
    let (gpu, config, layout) = (model.gpu(), model.config(), model.layout());
    let (adapter, features, limits) = (gpu.adapter(), gpu.features(), gpu.limits());
    let fingerprint: serde_json::Map<String, Value> = engine
        .fingerprint()
        .parts()
        .iter()
        .map(|(part, hash)| ((*part).into(), RecordId(*hash).to_string().into()))
        .collect();
    let layers: Vec<Value> = config
        .layers
        .iter()
        .map(|layer| {
            json!({
                "index": layer.index,
                "role": match layer.role {
                    Role::Window => "window",
                    Role::Full => "full",
                    Role::Reindex => "reindex",
                    Role::Reuse => "reuse",
                },
                "ratio": layer.ratio,
                "part": if layer.index < config.decoder() { "encoder" } else { "decoder" },
                "engram": layer.engram.is_some(),
            })
        })
        .collect();
    json!({
        "adapter": {
            "name": adapter.name,
            "software": adapter.device_type == wgpu::DeviceType::Cpu,
            "description": gpu.describe(),
        },
        "features": {
            "f16": features.f16,
            "subgroups": features.subgroups,
            "dot4": features.dot4,
            "timestamps": features.timestamps,
        },
        "limits": {
            "maxBufferSize": limits.max_buffer_size,
            "maxStorageBufferBindingSize": limits.max_storage_buffer_binding_size,
            "maxComputeWorkgroupStorageSize": limits.max_compute_workgroup_storage_size,
            "maxComputeInvocationsPerWorkgroup": limits.max_compute_invocations_per_workgroup,
            "maxStorageBuffersPerShaderStage": limits.max_storage_buffers_per_shader_stage,
        },
        "model": {
            "vocabulary": config.vocab_size,
            "hidden": config.hidden_size,
            "heads": config.num_attention_heads,
            "headDim": config.head_dim,
            "experts": config.n_routed_experts,
            "expertsPerToken": config.num_experts_per_tok,
            "window": config.sliding_window,
            "maxContext": config.max_position_embeddings,
            "decoder": config.decoder(),
            "bos": config.bos_token_id,
            "eos": config.eos_token_id,
            "fingerprint": fingerprint,
        },
        "context": layout.context,
        "chunk": layout.rows,
        "memory": plan(model.plan()),
        "layers": layers,
    })
}
