"""kill -9 and SIGSTOP of real shards and lookup partitions, each at a named place in the middle of its work.

Whatever it was in the middle of: the call under way ends in time, every byte that is promised is right, and once the
part is back everything can be stored and found, with nothing taken for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest

from kvservice.errors import KVServiceError
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from tests.failpoints import Failpoints
from tests.integration.engine import Engine, attached, chain
from tests.integration.test_two_nodes import leave

LEASE_SECONDS = 2.0
STOPPED_SECONDS = 3.0  # longer than a lease, and than the directory believes in a silent node
CALL_SECONDS = 20.0
BLOCKS = 12
_seeds = itertools.count(1)


@dataclass
class Field:
    cluster: LocalCluster
    failpoints: Failpoints

    def name_of(self, pid: int) -> str:
        return next(name for name in ("n0", "n1", "lookup0") if self.cluster.pid(name) == pid)

    def start(self, name: str) -> None:
        if name == "lookup0":
            self.cluster.start_lookup(0)
        else:
            self.cluster.start_shard(name)


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    points = Failpoints(tmp_path_factory.mktemp("failpoints"))
    environment = points.environment
    # Without a mirror, because nothing would be asked of the lookup partition.
    with LocalCluster(2, 1, lease_seconds=LEASE_SECONDS, mirror_bytes=0, environment=environment) as cluster:
        yield Field(cluster, points)


Work = Callable[[Field, Engine, Engine, int], Awaitable[object]]  # engines of n0 and n1, and a seed


async def store(field: Field, a: Engine, b: Engine, seed: int) -> object:
    return await a.store(chain(seed, BLOCKS))


async def read_here(field: Field, a: Engine, b: Engine, seed: int) -> object:
    return await a.read_all(chain(seed, BLOCKS), timeout=2.0)


async def read_there(field: Field, a: Engine, b: Engine, seed: int) -> object:
    return await b.read_all(chain(seed, BLOCKS), timeout=2.0)


async def restart(field: Field, a: Engine, b: Engine, seed: int) -> object:
    await asyncio.to_thread(field.cluster.kill, "n0")
    return await asyncio.to_thread(field.cluster.start_shard, "n0", wait=False)


# (where, in the middle of what, whether the chain is stored before)
PLACES: list[tuple[str, Work, bool]] = [
    ("shard.header", store, False),  # while slots are being reserved
    ("shard.digest", store, False),
    ("shard.announce", store, False),
    ("shard.answer", store, False),
    ("shard.answer", read_here, True),
    ("shard.answer", read_there, True),
    ("shard.read", read_there, True),
    ("shard.pulled", read_there, True),
    ("shard.adopt", restart, True),
    ("lookup.announce", store, False),
    ("lookup.resolve", read_there, True),
]
STOPPED = [("shard.announce", store, False), ("shard.pulled", read_there, True), ("lookup.announce", store, False)]
CASES = [(*place, signal.SIGKILL) for place in PLACES] + [(*place, signal.SIGSTOP) for place in STOPPED]


@pytest.mark.parametrize(
    "where, work, is_stored, number", CASES, ids=[f"{n.name}-{where}-{work.__name__}" for where, work, _, n in CASES]
)
async def test_a_part_that_dies_or_sleeps_midway_costs_hits_only(
    field: Field, where: str, work: Work, is_stored: bool, number: signal.Signals
) -> None:
    cluster, seed = field.cluster, next(_seeds)
    keys = chain(seed, BLOCKS)
    a, b = [await attached(field.cluster.socket(node)) for node in ("n0", "n1")]
    if is_stored:
        await a.store(keys)
        cluster.wait_until_known(keys)
    field.failpoints.arm(where)
    under_way = asyncio.ensure_future(work(field, a, b, seed))
    name = field.name_of(await asyncio.to_thread(field.failpoints.hit, where))
    await asyncio.to_thread(cluster.kill, name, number)
    if number is signal.SIGSTOP:
        await asyncio.sleep(STOPPED_SECONDS)
        field.failpoints.release(where)
        cluster.kill(name, signal.SIGCONT)
    with contextlib.suppress(KVServiceError):
        await asyncio.wait_for(under_way, CALL_SECONDS)  # reads compare every promised byte themselves
    if number is signal.SIGKILL:
        await asyncio.to_thread(field.start, name)
    await leave(a, b)
    await heals(field, seed)


async def heals(field: Field, seed: int) -> None:
    keys, fresh = chain(seed, BLOCKS), chain(next(_seeds), BLOCKS)
    a, b = [await attached(field.cluster.socket(node)) for node in ("n0", "n1")]
    for engine in (a, b):
        if (begin := len((await engine.read_all(keys)).blocks)) < BLOCKS:
            await engine.store(keys, start=begin)
    await a.store(fresh)

    async def is_found() -> bool:
        return len((await b.read_all(fresh)).blocks) == BLOCKS

    await eventually_async(is_found, "what was stored just now, at the other node")
    assert len((await a.read_all(keys)).blocks) == len((await b.read_all(keys)).blocks) == BLOCKS
    await leave(a, b)
    for node in field.cluster.nodes:

        def is_settled(node: str = node) -> bool:
            books = field.cluster.accounting(node)
            assert books.balanced, books.violation
            taken = sum(books.slots[state] for state in ("writing", "leased", "quarantined"))
            return books.leases == taken == 0

        await eventually_async(is_settled, "no lease and no slot being written")
