#!/usr/bin/env bash
# Trains and measures the pocket model, from nothing to tables: gather, tokenizer, golden check, training, draft, export, evaluation.
#
#   tools/pocket/run.sh [--minutes N] [--work FOLDER] [--init MODEL]    hours; goes on where it was interrupted
#   tools/pocket/run.sh --smoke                                        every step, tiny, from this project's own Markdown
#
# --init starts from a checkpoint in the released layout, and takes over its tokenizer. Needs Python 3.11 or newer, cargo, and gcc or
# patience. setup.sh makes a virtual environment, unless POCKET_PYTHON names a Python that has requirements.txt.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=$PWD/tools/pocket minutes=90 draft_minutes=60 work=$here/work init=() smoke=
while [ $# -gt 0 ]; do
  case $1 in
    --minutes) minutes=$2; shift 2 ;;
    --work) work=$2; shift 2 ;;
    --init) init=(--init "$2"); shift 2 ;;
    --smoke) smoke=1 work=$(mktemp -d); trap 'rm -rf "$work"' EXIT; shift ;;
    *) echo "unknown: $1"; exit 2 ;;
  esac
done
mkdir -p "$work"
step() { echo "== $(date +%T) $*"; }

if [ -z "${POCKET_PYTHON:-}" ]; then step install; fi
python=${POCKET_PYTHON:-$("$here/setup.sh")}
# Memory that is given back to the system comes back as page faults.
export OMP_NUM_THREADS=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_TOP_PAD_=536870912 PYTHONDONTWRITEBYTECODE=1
run() { local script=$1; shift; step "$script"; "$python" "$here/$script" "$@"; }

if [ ! -e "$work/docs.jsonl" ]; then
  if [ -n "$smoke" ]; then run gather.py --out "$work/docs.jsonl" --markdown . --markdown docs --markdown pkg
  else run gather.py --out "$work/docs.jsonl"; fi
fi
if [ ! -e "$work/tokenizer/tokenizer.json" ]; then
  take=(); if [ -n "$smoke" ]; then take=(--from models/pocket); elif [ ${#init[@]} -gt 0 ]; then take=(--from "${init[1]}"); fi
  run tokenizer.py --docs "$work/docs.jsonl" --out "$work/tokenizer" "${take[@]}"
fi
run check_golden.py
if [ -n "$smoke" ]; then
  run train.py --work "$work" --steps 4 --shrink 8 --log-every 1
  run train.py --work "$work" --steps 6 --shrink 8 --log-every 1 # goes on
  run draft.py --work "$work" --steps 2
  lengths=256 cases=1 bytes=1000
else
  run train.py --work "$work" --minutes "$minutes" "${init[@]}"
  run draft.py --work "$work" --minutes "$draft_minutes" "${init[@]}"
  lengths=256,1024,4096,16384,65536 cases=50 bytes=67000
fi
run export.py --work "$work" --draft "$work/draft.pt" --out "$work/export" --expected "$work/expected"
if [ -n "$smoke" ]; then run evaluate.py --work "$work" --lengths 256 --cases 5 --bytes 1000
else run evaluate.py --work "$work" --out "$work/ablations.json"; fi
run baselines.py --work "$work" --bytes "$bytes" --out "$work/baselines.json"
run cases.py --work "$work" --out "$work/tasks.jsonl" --lengths "$lengths" --cases "$cases" --bytes "$bytes"
step measure
cargo run --release --quiet --example measure -- "$work/export" "$work/tasks.jsonl" "$work/results.jsonl"
run report.py --results "this=$work/results.jsonl" --baselines "$work/baselines.json" --plot "$work/retrieval.svg"
step done
