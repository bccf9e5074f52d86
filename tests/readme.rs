//! The README tells the truth: its files exist, its scripts can be run, and the binary knows every command and flag.

use cedra::gpu::{DeviceOptions, Gpu};
use std::path::Path;
use std::process::Command;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn readme() -> String {
    std::fs::read_to_string(Path::new(ROOT).join("README.md")).unwrap()
}

/// Lines of fenced and indented code blocks.
fn code_lines(text: &str) -> Vec<&str> {
    let mut fenced = false;
    let mut lines = Vec::new();
    for line in text.lines() {
        if line.starts_with("```") {
            fenced = !fenced;
        } else if fenced {
            lines.push(line);
        } else if let Some(code) = line.strip_prefix("    ") {
            lines.push(code);
        }
    }
    lines
}

/// Text between backticks outside of code blocks.
fn code_spans(text: &str) -> Vec<&str> {
    let block_free = text.split("```").step_by(2);
    block_free.flat_map(|part| part.split('`').skip(1).step_by(2)).collect()
}

/// Targets of links into the repository.
fn link_targets(text: &str) -> Vec<&str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://")).collect()
}

/// Splits a command line at white space outside of double quotes.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for c in line.chars() {
        match c {
            '"' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            c => words.last_mut().unwrap().push(c),
        }
    }
    words
}

fn looks_like_a_path(word: &str) -> bool {
    let folders = ["src/", "shaders/", "tests/", "docs/", "models/", "tools/"];
    let plain = !word.contains([' ', '*', '=']);
    plain && (folders.iter().any(|folder| word.starts_with(folder)) || (word.ends_with(".md") && word.len() > 3))
}

#[test]
fn paths_exist() {
    let text = readme();
    let in_code = code_lines(&text).into_iter().flat_map(words);
    let in_text = code_spans(&text).into_iter().map(String::from);
    let mut paths: Vec<String> = in_code.chain(in_text).filter(|word| looks_like_a_path(word)).collect();
    paths.extend(link_targets(&text).into_iter().map(String::from));
    assert!(paths.len() > 15, "only found {paths:?}");
    for path in paths {
        assert!(Path::new(ROOT).join(&path).exists(), "README names `{path}`, which is not there");
    }
}

#[cfg(unix)]
#[test]
fn scripts_can_be_run() {
    use std::os::unix::fs::PermissionsExt;
    let text = readme();
    let scripts: Vec<&str> = code_lines(&text).into_iter().filter(|line| line.starts_with("tools/")).collect();
    assert!(scripts.contains(&"tools/try.sh") && scripts.contains(&"tools/test.sh"), "{scripts:?}");
    for script in scripts {
        let file = Path::new(ROOT).join(&words(script)[0]);
        assert_ne!(file.metadata().unwrap().permissions().mode() & 0o111, 0, "{} is not executable", file.display());
    }
}

#[test]
fn commands_parse() {
    let text = readme();
    let lines: Vec<&str> = code_lines(&text).into_iter().filter(|line| line.starts_with("cedra ")).collect();
    assert!(lines.len() >= 4, "only found {lines:?}");
    for line in &lines {
        if let Err(error) = cedra::cli::command().try_get_matches_from(words(line)) {
            panic!("README's `{line}`: {error}");
        }
    }
    // The other way round: nothing that the binary offers is left out.
    let offered = offered(&cedra::cli::command(), "cedra");
    assert!(offered.iter().any(|(name, _)| name == "cedra session truncate"), "{offered:?}");
    for (name, command) in offered {
        assert!(text.contains(&format!("`{name}`")), "README does not name `{name}`");
        for flag in command.get_arguments().filter_map(|argument| argument.get_long()).filter(|flag| *flag != "help") {
            let used = lines.iter().any(|line| line.starts_with(&name) && line.contains(&format!("--{flag} ")));
            let told = text.contains(&format!("`--{flag}"));
            assert!(used || told, "README does not name `--{flag}` of `{name}`");
        }
    }
}

/// Every command below this one, by its full name; those that only group others as well.
fn offered(command: &clap::Command, name: &str) -> Vec<(String, clap::Command)> {
    let subs = command.get_subcommands().filter(|sub| sub.get_name() != "help");
    subs.flat_map(|sub| {
        let name = format!("{name} {}", sub.get_name());
        let below = offered(sub, &name);
        [(name, sub.clone())].into_iter().chain(below)
    })
    .collect()
}

