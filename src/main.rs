//! The `cedra` binary; everything but the model that it carries is in [`cedra::cli`].

use cedra::cli::Embedded;

/// The pocket model, with the feature of its name.
#[cfg(feature = "pocket")]
const EMBEDDED: Option<Embedded> = Some(Embedded {
    config: include_str!("../models/pocket/config.json"),
    weights: include_bytes!("../models/pocket/model.safetensors"),
    tokenizer: include_bytes!("../models/pocket/tokenizer.json"),
});
#[cfg(not(feature = "pocket"))]
const EMBEDDED: Option<Embedded> = None;

fn main() -> std::process::ExitCode {
    cedra::cli::main(EMBEDDED)
}
