"""Cut, lossy and slow networks between two hosts: a read ends in time as a miss, what is here is served, and once the
network is back everything is found again and nothing is left taken. Every promised byte is compared.

The kernel of a test machine may lack netem: routes that drop, a link that goes down and a rate limit are everywhere.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from kvservice.testing.eventually import eventually
from kvservice.transfer.nixl import nixl_available
from kvservice.transfer.silence import SILENT_SECONDS
from tests.netns.blocks import RemoteEngine
from tests.netns.cuts import both_ways, cable_out, no_bytes_of_blocks, no_way
from tests.netns.hosts import Host, Hosts, why_not
from tests.netns.service import Service, socket_on

REASON = why_not() or (None if nixl_available() else "NIXL is not installed")
pytestmark = [
    pytest.mark.netns,
    pytest.mark.nixl,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

COUNT = 20  # 1.25 MiB
READ_SECONDS = 1.0
GRACE_SECONDS = 1.0  # of a machine that also runs other tests
KNOWN_SECONDS = 1.0  # what was sealed is in the directory by then; if not, the read is a miss for another reason
FLAP_SECONDS = 1.0
STORED = {"sealed": COUNT}
_seeds = itertools.count(1)


@dataclass
class Pair:
    """Two hosts with an engine each."""

    hosts: tuple[Host, Host]
    engines: tuple[RemoteEngine, RemoteEngine]
    service: Service

    def store(self, host: int) -> int:
        seed = next(_seeds)
        assert self.engines[host].ask("store", seed=seed, count=COUNT) == STORED
        return seed

    def read(self, host: int, seed: int) -> tuple[int, int]:
        """(promised, fetched), in time."""
        answer = self.engines[host].ask("read", seed=seed, count=COUNT, timeout=READ_SECONDS)
        assert answer["seconds"] < READ_SECONDS + GRACE_SECONDS, answer
        assert (answer["miss"] == "none") == (answer["promised"] == COUNT), "a miss has a reason"
        return answer["promised"], answer["fetched"]

    def heals(self, *wanted: tuple[int, int]) -> None:
        """Each (host, seed) is read whole from the other host, and no slot or lease stays taken anywhere."""
        for host, seed in wanted:
            eventually(lambda host=host, seed=seed: self.read(host, seed)[0] == COUNT, "the healed network to be used")
        for engine in self.engines:
            eventually(lambda engine=engine: settled(engine.ask("books")), "leases and slots to be given back")


def settled(books: dict[str, object]) -> bool:
    slots = books["slots"]
    assert books["balanced"] and isinstance(slots, dict)
    return books["leases"] == 0 and slots.get("quarantined", 0) == slots.get("leased", 0) == 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("partitions")
    with (
        Hosts() as hosts,
        Service(hosts, logs, "--pool-bytes", "64MiB", "--lease-seconds", "2") as service,
        RemoteEngine(hosts[0], socket_on(0)) as a,
        RemoteEngine(hosts[1], socket_on(1)) as b,
    ):
        yield Pair(hosts, (a, b), service)


CUTS: dict[str, Callable[[Host, Host], contextlib.AbstractContextManager[None]]] = {
    "both ways": both_ways,
    "requests arrive and answers are lost": lambda holder, reader: no_way(holder, reader),
    "requests are lost": lambda holder, reader: no_way(reader, holder),
    "the cable is out": lambda holder, reader: cable_out(holder),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_cut_network_costs_the_deadline_and_is_found_healed(
    pair: Pair, cut: Callable[[Host, Host], contextlib.AbstractContextManager[None]]
) -> None:
    first = pair.store(0)
    time.sleep(KNOWN_SECONDS)
    with cut(*pair.hosts):
        assert pair.read(1, first) == (0, 0)
        assert pair.read(0, first) == (COUNT, 0), "what is here needs no network"
        second = pair.store(1)
        assert pair.read(1, second) == (COUNT, 0)
    pair.heals((1, first), (0, second))


def test_a_peer_that_moves_no_bytes_costs_few_their_deadline(pair: Pair) -> None:
    """It answers calls and grants leases all the time. Slots that its reads hold back do not become more."""
    seeds = [pair.store(0) for _ in range(6)]
    time.sleep(KNOWN_SECONDS)
    assert pair.read(1, seeds[0]) == (COUNT, COUNT)
    with no_bytes_of_blocks(*pair.hosts, pair.service.ports()):
        assert pair.read(1, seeds[1]) == (0, 0)
        time.sleep(SILENT_SECONDS)
        for seed in seeds[2:]:
            answer = pair.engines[1].ask("read", seed=seed, count=COUNT, timeout=READ_SECONDS)
            assert answer["miss"] == "peer_failed" and answer["seconds"] < READ_SECONDS / 2, answer
        assert pair.engines[1].ask("books")["slots"]["quarantined"] <= COUNT
    pair.heals((1, seeds[1]))


def opened_connections(host: Host) -> int:
    lines = host.output(["cat", "/proc/net/snmp"]).splitlines()
    names, values = (line.split() for line in lines if line.startswith("Tcp:"))
    return int(values[names.index("ActiveOpens")])


def test_flapping_link_makes_no_storm_of_connections(pair: Pair) -> None:
    seeds = [pair.store(0) for _ in range(4)]
    time.sleep(KNOWN_SECONDS)
    before = [opened_connections(host) for host in pair.hosts]
    started = time.monotonic()
    for seed in seeds:
        with both_ways(*pair.hosts):
            pair.read(1, seed)
            time.sleep(FLAP_SECONDS)
        pair.read(1, seed)
        time.sleep(FLAP_SECONDS)
    seconds = time.monotonic() - started
    opened = [opened_connections(host) - count for host, count in zip(pair.hosts, before, strict=True)]
    print(f"connections opened in {seconds:.1f} s: {opened}")
    # Each host calls a lookup partition and a shard, and reads blocks: one new attempt a second of each at most.
    assert max(opened) <= 3 * (seconds + 1), opened
    pair.heals(*((1, seed) for seed in seeds))


def test_lossy_network_costs_hits_and_no_byte(pair: Pair) -> None:
    seeds = [pair.store(0) for _ in range(6)]
    time.sleep(KNOWN_SECONDS)
    for seed in seeds:
        for _ in range(3):
            with no_way(pair.hosts[0], pair.hosts[1]):
                time.sleep(0.03)
            time.sleep(0.05)
        pair.read(1, seed)
    pair.heals(*((1, seed) for seed in seeds))


def test_network_that_is_too_slow_is_given_up(pair: Pair) -> None:
    """Nothing is left waiting."""
    first, holder = pair.store(0), pair.hosts[0]
    time.sleep(KNOWN_SECONDS)
    holder.output(
        [
            "tc",
            "qdisc",
            "add",
            "dev",
            holder.device,
            "root",
            "tbf",
            "rate",
            "1mbit",
            "burst",
            "32kbit",
            "latency",
            "400ms",
        ]
    )
    try:
        promised, _ = pair.read(1, first)
        assert promised < COUNT, "ten seconds of bytes do not come in one"
        second = pair.store(1)
        assert pair.read(1, second) == (COUNT, 0)
    finally:
        holder.output(["tc", "qdisc", "del", "dev", holder.device, "root"])
    pair.heals((1, first), (0, second))
