"""Ways to take the network between two hosts away for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

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
def no_bytes_of_blocks(a: Host, b: Host, ports: Sequence[int]) -> Iterator[None]:
    """Calls arrive, at these ports and from them. Nothing else does, so no block: a card or a rule for UCX is lost."""
    rules = [["priority", "200", "ipproto", "tcp", "blackhole"]]
    for port in ports:
        for end in ("sport", "dport"):
            rules.append(["priority", "100", "ipproto", "tcp", end, str(port), "lookup", "main"])
    ways = [(host, [*rule, "to", f"{to.address}/32"]) for host, to in ((a, b), (b, a)) for rule in rules]
    with contextlib.ExitStack() as healed:
        for host, rule in ways:
            host.output(["ip", "rule", "add", *rule])
            healed.callback(host.output, ["ip", "rule", "del", *rule])
        yield


@contextlib.contextmanager
def cable_out(host: Host) -> Iterator[None]:
    link(host.outer, "down")
    try:
        yield
    finally:
        link(host.outer, "up")
