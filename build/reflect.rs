//! Validates preprocessed WGSL with naga and reads off what the host must know: bindings, structs, overrides.
//!
//! Part of the build script, not of the library; `tests/shaders.rs` includes it too.

use crate::preprocess::{compact, Expanded, Variant};
use naga::valid::{Capabilities, ShaderStages, SubgroupOperationSet, ValidationFlags, Validator};
use naga::{AddressSpace, ArraySize, StorageAccess, TypeInner};
use std::collections::BTreeMap;
use std::fmt::Write;

/// WebGPU's default limits: every variant fits them.
const MAX_STORAGE_BUFFERS: usize = 8;
const MAX_WORKGROUP_BYTES: u32 = 16 << 10;
const MAX_INVOCATIONS: u32 = 256;

/// One variant, validated.
#[derive(Debug)]
pub struct Reflected {
    /// The text for the device.
    pub source: String,
    /// Literal workgroup size.
    pub workgroup_size: [u32; 3],
    /// Bindings of group 0, ascending.
    pub bindings: Vec<Binding>,
    /// Every struct of the shader.
    pub structs: Vec<Struct>,
    /// Names of the `override` constants.
    pub overrides: Vec<String>,
}

/// A buffer of group 0.
#[derive(Debug)]
pub struct Binding {
    /// `@binding(..)`.
    pub binding: u32,
    /// Name of the variable.
    pub name: String,
    /// `Uniform`, `Read` or `ReadWrite`.
    pub kind: &'static str,
    /// Bytes of the type, 0 when it is sized at run time.
    pub size: u32,
}

/// A struct as WGSL lays it out.
#[derive(Debug)]
pub struct Struct {
    /// Its name.
    pub name: String,
    /// Bytes, 0 when it is sized at run time.
    pub size: u32,
    /// `(name, offset, size)`.
    pub members: Vec<(String, u32, u32)>,
}

/// Parses, validates and reflects a variant. The error is naga's message, with the files that its lines came from.
pub fn reflect(variant: &Variant, expanded: &Expanded) -> Result<Reflected, String> {
    let path = format!("shaders/{}.wgsl, variant {}", variant.kernel, variant.name);
    let text = &expanded.text;
    let module = naga::front::wgsl::parse_str(text).map_err(|error| {
        let message = error.emit_to_string_with_path(text, &path);
        locate(message, expanded, error.labels().filter_map(|(span, _)| line_of(span, text)))
    })?;
    let mut capabilities = Capabilities::SHADER_FLOAT16_IN_FLOAT32;
    capabilities.set(Capabilities::SHADER_FLOAT16, variant.defines("F16"));
    let subgroups = variant.defines("SUBGROUPS");
    capabilities.set(Capabilities::SUBGROUP, subgroups);
    let mut validator = Validator::new(ValidationFlags::all(), capabilities);
    if subgroups {
        validator.subgroup_stages(ShaderStages::COMPUTE).subgroup_operations(SubgroupOperationSet::all());
    }
    validator.validate(&module).map_err(|error| {
        let message = error.emit_to_string_with_path(text, &path);
        locate(message, expanded, error.spans().filter_map(|(span, _)| line_of(*span, text)))
    })?;

    let source = compact(text);
    naga::front::wgsl::parse_str(&source)
        .map_err(|error| format!("{path}: without comments: {}", error.emit_to_string(&source)))?;
    let reflected = read_off(&module, source).map_err(|problem| format!("{path}: {problem}"))?;
    check_conventions(&reflected).map_err(|problem| format!("{path}: {problem}"))?;
    Ok(reflected)
}

/// 1-based line of a span, if it has a place.
fn line_of(span: naga::Span, text: &str) -> Option<usize> {
    span.is_defined().then(|| span.location(text).line_number as usize)
}

