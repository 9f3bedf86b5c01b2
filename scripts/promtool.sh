#!/usr/bin/env bash
# promtool.sh FOLDER: put Prometheus' promtool into FOLDER, out of Debian's package and without installing that.
# Says how to get it where there is no apt. The tests of the alerts then skip.
set -euo pipefail
folder=$1

if command -v promtool >/dev/null; then
  ln -sf "$(command -v promtool)" "$folder/promtool"
  exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
chmod 755 "$work" # apt downloads as a user of its own
if ! (cd "$work" && apt-get download -q prometheus && dpkg-deb -x prometheus_*.deb .) >"$work/log" 2>&1; then
  cat "$work/log"
  echo "promtool is not installed, so the alerts are not tested: \`apt-get update\`, or put promtool on the PATH"
  exit 0
fi
install "$work/usr/bin/promtool" "$folder/promtool"
