#!/usr/bin/env bash
# Everything that has to hold before a change is merged, cheap checks first. Stops at the first step that fails.
# Needs rustup; installs the rest where it can (tools/setup.sh --tests). Arguments go to the native tests' runner.
set -euo pipefail
cd "$(dirname "$0")/.."
wasm_limit=1500000 # bytes of the gzipped library for the web

step() { # NAME COMMAND...
  local name=$1 start=$SECONDS; shift
  echo "--- $name"
  "$@" || { echo "--- FAILED: $name ($((SECONDS - start)) s)" >&2; exit 1; }
  echo "--- $name: $((SECONDS - start)) s"
}

native_tests() {
  if cargo nextest --version >/dev/null 2>&1; then
    cargo nextest run --release --status-level fail --final-status-level slow "$@"
  else
    cargo test --release --lib --bins --tests --quiet "$@"
  fi
}

web_library() {
  local library=pkg/wasm/cedra_bg.wasm raw packed
  tools/build-web.sh || return
  raw=$(wc -c <"$library") packed=$(gzip -9 -c "$library" | wc -c)
  echo "cedra_bg.wasm: $((raw / 1000)) kB, gzipped $((packed / 1000)) kB of $((wasm_limit / 1000)) kB allowed"
  [ "$packed" -le "$wasm_limit" ]
}

step "setup" tools/setup.sh --tests
. target/test-env.sh
export CEDRA_REQUIRE_GPU=1 INSTA_UPDATE=no RUSTDOCFLAGS='-D warnings'

step "format" cargo fmt --check
step "lints" cargo clippy --release --all-targets --quiet -- -D warnings
step "documentation" cargo doc --release --no-deps --quiet
step "native tests" native_tests "$@"
step "documentation tests" cargo test --release --doc --quiet
step "web library" web_library
echo "--- all passed: $SECONDS s"
