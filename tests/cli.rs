//! The `cedra` binary as a user meets it.

mod common;

use cedra::checkpoint::{Checkpoint, Fingerprint};
use cedra::gpu::{DeviceOptions, Gpu};
use cedra::model::{Model, Options};
use cedra::reading::Floors;
use cedra::reference::trace::Values;
use cedra::sampling::{Generator, Request, Sampling};
use cedra::session::Engine;
use cedra::snapshot::{Geometry, Head, PagePart, Writer};
use cedra::store::RedbStore;
use cedra::text::{NgramTables, Tokenizer};
use common::golden;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

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
    let text = stdout(&run(&generate(&["--prompt", PROMPT, "--max-tokens", "20"])));
    assert!(text.starts_with(".\n\nThis type will be used to create a `Vec`"), "{text}");
    let json: Value =
        serde_json::from_str(&stdout(&run(&generate(&["--prompt", PROMPT, "--max-tokens", "20", "--json"])))).unwrap();
    assert_eq!(format!("{}\n", json["text"].as_str().unwrap()), text);
    assert_eq!(json["ids"].as_array().unwrap().len(), 20);
    assert_eq!(json["prompt_ids"][0], 0, "a text begins with the beginning-of-text token");
    assert_eq!(json["finish"], "length");
    assert!(json["timings"]["load_seconds"].as_f64().unwrap() > 0.0);

    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), PROMPT).unwrap();
    let path = file.path().to_str().unwrap();
    assert_eq!(stdout(&run(&generate(&["--prompt-file", path, "--max-tokens", "20"]))), text);
    let ids: Vec<String> = json["prompt_ids"].as_array().unwrap().iter().map(|id| id.to_string()).collect();
    assert_eq!(stdout(&run(&generate(&["--tokens", &ids.join(","), "--max-tokens", "20"]))), text);
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
    assert!(with(&["--max-tokens", "140000"]).contains("context overrun: 140002 tokens needed, 131072 allowed"));
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

/// A text that is longer than the window: `exact` is `full`, `bounded` is something else.
#[test]
fn texts_are_read_as_asked() {
    // The two ways of reading hardly ever make another text of it: here they do.
    const TEXT: &str = "shaders/lanes.wgsl";
    let text =
        |prefill: &str| stdout(&run(&generate(&["--prompt-file", TEXT, "--max-tokens", "48", "--prefill", prefill])));
    let full = text("full");
    assert_eq!(text("exact"), full);
    assert_ne!(text("bounded"), full);
    assert_eq!(text("bounded"), stdout(&run(&generate(&["--prompt-file", TEXT, "--max-tokens", "48"]))), "the default");
}

/// `cedra session ACTION ... --store STORE`
fn session(store: &Path, arguments: &[&str]) -> Output {
    cedra(&[&["session"], arguments, &["--store", store.to_str().unwrap()]].concat())
}

/// The same with the pocket model.
fn with_model(store: &Path, arguments: &[&str]) -> Output {
    session(store, &[arguments, &["--model", POCKET]].concat())
}

fn json(output: &Output) -> Value {
    serde_json::from_str(&stdout(output)).unwrap()
}

/// The one line that a command must fail with.
fn one_line(output: Output) -> String {
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.starts_with("cedra: ") && message.lines().count() == 1, "{message}");
    message
}

const POCKET: &str = "models/pocket";

fn pocket() -> (Checkpoint, Tokenizer, Fingerprint) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(POCKET);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let fingerprint = Fingerprint::new(&checkpoint, Some(&std::fs::read(folder.join("tokenizer.json")).unwrap()));
    (checkpoint, Tokenizer::open(&folder).unwrap(), fingerprint)
}

