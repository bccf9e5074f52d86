//! Every uniform struct of the host against the struct of the same name in the shaders, as naga lays it out.

use cedra::gpu::{BindingKind, Layout, StructInfo, SHADERS};
use cedra::kernels::cache_append::TABLE_PAGES;
use std::fmt::Write;

/// What differs, or nothing.
fn differences(host: &Layout, shader: &StructInfo) -> String {
    let mut out = String::new();
    if host.size != shader.size {
        let _ = writeln!(out, "size: {} bytes on the host, {} in the shader", host.size, shader.size);
    }
    if host.members.len() != shader.members.len() {
        let _ = writeln!(out, "members: {} on the host, {} in the shader", host.members.len(), shader.members.len());
    }
    for (h, s) in host.members.iter().zip(shader.members) {
        if (h.name, h.offset, h.size) != (s.name, s.offset, s.size) {
            let _ = writeln!(
                out,
                "host `{}` at {}, {} bytes; shader `{}` at {}, {} bytes",
                h.name, h.offset, h.size, s.name, s.offset, s.size
            );
        }
    }
    out
}

#[test]
fn host_structs_match_the_shaders() {
    let layouts = cedra::kernels::layouts();
    let mut problems = String::new();
    for shader in SHADERS {
        for structure in shader.structs {
            let registered: Vec<_> = match structure.name {
                // One struct each, shared by the kernels that import it.
                name @ ("Step" | "Tile") => layouts.iter().filter(|l| l.structure == name).collect(),
                name => layouts.iter().filter(|l| l.structure == name && l.kernel == shader.kernel).collect(),
            };
            let place = format!("{}/{} {}", shader.kernel, shader.variant, structure.name);
            match registered[..] {
                [] if structure.name == "Params" => {
                    let _ = writeln!(problems, "{place}: no layout registered in kernels::layouts()");
                }
                [] => {}
                [layout] => {
                    for line in differences(layout, structure).lines() {
                        let _ = writeln!(problems, "{place}: {line}");
                    }
                }
                _ => {
                    let _ = writeln!(problems, "{place}: registered {} times", registered.len());
                }
            }
        }
    }
    for layout in layouts.iter().filter(|layout| layout.structure != "Step") {
        let known = SHADERS
            .iter()
            .any(|s| s.kernel == layout.kernel && s.structs.iter().any(|info| info.name == layout.structure));
        if !known {
            let _ = writeln!(problems, "{}: no shader has the struct {}", layout.kernel, layout.structure);
        }
    }
    assert!(problems.is_empty(), "\n{problems}");
}

#[test]
fn uniforms_are_structs_with_a_known_name() {
    for shader in SHADERS {
        for binding in shader.bindings.iter().filter(|b| b.kind == BindingKind::Uniform) {
            let expected = match binding.name {
                "step" => "Step",
                "table" => "PageTable",
                "tile" => "Tile",
                "stop_ids" => "StopIds",
                _ => "Params",
            };
            let found = shader.structs.iter().find(|s| s.name == expected);
            let place = format!("{}/{} `{}`", shader.kernel, shader.variant, binding.name);
            let structure = found.unwrap_or_else(|| panic!("{place} has no struct {expected}"));
            assert_eq!(structure.size as u64, binding.size, "{place} is not a {expected}");
            if expected == "PageTable" {
                assert_eq!(structure.size, 4 * TABLE_PAGES, "{place}: a word for each page");
            }
        }
    }
}
