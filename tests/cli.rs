//! The `cedra` binary as a user meets it.

mod common;

use cedra::reference::trace::Values;
use common::golden;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const PROMPT: &str = "# Struct `Vec`\n\nA contiguous growable array type";

fn cedra(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cedra"));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The message of a command that must fail.
fn refused(arguments: &[&str]) -> String {
    let output = cedra(arguments);
    assert!(!output.status.success(), "{arguments:?} went through: {}", String::from_utf8_lossy(&output.stdout));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(!message.contains("panicked"), "{message}");
    message
}

fn generate(more: &[&str]) -> Vec<String> {
    let common = ["generate", "--model", "models/pocket", "--device", "cpu"];
    common.iter().chain(more).map(|argument| argument.to_string()).collect()
}

fn run(arguments: &[String]) -> Output {
    cedra(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn text_is_streamed_and_json_holds_the_same() {
    let text = stdout(&run(&generate(&["--prompt", PROMPT, "--max-tokens", "40"])));
    assert!(text.starts_with(" returned by `Vec<T>`\n\nThe `Vec<T>` type can be used to create"), "{text}");
    let json: Value =
        serde_json::from_str(&stdout(&run(&generate(&["--prompt", PROMPT, "--max-tokens", "40", "--json"])))).unwrap();
    assert_eq!(format!("{}\n", json["text"].as_str().unwrap()), text);
    assert_eq!(json["ids"].as_array().unwrap().len(), 40);
    assert_eq!(json["prompt_ids"][0], 0, "a text begins with the beginning-of-text token");
    assert_eq!(json["finish"], "length");
    assert!(json["timings"]["load_seconds"].as_f64().unwrap() > 0.0);

    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), PROMPT).unwrap();
    let path = file.path().to_str().unwrap();
    assert_eq!(stdout(&run(&generate(&["--prompt-file", path, "--max-tokens", "40"]))), text);
    let ids: Vec<String> = json["prompt_ids"].as_array().unwrap().iter().map(|id| id.to_string()).collect();
    assert_eq!(stdout(&run(&generate(&["--tokens", &ids.join(","), "--max-tokens", "40"]))), text);
}

#[test]
fn a_seed_fixes_the_text() {
    let draw = |seed: &str| {
        stdout(&run(&generate(&["--prompt", PROMPT, "--max-tokens", "20", "--temperature", "0.9", "--seed", seed])))
    };
    assert_eq!(draw("5"), draw("5"));
    assert_ne!(draw("5"), draw("6"));
}

#[test]
fn without_a_gpu_auto_says_so_in_one_line() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cedra"));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).env("VK_DRIVER_FILES", "/nonexistent");
    let arguments = ["--model", "models/pocket", "--tokens", "0,5", "--max-tokens", "2"];
    let output = command.arg("generate").args(arguments).output().unwrap();
    let message = String::from_utf8(output.stderr.clone()).unwrap();
    if cfg!(target_os = "linux") {
        assert!(message.contains("no usable GPU") && message.contains("running on the CPU"), "{message}");
        let lines = message.lines().filter(|line| line.starts_with("cedra:")).count();
        assert_eq!(lines, 1, "{message}");
        let output = Command::new(env!("CARGO_BIN_EXE_cedra"))
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .env("VK_DRIVER_FILES", "/nonexistent")
            .args(["generate", "--device", "gpu"])
            .args(arguments)
            .output()
            .unwrap();
        assert!(!output.status.success());
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(message.contains("no usable GPU"), "{message}");
    }
    stdout(&output);
}

#[test]
fn bad_settings_name_themselves() {
    let refused = |more: &[&str]| {
        let arguments = generate(more);
        self::refused(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let input = ["--tokens", "0,5"];
    let with = |more: &[&str]| refused(&[&input, more].concat());
    assert!(
        with(&["--temperature", "-1"]).contains("setting `temperature`: found -1, allowed: a finite number, 0 or more")
    );
    assert!(with(&["--top-p", "0"]).contains("setting `top-p`: found 0, allowed: more than 0, at most 1"));
    assert!(with(&["--max-tokens", "0"]).contains("setting `max-tokens`: found 0, allowed: 1 or more"));
    assert!(with(&["--max-tokens", "70000"]).contains("context overrun: 70002 tokens needed, 65536 allowed"));
    assert!(refused(&["--tokens", "0,4096"]).contains("token id 4096 is outside the vocabulary of 4096 tokens"));
    assert!(refused(&["--tokens", "1,x"]).contains("token id `x`"));
    assert!(refused(&["--tokens", ","]).contains("the prompt is empty"));
    assert!(refused(&["--prompt-file", "no/such/file"]).contains("no/such/file"));
    assert!(self::refused(&["generate", "--model", "no/such/model", "--tokens", "1"]).contains("no/such/model"));
    assert!(refused(&[]).contains("--prompt"));
}

/// `cedra trace` on the CPU without cache quantisation gives the recorded reference.
#[test]
fn a_trace_is_the_reference() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/golden");
    let (tokens, _) = golden::inputs(&folder.join("inputs.safetensors"));
    let scratch = tempfile::tempdir().unwrap();
    let (ids, out) = (scratch.path().join("ids.txt"), scratch.path().join("trace.safetensors"));
    let text: Vec<String> = tokens[..40].iter().map(|id| id.to_string()).collect();
    std::fs::write(&ids, text.join("\n")).unwrap();
    let [ids, out] = [&ids, &out].map(|path| path.to_str().unwrap());
    let model = folder.join("ckpt_fp8fp4");
    let arguments = ["trace", "--model", model.to_str().unwrap(), "--tokens", ids, "--out", out, "--device", "cpu"];
    stdout(&cedra(&[&arguments[..], &["--cache-quant", "off"]].concat()));
    let ours = golden::read(Path::new(out));
    let recorded = golden::Golden::file(&folder.join("record_noquant.safetensors"));
    let mut compared = 0;
    for (name, theirs) in &recorded.0 {
        let Some(ours) = ours.get(name) else { continue };
        if let (Values::F32(a), Values::F32(b)) = (&ours.values, &theirs.values) {
            if a.len() == b.len() && !name.ends_with("moe_weights") {
                assert!(golden::max_difference(a, b) < 2e-4, "{name}");
                compared += 1;
            }
        }
    }
    assert!(compared > 20, "{compared} tensors compared");

    stdout(&cedra(&[&arguments[..], &["--layers", "4..6"]].concat()));
    let layers = golden::Golden::file(Path::new(out)).layers();
    assert_eq!(layers, [4, 5]);
    assert!(refused(&[&arguments[..], &["--layers", "4..60"]].concat()).contains("allowed: a..b within 0..12"));
    assert!(refused(&[&arguments[..7], &["--device", "gpu", "--cache-quant", "off"]].concat()).contains("cache-quant"));
}

#[test]
fn bench_prints_what_it_measured() {
    let arguments =
        ["bench", "--model", "models/pocket", "--device", "cpu", "--context", "48", "--generate", "4", "--json"];
    let json: Value = serde_json::from_str(&stdout(&cedra(&arguments))).unwrap();
    assert!(json["prefill_tokens_per_second"].as_f64().unwrap() > 0.0);
    assert!(json["decode_tokens_per_second"].as_f64().unwrap() > 0.0);
    assert_eq!(json["generated"], 4);
}

/// A pipe that closes early is no failure.
#[test]
fn a_closed_pipe_is_no_failure() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_cedra"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(generate(&["--prompt", PROMPT, "--max-tokens", "200"]))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