/// Saves a session of `length` tokens without a device: two pages, and one that has begun.
fn save(store: &Path, name: &str, fingerprint: Fingerprint, length: usize) {
    let part = PagePart { layer: 2, ratio: 2, at: 0, latent_words: 3, key_words: 2 };
    let geometry = Geometry {
        page_tokens: 128,
        page_words: 320,
        window: 64,
        layers: 8,
        head_dim: 4,
        history: 2,
        parts: vec![part],
    };
    let tokens: Vec<u32> = (0..length as u32).collect();
    let (floors, generator) = (Floors::default(), Generator::default());
    let kept = length - 1;
    let head =
        Head { fingerprint, geometry, tokens: &tokens, cached: kept, kept, floors, generator, saved_at: 1_000_000 };
    let store = RedbStore::open(store).unwrap();
    pollster::block_on(async {
        let mut writer = Writer::new(&store, name, None, head).unwrap();
        assert_eq!(writer.pages(), 0..2);
        writer.feed(&[7; 2 * 320]).await.unwrap();
        writer.finish(Some(&[7; 320]), None).await.unwrap();
    });
}

/// What needs no device: sessions are listed, shown, forked and deleted.
#[test]
fn saved_sessions_are_looked_after_without_a_device() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    save(&store, "book", pocket().2, 300);

    let shown = json(&session(&store, &["show", "book", "--json"]));
    assert_eq!(shown["tokens"], 300);
    assert_eq!((&shown["pages"], &shown["begun_pages"]), (&2.into(), &1.into()));
    let bytes = &shown["bytes"];
    assert_eq!(bytes["pages"], 12 + 2 * 4 * (128 + 320));
    assert_eq!(bytes["end"], 12 + 4 * (44 + 320));
    assert_eq!((&bytes["state"], &shown["rings_saved"]), (&0.into(), &false.into()));
    // Rows 236 to 298: the last token waits.
    assert_eq!(shown["replayed_by_a_restore"], 63);
    let text = stdout(&session(&store, &["show", "book"]));
    for row in ["tokens                   300", "2 complete, 1 begun", "not saved", "63 tokens", " days ago"] {
        assert!(text.contains(row), "{row}: {text}");
    }

    stdout(&session(&store, &["fork", "book", "copy"]));
    let listed = json(&session(&store, &["list", "--json"]));
    let (names, records) = (["book", "copy"], listed["records"].clone());
    for (entry, name) in listed["sessions"].as_array().unwrap().iter().zip(names) {
        assert_eq!((&entry["name"], &entry["tokens"]), (&name.into(), &300.into()));
        assert_eq!(entry["bytes"], listed["bytes"], "the two share every record");
    }
    let text = stdout(&session(&store, &["list"]));
    assert!(text.starts_with("book ") && text.contains("\n2 sessions, "), "{text}");
    stdout(&session(&store, &["delete", "book"]));
    let listed = json(&session(&store, &["list", "--json"]));
    assert_eq!((listed["sessions"].as_array().unwrap().len(), &listed["records"]), (1, &records));
    stdout(&session(&store, &["delete", "copy"]));
    let listed = json(&session(&store, &["list", "--json"]));
    assert_eq!(
        (&listed["sessions"], &listed["records"], &listed["bytes"]),
        (&Value::Array(vec![]), &0.into(), &0.into())
    );
}

