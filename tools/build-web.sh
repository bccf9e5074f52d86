#!/usr/bin/env bash
# Builds the library for the web: wasm, and the JavaScript and the types beside it.
#
#   tools/build-web.sh                                           to pkg/wasm
#   tools/build-web.sh FOLDER [--features browser-tests ...]     elsewhere, with arguments for cargo
#
# Needs the target wasm32-unknown-unknown (tools/setup.sh --tests), in the toolchain $CEDRA_WEB_TOOLCHAIN if that is set.
# wasm-opt makes the package's library smaller where it is installed (npm: binaryen).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-pkg/wasm}
shift $(($# > 0))

target_dir=$(cargo metadata --format-version 1 --no-deps | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
cargo ${CEDRA_WEB_TOOLCHAIN:+"+$CEDRA_WEB_TOOLCHAIN"} build --lib --profile wasm --target wasm32-unknown-unknown "$@"
cargo build --quiet --release --locked --manifest-path tools/web/Cargo.toml --target-dir "$target_dir/glue"
mkdir -p "$out"
"$target_dir/glue/release/cedra-glue" "$target_dir/wasm32-unknown-unknown/wasm/cedra.wasm" "$out" cedra

library=$out/cedra_bg.wasm
wasm_opt=$(PATH="$PWD/pkg/node_modules/.bin:$PWD/node_modules/.bin:$PATH" command -v wasm-opt || true)
if [ -n "$wasm_opt" ] && [ "$out" = pkg/wasm ]; then
  "$wasm_opt" -Os "$library" -o "$library.small"
  mv "$library.small" "$library"
fi
echo "$library: $(($(wc -c <"$library") / 1000)) kB, gzipped $(($(gzip -9 -c "$library" | wc -c) / 1000)) kB"
