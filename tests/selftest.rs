//! The self test: every kernel has one, a good device passes it, and a wrong kernel does not.

use cedra::gpu::{find, DeviceOptions, FeatureUse, Gpu, Shader, SHADERS};
use cedra::selftest::{run, run_one, Report};
use cedra::Error;

/// A device of one's own, or none: then the caller returns.
fn gpu(features: FeatureUse) -> Option<Gpu> {
    match Gpu::new_blocking(&DeviceOptions { software: true, features, ..DeviceOptions::default() }) {
        Ok(gpu) => Some(gpu),
        Err(error) if std::env::var("CEDRA_REQUIRE_GPU").is_ok_and(|v| v == "1") => panic!("{error}"),
        Err(error) => {
            println!("skipped: no GPU adapter ({error})");
            None
        }
    }
}

fn report(gpu: &Gpu) -> Report {
    pollster::block_on(run(gpu)).unwrap()
}

#[test]
fn every_kernel_of_the_table_is_tested_and_equals_its_twin() {
    let Some(gpu) = gpu(FeatureUse::of_kernels()) else { return };
    let before = gpu.counters();
    let report = report(&gpu);
    println!("{} in {:.0} ms", report.adapter, report.milliseconds);
    for kernel in &report.kernels {
        println!("{}/{}: {:e} of {:e}", kernel.kernel, kernel.variant, kernel.worst, kernel.allowed);
        assert!(kernel.ok && kernel.message.is_none(), "{kernel:?}");
    }
    assert!(report.ok);
    let expected: Vec<_> =
        SHADERS.iter().filter(|s| gpu.features().cover(s.needs)).map(|s| (s.kernel, s.variant)).collect();
    let found: Vec<_> = report.kernels.iter().map(|kernel| (kernel.kernel, kernel.variant)).collect();
    assert_eq!(found, expected);
    let counters = gpu.counters();
    for (kernel, variant) in expected {
        assert!(counters.dispatches_by_kernel.contains_key(&format!("{kernel}/{variant}")), "{kernel}/{variant}");
    }
    assert_eq!(counters.allocated, before.allocated, "it leaves no memory behind");
}

#[test]
fn a_lost_device_is_no_report() {
    let Some(gpu) = gpu(FeatureUse::of_kernels()) else { return };
    gpu.destroy();
    let error = pollster::block_on(run(&gpu)).unwrap_err();
    assert!(matches!(error, Error::DeviceLost { reason: "destroyed", .. }), "{error}");
}

/// The shader with its last `from` replaced.
fn wrong(shader: &Shader, from: &str, to: &str) -> &'static Shader {
    let source = shader.source.concat();
    let at = source.rfind(from).unwrap_or_else(|| panic!("{}/{} has no `{from}`", shader.kernel, shader.variant));
    let source = format!("{}{to}{}", &source[..at], &source[at + from.len()..]);
    let source: &'static [&'static str] = Box::leak(Box::new([&*Box::leak(source.into_boxed_str())]));
    Box::leak(Box::new(Shader { source, ..*shader }))
}