/// What cannot be done is said in one line, before a device is looked for; what was saved stays as it was.
#[test]
fn sessions_refuse_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let fingerprint = pocket().2;
    save(&store, "book", fingerprint, 300);
    save(&store, "other", Fingerprint { weights: [1; 16], ..fingerprint }, 300);
    let before = ["book", "other"].map(|name| stdout(&session(&store, &["show", name, "--json"])));

    let says = |arguments: &[&str], what: &str| {
        let message = one_line(with_model(&store, arguments));
        assert!(message.contains(what), "{arguments:?}: {message}");
    };
    for action in [&["append", "none", "--text", "a"][..], &["ask", "none", "a"], &["truncate", "none", "1"]] {
        says(action, "no session `none` in the store");
    }
    says(&["new", "book"], "session `book` exists already");
    says(&["append", "other", "--text", "a"], "session `other` was saved with another weights: found 0101");
    says(&["ask", "book", "a", "--max-tokens", "130772"], "context overrun: 131073 tokens needed, 131072 allowed");
    says(&["ask", "book", "a", "--temperature", "-1"], "setting `temperature`: found -1");
    says(&["truncate", "book", "301"], "setting `length`: found 301, allowed: 0 to 300");
    for empty in [&["append", "book", "--text", ""][..], &["append", "book", "--tokens", ","], &["ask", "book", ""]] {
        says(empty, "empty: at least one token is needed");
    }
    says(&["append", "book", "--tokens", "4096"], "token id 4096 is outside the vocabulary of 4096 tokens");
    says(&["append", "book", "--file", "no/such"], "no/such: ");
    for action in [&["new", "a"][..], &["append", "book", "--text", "a"], &["ask", "book", "a"]] {
        says(&[action, &["--device", "cpu"]].concat(), "setting `device`: found cpu, allowed: auto or gpu");
    }
    let no_model = one_line(session(&store, &["append", "book", "--text", "a", "--model", "no/such"]));
    assert_eq!(no_model.matches("os error").count(), 1, "{no_model}");

    for (arguments, what) in [
        (&["show", "none"][..], "no session `none`"),
        (&["delete", "none"], "no session `none`"),
        (&["fork", "none", "copy"], "no session `none`"),
        (&["fork", "book", "other"], "session `other` exists already"),
    ] {
        let message = one_line(session(&store, arguments));
        assert!(message.contains(what), "{arguments:?}: {message}");
    }
    for name in ["", "two\nlines"] {
        let output = session(&store, &["fork", "book", name]);
        assert_eq!(output.status.code(), Some(2), "{name:?} is no name");
    }
    if cfg!(target_os = "linux") {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cedra"));
        command.current_dir(env!("CARGO_MANIFEST_DIR")).env("VK_DRIVER_FILES", "/nonexistent");
        command.args(["session", "append", "book", "--text", "a", "--model", POCKET, "--store"]).arg(&store);
        assert!(one_line(command.output().unwrap()).contains("no usable GPU"), "the CPU keeps no sessions");
    }

    let missing = folder.path().join("missing");
    assert!(one_line(session(&missing, &["list"])).contains("there is no such file"));
    assert!(!missing.exists(), "looking makes no store");
    let text = folder.path().join("text");
    std::fs::write(&text, "not a store").unwrap();
    for path in [&text, &folder.path().to_path_buf()] {
        let message = one_line(session(path, &["list"]));
        assert!(message.contains(&format!("store {}: ", path.display())), "{message}");
    }
    assert_eq!(std::fs::read(&text).unwrap(), b"not a store");
    {
        let _busy = RedbStore::open(&store).unwrap();
        assert!(one_line(session(&store, &["list"])).contains("is in use by another process"));
    }
    assert_eq!(before, ["book", "other"].map(|name| stdout(&session(&store, &["show", name, "--json"]))));
}

/// A device, a software one too; none is a failure under `CEDRA_REQUIRE_GPU=1`.
fn gpu() -> Option<Arc<Gpu>> {
    match Gpu::new_blocking(&DeviceOptions { software: true, ..DeviceOptions::default() }) {
        Ok(gpu) => Some(Arc::new(gpu)),
        Err(error) if std::env::var("CEDRA_REQUIRE_GPU").is_ok_and(|v| v == "1") => panic!("{error}"),
        Err(error) => {
            println!("skipped: no GPU adapter ({error})");
            None
        }
    }
}

