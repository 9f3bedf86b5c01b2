"""Ways to take the network between two hosts away for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.netns.hosts import Host, link


@contextlib.contextmanager
def no_way(host: Host, to: Host) -> Iterator[None]:
    """Nothing that `host` sends reaches `to`."""
    host.output(["ip", "route", "add", "blackhole", f"{to.address}/32"])
    try:
        yield
    finally:
        host.output(["ip", "route", "del", "blackhole", f"{to.address}/32"])


@contextlib.contextmanager
def both_ways(a: Host, b: Host) -> Iterator[None]:
    with no_way(a, b), no_way(b, a):
        yield


@contextlib.contextmanager
def cable_out(host: Host) -> Iterator[None]:
    link(host.outer, "down")
    try:
        yield
    finally:
        link(host.outer, "up")
