//! The WGSL preprocessor: `#import`, `#ifdef` / `#ifndef` / `#else` / `#endif`, and the table of variants. Text in, text out.
//!
//! Part of the build script, not of the library; `tests/shaders.rs` includes it too.

use std::collections::BTreeSet;

/// One line of the table: a kernel, a name for the variant, and its definitions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variant {
    /// Name of the file, without `.wgsl`.
    pub kernel: String,
    /// Name of the variant, unique in the kernel.
    pub name: String,
    /// `NAME` or `NAME=value`, in the order of the table.
    pub defines: Vec<(String, Option<u32>)>,
}

impl Variant {
    /// The variant of a kernel that the table does not name.
    pub fn plain(kernel: &str) -> Self {
        Self { kernel: kernel.into(), name: "plain".into(), defines: Vec::new() }
    }
    /// Whether `name` is defined.
    pub fn defines(&self, name: &str) -> bool {
        self.defines.iter().any(|(defined, _)| defined == name)
    }
}

/// Parses the table of variants: `kernel  variant  [NAME | NAME=value]...`, `#` opens a comment.
pub fn parse_variants(table: &str) -> Result<Vec<Variant>, String> {
    let mut variants: Vec<Variant> = Vec::new();
    for (number, line) in (1..).zip(table.lines()) {
        let line = line.split('#').next().unwrap_or("");
        let mut words = line.split_whitespace();
        let Some(kernel) = words.next() else { continue };
        let name = words.next().ok_or_else(|| format!("line {number}: kernel `{kernel}` has no variant name"))?;
        if variants.iter().any(|v| v.kernel == kernel && v.name == name) {
            return Err(format!("line {number}: `{kernel} {name}` is there twice"));
        }
        let mut defines = Vec::new();
        for word in words {
            let (key, value) = match word.split_once('=') {
                None => (word, None),
                Some((key, value)) => (key, Some(value)),
            };
            if !is_identifier(key) {
                return Err(format!("line {number}: `{word}` is neither NAME nor NAME=value"));
            }
            let value = value
                .map(|value| value.parse().map_err(|_| format!("line {number}: `{word}`: the value is not a u32")))
                .transpose()?;
            defines.push((key.to_string(), value));
        }
        variants.push(Variant { kernel: kernel.into(), name: name.into(), defines });
    }
    Ok(variants)
}

fn is_identifier(word: &str) -> bool {
    let first = word.chars().next();
    first.is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// The preprocessed text, and where each of its lines came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expanded {
    /// WGSL.
    pub text: String,
    /// `(file, line)` of every line of `text`; lines made by the preprocessor name the table of variants.
    pub origins: Vec<(String, usize)>,
}

impl Expanded {
    fn push(&mut self, line: &str, file: &str, number: usize) {
        self.text.push_str(line);
        self.text.push('\n');
        self.origins.push((file.to_string(), number));
    }
}

/// Expands `kernel.wgsl` for a variant. `read` gives the text of a file under `shaders/`, e.g. `shared/step.wgsl`.
///
/// The output opens with the directives that the variant's features need (`F16`, `DOT4`; naga knows no `enable subgroups`, which is
/// put before it where the text goes to a browser), then one `const NAME: u32` for every `NAME=value`, then the kernel's text.
pub fn expand(variant: &Variant, read: &dyn Fn(&str) -> Option<String>) -> Result<Expanded, String> {
    let mut out = Expanded { text: String::new(), origins: Vec::new() };
    if variant.defines("F16") {
        out.push("enable f16;", "variants.txt", 0);
    }
    if variant.defines("DOT4") {
        out.push("requires packed_4x8_integer_dot_product;", "variants.txt", 0);
    }
    for (name, value) in &variant.defines {
        if let Some(value) = value {
            out.push(&format!("const {name}: u32 = {value}u;"), "variants.txt", 0);
        }
    }
    let file = format!("{}.wgsl", variant.kernel);
    include(&file, variant, read, &mut BTreeSet::new(), &mut out)?;
    Ok(out)
}

/// Appends `file` to `out`, once: a file that was included before adds nothing.
fn include(
    file: &str,
    variant: &Variant,
    read: &dyn Fn(&str) -> Option<String>,
    included: &mut BTreeSet<String>,
    out: &mut Expanded,
) -> Result<(), String> {
    if !included.insert(file.to_string()) {
        return Ok(());
    }
    let text = read(file).ok_or_else(|| format!("{file}: no such file"))?;
    // One entry per open #ifdef: (line of the #ifdef, whether its present branch is taken, whether #else was seen).
    let mut open: Vec<(usize, bool, bool)> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let mut words = line.split_whitespace();
        let taken = open.iter().all(|&(_, taken, _)| taken);
        let directive = words.next().filter(|word| word.starts_with('#'));
        let Some(directive) = directive else {
            if taken {
                out.push(line, file, number);
            }
            continue;
        };
        let argument = words.next();
        if let Some(extra) = words.next() {
            return Err(format!("{file}:{number}: `{extra}` after {directive}"));
        }
        match (directive, argument) {
            ("#import", Some(name)) => {
                if taken {
                    let shared = format!("shared/{name}.wgsl");
                    include(&shared, variant, read, included, out).map_err(|problem| {
                        if problem.ends_with("no such file") {
                            format!("{file}:{number}: {problem}")
                        } else {
                            problem
                        }
                    })?;
                }
            }
            ("#ifdef", Some(name)) => open.push((number, variant.defines(name), false)),
            ("#ifndef", Some(name)) => open.push((number, !variant.defines(name), false)),
            ("#else", None) => match open.last_mut() {
                Some((_, taken, seen)) if !*seen => {
                    *taken = !*taken;
                    *seen = true;
                }
                _ => return Err(format!("{file}:{number}: #else without #ifdef")),
            },
            ("#endif", None) => {
                open.pop().ok_or_else(|| format!("{file}:{number}: #endif without #ifdef"))?;
            }
            ("#import" | "#ifdef" | "#ifndef", None) => {
                return Err(format!("{file}:{number}: {directive} needs a name"))
            }
            _ => return Err(format!("{file}:{number}: unknown directive `{}`", line.trim())),
        }
    }
    match open.last() {
        Some((number, ..)) => Err(format!("{file}:{number}: #ifdef without #endif")),
        None => Ok(()),
    }
}

/// The text without comments, indentation and empty lines: what the binary carries.
pub fn compact(text: &str) -> String {
    let mut stripped = String::with_capacity(text.len());
    let mut rest = text;
    let mut depth = 0; // block comments nest in WGSL
    while let Some(c) = rest.chars().next() {
        if rest.starts_with("/*") {
            depth += 1;
            rest = &rest[2..];
        } else if depth > 0 && rest.starts_with("*/") {
            depth -= 1;
            stripped.push(' ');
            rest = &rest[2..];
        } else if depth > 0 {
            rest = &rest[c.len_utf8()..];
        } else if rest.starts_with("//") {
            rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
        } else {
            stripped.push(c);
            rest = &rest[c.len_utf8()..];
        }
    }
    let mut out = String::with_capacity(stripped.len());
    for line in stripped.lines().map(str::trim).filter(|line| !line.is_empty()) {
        out.push_str(line);
        out.push('\n');
    }
    out
}
