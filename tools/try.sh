#!/usr/bin/env bash
# Builds Cedra and asks the pocket model about a text. Arguments are those of `cedra ask`; without any it is asked about a source file:
# tools/try.sh README.md "What is the port of falcon?" --device cpu
set -euo pipefail
cd "$(dirname "$0")/.."
tools/setup.sh >&2
(($# > 0)) || set -- src/store/mod.rs "What is the value of MAX_NAME?"
exec cargo run --release --quiet --bin cedra -- ask "$@"
