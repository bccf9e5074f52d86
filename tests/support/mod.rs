//! Where test data lies.

#![allow(dead_code)] // no test binary needs all of it

use std::path::PathBuf;

/// A path in the shared folder (reference checkpoints too large to carry): beside the project or where `CEDRA_SHARED`
/// says. `None` when it is not there, and the test says so and ends.
pub fn shared(path: &str) -> Option<PathBuf> {
    let root = std::env::var_os("CEDRA_SHARED").map(PathBuf::from);
    let root = root.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared"));
    let path = root.join(path);
    if !path.exists() {
        println!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}

/// A path in the fixtures that the project carries.
pub fn fixture(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(path)
}
