#!/usr/bin/env bash
# install.sh PYTHON VENV LOCK: install the locked packages and this project, editable, into VENV.
set -euo pipefail
python=$1
venv=$2
lock=$3

"$(dirname "$0")/new-venv.sh" "$python" "$venv"
pip=("$venv/bin/pip" --disable-pip-version-check)
locked=(install --quiet --no-deps --require-hashes -r)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The CPU build of torch has a local version (+cpu), which PyPI does not take: it comes from pip's own sources when
# they have it (PIP_FIND_LINKS, a mirror), else from the project's index. The hash is checked either way.
install_torch() {
  grep '^torch==' "$lock" >"$work/torch"
  if ! "${pip[@]}" "${locked[@]}" "$work/torch" 2>/dev/null; then
    echo "torch: from https://download.pytorch.org/whl/cpu" >&2
    "${pip[@]}" "${locked[@]}" "$work/torch" --index-url https://download.pytorch.org/whl/cpu
  fi
}

# Unpacking and compiling keep one core busy, so several pips share the list. They resolve no dependencies, so no two of
# them install the same package.
echo "installing $(grep -c '==' "$lock") locked packages into $venv (a few minutes the first time)" >&2
install_torch &
torch=$!
grep '==' "$lock" | grep -v '^torch==' | split --number=r/8 - "$work/part."
printf '%s\0' "$work"/part.* | xargs -0 -n 1 -P 2 "${pip[@]}" "${locked[@]}"
wait "$torch"
"${pip[@]}" install --quiet --no-deps --no-build-isolation --editable .
"$venv/bin/python" "$(dirname "$0")/vllm_alias.py"
