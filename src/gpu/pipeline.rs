//! Pipelines, made once per variant and set of overrides, and bind groups checked against the shader's reflection.
//!
//! A device compiles a pipeline when it is first submitted: a model knows many more variants than a text needs, and some
//! devices take a second for a large one.

use super::buffer::{Buffer, MemoryKind};
use super::device::{locked, Gpu};
use super::shaders::{BindingInfo, BindingKind, Shader};
use crate::{Error, Result};
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// One variant of a kernel with its overrides, ready to run.
pub struct Pipeline {
    label: String,
    shader: &'static Shader,
    overrides: Vec<(String, f64)>,
    /// There once the device has compiled it.
    raw: OnceLock<wgpu::ComputePipeline>,
    layout: wgpu::BindGroupLayout,
    dispatches: AtomicU64,
}

impl Pipeline {
    /// `kernel/variant`.
    pub fn label(&self) -> &str {
        &self.label
    }
    /// What the build script knows about it.
    pub fn shader(&self) -> &'static Shader {
        self.shader
    }
    /// Whether the device has compiled it.
    pub fn compiled(&self) -> bool {
        self.raw.get().is_some()
    }
    /// What its `override` constants are.
    pub fn overrides(&self) -> &[(String, f64)] {
        &self.overrides
    }
    /// Dispatches so far.
    pub fn dispatches(&self) -> u64 {
        self.dispatches.load(Relaxed)
    }
    pub(super) fn count_dispatch(&self) {
        self.dispatches.fetch_add(1, Relaxed);
    }
}

impl fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.label)
    }
}

/// A buffer, or a part of one, for one binding of a shader.
#[derive(Debug, Clone, Copy)]
pub enum Binding<'a> {
    /// All of it.
    Whole(&'a Buffer),
    /// `(buffer, offset, bytes)`; the offset is a multiple of 256.
    Range(&'a Buffer, u64, u64),
}

impl<'a> From<&'a Buffer> for Binding<'a> {
    fn from(buffer: &'a Buffer) -> Self {
        Binding::Whole(buffer)
    }
}

impl<'a> Binding<'a> {
    fn buffer(&self) -> &'a Buffer {
        match *self {
            Binding::Whole(buffer) | Binding::Range(buffer, ..) => buffer,
        }
    }
    /// The bytes that are bound; a whole buffer includes its padding.
    fn range(&self) -> Range<u64> {
        match *self {
            Binding::Whole(buffer) => 0..Buffer::allocated(buffer.bytes()),
            Binding::Range(_, offset, bytes) => offset..offset + bytes,
        }
    }
}

/// What every WebGPU device accepts as an offset, whatever this one would.
const OFFSET_ALIGNMENT: u64 = 256;

/// A pipeline with its buffers: what a [`Recording`](super::Recording) dispatches. Clones share it.
#[derive(Debug, Clone)]
pub struct Bound(Arc<Group>);

#[derive(Debug)]
struct Group {
    pipeline: Arc<Pipeline>,
    raw: wgpu::BindGroup,
    /// Keeps the memory alive: a buffer frees it with its last handle.
    _buffers: Vec<Buffer>,
}

impl Bound {
    /// The pipeline.
    pub fn pipeline(&self) -> &Arc<Pipeline> {
        &self.0.pipeline
    }
    pub(super) fn group(&self) -> &wgpu::BindGroup {
        &self.0.raw
    }
}

impl Gpu {
    /// All pipelines so far, in no order.
    pub fn pipelines(&self) -> Vec<Arc<Pipeline>> {
        locked(&self.pipelines).values().cloned().collect()
    }

    /// The pipeline of a kernel's variant. The same arguments give the same pipeline.
    ///
    /// Workgroup memory is not zeroed at its start: kernels write before they read.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the table has no such variant or the device lacks a feature of it;
    /// [`Error::Device`] with the device's message when it refuses.
    pub fn pipeline(&self, kernel: &str, variant: &str, overrides: &[(&str, f64)]) -> Result<Arc<Pipeline>> {
        let shader = self.shader(kernel, variant).ok_or_else(|| Error::Unsupported {
            what: format!("kernel {kernel}/{variant}: no such shader in this build"),
        })?;
        self.pipeline_of(shader, overrides)
    }

