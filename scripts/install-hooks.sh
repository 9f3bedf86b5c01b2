#!/usr/bin/env bash
# Make git check the commit messages of this clone. A hook that is there already is left alone.
set -euo pipefail
hook=$(git rev-parse --git-path hooks)/commit-msg
if [[ -e $hook ]] && ! grep -q check_commit_message "$hook"; then
  echo "$hook is there already: let it run scripts/check_commit_message.py \"\$1\"" >&2
  exit 1
fi
mkdir -p "$(dirname "$hook")"
# git runs the hook in the root of the working tree. An older commit, checked out, has no such script.
printf '#!/bin/sh\n[ ! -x scripts/check_commit_message.py ] || exec scripts/check_commit_message.py "$1"\n' >"$hook"
chmod +x "$hook"
echo "$hook checks commit messages from now on"
