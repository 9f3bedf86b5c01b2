"""A network between the demo's two nodes: two namespaces of the kernel, each with an address, joined by one link.

Neither namespace has a name, so both end, with their devices, with the last process in them: nothing can be left. Root
and Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvservice.errors import Unavailable
from kvservice.units import format_bytes

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
HERE, THERE = "10.77.0.1", "10.77.0.2"  # nobody else is on this network
DEVICE, FAR_DEVICE = "kvslink", "kvspeer"
TOOLS = ("ip", "mount", "nsenter", "setpriv", "sh", "unshare")
# UCX and the counters look for devices in /sys, which shows those of the namespace that mounted it.
OWN_SYS = "mount -t sysfs sysfs /sys && ip link set lo up"
UNSHARE = ("unshare", "--net", "--mount", "--propagation", "private", "sh", "-c")
TRANSPORTS = {"nixl": "NIXL", "shm": "shared memory"}


@dataclass(frozen=True, slots=True)
class Crossing:
    """How blocks came from one node of the demo to the other."""

    transport: str  # of the shards
    link_bytes: int | None  # that went over the network; None without one
    reason: str  # there is none

    @property
    def way(self) -> str:
        return " or ".join(TRANSPORTS[way] for way in self.transport.split("+"))

    @property
    def how(self) -> str:
        words = self.way
        return words if self.link_bytes is None else f"{words} over a network between two namespaces"

    @property
    def sentence(self) -> str:
        if self.link_bytes is None:
            return f"Blocks crossed by {self.how} inside one machine, not over a network: {self.reason}."
        return (
            f"Blocks crossed by {self.how}: {format_bytes(self.link_bytes)} went over the link between {HERE} and "
            f"{THERE}, Ray's messages included."
        )


class NamespaceLink:
    """The link as this process sees it, at one end."""

    def __init__(self, far: int) -> None:
        """`far`: a process at the other end. `over_there` stands before a command that is to run there."""
        self.over_there = ["nsenter", "--target", str(far), "--net", "--mount", f"--wd={Path.cwd()}"]

    def carried_bytes(self) -> int:
        """The bytes that crossed, in both directions."""
        counters = Path(f"/sys/class/net/{DEVICE}/statistics")
        return sum(int((counters / name).read_text()) for name in ("rx_bytes", "tx_bytes"))


def why_not(model: str) -> str | None:
    """Reason the demo cannot have a network of its own for this model, or None. Blocks for a trial of some
    milliseconds, which leaves nothing."""
    if not Path(model).is_dir():
        return "the model comes from the hub, which cannot be reached from a network of the demo's own"
    if os.geteuid() != 0:
        return "network namespaces need root"
    from kvservice.transfer.nixl import nixl_available

    if not nixl_available():
        return "NIXL is not installed"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not found, of iproute2 and util-linux: {', '.join(missing)}"
    trial = f"{OWN_SYS} && ip link add {DEVICE} type veth peer name {FAR_DEVICE}"
    done = subprocess.run([*UNSHARE, trial], capture_output=True, text=True)
    if done.returncode:
        return f"this kernel or container does not permit network namespaces ({_last_line(done.stderr)})"
    return None


@contextlib.contextmanager
def two_namespaces() -> Iterator[NamespaceLink]:
    """This process, and what it starts, is at one end from now on, and remains there. For the main thread, before
    others use the network. Raises Unavailable."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS | CLONE_NEWNET):
        raise Unavailable(f"no network of the demo's own: {os.strerror(ctypes.get_errno())}")
    _do("mount", "--make-rprivate", "/")
    _do("sh", "-c", OWN_SYS)
    far = subprocess.Popen(
        [*UNSHARE, f"{OWN_SYS} && echo made && exec cat"],  # it ends when this process does, whose pipe it reads
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        if far.stdout is None or far.stdout.readline() != b"made\n":
            raise Unavailable("no network of the demo's own: its second namespace could not be made")
        link = NamespaceLink(far.pid)
        _do("ip", "link", "add", DEVICE, "type", "veth", "peer", "name", FAR_DEVICE, "netns", str(far.pid))
        for prefix, device, address in (([], DEVICE, HERE), (link.over_there, FAR_DEVICE, THERE)):
            _do(*prefix, "ip", "addr", "add", f"{address}/30", "dev", device)
            _do(*prefix, "ip", "link", "set", device, "up")
            _do(*prefix, "ip", "route", "add", "default", "dev", device)  # Ray and vLLM look for their address so
        yield link
    finally:
        far.kill()
        far.communicate()


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"no network of the demo's own: {' '.join(command)}: {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]
