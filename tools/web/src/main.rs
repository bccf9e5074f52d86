//! `cedra-glue LIBRARY.wasm FOLDER NAME`: writes FOLDER/NAME.js, NAME_bg.wasm and their types, an ES module for the web.

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [library, folder, name] = arguments.as_slice() else {
        eprintln!("usage: cedra-glue LIBRARY.wasm FOLDER NAME");
        return ExitCode::from(2);
    };
    let mut bindgen = wasm_bindgen_cli_support::Bindgen::new();
    bindgen.input_path(library).out_name(name).typescript(true).omit_default_module_path(false);
    let written = bindgen.web(true).and_then(|bindgen| bindgen.generate(folder));
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cedra-glue: {error:?}");
            ExitCode::FAILURE
        }
    }
}
