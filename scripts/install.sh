#!/usr/bin/env bash
# install.sh PYTHON VENV LOCK: the locked packages and this project, editable, into VENV.
set -euo pipefail
python=$1
venv=$2
lock=$3

"$(dirname "$0")/new-venv.sh" "$python" "$venv"
pip=("$venv/bin/pip" --disable-pip-version-check)
locked=(install --quiet --no-deps --require-hashes -r)

# The CPU build of torch has a local version (+cpu), which PyPI does not take: it comes from pip's own sources when
# they have it (PIP_FIND_LINKS, a mirror), else from the project's index. The hash is checked either way.
torch=$(mktemp)
trap 'rm -f "$torch"' EXIT
grep '^torch==' "$lock" >"$torch"
if ! "${pip[@]}" "${locked[@]}" "$torch" 2>/dev/null; then
  echo "torch: from https://download.pytorch.org/whl/cpu" >&2
  "${pip[@]}" "${locked[@]}" "$torch" --index-url https://download.pytorch.org/whl/cpu
fi

echo "installing $(grep -c '==' "$lock") locked packages into $venv (a few minutes the first time)" >&2
"${pip[@]}" "${locked[@]}" "$lock"
"${pip[@]}" install --quiet --no-deps --no-build-isolation --editable .
