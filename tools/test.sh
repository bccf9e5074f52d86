#!/usr/bin/env bash
# Everything that has to hold before a change is merged, cheap checks first. Stops at the first step that fails.
# Needs rustup and Node; installs the rest where it can. Arguments go to the native tests' runner.
set -euo pipefail
cd "$(dirname "$0")/.."

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
    # Two of the tests' binaries at a time: the last long test of one leaves cores idle that the other has a use for.
    local tests=(tests/*.rs tests/*/main.rs)
    tests=("${tests[@]%/main.rs}")
    tests=("${tests[@]#tests/}")
    cargo test --release --lib --bins --tests --quiet --no-run &&
      cargo test --release --lib --bins --quiet "$@" &&
      printf '%s\0' "${tests[@]%.rs}" | xargs -0 -P 2 -I '{}' cargo test --release --quiet --test '{}' "$@"
  fi
}

step "setup" tools/setup.sh --tests
. target/test-env.sh
export CEDRA_REQUIRE_GPU=1 INSTA_UPDATE=no RUSTDOCFLAGS='-D warnings'

step "format" cargo fmt --check
step "lints" cargo clippy --release --all-targets --quiet -- -D warnings
step "documentation" cargo doc --release --no-deps --quiet
step "native tests" native_tests "$@"
step "documentation tests" cargo test --release --doc --quiet
step "npm package" tools/test-web.sh
echo "--- all passed: $SECONDS s"