/// Adds to naga's message, whose lines count in the expanded text, the file and line that each came from.
fn locate(mut message: String, expanded: &Expanded, lines: impl Iterator<Item = usize>) -> String {
    let mut lines: Vec<_> = lines.collect();
    lines.sort_unstable();
    lines.dedup();
    for line in lines {
        if let Some((file, number)) = expanded.origins.get(line - 1) {
            let _ = writeln!(message, "  line {line} is shaders/{file}:{number}");
        }
    }
    message
}

fn read_off(module: &naga::Module, source: String) -> Result<Reflected, String> {
    let [entry] = &module.entry_points[..] else {
        return Err(format!("{} entry points, one named `main` is expected", module.entry_points.len()));
    };
    if entry.name != "main" || entry.stage != naga::ShaderStage::Compute {
        return Err(format!("the entry point is `{}`, a compute shader named `main` is expected", entry.name));
    }
    if entry.workgroup_size_overrides.is_some() {
        return Err("the workgroup size is not literal".into());
    }
    let size_of = |ty| {
        let inner = &module.types[ty].inner;
        if sized_at_run_time(module, inner) {
            0
        } else {
            inner.size(module.to_ctx())
        }
    };

    let mut bindings = Vec::new();
    let mut workgroup_bytes = 0;
    for (_, variable) in module.global_variables.iter() {
        let name = variable.name.clone().unwrap_or_default();
        let kind = match variable.space {
            AddressSpace::Uniform => "Uniform",
            AddressSpace::Storage { access } if access.contains(StorageAccess::STORE) => "ReadWrite",
            AddressSpace::Storage { .. } => "Read",
            AddressSpace::WorkGroup => {
                // An array sized by an override counts when the pipeline is made.
                if !sized_by_override(module, &module.types[variable.ty].inner) {
                    workgroup_bytes += size_of(variable.ty).next_multiple_of(16);
                }
                continue;
            }
            _ => continue,
        };
        let place = variable.binding.ok_or_else(|| format!("`{name}` has no binding"))?;
        if place.group != 0 {
            return Err(format!("`{name}` is in group {}, only group 0 is used", place.group));
        }
        bindings.push(Binding { binding: place.binding, name, kind, size: size_of(variable.ty) });
    }
    bindings.sort_by_key(|b| b.binding);
    if workgroup_bytes > MAX_WORKGROUP_BYTES {
        return Err(format!("{workgroup_bytes} bytes of workgroup memory, allowed {MAX_WORKGROUP_BYTES}"));
    }

    let mut structs = Vec::new();
    for (handle, ty) in module.types.iter() {
        if let (TypeInner::Struct { members, .. }, Some(name)) = (&ty.inner, &ty.name) {
            let members = members
                .iter()
                .map(|member| (member.name.clone().unwrap_or_default(), member.offset, size_of(member.ty)))
                .collect();
            structs.push(Struct { name: name.clone(), size: size_of(handle), members });
        }
    }
    let overrides = module.overrides.iter().filter_map(|(_, constant)| constant.name.clone()).collect();
    Ok(Reflected { source, workgroup_size: entry.workgroup_size, bindings, structs, overrides })
}

fn sized_at_run_time(module: &naga::Module, inner: &TypeInner) -> bool {
    match inner {
        TypeInner::Array { size, .. } => matches!(size, ArraySize::Dynamic),
        TypeInner::Struct { members, .. } => {
            members.last().is_some_and(|last| sized_at_run_time(module, &module.types[last.ty].inner))
        }
        _ => false,
    }
}

fn sized_by_override(module: &naga::Module, inner: &TypeInner) -> bool {
    match inner {
        TypeInner::Array { base, size, .. } => {
            matches!(size, ArraySize::Pending(_)) || sized_by_override(module, &module.types[*base].inner)
        }
        _ => false,
    }
}

