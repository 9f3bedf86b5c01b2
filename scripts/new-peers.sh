#!/usr/bin/env bash
# new-peers.sh PYTHON DIR: install Mooncake Store, Redis and KVCR, for comparison only, into an environment and a folder of
# their own. Debian's packages are unpacked there, not installed, so the machine stays as it is.
set -euo pipefail
python=$1 folder=$2
root=$PWD
"$root/scripts/new-venv.sh" "$python" "$folder"
"$folder/bin/pip" install --disable-pip-version-check --quiet --no-deps --require-hashes -r requirements/peers.txt
"$folder/bin/pip" install --disable-pip-version-check --quiet --no-deps --require-hashes --upgrade \
  --target "$folder/kvcr" -r requirements/kvcr.txt
mkdir -p "$folder/deb"
chmod 777 "$folder/deb" # apt downloads as another user
cd "$folder/deb"
apt-get download libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 librdmacm1 redis-server redis-tools libjemalloc2 \
  liblua5.1-0 liblzf1 lua-cjson lua-bitop >/dev/null
for package in *.deb; do dpkg -x "$package" .; done
