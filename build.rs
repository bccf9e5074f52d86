//! Turns `shaders/` into the table `SHADERS`: every variant is preprocessed, validated by naga and reflected.
//! A bad shader fails the build with naga's message.

#[path = "build/preprocess.rs"]
mod preprocess;
#[path = "build/reflect.rs"]
mod reflect;

use preprocess::Variant;
use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rerun-if-changed=shaders");
    let root = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let out = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    match table(&Path::new(&root).join("shaders")) {
        Ok(text) => std::fs::write(Path::new(&out).join("shaders.rs"), text).expect("OUT_DIR is writable"),
        Err(problems) => {
            for problem in &problems {
                eprintln!("error: {problem}");
            }
            eprintln!("{} of the shaders are bad", problems.len());
            std::process::exit(1);
        }
    }
}

/// The Rust text of the table, or what is wrong with each bad variant.
fn table(shaders: &Path) -> Result<String, Vec<String>> {
    let read = |file: &str| std::fs::read_to_string(shaders.join(file)).ok();
    let mut kernels: Vec<String> = std::fs::read_dir(shaders)
        .map_err(|error| vec![format!("{}: {error}", shaders.display())])?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter_map(|name| name.strip_suffix(".wgsl").map(str::to_string))
        .collect();
    kernels.sort();

    let variants = preprocess::parse_variants(&read("variants.txt").unwrap_or_default())
        .map_err(|problem| vec![format!("shaders/variants.txt: {problem}")])?;
    let mut problems: Vec<String> = variants
        .iter()
        .filter(|v| !kernels.contains(&v.kernel))
        .map(|v| format!("shaders/variants.txt: there is no shaders/{}.wgsl", v.kernel))
        .collect();

    let mut table = reflect::Table::default();
    for kernel in &kernels {
        let mut of_kernel: Vec<Variant> = variants.iter().filter(|v| v.kernel == *kernel).cloned().collect();
        if of_kernel.is_empty() {
            of_kernel.push(Variant::plain(kernel));
        }
        for variant in &of_kernel {
            let reflected = preprocess::expand(variant, &read)
                .map_err(|problem| format!("shaders/{problem}"))
                .and_then(|expanded| reflect::reflect(variant, &expanded));
            match reflected {
                Ok(shader) => table.add(variant, &shader),
                Err(problem) => problems.push(problem),
            }
        }
    }
    if problems.is_empty() {
        Ok(table.finish())
    } else {
        Err(problems)
    }
}
