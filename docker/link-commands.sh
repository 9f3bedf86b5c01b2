#!/bin/sh
# link-commands.sh VENV COMMAND...: commands that a login shell finds too, whose PATH knows nothing of the environment.
set -eu
venv=$1
shift
for name in "$@"; do
  test -x "$venv/bin/$name"
  ln -s "$venv/bin/$name" "/usr/local/bin/$name"
done
