#!/bin/sh
# steps.sh STEP [ARGUMENT...]: one step of an image. The Dockerfiles run them, and rootfs.sh without Docker.
#   packages NAME...       the Debian packages of debian/NAME.txt, in apt's cache as it is
#   python LOCK [NAMES]    /opt/kvservice with the locked packages; with a file of names, only those
#   kvservice WHEEL...     this project
#   finish COMMAND...      the user, these commands for login shells, and the launcher that keeps CAP_IPC_LOCK
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=/opt/kvservice
user=60900 # of the chart's security.runAsUser; no person and no package of Debian has it
step=$1
shift
case $step in
  packages)
    apt-get update
    for list in "$@"; do
      xargs apt-get install --yes --no-install-recommends <"$here/debian/$list.txt"
    done
    rm -rf /var/lib/apt/lists/*
    ;;
  python)
    python3.11 -m venv "$venv"
    wanted=$(mktemp)
    if [ $# -gt 1 ]; then
      sed 's/$/==/; s/^/^/' "$2" | grep -f - "$1" >"$wanted"
    else
      cat "$1" >"$wanted"
    fi
    "$venv/bin/pip" install --no-deps --require-hashes -r "$wanted"
    rm "$wanted"
    ;;
  kvservice)
    "$venv/bin/pip" install --no-deps --no-index "$@"
    "$venv/bin/kvservice" --help >/dev/null
    ;;
  finish)
    groupadd --gid "$user" kvservice
    useradd --uid "$user" --gid "$user" --home-dir /home/kvservice --create-home --shell /bin/bash kvservice
    for name in "$@"; do # a login shell's PATH knows nothing of the environment
      test -x "$venv/bin/$name"
      ln -s "$venv/bin/$name" "/usr/local/bin/$name"
    done
    # UCX of NIXL's wheel would load it, and with it a second libibverbs: then every process with NIXL ends with SIGSEGV.
    rm -f /usr/lib/*-linux-gnu/libefa.so.*
    # A user other than root holds a capability only through a file that has it. This one passes it on to what it starts.
    mkdir -p /usr/local/libexec
    cp /usr/bin/setpriv /usr/local/libexec/setpriv-ipc-lock
    setcap cap_ipc_lock+ep /usr/local/libexec/setpriv-ipc-lock
    ;;
  *)
    echo "steps.sh: no step $step" >&2
    exit 2
    ;;
esac
