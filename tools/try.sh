#!/usr/bin/env bash
# Builds Cedra and lets the pocket model continue a text. Arguments are those of `cedra generate`; what is not given is
# filled in: tools/try.sh --device cpu --prompt "Ownership is" --max-tokens 20
set -euo pipefail
cd "$(dirname "$0")/.."
tools/setup.sh >&2

given() { # FLAG...: is one of these among the script's arguments?
  local flag argument
  for flag in "$@"; do
    for argument in "${arguments[@]}"; do
      case $argument in "$flag" | "$flag"=*) return 0 ;; esac
    done
  done
  return 1
}

arguments=("$@")
given --model || set -- "$@" --model models/pocket
given --prompt --prompt-file --tokens || set -- "$@" --prompt $'# Struct `Vec`\n\nA contiguous growable array type'
given --max-tokens || set -- "$@" --max-tokens 64
exec cargo run --release --quiet --bin cedra -- generate "$@"