    /// As [`Gpu::pipeline`], for a shader that need not be in the table; its kernel and variant name it.
    ///
    /// # Errors
    /// As [`Gpu::pipeline`].
    pub fn pipeline_of(&self, shader: &'static Shader, overrides: &[(&str, f64)]) -> Result<Arc<Pipeline>> {
        self.check()?;
        let label = format!("{}/{}", shader.kernel, shader.variant);
        if !self.features().cover(shader.needs) {
            return Err(Error::Unsupported {
                what: format!("kernel {label} needs {}; the device has {}", shader.needs, self.features()),
            });
        }
        if let Some((name, _)) = overrides.iter().find(|(name, _)| !shader.overrides.contains(name)) {
            return Err(Error::Unsupported { what: format!("kernel {label} has no override `{name}`") });
        }
        let key = format!("{label} {overrides:?}");
        let mut pipelines = locked(&self.pipelines);
        if let Some(pipeline) = pipelines.get(&key) {
            return Ok(pipeline.clone());
        }
        let pipeline = Arc::new(self.make_pipeline(label, shader, overrides)?);
        pipelines.insert(key, pipeline.clone());
        Ok(pipeline)
    }

    fn make_pipeline(&self, label: String, shader: &'static Shader, overrides: &[(&str, f64)]) -> Result<Pipeline> {
        let entries: Vec<_> = shader.bindings.iter().map(layout_entry).collect();
        let layout = self.scoped(&format!("bind group layout of {label}"), || {
            let descriptor = wgpu::BindGroupLayoutDescriptor { label: Some(&label), entries: &entries };
            self.device.create_bind_group_layout(&descriptor)
        })?;
        let overrides = overrides.iter().map(|&(name, value)| (name.into(), value)).collect();
        Ok(Pipeline { label, shader, overrides, raw: OnceLock::new(), layout, dispatches: AtomicU64::new(0) })
    }

    /// Has the device compile a pipeline, if it has not yet: [`Gpu::submit`] does it for those that it needs.
    ///
    /// # Errors
    /// [`Error::Device`] with the device's message when it refuses.
    pub fn compile<'a>(&self, pipeline: &'a Pipeline) -> Result<&'a wgpu::ComputePipeline> {
        if let Some(raw) = pipeline.raw.get() {
            return Ok(raw);
        }
        let label = Some(&*pipeline.label);
        let constants: Vec<_> = pipeline.overrides.iter().map(|(name, value)| (&**name, *value)).collect();
        let raw = self.scoped(&format!("pipeline {}", pipeline.label), || {
            let module = self.device.create_shader_module(wgpu::ShaderModuleDescriptor {
                label,
                source: wgpu::ShaderSource::Wgsl(text(pipeline.shader).into()),
            });
            let layout = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label,
                bind_group_layouts: &[Some(&pipeline.layout)],
                immediate_size: 0,
            });
            self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label,
                layout: Some(&layout),
                module: &module,
                entry_point: Some("main"),
                compilation_options: wgpu::PipelineCompilationOptions {
                    constants: &constants,
                    zero_initialize_workgroup_memory: false,
                },
                cache: None,
            })
        })?;
        Ok(pipeline.raw.get_or_init(|| raw))
    }

    /// Binds buffers to a pipeline, in the order of the shader's binding numbers.
    ///
    /// # Errors
    /// [`Error::DeviceLimit`] when a range is larger than the device can bind; [`Error::Device`], naming the shader's
    /// binding, when number, kind, size or alignment do not fit, or a written buffer is bound twice.
    pub fn bind(&self, pipeline: &Arc<Pipeline>, bindings: &[Binding<'_>]) -> Result<Bound> {
        self.check()?;
        let infos = pipeline.shader.bindings;
        if bindings.len() != infos.len() {
            let names: Vec<_> = infos.iter().map(|info| info.name).collect();
            return Err(misfit(pipeline, format!("{} buffers for the bindings {names:?}", bindings.len())));
        }
        for (info, binding) in infos.iter().zip(bindings) {
            self.check_binding(pipeline, info, binding)?;
        }
        for (i, (info, binding)) in infos.iter().zip(bindings).enumerate() {
            for (other_info, other) in infos.iter().zip(bindings).skip(i + 1) {
                check_aliasing(pipeline, (info, binding), (other_info, other))?;
            }
        }
        let entries: Vec<_> = infos
            .iter()
            .zip(bindings)
            .map(|(info, binding)| {
                let range = binding.range();
                wgpu::BindGroupEntry {
                    binding: info.binding,
                    resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                        buffer: binding.buffer().raw(),
                        offset: range.start,
                        size: wgpu::BufferSize::new(range.end - range.start),
                    }),
                }
            })
            .collect();
        let raw = self.scoped(&format!("bind group of {}", pipeline.label), || {
            self.device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(&pipeline.label),
                layout: &pipeline.layout,
                entries: &entries,
            })
        })?;
        let buffers = bindings.iter().map(|binding| binding.buffer().clone()).collect();
        Ok(Bound(Arc::new(Group { pipeline: pipeline.clone(), raw, _buffers: buffers })))
    }

    fn check_binding(&self, pipeline: &Pipeline, info: &BindingInfo, binding: &Binding<'_>) -> Result<()> {
        let (buffer, range) = (binding.buffer(), binding.range());
        let bytes = range.end.saturating_sub(range.start);
        let place = format!("binding {} `{}`", info.binding, info.name);
        let (allowed_kind, allowed) = match info.kind {
            BindingKind::Uniform => {
                (buffer.kind() == MemoryKind::Params, self.limits().max_uniform_buffer_binding_size)
            }
            BindingKind::Read | BindingKind::ReadWrite => {
                (buffer.kind() != MemoryKind::Readback, self.limits().max_storage_buffer_binding_size)
            }
        };
        if !allowed_kind {
            return Err(misfit(pipeline, format!("{place} is {:?}, the buffer is {buffer:?}", info.kind)));
        }
        if bytes == 0 || range.end > Buffer::allocated(buffer.bytes()) {
            return Err(misfit(pipeline, format!("{place}: bytes {range:?} of {buffer:?}")));
        }
        if !range.start.is_multiple_of(OFFSET_ALIGNMENT) || !bytes.is_multiple_of(4) {
            let rule = "the offset must be a multiple of 256, the size of 4";
            return Err(misfit(pipeline, format!("{place}: bytes {range:?} of {buffer:?}: {rule}")));
        }
        if bytes < info.size {
            return Err(misfit(pipeline, format!("{place} needs {} bytes, {buffer:?} gives {bytes}", info.size)));
        }
        if bytes > allowed {
            let what = format!("{}: {place}, {buffer:?}", pipeline.label);
            return Err(Error::DeviceLimit { what, needed: bytes, allowed });
        }
        Ok(())
    }
}