/// What every kernel of this crate promises: see docs/shaders.md.
fn check_conventions(shader: &Reflected) -> Result<(), String> {
    let invocations: u32 = shader.workgroup_size.iter().product();
    if invocations > MAX_INVOCATIONS {
        return Err(format!("{invocations} invocations a workgroup, allowed {MAX_INVOCATIONS}"));
    }
    let storage = shader.bindings.iter().filter(|b| b.kind != "Uniform").count();
    if storage > MAX_STORAGE_BUFFERS {
        return Err(format!("{storage} storage buffers, allowed {MAX_STORAGE_BUFFERS}"));
    }
    for pair in shader.bindings.windows(2) {
        if pair[0].binding == pair[1].binding {
            return Err(format!("`{}` and `{}` share binding {}", pair[0].name, pair[1].name, pair[0].binding));
        }
    }
    for binding in &shader.bindings {
        let expected = match (binding.kind, binding.name.as_str()) {
            ("Uniform", "params") => binding.binding == 0,
            ("Uniform", "step") => binding.binding == 1,
            _ => binding.binding >= 2,
        };
        if !expected {
            return Err(format!(
                "`{}` is at binding {}; `params` is 0, `step` 1, all others follow from 2",
                binding.name, binding.binding
            ));
        }
    }
    Ok(())
}

/// The Rust text of the table `SHADERS`. Variants of a kernel, and kernels that import the same text, are nearly equal:
/// the sources are cut into their top-level items, and each different item is written once.
#[derive(Default)]
pub struct Table {
    items: BTreeMap<String, usize>,
    entries: String,
}

impl Table {
    /// Adds a variant.
    pub fn add(&mut self, variant: &Variant, shader: &Reflected) {
        let out = &mut self.entries;
        let _ = write!(out, "Shader {{ kernel: {:?}, variant: {:?}, source: &[", variant.kernel, variant.name);
        for item in items(&shader.source) {
            let next = self.items.len();
            let index = *self.items.entry(item.to_string()).or_insert(next);
            let _ = write!(out, "ITEM_{index}, ");
        }
        let _ = write!(
            out,
            "], workgroup_size: {:?}, needs: Needs {{ f16: {}, subgroups: {}, dot4: {} }}, bindings: &[",
            shader.workgroup_size,
            variant.defines("F16"),
            variant.defines("SUBGROUPS"),
            variant.defines("DOT4")
        );
        for Binding { binding, name, kind, size } in &shader.bindings {
            let _ = write!(
                out,
                "BindingInfo {{ binding: {binding}, name: {name:?}, kind: BindingKind::{kind}, size: {size} }}, "
            );
        }
        out.push_str("], structs: &[");
        for Struct { name, size, members } in &shader.structs {
            let _ = write!(out, "StructInfo {{ name: {name:?}, size: {size}, members: &[");
            for (name, offset, size) in members {
                let _ = write!(out, "MemberInfo {{ name: {name:?}, offset: {offset}, size: {size} }}, ");
            }
            out.push_str("] }, ");
        }
        let _ = writeln!(out, "], overrides: &{:?} }},", shader.overrides);
    }

    /// The whole text.
    pub fn finish(self) -> String {
        let mut out = String::new();
        for (item, index) in &self.items {
            let _ = writeln!(out, "const ITEM_{index}: &str = {item:?};");
        }
        out.push_str("/// Every variant of every kernel, by kernel, in the order of `shaders/variants.txt`.\n");
        let _ = writeln!(out, "pub static SHADERS: &[Shader] = &[\n{}];", self.entries);
        out
    }
}

/// Cuts compact WGSL after every line that ends a declaration. Concatenated, the items are the text again.
pub fn items(source: &str) -> Vec<&str> {
    let mut items = Vec::new();
    let (mut start, mut at, mut depth) = (0, 0, 0i32);
    for line in source.split_inclusive('\n') {
        at += line.len();
        depth += line.chars().map(|c| i32::from("{([".contains(c)) - i32::from("})]".contains(c))).sum::<i32>();
        if depth == 0 && line.trim_end().ends_with(['}', ';']) {
            items.push(&source[start..at]);
            start = at;
        }
    }
    if start < source.len() {
        items.push(&source[start..]);
    }
    items
}