/// A session that is asked by one process after the other says what it says in one process; only new text is read.
#[test]
fn a_session_goes_on_across_processes() {
    let Some(gpu) = gpu() else { return };
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("CONTRIBUTING.md")).unwrap();
    let questions = [" The first rule", " and `Vec`"];

    stdout(&with_model(&store, &["new", "rules", "--rings", "saved"]));
    let appended = json(&with_model(&store, &["append", "rules", "--file", "CONTRIBUTING.md", "--json"]));
    assert_eq!((&appended["read"], &appended["reused"]), (&appended["tokens"], &0.into()));
    let asked = questions.map(|question| {
        let shown = json(&session(&store, &["show", "rules", "--json"]));
        assert_eq!((&shown["rings_saved"], &shown["replayed_by_a_restore"]), (&true.into(), &0.into()));
        let asked = json(&with_model(&store, &["ask", "rules", question, "--max-tokens", "6", "--json"]));
        assert!(asked["session"]["read"].as_u64().unwrap() < 8, "only the question is read: {asked}");
        assert_eq!(asked["session"]["replayed"], 0);
        asked
    });

    let (checkpoint, tokenizer, fingerprint) = pocket();
    let tables = NgramTables::new(checkpoint.config(), &tokenizer).unwrap();
    let options = Options { context: 2048, ..Options::default() };
    let model = Arc::new(Model::load_blocking(gpu, &checkpoint, &tables, &options, &mut |_, _| {}).unwrap());
    let mut session_here = Engine::new(model, fingerprint).session().unwrap();
    let ids = |text: &str| tokenizer.encode_with_special(text).unwrap();
    session_here.append(&[vec![checkpoint.config().bos_token_id], ids(&text)].concat()).unwrap();
    for (question, asked) in questions.iter().zip(&asked) {
        session_here.append(&ids(question)).unwrap();
        let request = Request { max_tokens: 6, sampling: Sampling::default(), stop_ids: vec![1] };
        let here: Vec<u32> = session_here.generate(&request).unwrap().map(Result::unwrap).collect();
        assert_eq!(asked["ids"], serde_json::json!(here), "{question}");
        assert_eq!(asked["text"], tokenizer.decode(&here).unwrap());
    }
    assert_eq!(asked[1]["session"]["tokens"], session_here.len());

    // Cut without its rings: what `show` says is what the next process does.
    let cut = json(&with_model(&store, &["truncate", "rules", "200", "--rings", "replay", "--json"]));
    assert_eq!((&cut["tokens"], &cut["replayed"]), (&200.into(), &63.into()));
    let shown = json(&session(&store, &["show", "rules", "--json"]));
    assert_eq!((&shown["tokens"], &shown["rings_saved"]), (&200.into(), &false.into()));
    // A reader who goes away ends the answer, and the session keeps it.
    let mut child = Command::new(env!("CARGO_BIN_EXE_cedra"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["session", "ask", "rules", "And so", "--max-tokens", "900", "--model", POCKET, "--store"])
        .arg(&store)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{told}");
    assert!(told.contains(&format!(" {} replayed; 20", shown["replayed_by_a_restore"])), "{told}");
    let tokens = json(&session(&store, &["show", "rules", "--json"]))["tokens"].as_u64().unwrap();
    assert!((203..300).contains(&tokens), "{tokens} tokens, and the pipe was closed from the start");
}

/// Ctrl-C while a long text is read: what was read is kept, and another session reads only the rest.
#[cfg(unix)]
#[test]
fn an_interrupted_reading_is_kept() {
    if gpu().is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    // So long that no device reads it before the signal comes.
    let (checkpoint, tokenizer, _) = pocket();
    let text = PROMPT.repeat(3000);
    let ids = [vec![checkpoint.config().bos_token_id], tokenizer.encode_with_special(&text).unwrap()].concat();
    assert!((30_000..65_000).contains(&ids.len()), "{} tokens", ids.len());
    let file = folder.path().join("text");
    std::fs::write(&file, text).unwrap();
    stdout(&with_model(&store, &["new", "long"]));
    let mut child = Command::new(env!("CARGO_BIN_EXE_cedra"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["session", "append", "long", "-v", "--model", POCKET, "--store"])
        .args([&store, Path::new("--file"), &file])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("cedra: reading ") {
        line.clear();
        assert_ne!(lines.read_line(&mut line).unwrap(), 0, "it never began to read");
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let mut told = String::new();
    lines.read_to_string(&mut told).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{told}");
    let kept = json(&session(&store, &["show", "long", "--json"]))["tokens"].as_u64().unwrap() as usize;
    assert!((128..ids.len()).contains(&kept), "{kept} tokens kept");
    assert!(told.contains(&format!("stopped after {kept} of {} tokens; `long` has {kept} tokens now", ids.len())));

    let begun: Vec<String> = ids[..kept + 5].iter().map(|id| id.to_string()).collect();
    let begun = begun.join(",");
    let arguments =
        ["generate", "--model", POCKET, "--device", "gpu", "--tokens", &begun, "--max-tokens", "2", "--json"];
    let store = ["--session", "again", "--store", store.to_str().unwrap()];
    let again = &json(&cedra(&[&arguments[..], &store].concat()))["session"];
    assert_eq!((&again["reused"], &again["read"]), (&kept.into(), &5.into()));
    assert_eq!(again["tokens"], kept + 7);
}
