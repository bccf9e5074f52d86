//! The table of shaders that the build script makes of `shaders/`, and the host structs that must match it.

use std::fmt;

/// One variant of one kernel, validated at build time. All buffers are in group 0.
#[derive(Debug)]
pub struct Shader {
    /// Name of the WGSL file.
    pub kernel: &'static str,
    /// Name in `shaders/variants.txt`, or `plain`.
    pub variant: &'static str,
    /// Preprocessed WGSL, in pieces to be joined: pieces that shaders have in common are in the binary once.
    pub source: &'static [&'static str],
    /// Invocations of a workgroup in x, y, z.
    pub workgroup_size: [u32; 3],
    /// What the device must have.
    pub needs: Needs,
    /// By ascending binding number.
    pub bindings: &'static [BindingInfo],
    /// Every struct of the shader as WGSL lays it out.
    pub structs: &'static [StructInfo],
    /// Names of the `override` constants.
    pub overrides: &'static [&'static str],
}

/// Device features that a variant cannot do without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// `shader-f16`.
    pub f16: bool,
    /// Subgroup operations.
    pub subgroups: bool,
    /// The language feature `packed_4x8_integer_dot_product`.
    pub dot4: bool,
}

impl fmt::Display for Needs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [(self.f16, "f16"), (self.subgroups, "subgroups"), (self.dot4, "dot4")];
        let names: Vec<_> = names.into_iter().filter_map(|(needed, name)| needed.then_some(name)).collect();
        f.write_str(if names.is_empty() { "nothing" } else { "" })?;
        f.write_str(&names.join(", "))
    }
}

/// One buffer of a shader.
#[derive(Debug)]
pub struct BindingInfo {
    /// Number in group 0.
    pub binding: u32,
    /// Name of the variable.
    pub name: &'static str,
    /// How it is used.
    pub kind: BindingKind,
    /// Bytes of the type; 0 when it ends in an array sized at run time.
    pub size: u64,
}

/// How a shader uses a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BindingKind {
    /// `var<uniform>`
    Uniform,
    /// `var<storage, read>`
    Read,
    /// `var<storage, read_write>`
    ReadWrite,
}

/// A struct of a shader.
#[derive(Debug)]
pub struct StructInfo {
    /// Its name.
    pub name: &'static str,
    /// Bytes; 0 when it ends in an array sized at run time.
    pub size: usize,
    /// In order.
    pub members: &'static [MemberInfo],
}

/// A member of a [`StructInfo`], in bytes.
#[derive(Debug)]
pub struct MemberInfo {
    /// Its name.
    pub name: &'static str,
    /// From the start of the struct.
    pub offset: usize,
    /// Bytes; 0 when sized at run time.
    pub size: usize,
}

include!(concat!(env!("OUT_DIR"), "/shaders.rs"));

/// The variant of a kernel, if the table has it.
pub fn find(kernel: &str, variant: &str) -> Option<&'static Shader> {
    SHADERS.iter().find(|shader| shader.kernel == kernel && shader.variant == variant)
}

/// A host struct and the WGSL struct of the same name, to be held against each other: see [`layout!`](crate::layout!).
#[derive(Debug, Clone)]
pub struct Layout {
    /// The kernel whose shaders have the struct.
    pub kernel: &'static str,
    /// Name of the struct, on both sides.
    pub structure: &'static str,
    /// Bytes of the host struct.
    pub size: usize,
    /// Its members in order.
    pub members: Vec<LayoutMember>,
}

/// A member of a [`Layout`], in bytes.
#[derive(Debug, Clone)]
pub struct LayoutMember {
    /// Name, on both sides.
    pub name: &'static str,
    /// From the start of the struct.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
}

/// The [`Layout`](crate::gpu::Layout) of a `#[repr(C)]` struct: `layout!("linear", Params { k, x_stride })`. All members
/// must be listed, or it does not compile.
#[macro_export]
macro_rules! layout {
    ($kernel:literal, $structure:ident { $($member:ident),+ $(,)? }) => {{
        fn size_of_member<F>(_: fn(&$structure) -> &F) -> usize {
            std::mem::size_of::<F>()
        }
        let _all_members_are_listed = |value: $structure| {
            let $structure { $($member: _),+ } = value;
        };
        $crate::gpu::Layout {
            kernel: $kernel,
            structure: stringify!($structure),
            size: std::mem::size_of::<$structure>(),
            members: vec![$($crate::gpu::LayoutMember {
                name: stringify!($member),
                offset: std::mem::offset_of!($structure, $member),
                size: size_of_member(|value| &value.$member),
            }),+],
        }
    }};
}
