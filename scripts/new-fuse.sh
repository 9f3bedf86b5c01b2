#!/usr/bin/env bash
# new-fuse.sh PIP DIR: fusepy, and libfuse 2 in DIR/deb. Debian's package is unpacked there, not installed, so the machine
# stays as it is. Where there is no apt-get, DIR has no libfuse and the tests that mount a file system are skipped.
set -euo pipefail
pip=$1 folder=$2
"$pip" install --disable-pip-version-check --quiet --no-deps --require-hashes --upgrade --target "$folder" -r requirements/fuse.txt
command -v apt-get >/dev/null || { echo "no apt-get: tests on FUSE are skipped" >&2; exit 0; }
mkdir -p "$folder/deb"
chmod 777 "$folder/deb" # apt downloads as another user
cd "$folder/deb"
apt-get download libfuse2 >/dev/null || apt-get download libfuse2t64 >/dev/null
for package in *.deb; do dpkg -x "$package" .; done
