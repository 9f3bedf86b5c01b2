#!/usr/bin/env bash
# new-browser.sh DIR: the packages of tests/browser in DIR, and chromium if the machine has no browser of its kind.
set -euo pipefail
folder=$1
command -v node >/dev/null || { echo "the browser tests need node 20 or newer: apt-get install nodejs npm" >&2; exit 1; }
if ! command -v chromium chromium-browser google-chrome >/dev/null; then
  [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null || { echo "install chromium: apt-get install chromium" >&2; exit 1; }
  apt-get install -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
fi
mkdir -p "$folder"
cp tests/browser/package.json tests/browser/package-lock.json "$folder"
npm ci --prefix "$folder" --ignore-scripts --no-audit --no-fund --loglevel error
