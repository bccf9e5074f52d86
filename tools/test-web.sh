#!/usr/bin/env bash
# Tests the npm package: types, unit tests, API documentation, size, and everything in Node, in Deno, and in a headless Chromium, whose
# WebGPU runs on the CPU.
# Needs Node 20 or newer; installs the rest where it can. Arguments are the test files to run (default: all).
#
#   tools/test-web.sh
#   tools/test-web.sh tests/browser/streams.test.mjs
#
# CEDRA_CHROMIUM is the browser to use instead of the system's.
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "test-web: $*" >&2; exit 1; }

step() { # NAME COMMAND...
  local name=$1 start=$SECONDS; shift
  echo "--- $name"
  "$@" || { echo "--- FAILED: $name ($((SECONDS - start)) s)" >&2; exit 1; }
  echo "--- $name: $((SECONDS - start)) s"
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif command -v sudo >/dev/null; then sudo "$@"
  else die "needs root for: $*"; fi
}

node_works() {
  command -v node >/dev/null || die "no Node: install version 20 or newer from https://nodejs.org"
  [ "$(node -p 'process.versions.node.split(".")[0]')" -ge 20 ] || die "Node $(node --version) found, 20 or newer needed"
}

# npm ci starts from nothing each time; what is there is kept as long as the lock file says the same.
packages() {
  local stamp=node_modules/.cedra-lock
  cmp -s package-lock.json "$stamp" && return
  npm ci --no-audit --no-fund --loglevel=error && cp package-lock.json "$stamp"
}

chromium_works() {
  CEDRA_CHROMIUM=${CEDRA_CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}
  if [ -z "$CEDRA_CHROMIUM" ] && command -v apt-get >/dev/null; then
    as_root apt-get update -qq >/dev/null || true
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null
    CEDRA_CHROMIUM=$(command -v chromium || true)
  fi
  [ -n "$CEDRA_CHROMIUM" ] || die "no Chromium: install it, or say where it is in CEDRA_CHROMIUM"
  export CEDRA_CHROMIUM
}

rust_environment() {
  [ -f target/test-env.sh ] || tools/setup.sh --tests
  . target/test-env.sh
  export CEDRA_WEB_TOOLCHAIN
}

# WebGPU in the browser runs on the software Vulkan driver that the native tests use, where there is one.
browser_driver() {
  [ "$(uname)" = Linux ] && [ -n "${VK_DRIVER_FILES:-}" ] || return 0
  export CEDRA_BROWSER_DRIVER=$PWD/target/browser-driver.so
  cc -O2 -Wall -Wextra -Werror -shared -fPIC -o "$CEDRA_BROWSER_DRIVER" tests/browser/driver.c -ldl
}

browser_tests() {
  [ $# -gt 0 ] || set -- tests/node/*.test.mjs tests/browser/*.test.mjs
  # A file takes minutes at most; one that hangs after a failure must not take the run with it. Asked for more work, it may take longer.
  local limit=600000
  [ -z "${CEDRA_LONG_TOKENS:-}${CEDRA_GENERATIONS:-}${CEDRA_KILLS:-}${CEDRA_SAMPLE:-}${CEDRA_ALL_PROMPTS:-}" ] || limit=86400000
  node --test --test-concurrency=2 "--test-timeout=$limit" --test-reporter=spec "$@"
}

step "node" node_works
step "packages" packages
step "browser" chromium_works
step "rust" rust_environment
step "browser's driver" browser_driver
step "wasm" tools/build-web.sh
step "wasm with tests inside" tools/build-web.sh target/web-tests --features browser-tests
step "types" npm run --silent typecheck
step "package" npm run --silent build
step "page" npm run --silent build:page
step "unit tests" node --test pkg/test/*.test.mjs
step "api documentation" npm run --silent docs -w cedra
step "size" npm run --silent size -w cedra
step "in Chromium, Node and Deno" browser_tests "$@"
echo "--- all passed: $SECONDS s"
