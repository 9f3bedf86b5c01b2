#!/usr/bin/env bash
# rootfs.sh PYTHON DIR WHEEL: the root file system of docker/shard.Dockerfile in DIR, of Debian's packages and this wheel.
# Its steps are the Dockerfile's, in its order; Debian comes from mmdebstrap instead of a base image. Needs root.
set -euo pipefail
python=$1
dir=$2
wheel=$3
here=$(dirname "$0")

if [[ $(id -u) != 0 ]] || ! command -v mmdebstrap >/dev/null; then
  echo "rootfs.sh: needs root and mmdebstrap (apt-get install mmdebstrap)" >&2
  exit 77
fi
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
rm -rf "$dir"

sed 's/$/==/; s/^/^/' "$here/shard-python.txt" | grep -f - "$here/../requirements/cpu-py311.lock" >"$wheels/lock"
"$python" -m pip download --quiet --no-deps --require-hashes --dest "$wheels" -r "$wheels/lock"
cp "$wheel" "$wheels"

# `packages shard`, and what makes the environment. No compiler: the wheel is built.
packages=$(cat "$here/debian/shard.txt" && grep '^python' "$here/debian/build.txt")
mmdebstrap --quiet --variant=minbase --include="$(tr '\n' ',' <<<"$packages")" bookworm "$dir"

mkdir -p "$dir/src/wheels"
cp -r "$here" "$dir/src/docker"
cp "$wheels"/* "$dir/src/wheels"
inside() { chroot "$dir" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin PIP_NO_INDEX=1 PIP_FIND_LINKS=/src/wheels "$@"; }
inside /src/docker/steps.sh python /src/wheels/lock
inside sh -c '/src/docker/steps.sh kvservice /src/wheels/kvservice-*.whl'
inside /src/docker/steps.sh finish kvservice
rm -rf "$dir/src"
