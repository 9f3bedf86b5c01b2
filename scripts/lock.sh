#!/usr/bin/env bash
# lock.sh PYTHON LOCK: resolve requirements/*.in with pip as of today, and write the versions with their hashes.
set -euo pipefail
python=$1
lock=$2
here=$(dirname "$0")
venv=.venv-lock

"$here/new-venv.sh" "$python" "$venv"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

resolve=("$venv/bin/pip" --disable-pip-version-check install --quiet --dry-run --ignore-installed)
pytorch=(--extra-index-url https://download.pytorch.org/whl/cpu)
if "$venv/bin/pip" download --quiet --no-deps --dest "$work" "$(grep '^torch==' "$lock" | cut -d' ' -f1)" 2>/dev/null; then
  pytorch=() # pip's own sources have the CPU build
fi
"${resolve[@]}" "${pytorch[@]}" --report "$work/resolved.json" -r requirements/cpu.in
"${resolve[@]}" --no-deps --report "$work/nodeps.json" -r requirements/cpu-nodeps.in
"$venv/bin/python" "$here/lock.py" "$lock" "$work/resolved.json" "$work/nodeps.json"

# The lock of the CUDA image comes from PyPI alone. This is slow: pip reads the metadata of many large wheels.
"${resolve[@]}" --report "$work/cuda.json" -r requirements/cuda.in
"$venv/bin/python" "$here/lock.py" requirements/cuda-py311.lock "$work/cuda.json"
