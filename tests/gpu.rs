//! The device layer on its own: memory, errors, recording, readback. The shaders here belong to the tests.

use cedra::gpu::{
    Binding, BindingInfo, BindingKind, DeviceOptions, FeatureUse, Gpu, MemoryKind, Needs, ReadbackRing, Recording,
    Shader, Traffic,
};
use cedra::Error;

const NOTHING: Needs = Needs { f16: false, subgroups: false, dot4: false };
const PARAMS: BindingInfo = BindingInfo { binding: 0, name: "params", kind: BindingKind::Uniform, size: 16 };
const TARGET: BindingInfo = BindingInfo { binding: 2, name: "target_words", kind: BindingKind::ReadWrite, size: 0 };

/// Adds `params.x` to every word.
static ADD: Shader = Shader {
    kernel: "add",
    variant: "plain",
    source: &["
        @group(0) @binding(0) var<uniform> params: vec4<u32>;
        @group(0) @binding(2) var<storage, read_write> target_words: array<u32>;
        override times: u32 = 1u;
        @compute @workgroup_size(64)
        fn main(@builtin(global_invocation_id) id: vec3<u32>) {
            if id.x < arrayLength(&target_words) { target_words[id.x] += params.x * times; }
        }"],
    workgroup_size: [64, 1, 1],
    needs: NOTHING,
    bindings: &[PARAMS, TARGET],
    structs: &[],
    overrides: &["times"],
};

/// Copies one storage buffer to another.
static COPY: Shader = Shader {
    kernel: "copy",
    variant: "plain",
    source: &["
        @group(0) @binding(2) var<storage, read_write> target_words: array<u32>;
        @group(0) @binding(3) var<storage, read> source_words: array<u32>;
        @compute @workgroup_size(64)
        fn main(@builtin(global_invocation_id) id: vec3<u32>) {
            if id.x < arrayLength(&target_words) { target_words[id.x] = source_words[id.x]; }
        }"],
    workgroup_size: [64, 1, 1],
    needs: NOTHING,
    bindings: &[TARGET, BindingInfo { binding: 3, name: "source_words", kind: BindingKind::Read, size: 0 }],
    structs: &[],
    overrides: &[],
};

/// Whether a missing adapter is a failure or a reason to skip.
fn open(options: DeviceOptions) -> Option<Gpu> {
    match Gpu::new_blocking(&options) {
        Ok(gpu) => Some(gpu),
        Err(error) if std::env::var("CEDRA_REQUIRE_GPU").is_ok_and(|v| v == "1") => panic!("{error}"),
        Err(error) => {
            println!("skipped: no GPU adapter ({error})");
            None
        }
    }
}

fn gpu() -> Option<Gpu> {
    open(DeviceOptions { software: true, ..Default::default() })
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytemuck::pod_collect_to_vec(bytes)
}

/// `add` over `count` words, ready to record.
fn adder(gpu: &Gpu, count: u64, amount: u32) -> (cedra::gpu::Buffer, cedra::gpu::Bound) {
    let target = gpu.buffer(MemoryKind::Scratch, "sums", count * 4).unwrap();
    let params = gpu.uniform("add params", &[amount, 0, 0, 0]).unwrap();
    let pipeline = gpu.pipeline_of(&ADD, &[]).unwrap();
    let bound = gpu.bind(&pipeline, &[Binding::Whole(&params), Binding::Whole(&target)]).unwrap();
    (target, bound)
}

fn device_message(result: Result<impl std::fmt::Debug, Error>) -> String {
    match result {
        Err(Error::Device { message }) => message,
        other => panic!("expected Error::Device, found {other:?}"),
    }
}

#[test]
fn buffers_keep_their_bytes_and_are_counted_by_kind() {
    let Some(gpu) = gpu() else { return };
    let before = gpu.counters();
    let buffer = gpu.buffer(MemoryKind::Cache, "odd", 13).unwrap();
    let empty = gpu.buffer(MemoryKind::Weights, "empty", 0).unwrap();
    assert_eq!(gpu.read_blocking(&buffer).unwrap(), [0; 13], "new memory is zero");
    gpu.upload(&buffer, 4, &[1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert_eq!(gpu.read_blocking(&buffer).unwrap(), [0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    assert!(gpu.read_blocking(&empty).unwrap().is_empty());

    let held = gpu.counters();
    assert_eq!(held.allocated[&MemoryKind::Cache], 16);
    assert_eq!(held.allocated[&MemoryKind::Weights], 16);
    assert_eq!(held.allocated[&MemoryKind::Readback], 0, "staging copies are freed");
    assert_eq!((held.buffers, held.allocated_bytes()), (2, 32));
    let done = held - before.clone();
    assert_eq!((done.blocking_readbacks, done.submissions, done.dispatches), (3, 3, 0));

    let clone = buffer.clone();
    drop(buffer);
    assert_eq!(gpu.counters().allocated[&MemoryKind::Cache], 16, "a clone holds the memory");
    drop((clone, empty));
    assert_eq!(gpu.counters().allocated, before.allocated);
}

#[test]
fn poison_fills_every_word() {
    let Some(gpu) = gpu() else { return };
    let buffer = gpu.buffer(MemoryKind::Scratch, "poisoned", (3 << 20) + 20).unwrap();
    gpu.fill(&buffer, u32::MAX);
    assert!(gpu.read_blocking(&buffer).unwrap().iter().all(|&byte| byte == 0xFF));
    gpu.fill(&buffer, 0x0403_0201);
    assert!(words(&gpu.read_blocking(&buffer).unwrap()).iter().all(|&word| word == 0x0403_0201));
}

#[test]
fn a_recording_runs_in_order_and_is_counted() {
    let Some(gpu) = gpu() else { return };
    let (sums, add) = adder(&gpu, 100, 3);
    let copy = gpu.buffer(MemoryKind::Scratch, "copy", 400).unwrap();
    let before = gpu.counters();
    let mut recording = Recording::new();
    recording.dispatch(&add, [2, 1, 1], Traffic { weights: 400, cache: 8 });
    recording.dispatch(&add, [2, 1, 1], Traffic { weights: 400, cache: 0 });
    recording.copy(&sums, 0, &copy, 0, 400);
    recording.dispatch(&add, [2, 1, 1], Traffic::NONE);
    recording.dispatch(&add, [0, 1, 1], Traffic::NONE);
    gpu.submit(recording).unwrap();
    let done = gpu.counters() - before;
    assert_eq!((done.submissions, done.dispatches, done.weight_bytes, done.cache_bytes), (1, 3, 800, 8));
    assert_eq!(done.dispatches_by_kernel, [("add/plain".to_string(), 3)].into());
    assert_eq!(words(&gpu.read_blocking(&copy).unwrap()), [6; 100]);
    assert_eq!(words(&gpu.read_blocking(&sums).unwrap()), [9; 100]);
}

#[test]
fn pipelines_are_made_once_per_overrides() {
    let Some(gpu) = gpu() else { return };
    let plain = gpu.pipeline_of(&ADD, &[]).unwrap();
    let tenfold = gpu.pipeline_of(&ADD, &[("times", 10.0)]).unwrap();
    assert!(std::sync::Arc::ptr_eq(&plain, &gpu.pipeline_of(&ADD, &[]).unwrap()));
    assert!(!std::sync::Arc::ptr_eq(&plain, &tenfold));
    let (sums, _) = adder(&gpu, 4, 1);
    let params = gpu.uniform("add params", &[7u32, 0, 0, 0]).unwrap();
    let bound = gpu.bind(&tenfold, &[Binding::Whole(&params), Binding::Whole(&sums)]).unwrap();
    let mut recording = Recording::new();
    recording.dispatch(&bound, [1, 1, 1], Traffic::NONE);
    gpu.submit(recording).unwrap();
    assert_eq!(words(&gpu.read_blocking(&sums).unwrap()), [70; 4]);
}

#[test]
fn what_does_not_exist_or_cannot_run_is_unsupported() {
    let Some(gpu) = open(DeviceOptions { software: true, features: FeatureUse::NONE, ..Default::default() }) else {
        return;
    };
    let features = gpu.features();
    assert!(!features.f16 && !features.subgroups && !features.dot4 && !features.timestamps);
    static NEEDS_F16: Shader = Shader { needs: Needs { f16: true, ..NOTHING }, ..ADD };
    let message = |result: Result<_, Error>| match result {
        Err(Error::Unsupported { what }) => what,
        other => panic!("expected Error::Unsupported, found {other:?}"),
    };
    assert_eq!(message(gpu.pipeline("nothing", "plain", &[])), "kernel nothing/plain: no such shader in this build");
    assert_eq!(
        message(gpu.pipeline_of(&NEEDS_F16, &[])),
        "kernel add/plain needs f16; \
         the device has f16 no, subgroups no, dot4 no, timestamps no"
    );
    assert_eq!(message(gpu.pipeline_of(&ADD, &[("size", 1.0)])), "kernel add/plain has no override `size`");
    assert!(gpu.set_profiling(true).is_err());
}

/// Runs a shader with the one binding `TARGET` on `input` and returns what it left there.
fn run_on(gpu: &Gpu, shader: &'static Shader, input: &[u32]) -> Vec<u32> {
    let target = gpu.buffer(MemoryKind::Scratch, "target", input.len() as u64 * 4).unwrap();
    gpu.upload(&target, 0, bytemuck::cast_slice(input));
    let pipeline = gpu.pipeline_of(shader, &[]).unwrap();
    let bound = gpu.bind(&pipeline, &[Binding::Whole(&target)]).unwrap();
    let mut recording = Recording::new();
    recording.dispatch(&bound, [1, 1, 1], Traffic::NONE);
    gpu.submit(recording).unwrap();
    words(&gpu.read_blocking(&target).unwrap())
}

#[test]
fn the_features_that_the_device_reports_work() {
    let options = DeviceOptions { software: true, features: FeatureUse::ALL, ..Default::default() };
    let Some(gpu) = open(options) else { return };
    println!("{gpu:?}");
    static HALF: Shader = Shader {
        kernel: "half",
        source: &["enable f16;
            @group(0) @binding(2) var<storage, read_write> target_words: array<u32>;
            @compute @workgroup_size(1)
            fn main() { target_words[0] = u32(f16(target_words[0]) * 0.5h); }"],
        needs: Needs { f16: true, ..NOTHING },
        bindings: &[TARGET],
        overrides: &[],
        ..ADD
    };
    static LANES: Shader = Shader {
        kernel: "lanes",
        source: &["
            @group(0) @binding(2) var<storage, read_write> target_words: array<u32>;
            @compute @workgroup_size(4)
            fn main(@builtin(local_invocation_index) i: u32, @builtin(subgroup_size) size: u32) {
                let sum = subgroupAdd(target_words[i]);
                if i == 0u { target_words[0] = sum; target_words[1] = size; }
            }"],
        needs: Needs { subgroups: true, ..NOTHING },
        bindings: &[TARGET],
        overrides: &[],
        ..ADD
    };
    static DOT: Shader = Shader {
        kernel: "dot",
        source: &["requires packed_4x8_integer_dot_product;
            @group(0) @binding(2) var<storage, read_write> target_words: array<u32>;
            @compute @workgroup_size(1)
            fn main() { target_words[0] = bitcast<u32>(dot4I8Packed(target_words[0], target_words[1])); }"],
        needs: Needs { dot4: true, ..NOTHING },
        bindings: &[TARGET],
        overrides: &[],
        ..ADD
    };
    if gpu.features().f16 {
        assert_eq!(run_on(&gpu, &HALF, &[14]), [7]);
    }
    if gpu.features().subgroups {
        let (min, max) = gpu.features().subgroup_size;
        let result = run_on(&gpu, &LANES, &[1, 10, 100, 1000]);
        println!("subgroups of {} lanes", result[1]);
        assert!((min..=max).contains(&result[1]), "{} lanes, {min} to {max} reported", result[1]);
        assert!(result[1] < 4 || result[0] == 1111, "{result:?}");
    }
    if gpu.features().dot4 {
        // (1, -2, 3, -4) . (5, 6, 7, 127)
        assert_eq!(run_on(&gpu, &DOT, &[0xFC03_FE01, 0x7F07_0605])[0] as i32, 5 - 12 + 21 - 508);
    }
}

#[test]
fn bindings_are_held_against_the_shader() {
    let Some(gpu) = gpu() else { return };
    let add = gpu.pipeline_of(&ADD, &[]).unwrap();
    let copy = gpu.pipeline_of(&COPY, &[]).unwrap();
    let params = gpu.buffer(MemoryKind::Params, "params", 512).unwrap();
    let data = gpu.buffer(MemoryKind::Scratch, "data", 1024).unwrap();
    let staging = gpu.buffer(MemoryKind::Readback, "staging", 64).unwrap();
    use Binding::{Range, Whole};
    let mut said = String::new();
    for (pipeline, bindings) in [
        (&add, &[Whole(&params)][..]),
        (&add, &[Whole(&data), Whole(&data)]),
        (&add, &[Whole(&params), Whole(&staging)]),
        (&add, &[Range(&params, 0, 12), Whole(&data)]),
        (&add, &[Range(&params, 4, 16), Whole(&data)]),
        (&add, &[Whole(&params), Range(&data, 512, 1024)]),
        (&copy, &[Whole(&data), Whole(&data)]),
        (&copy, &[Range(&data, 0, 256), Range(&data, 256, 256)]),
    ] {
        said.push_str(&device_message(gpu.bind(pipeline, bindings)));
        said.push('\n');
    }
    insta::assert_snapshot!(said);
    gpu.check().expect("none of these reached the device");
    assert!(gpu.bind(&add, &[Range(&params, 256, 16), Range(&data, 256, 512)]).is_ok());
}

#[test]
fn sizes_beyond_the_device_are_typed_errors() {
    let Some(gpu) = open(DeviceOptions { software: true, default_limits: true, ..Default::default() }) else { return };
    assert_eq!(gpu.limits().max_storage_buffers_per_shader_stage, 8);
    assert_eq!(gpu.limits().max_compute_workgroup_storage_size, 16 << 10);
    match gpu.buffer(MemoryKind::Weights, "huge", 1 << 40) {
        Err(Error::DeviceLimit { what, needed, allowed }) => {
            assert_eq!((what.as_str(), needed, allowed), ("buffer `huge`", 1 << 40, 256 << 20));
        }
        other => panic!("{other:?}"),
    }
    // Larger than one binding: it can be held, and bound in parts.
    let wide = gpu.buffer(MemoryKind::Weights, "wide", 129 << 20).unwrap();
    let params = gpu.uniform("add params", &[1u32, 0, 0, 0]).unwrap();
    let add = gpu.pipeline_of(&ADD, &[]).unwrap();
    match gpu.bind(&add, &[Binding::Whole(&params), Binding::Whole(&wide)]) {
        Err(Error::DeviceLimit { needed, allowed, .. }) => assert_eq!((needed, allowed), (129 << 20, 128 << 20)),
        other => panic!("{other:?}"),
    }
    let bound = gpu.bind(&add, &[Binding::Whole(&params), Binding::Range(&wide, 128 << 20, 1 << 20)]).unwrap();
    let mut recording = Recording::new();
    recording.dispatch(&bound, [65_536, 1, 1], Traffic::NONE);
    assert_eq!(
        device_message(gpu.submit(recording)),
        "add/plain: grid [65536, 1, 1], at most 65535 workgroups a dimension are allowed"
    );
    let mut recording = Recording::new();
    recording.dispatch(&bound, [4096, 1, 1], Traffic::NONE);
    gpu.submit(recording).unwrap();
    let part = pollster::block_on(gpu.read_range(&wide, (128 << 20) - 16, 32)).unwrap();
    assert_eq!(words(&part), [0, 0, 0, 0, 1, 1, 1, 1]);
}

#[test]
fn a_refused_shader_is_a_typed_error_with_its_label() {
    let Some(gpu) = gpu() else { return };
    static BAD: Shader = Shader { kernel: "bad", source: &["fn main( {"], bindings: &[], ..ADD };
    let bad = gpu.pipeline_of(&BAD, &[]).unwrap();
    let message = device_message(gpu.compile(&bad));
    assert!(message.starts_with("pipeline bad/plain: "), "{message}");
    assert!(message.contains("fn main( {"), "naga's message shows the line: {message}");
    gpu.check().expect("a refused pipeline leaves the device usable");
}

#[test]
fn an_error_that_nobody_caught_stops_everything_after_it() {
    let Some(gpu) = gpu() else { return };
    // Reflection that lies about a size gets past our checks and is caught by the device at dispatch.
    static LIES: Shader = Shader { kernel: "lies", bindings: &[BindingInfo { size: 0, ..PARAMS }, TARGET], ..ADD };
    let (sums, _) = adder(&gpu, 4, 1);
    let params = gpu.buffer(MemoryKind::Params, "params", 16).unwrap();
    let pipeline = gpu.pipeline_of(&LIES, &[]).unwrap();
    let bound = gpu.bind(&pipeline, &[Binding::Range(&params, 0, 4), Binding::Whole(&sums)]).unwrap();
    let mut recording = Recording::new();
    recording.dispatch(&bound, [1, 1, 1], Traffic::NONE);
    let first = device_message(gpu.submit(recording));
    assert_eq!(device_message(gpu.submit(Recording::new())), first, "the first error is kept");
    assert_eq!(device_message(gpu.read_blocking(&sums)), first);
    assert_eq!(device_message(gpu.buffer(MemoryKind::Scratch, "more", 4)), first);
}

#[test]
fn a_lost_device_says_so_and_another_can_be_opened() {
    let Some(gpu) = gpu() else { return };
    let (sums, add) = adder(&gpu, 4, 1);
    let mut ring = ReadbackRing::new(&gpu, 2, 16).unwrap();
    let mut recording = Recording::new();
    recording.dispatch(&add, [1, 1, 1], Traffic::NONE);
    assert!(ring.copy(&mut recording, &[(&sums, 0, 16)]));
    gpu.submit(recording).unwrap();
    gpu.destroy();
    let adapter = gpu.adapter().name.clone();
    let lost = |error: Error| match error {
        Error::DeviceLost { reason, message, adapter: on } => {
            assert!(on.contains(&adapter), "{on}");
            (reason, message)
        }
        other => panic!("expected Error::DeviceLost, found {other:?}"),
    };
    let first = lost(gpu.submit(Recording::new()).unwrap_err());
    assert_eq!(first, ("destroyed", "given up by the program".into()));
    assert_eq!(lost(gpu.read_blocking(&sums).unwrap_err()), first);
    assert_eq!(lost(ring.poll(&gpu).unwrap_err()), first);
    assert_eq!(lost(ring.wait_oldest(&gpu).unwrap_err()), first);
    assert_eq!(lost(gpu.buffer(MemoryKind::Scratch, "more", 4).unwrap_err()), first);

    let again = self::gpu().expect("the adapter is still there");
    let (sums, _) = adder(&again, 4, 1);
    assert_eq!(words(&again.read_blocking(&sums).unwrap()), [0; 4]);
}

#[test]
fn a_readback_ring_keeps_several_payloads_in_flight_and_in_order() {
    let Some(gpu) = gpu() else { return };
    let (sums, add) = adder(&gpu, 8, 1);
    let mut ring = ReadbackRing::new(&gpu, 3, 16).unwrap();
    assert_eq!(ring.wait_oldest(&gpu).unwrap(), None, "nothing was submitted");
    let before = gpu.counters();
    let mut sent = 0;
    let mut arrived = Vec::new();
    while arrived.len() < 20 {
        let mut recording = Recording::new();
        recording.dispatch(&add, [1, 1, 1], Traffic::NONE);
        // Two parts, from different places, in one payload.
        if sent < 20 && ring.copy(&mut recording, &[(&sums, 28, 4), (&sums, 0, 8)]) {
            gpu.submit(recording).unwrap();
            sent += 1;
        } else {
            assert!(ring.in_flight() == 3 || sent == 20);
            arrived.push(ring.wait_oldest(&gpu).unwrap().expect("one is in flight"));
        }
        while let Some(payload) = ring.poll(&gpu).unwrap() {
            arrived.push(payload);
        }
    }
    for (i, payload) in (1..).zip(&arrived) {
        assert_eq!(words(payload), [i; 3]);
    }
    let done = gpu.counters() - before.clone();
    assert_eq!((done.readbacks, done.submissions, done.blocking_readbacks), (20, 20, 0));
    assert!(done.waits <= 20);
    assert_eq!(done.buffers, before.buffers, "the slots are used again");

    // A recording that is never submitted gives its slot back.
    let mut recording = Recording::new();
    assert!(ring.copy(&mut recording, &[(&sums, 0, 4)]));
    assert_eq!(ring.poll(&gpu).unwrap(), None);
    drop(recording);
    assert_eq!((ring.poll(&gpu).unwrap(), ring.in_flight()), (None, 0));
}

#[test]
fn memory_stays_flat_over_many_steps() {
    let Some(gpu) = gpu() else { return };
    let (sums, add) = adder(&gpu, 8, 1);
    let mut ring = ReadbackRing::new(&gpu, 4, 4).unwrap();
    let held = gpu.counters();
    for _ in 0..200 {
        let mut recording = Recording::new();
        recording.dispatch(&add, [1, 1, 1], Traffic::NONE);
        assert!(ring.copy(&mut recording, &[(&sums, 0, 4)]));
        gpu.submit(recording).unwrap();
        if ring.in_flight() == 4 {
            ring.wait_oldest(&gpu).unwrap();
        }
    }
    let after = gpu.counters();
    assert_eq!((after.buffers, &after.allocated), (held.buffers, &held.allocated));
}

#[test]
fn profiling_times_every_dispatch() {
    let Some(gpu) = gpu() else { return };
    if !gpu.features().timestamps {
        println!("skipped: no timestamps");
        return;
    }
    let (sums, add) = adder(&gpu, 1 << 16, 1);
    gpu.set_profiling(true).unwrap();
    // More dispatches than one query set holds.
    let mut recording = Recording::new();
    for _ in 0..2500 {
        recording.dispatch(&add, [1, 1, 1], Traffic::NONE);
    }
    gpu.submit(recording).unwrap();
    gpu.submit(Recording::new()).unwrap();
    let times = pollster::block_on(gpu.take_profile()).unwrap();
    assert_eq!(times["add/plain"].dispatches, 2500);
    assert!(times["add/plain"].nanoseconds > 0);
    assert!(pollster::block_on(gpu.take_profile()).unwrap().is_empty());
    assert_eq!(words(&gpu.read_blocking(&sums).unwrap())[0], 2500);
}

#[test]
fn a_software_adapter_is_used_only_when_asked_for() {
    let Some(gpu) = gpu() else { return };
    println!("{gpu:?}");
    if !gpu.describe().contains("(software, ") {
        return;
    }
    match Gpu::new_blocking(&DeviceOptions::default()) {
        Err(Error::NoGpu { looked_for }) => {
            assert!(looked_for.starts_with("looked for "), "{looked_for}");
            assert!(looked_for.contains("; found only "), "{looked_for}");
        }
        other => panic!("{other:?}"),
    }
}
