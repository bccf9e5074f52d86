#!/usr/bin/env bash
# Makes a virtual environment with what requirements.txt pins, unless it is there, and prints its Python.
#
#   tools/pocket/setup.sh [FOLDER]    default: $CEDRA_TOOLS/pocket, by default ~/.cache/cedra/pocket
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
home=${1:-${CEDRA_TOOLS:-${XDG_CACHE_HOME:-$HOME/.cache}/cedra}/pocket}
die() { echo "setup: $*" >&2; exit 1; }

if ! cmp -s "$here/requirements.txt" "$home/installed.txt"; then
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "Python 3.11 or newer needed, $(python3 --version) found"
  python3 -c 'import ensurepip, venv' 2>/dev/null || die "this Python has no venv: on Debian and Ubuntu \`apt install python3-venv\`"
  echo "setup: installing PyTorch and more into $home: 0.9 GB to download, 6.8 GB on the disk" >&2
  python3 -m venv "$home"
  "$home/bin/pip" install --quiet --no-cache-dir --requirement "$here/requirements.txt" >&2
  cp "$here/requirements.txt" "$home/installed.txt"
fi
echo "$home/bin/python"
