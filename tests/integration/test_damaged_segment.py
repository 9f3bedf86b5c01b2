"""Bits flipped and blocks exchanged in the segment of a running shard, in the places that it has promised.

Loads on the node itself are checked with `verify_load` at `full`: by default a digest is looked at for one block in
sixteen, and flipped bits in the others would go unseen, as in the engine's own memory. Blocks that are read by another
node are always verified, whatever the setting.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from kvservice.client.channels import Channels
from kvservice.client.overview import gather_overview
from kvservice.client.shard import ShardClient
from kvservice.connector.options import Verify
from kvservice.core.segment.geometry import HEADER_BYTES
from kvservice.core.segment.refs import BlockRef
from kvservice.memory.segment import Segment
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from kvservice.units import BlockKey, MiB
from tests.integration.engine import LAYOUT, Engine, chain, content
from tests.integration.loader import Loader
from tests.integration.test_two_nodes import leave

CHAINS, BLOCKS, ROUNDS = 48, 8, 9
DAMAGE = ("payload bit", "payload bit", "header bit", "payloads exchanged", "headers exchanged")
Block = tuple[BlockRef, BlockKey]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=2, lookup_partitions=1, transport="shm", pool_bytes=64 * MiB) as running:
        yield running


class Damage:
    """Of some slots of a live segment; `repair` puts everything back."""

    def __init__(self, segment: Segment, draw: random.Random) -> None:
        self._buffer = segment.buffer
        self._geometry = segment.geometry
        self._random = draw
        self._before: dict[int, bytes] = {}
        self.kinds: Counter[str] = Counter()

    def do(self, block: Block, other: Block, kind: str) -> None:
        """`other` is damaged too when two are exchanged."""
        spans = [self._span(one[0], kind.startswith("header")) for one in (block, other)]
        if kind.endswith("bit"):
            start, length = spans[0]
            bit = self._random.randrange(8 * length)
            self._keep(start, length)
            self._buffer[start + bit // 8] ^= 1 << bit % 8
        else:
            one, two = [bytes(self._buffer[start : start + length]) for start, length in spans]
            for (start, length), data in zip(spans, (two, one), strict=True):
                self._keep(start, length)
                self._buffer[start : start + length] = data
        self.kinds[kind] += 1

    def repair(self) -> None:
        for start, data in self._before.items():
            self._buffer[start : start + len(data)] = data
        self._before.clear()

    def _span(self, ref: BlockRef, header: bool) -> tuple[int, int]:
        if header:
            return self._geometry.header_offset(ref.slot), HEADER_BYTES
        return self._geometry.payload_offset(ref.slot, LAYOUT.payload_bytes), LAYOUT.payload_bytes

    def _keep(self, start: int, length: int) -> None:
        self._before.setdefault(start, bytes(self._buffer[start : start + length]))


async def stored(engine: Engine, chains: Sequence[tuple[BlockKey, ...]]) -> list[Block]:
    """Every block of the chains, stored and promised for as long as the engine is attached."""
    found: list[Block] = []
    for keys in chains:
        await engine.store(keys)
        result = await engine.acquire(keys)
        found += zip(result.blocks, keys, strict=True)
    return found


def damage_some(damage: Damage, blocks: Sequence[Block], draw: random.Random, share: float) -> set[BlockKey]:
    """Keys of what was damaged, in pairs of neighbours where two are exchanged."""
    bad: set[BlockKey] = set()
    for block, other in zip(blocks[::2], blocks[1::2], strict=True):
        if draw.random() < share:
            kind = draw.choice(DAMAGE)
            damage.do(block, other, kind)
            bad |= {block[1]} if kind.endswith("bit") else {block[1], other[1]}
            if kind.endswith("bit"):
                damage.do(other, block, kind)
                bad.add(other[1])
    return bad


async def test_no_damaged_block_of_a_live_segment_is_read(cluster: LocalCluster) -> None:
    draw = random.Random(1)
    writer = await Engine.attach(ShardClient(cluster.socket("n0")))
    chains = [chain(seed=9000 + i, count=BLOCKS) for i in range(CHAINS)]
    blocks = await stored(writer, chains)
    damage = Damage(writer.segment, draw)
    counters = load_all_damaged(writer.segment, blocks, damage, draw)
    assert counters.keys() >= {"load_stale", "load_corrupt"}, "both the headers and the digests were needed"
    bad = damage_some(damage, blocks, draw, share=0.1)
    cluster.wait_until_known([key for _, key in blocks])
    await read_from_the_other_node(cluster, chains, bad)
    print(f"{sum(damage.kinds.values())} damaged places, {dict(damage.kinds)}; local {dict(counters)}")
    assert sum(damage.kinds.values()) >= 2500
    damage.repair()
    await leave(writer)


def load_all_damaged(segment: Segment, blocks: Sequence[Block], damage: Damage, draw: random.Random) -> Counter[str]:
    """All blocks, whole and then damaged, some times. Returns the reasons for which loads were refused."""
    loader = Loader(segment, LAYOUT, BLOCKS, Verify.FULL)
    steps = [blocks[start : start + BLOCKS] for start in range(0, len(blocks), BLOCKS)]
    for step in steps:
        assert all(loader.load(step)), "whole blocks are loaded"
    for _ in range(ROUNDS):
        bad = damage_some(damage, blocks, draw, share=1.0)
        assert len(bad) == len(blocks)
        for step in steps:
            assert not any(loader.load(step)), "a damaged block was accepted"
        damage.repair()
    reasons = Counter({name: count for name, count in loader.counters.items() if name.startswith("load_")})
    loader.close()
    assert reasons["load_stale"] + reasons["load_corrupt"] == ROUNDS * len(blocks), "a refusal has a counted reason"
    return reasons


async def read_from_the_other_node(
    cluster: LocalCluster, chains: Sequence[tuple[BlockKey, ...]], bad: set[BlockKey]
) -> None:
    """Each prefix ends at its first damaged block at the latest, and what is promised is right."""
    reader = await Engine.attach(ShardClient(cluster.socket("n1")))

    promised, misses = 0, Counter[str]()
    for keys in chains:
        result = await reader.read_all(keys, timeout=5.0)  # asserts every byte
        sound = next((place for place, key in enumerate(keys) if key in bad), len(keys))
        assert len(result.blocks) <= sound, "a damaged block was promised"
        promised += len(result.blocks)
        if len(result.blocks) < sound:
            misses[result.miss.value] += 1
    print(f"{promised} blocks promised; sound prefixes that were not: {dict(misses)}")
    assert promised > CHAINS * BLOCKS // 4, "hardly anything was read"
    counters = cluster.stats("n1").counters
    refused = {name: count for name, count in counters.items() if "corrupt" in name or "stale" in name}
    print(f"{len(bad)} of {len(chains) * BLOCKS} blocks damaged; the other node counts {refused}")
    assert sum(refused.values()) >= len(bad) // 2, "a refusal has a counted reason"
    assert cluster.accounting("n1").balanced
    await eventually_async(lambda: cluster.stats("n0").counters.get("suspects_damaged"), "the holder gives some up")
    assert cluster.accounting("n0").balanced
    assert content(chains[0][0])  # what the bytes are compared with
    await leave(reader)


async def test_causes_of_evictions_add_up_with_damaged_blocks(cluster: LocalCluster) -> None:
    writer = await Engine.attach(ShardClient(cluster.socket("n0")))
    reader = await Engine.attach(ShardClient(cluster.socket("n1")))
    keys = chain(seed=9900, count=BLOCKS)
    before = cluster.stats("n0").counters.get("evicted_corrupt", 0)
    blocks = await stored(writer, [keys])
    Damage(writer.segment, random.Random(2)).do(blocks[3], blocks[3], "payload bit")
    cluster.wait_until_known(keys)
    assert len((await reader.read_all(keys, timeout=5.0)).blocks) == 3
    await eventually_async(lambda: cluster.stats("n0").counters["evicted_corrupt"] > before, "the holder gives it up")
    async with Channels() as channels:
        seen = await gather_overview(channels, cluster.service, cluster.lookup_addresses)
    for whole in (seen.nodes[0], seen):
        assert whole.evictions["corrupt"] > before
        assert sum(whole.evictions.values()) == whole.windows[0].evicted_blocks
    await leave(reader)
    await leave(writer)
