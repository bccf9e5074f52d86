//! The build script's preprocessor and reflection, on texts of their own; and the table that they made.

#[path = "../build/preprocess.rs"]
mod preprocess;
#[path = "../build/reflect.rs"]
#[allow(dead_code, reason = "the table itself is emitted by the build script only")]
mod reflect;

use preprocess::{compact, expand, parse_variants, Expanded, Variant};
use reflect::reflect;

/// A folder of shaders in memory.
fn folder<'a>(files: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
    |name| files.iter().find(|(file, _)| *file == name).map(|(_, text)| text.to_string())
}

fn variant(line: &str) -> Variant {
    parse_variants(line).unwrap().remove(0)
}

fn expanded(line: &str, files: &[(&str, &str)]) -> Result<Expanded, String> {
    expand(&variant(line), &folder(files))
}

#[test]
fn the_table_of_variants() {
    let table = "# comment\n\nlinear  r1  ROWS=1\nlinear  r4_f16  ROWS=4 F16 # trailing\nembed plain\n";
    let variants = parse_variants(table).unwrap();
    assert_eq!(variants.len(), 3);
    assert_eq!(variants[1].name, "r4_f16");
    assert_eq!(variants[1].defines, [("ROWS".to_string(), Some(4)), ("F16".to_string(), None)]);
    assert_eq!(variants[2], Variant::plain("embed"));

    let problems: Vec<_> = ["linear", "\na b\na b", "a b ROWS=x", "a b ROWS=-1", "a b 4=ROWS", "a b R+W"]
        .iter()
        .map(|table| parse_variants(table).unwrap_err())
        .collect();
    insta::assert_snapshot!(problems.join("\n"), @r"
    line 1: kernel `linear` has no variant name
    line 3: `a b` is there twice
    line 1: `ROWS=x`: the value is not a u32
    line 1: `ROWS=-1`: the value is not a u32
    line 1: `4=ROWS` is neither NAME nor NAME=value
    line 1: `R+W` is neither NAME nor NAME=value
    ");
}

#[test]
fn imports_come_once_and_conditions_nest() {
    let files = [
        ("k.wgsl", "#import a\n#import b\n#ifdef ROWS\nrows\n#ifndef OTHER\nonly rows\n#else\nboth\n#endif\n#else\n#import missing\nnone\n#endif\nend"),
        ("shared/a.wgsl", "a\n#import b"),
        ("shared/b.wgsl", "#import a\nb"),
    ];
    let plain = expanded("k r4 ROWS=4 F16 DOT4", &files).unwrap();
    insta::assert_snapshot!(plain.text, @r"
    enable f16;
    requires packed_4x8_integer_dot_product;
    const ROWS: u32 = 4u;
    a
    b
    rows
    only rows
    end
    ");
    let origin = |line: usize| (plain.origins[line].0.as_str(), plain.origins[line].1);
    assert_eq!(origin(3), ("shared/a.wgsl", 1));
    assert_eq!(origin(4), ("shared/b.wgsl", 2));
    assert_eq!(origin(6), ("k.wgsl", 6));
    assert_eq!(expanded("k r4 ROWS=1 OTHER", &files).unwrap().text, "const ROWS: u32 = 1u;\na\nb\nrows\nboth\nend\n");
    // What is not taken is not read, what is taken must exist.
    assert_eq!(expanded("k plain", &files).unwrap_err(), "k.wgsl:11: shared/missing.wgsl: no such file");
}

#[test]
fn directives_that_make_no_sense_name_their_line() {
    let problems: Vec<_> = [
        "\n#endif",
        "#ifdef A\n#else\n#else\n#endif",
        "x\n#ifdef A",
        "#ifdef",
        "#import",
        "#define A",
        "#ifdef A B",
        "#else",
    ]
    .iter()
    .map(|text| expanded("k plain", &[("k.wgsl", text)]).unwrap_err())
    .collect();
    insta::assert_snapshot!(problems.join("\n"), @r"
    k.wgsl:2: #endif without #ifdef
    k.wgsl:3: #else without #ifdef
    k.wgsl:2: #ifdef without #endif
    k.wgsl:1: #ifdef needs a name
    k.wgsl:1: #import needs a name
    k.wgsl:1: unknown directive `#define A`
    k.wgsl:1: `B` after #ifdef
    k.wgsl:1: #else without #ifdef
    ");
    assert_eq!(expanded("nothing plain", &[]).unwrap_err(), "nothing.wgsl: no such file");
}

#[test]
fn comments_and_indentation_do_not_reach_the_binary() {
    let text = "// é\nfn f() { // end\n  /* a /* nested */ b */ let a = 1 / 2;\n\n}\n/**/";
    assert_eq!(compact(text), "fn f() {\nlet a = 1 / 2;\n}\n");
}

#[test]
fn items_are_cut_between_declarations() {
    let text = "enable f16;\nstruct A {\na: u32,\n}\nconst b = array<u32, 2>(\n1u, 2u,\n);\n@compute @workgroup_size(64)\nfn main() {\n{ let c = 1; }\n}\n";
    let items = reflect::items(text);
    assert_eq!(items.concat(), text);
    let firsts: Vec<_> = items.iter().map(|item| item.lines().next().unwrap()).collect();
    assert_eq!(firsts, ["enable f16;", "struct A {", "const b = array<u32, 2>(", "@compute @workgroup_size(64)"]);
}

/// The error for a kernel that reads `shared/helper.wgsl`.
fn refused(line: &str, kernel: &str) -> String {
    let helper = "// A comment.\nfn helper(x: f32) -> f32 {\n    return x * 2.0;\n}\n";
    let files = [("k.wgsl", kernel), ("shared/helper.wgsl", helper)];
    reflect(&variant(line), &expanded(line, &files).unwrap()).unwrap_err()
}

#[test]
fn a_bad_shader_shows_nagas_message_and_the_file() {
    let parse =
        refused("k r4 ROWS=4", "#import helper\n@compute @workgroup_size(64)\nfn main() {\n    let x = helpe(1.0);\n}");
    let types = refused(
        "k r4 ROWS=4",
        "#import helper\n@compute @workgroup_size(64)\nfn main() {\n    let x: u32 = helper(1.0);\n}",
    );
    let validation = refused(
        "k plain",
        "#import helper\nvar<workgroup> sums: array<f32, 8>;\nfn total() -> f32 {\n    if sums[0] > 1.0 { return 1.0; }\n}\n@compute @workgroup_size(64)\nfn main() { sums[0] = total(); }",
    );
    insta::assert_snapshot!([parse, types, validation].join("\n"));
}

#[test]
fn features_must_be_named_in_the_table() {
    let half = "@compute @workgroup_size(64)\nfn main() { let x = f16(1.0); }";
    assert!(refused("k plain", half).contains("f16"));
    let sum = "var<workgroup> sums: array<u32, 64>;\n@compute @workgroup_size(64)\nfn main(@builtin(local_invocation_index) i: u32) { sums[i] = subgroupAdd(i); }";
    assert!(refused("k plain", sum).contains("SUBGROUP"), "{}", refused("k plain", sum));
    for (line, text) in [("k half F16", half), ("k lanes SUBGROUPS", sum)] {
        reflect(&variant(line), &expanded(line, &[("k.wgsl", text)]).unwrap()).unwrap();
    }
}

#[test]
fn conventions_are_checked() {
    let buffers: String =
        (2..11).map(|i| format!("@group(0) @binding({i}) var<storage> b{i}: array<u32>;\n")).collect();
    let main = "@compute @workgroup_size(64)\nfn main() {}";
    let problems: Vec<_> = [
        format!("{buffers}{main}"),
        format!("@group(0) @binding(2) var<storage> a: array<u32>;\n@group(0) @binding(2) var<storage> b: array<u32>;\n{main}"),
        format!("@group(1) @binding(2) var<storage> a: array<u32>;\n{main}"),
        format!("@group(0) @binding(1) var<storage> a: array<u32>;\n{main}"),
        format!("@group(0) @binding(1) var<uniform> params: vec4<u32>;\n{main}"),
        format!("@group(0) @binding(0) var<uniform> table: vec4<u32>;\n{main}"),
        format!("var<workgroup> a: array<vec4<f32>, 1025>;\n{main}"),
        "@compute @workgroup_size(512)\nfn main() {}".into(),
        "@compute @workgroup_size(64)\nfn other() {}".into(),
        "override n: u32 = 64;\n@compute @workgroup_size(n)\nfn main() {}".into(),
        "fn f() {}".into(),
    ]
    .iter()
    .map(|text| refused("k plain", text))
    .collect();
    insta::assert_snapshot!(problems.join("\n"), @r"
    shaders/k.wgsl, variant plain: 9 storage buffers, allowed 8
    shaders/k.wgsl, variant plain: `a` and `b` share binding 2
    shaders/k.wgsl, variant plain: `a` is in group 1, only group 0 is used
    shaders/k.wgsl, variant plain: `a` is at binding 1; `params` is 0, `step` 1, all others follow from 2
    shaders/k.wgsl, variant plain: `params` is at binding 1; `params` is 0, `step` 1, all others follow from 2
    shaders/k.wgsl, variant plain: `table` is at binding 0; `params` is 0, `step` 1, all others follow from 2
    shaders/k.wgsl, variant plain: 16400 bytes of workgroup memory, allowed 16384
    shaders/k.wgsl, variant plain: 512 invocations a workgroup, allowed 256
    shaders/k.wgsl, variant plain: the entry point is `other`, a compute shader named `main` is expected
    shaders/k.wgsl, variant plain: the workgroup size is not literal
    shaders/k.wgsl, variant plain: 0 entry points, one named `main` is expected
    ");
}

#[test]
fn reflection_reads_sizes_and_offsets() {
    let text = "
        struct Params { a: u32, b: vec3<f32>, c: array<vec4<u32>, 3> }
        struct Tail { count: u32, items: array<vec2<u32>> }
        @group(0) @binding(4) var<storage, read_write> tail: Tail;
        @group(0) @binding(0) var<uniform> params: Params;
        @group(0) @binding(2) var<storage> words: array<u32>;
        @group(0) @binding(3) var<storage> fixed: array<u32, 5>;
        override width: u32;
        override scale: f32 = 1.0;
        var<workgroup> sums: array<f32, width * 2>;
        @compute @workgroup_size(8, 4)
        fn main() { tail.items[0].x = params.a + words[0] + fixed[0] + u32(sums[0] * scale); }";
    let line = "k plain";
    let shader = reflect(&variant(line), &expanded(line, &[("k.wgsl", text)]).unwrap()).unwrap();
    assert_eq!(shader.workgroup_size, [8, 4, 1]);
    assert_eq!(shader.overrides, ["width", "scale"]);
    let bindings: Vec<_> = shader.bindings.iter().map(|b| (b.binding, b.name.as_str(), b.kind, b.size)).collect();
    assert_eq!(
        bindings,
        [(0, "params", "Uniform", 80), (2, "words", "Read", 0), (3, "fixed", "Read", 20), (4, "tail", "ReadWrite", 0)]
    );
    let params = shader.structs.iter().find(|s| s.name == "Params").unwrap();
    let member = |name: &str, offset, size| (name.to_string(), offset, size);
    assert_eq!(
        (params.size, &params.members),
        (80, &vec![member("a", 0, 4), member("b", 16, 12), member("c", 32, 48)])
    );
    let tail = shader.structs.iter().find(|s| s.name == "Tail").unwrap();
    assert_eq!((tail.size, &tail.members), (0, &vec![member("count", 0, 4), member("items", 8, 0)]));
}

#[test]
fn every_kernel_has_a_variant_that_needs_no_feature() {
    // But the one that tries a feature.
    for shader in cedra::gpu::SHADERS.iter().filter(|shader| shader.kernel != "lanes") {
        let plain = cedra::gpu::SHADERS
            .iter()
            .any(|s| s.kernel == shader.kernel && !s.needs.f16 && !s.needs.subgroups && !s.needs.dot4);
        assert!(plain, "{}: every variant needs a device feature", shader.kernel);
    }
}