/// A slip a kernel at least: the self test says which kernel is wrong, and where.
#[test]
fn a_wrong_kernel_is_found() {
    let Some(gpu) = gpu(FeatureUse::of_kernels()) else { return };
    let slips = [
        ("tap", "plain", "sum / f32(params.streams)", "sum"),
        ("embed", "plain", "v * ue8m0_half(byte)", "v * 2.0 * ue8m0_half(byte)"),
        ("boundary", "r1", "fma(mix_pre[r * STREAMS + o], value", "fma(1.0001 * mix_pre[r * STREAMS + o], value"),
        ("engram_gather", "plain", "age < lookup / params.heads + 2u", "age < lookup / params.heads + 1u"),
        ("engram_gate", "plain", "select(root, -root,", "select(root, root,"),
        ("lanes", "w128", "== (local ^ s)", "== (local ^ s ^ 1u)"),
        ("boundary", "r1_sub", "subgroupShuffle(comb[o], first + i)", "subgroupShuffle(comb[o], first)"),
        ("engram_gate", "sub", "subgroupShuffleXor(total, half)", "subgroupShuffleXor(total, half ^ 1u)"),
        ("linear", "r1_sub", "rows_across(sum.b, s)", "rows_across(sum.c, s)"),
        ("linear", "r1", "v *= rms_factor(", "v *= 1.0001 * rms_factor("),
        ("route", "plain", "keys[j] == key && j < e", "keys[j] == key && j > e"),
        ("group_rows", "plain", "places[id]) + rank] = p;", "places[id]) + rank] = p + 1u;"),
        ("experts_up", "r1", "up < -params.limit", "up < -2.0 * params.limit"),
        ("experts_down", "r1", "z[at + o] = v[o];", "z[at + o] = v[0];"),
        ("cache_append", "window", "ring[position % params.slots", "ring[(position + 1u) % params.slots"),
        ("ring_commit", "plain", "(step.position + row) %", "(step.position + row + 1u) %"),
        ("latent_gather", "plain", "] = slab[latent + word]", "] = slab[latent + word] ^ 1u"),
        (
            "attend",
            "window1",
            "select(0.0, exp(scores[lane] - largest)",
            "select(0.0, exp(0.999 * scores[lane] - largest)",
        ),
        ("index_score", "plain", "max(dot, 0.0)", "dot"),
        ("select", "plain", "id = first_slot + p;", "id = first_slot + (p ^ 1u);"),
        ("select_merge", "plain", "(key == cut.digit && equal < cut.rest)", "(key == cut.digit && equal > cut.rest)"),
        ("sample", "plain", "/ temperature, -104.0", "/ (temperature + 0.3), -104.0"),
        ("draft_begin", "plain", "block_step.position = step.position;", "block_step.position = step.position + 1u;"),
        ("draft_pick", "plain", "tokens[at.rows] = token;", "tokens[at.rows] = token ^ 1u;"),
        ("verify", "judge", "u64_less(mulhi(random, all), wanted)", "u64_less(wanted, mulhi(random, all))"),
    ];
    let mut kernels: Vec<_> = SHADERS.iter().map(|shader| shader.kernel).collect();
    kernels.sort_unstable();
    kernels.dedup();
    let mut tried: Vec<_> = slips.iter().map(|(kernel, ..)| *kernel).collect();
    tried.sort_unstable();
    tried.dedup();
    assert_eq!(tried, kernels, "a slip for every kernel");
    for (kernel, variant, from, to) in slips {
        let good = find(kernel, variant).unwrap();
        if !gpu.supports(kernel, variant) {
            println!("skipped: {kernel}/{variant} needs {}", good.needs);
            continue;
        }
        gpu.substitute(wrong(good, from, to));
        let found = pollster::block_on(run_one(&gpu, kernel, variant)).unwrap();
        println!("{kernel}/{variant}: {:?}", found.message);
        assert!(!found.ok && found.message.is_some() && found.worst > found.allowed, "{found:?}");
    }
}

/// A shader that the device refuses is a wrong kernel, and no end of the device.
#[test]
fn a_kernel_that_does_not_compile_is_found() {
    let Some(gpu) = gpu(FeatureUse::of_kernels()) else { return };
    let good = find("ring_commit", "plain").unwrap();
    gpu.substitute(wrong(good, "step.rows < 2u", "step.lines < 2u"));
    let found = pollster::block_on(run_one(&gpu, "ring_commit", "plain")).unwrap();
    assert!(
        !found.ok && found.message.as_deref().is_some_and(|m| m.contains("pipeline ring_commit/plain")),
        "{found:?}"
    );
    assert!(pollster::block_on(run_one(&gpu, "latent_gather", "plain")).unwrap().ok);
}

#[test]
fn what_has_no_self_test_is_not_passed() {
    let Some(gpu) = gpu(FeatureUse::of_kernels()) else { return };
    let found = pollster::block_on(run_one(&gpu, "linear", "r16")).unwrap();
    assert_eq!((found.ok, found.message.as_deref()), (false, Some("there is no self test of it")));
}
