#!/usr/bin/env bash
# new-venv.sh PYTHON FOLDER: make a Python 3.11 virtual environment, or say what is missing.
set -euo pipefail
python=$1
venv=$2

[[ -x $venv/bin/pip ]] && exit 0

fail() {
  printf 'error: %s\n' "$@" >&2
  exit 1
}

if ! version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null); then
  fail "'$python' does not run. The locked packages are for CPython 3.11 on Linux x86_64." \
    "Debian 12: apt-get install python3.11 python3.11-venv; elsewhere: make PYTHON=/path/to/python3.11 ..."
fi
if [[ $version != 3.11 ]]; then
  fail "'$python' is Python $version, and the locked packages are for 3.11: make PYTHON=/path/to/python3.11 ..."
fi
if [[ $(uname -sm) != "Linux x86_64" ]]; then
  fail "the locked packages are for Linux x86_64, and this is $(uname -sm)"
fi
rm -rf "$venv"
if ! output=$("$python" -m venv "$venv" 2>&1); then
  rm -rf "$venv"
  fail "$output" "On Debian and Ubuntu the venv module is a package of its own: apt-get install python3.11-venv"
fi
