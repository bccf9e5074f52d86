#!/usr/bin/env bash
# Measures Cedra against the numpy reference, one after the other in the same run, and prints a table for BENCHMARKS.md.
#
#   tools/bench.sh [MODEL] [CONTEXT]      models/pocket and 512 tokens by default
#
# CEDRA_DEVICES lists the devices to measure ("cpu gpu" by default). The first run fetches numpy into target/venv.
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:-models/pocket} context=${2:-512}
tools/setup.sh >&2
python=target/venv/bin/python
"$python" -c 'import numpy' 2>/dev/null || {
  python3 -m venv target/venv
  "$python" -m pip install --quiet --disable-pip-version-check numpy
}
cargo build --release --quiet --bin cedra

echo "bench: numpy" >&2
rows=("$(OMP_NUM_THREADS=1 "$python" tools/numpy_reference.py "$model" --context "$context")")
names=("numpy: one thread, float32")
for device in ${CEDRA_DEVICES:-cpu gpu}; do
  echo "bench: cedra on $device" >&2
  if row=$(cargo run --release --quiet --bin cedra -- bench --model "$model" --context "$context" --device "$device" --json); then
    rows+=("$row") names+=("Cedra")
  else
    echo "bench: no result on $device" >&2
  fi
done

processor=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -1 || true)
"$python" - "$model" "$context" "${processor:-$(uname -m)}" "${names[@]}" -- "${rows[@]}" <<'PYTHON'
import json
import sys

model, context, processor, *rest = sys.argv[1:]
middle = rest.index("--")
results = list(zip(rest[:middle], map(json.loads, rest[middle + 1 :])))
base = results[0][1]
print(f"{model}, {context} tokens of prompt; {processor}\n")
print("| | prefill, tokens/s | times numpy | decode, tokens/s | times numpy |")
print("|---|---|---|---|---|")
for name, result in results:
    line = f"| {name}: {result['device']} |" if "device" in result else f"| {name} |"
    for key in ("prefill_tokens_per_second", "decode_tokens_per_second"):
        line += f" {result[key]:,.1f} | {result[key] / base[key]:.2f} |"
    print(line)
PYTHON