/// Whether there is a device, a software one too.
fn gpu() -> bool {
    match Gpu::new_blocking(&DeviceOptions { software: true, ..DeviceOptions::default() }) {
        Ok(_) => true,
        Err(error) if std::env::var("CEDRA_REQUIRE_GPU").is_ok_and(|v| v == "1") => panic!("{error}"),
        Err(error) => {
            println!("skipped: no GPU adapter ({error})");
            false
        }
    }
}

/// The first question of the README, and the second, for which nothing is read again.
#[test]
fn questions_are_answered_as_told() {
    if !gpu() {
        return;
    }
    let text = readme();
    let lines: Vec<&str> =
        code_lines(&text).into_iter().filter(|line| line.starts_with("cedra ask src/store/mod.rs \"")).collect();
    assert!(lines.len() == 2, "{lines:?}");
    let script = std::fs::read_to_string(Path::new(ROOT).join("tools/try.sh")).unwrap();
    assert!(script.contains(lines[0].strip_prefix("cedra ask ").unwrap()), "tools/try.sh does not ask {}", lines[0]);
    let folder = tempfile::tempdir().unwrap();
    let mut answers = vec![];
    for (i, line) in lines.iter().enumerate() {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cedra"));
        command.args(words(line).into_iter().skip(1)).arg("--store").arg(folder.path().join("store"));
        let output = command.current_dir(ROOT).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "`{line}` fails: {told}");
        assert_eq!(told.contains(" 0 reused"), i == 0, "{told}");
        answers.push(String::from_utf8(output.stdout).unwrap().trim().to_owned());
    }
    answers.dedup();
    let told = format!("The pocket model answers `{}`", answers.join("` and `"));
    assert!(text.contains(&told), "README does not say: {told}");
}

/// The example of sessions, line by line, on a device: a software one too. Skipped where there is none.
#[test]
fn sessions_work_as_told() {
    if !gpu() {
        return;
    }
    let text = readme();
    let lines: Vec<&str> = code_lines(&text).into_iter().filter(|line| line.starts_with("cedra session ")).collect();
    assert!(lines.len() > 9, "{lines:?}");
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    let mut answers = vec![];
    for line in lines {
        let words = words(line).into_iter().skip(1);
        let words = words.map(|word| if word == "notes.cedra" { store.to_str().unwrap().into() } else { word });
        let output = Command::new(env!("CARGO_BIN_EXE_cedra")).args(words).current_dir(ROOT).output().unwrap();
        assert!(output.status.success(), "`{line}` fails: {}", String::from_utf8_lossy(&output.stderr));
        if line.starts_with("cedra session ask ") {
            answers.push(String::from_utf8(output.stdout).unwrap().trim().to_owned());
        }
    }
    let told = format!("The pocket model answers `{}`", answers.join("` and `"));
    assert!(text.contains(&told), "README does not say: {told}");
}

/// `cedra inspect` is the one command that needs neither a device nor time: run what the README says of it.
#[test]
fn inspect_lines_run() {
    let text = readme();
    let lines: Vec<&str> = code_lines(&text).into_iter().filter(|line| line.starts_with("cedra inspect ")).collect();
    assert!(!lines.is_empty());
    for line in lines {
        let output =
            Command::new(env!("CARGO_BIN_EXE_cedra")).args(&words(line)[1..]).current_dir(ROOT).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "`{line}` fails: {err}");
        assert!(out.contains("bytes_per_token") || out.contains("bytes a token"), "`{line}` prints:\n{out}");
    }
}

#[test]
fn figures_are_those_of_inspect() {
    let file = Path::new(ROOT).join("tests/fixtures/reference/released-config.json");
    let cache = cedra::cli::inspect::Inspection::open(file, Some(1_000_000)).unwrap().cache;
    let text = readme();
    assert!(text.contains(&format!("{} bytes a token", cache.bytes_per_token)));
    assert!(text.contains(&format!("{:.1} MB of window rings", cache.ring_bytes as f64 / 1e6)));
    assert!(text.contains(&format!("{:.2} GB", cache.total_bytes as f64 / 1e9)));
}