/// WebGPU refuses a dispatch that writes a buffer which it also reads, or writes twice at one place.
fn check_aliasing(
    pipeline: &Pipeline,
    (info, binding): (&BindingInfo, &Binding<'_>),
    (other_info, other): (&BindingInfo, &Binding<'_>),
) -> Result<()> {
    let written = info.kind == BindingKind::ReadWrite || other_info.kind == BindingKind::ReadWrite;
    if !written || !binding.buffer().is(other.buffer()) {
        return Ok(());
    }
    let (a, b) = (binding.range(), other.range());
    if info.kind != other_info.kind || (a.start < b.end && b.start < a.end) {
        let message = format!(
            "`{}` and `{}` are the same buffer {:?}, bytes {a:?} and {b:?}, and one is written",
            info.name,
            other_info.name,
            binding.buffer()
        );
        return Err(misfit(pipeline, message));
    }
    Ok(())
}

fn misfit(pipeline: &Pipeline, problem: String) -> Error {
    Error::Device { message: format!("{}: {problem}", pipeline.label) }
}

/// What the device is given. A browser wants to be told that a shader has subgroup operations; naga knows no such line.
fn text(shader: &Shader) -> String {
    let enabled = if cfg!(target_arch = "wasm32") && shader.needs.subgroups { "enable subgroups;\n" } else { "" };
    enabled.to_string() + &shader.source.concat()
}

fn layout_entry(info: &BindingInfo) -> wgpu::BindGroupLayoutEntry {
    let ty = match info.kind {
        BindingKind::Uniform => wgpu::BufferBindingType::Uniform,
        BindingKind::Read => wgpu::BufferBindingType::Storage { read_only: true },
        BindingKind::ReadWrite => wgpu::BufferBindingType::Storage { read_only: false },
    };
    wgpu::BindGroupLayoutEntry {
        binding: info.binding,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer {
            ty,
            has_dynamic_offset: false,
            min_binding_size: wgpu::BufferSize::new(info.size),
        },
        count: None,
    }
}
