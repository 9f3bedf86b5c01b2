"""Engines of five block sizes share two pools that are too small for them, so slabs move all the time.

Shards are killed and keep their memory. Engines write and read long after their attachments have ended. Every byte is
compared.

    python -m tests.integration.test_moving_slabs SEED STEPS
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvservice.client.shard import ShardClient
from kvservice.core.block.keys import block_keys, chain_hashes, span_route
from kvservice.core.messages import EngineSpec, SealItem, SealStatus
from kvservice.core.segment.header_checks import is_as_promised
from kvservice.core.segment.refs import BlockRef
from kvservice.errors import KVServiceError
from kvservice.testing.cluster import LocalCluster
from kvservice.units import BlockKey, MiB
from tests.integration.engine import LAYOUT, Engine, content, spec

pytestmark = pytest.mark.processes

CELLS = (512, 3000, 8192, 40_000, 110_000)  # bytes: blocks of 4 to 860 KiB, 200 to 1 in a slab
PROMPTS = 12  # of each size, which come again and again
PROMPT_BYTES = 3 * MiB // 2
POOL_BYTES = 12 * MiB
LATE = 4  # engines that still write without an attachment, and as many that still read
STEPS = 250
Promised = tuple[tuple[BlockRef, BlockKey], ...]


def sized(cells: int) -> EngineSpec:
    return replace(spec(f"model-{cells}"), layout=replace(LAYOUT, cell_bytes=cells))


def prompt(of: EngineSpec, number: int) -> tuple[BlockKey, ...]:
    rng = np.random.default_rng(number)
    blocks = min(96, int(rng.integers(1, max(3, PROMPT_BYTES // of.layout.payload_bytes))))
    tokens = rng.integers(0, 50_000, blocks * LAYOUT.block_tokens).tolist()
    return tuple(block_keys(of.fingerprint.digest, chain_hashes(tokens, LAYOUT.block_tokens)))


@dataclass(frozen=True, slots=True)
class Late:
    """An engine whose attachment has ended and that does not know it: it was stopped."""

    engine: Engine
    size: int
    promised: Promised
    writing: tuple[BlockRef, ...]


class Rounds:
    def __init__(self, cluster: LocalCluster, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._cluster, self._rng = cluster, random.Random(seed)
        self._engines: dict[tuple[str, int], Engine] = {}
        self._late: list[Late] = []

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            try:
                await self._step()
            except (KVServiceError, OSError):  # a shard was killed
                self.counts["refused"] += 1
            for place in [place for place, engine in self._engines.items() if engine.lost]:
                await self._leave(*place)
            self._be_late()
        for place in list(self._engines):
            await self._leave(*place)
        for late in self._late:
            late.engine.let_go()

    async def _step(self) -> None:
        node, cells, kind = self._rng.choice(self._cluster.nodes), self._rng.choice(CELLS), self._rng.random()
        if kind < 0.01:
            self._cluster.kill(node)
            await asyncio.to_thread(self._cluster.start_shard, node)
            self.counts["killed"] += 1
            return
        of = sized(cells)
        if (node, cells) not in self._engines:
            self._engines[node, cells] = await Engine.attach(ShardClient(self._cluster.socket(node)), of)
        engine, keys = self._engines[node, cells], prompt(of, self._rng.randrange(PROMPTS))
        if kind < 0.5:
            await self._store(engine, of.layout.payload_bytes, keys)
        elif kind < 0.97:
            promised, lease = await self._read(engine, of.layout.payload_bytes, keys)
            if promised and self._rng.random() < 0.3:
                await self._leave(node, cells, promised)
            elif lease:
                await engine.pool.release(engine.id, [lease])
        else:
            await self._leave(node, cells)

    async def _store(self, engine: Engine, size: int, keys: tuple[BlockKey, ...]) -> None:
        items = []
        for position, ref in enumerate(await engine.pool.reserve(engine.id, len(keys))):
            engine.segment.payload(ref.slot, size)[:] = content(keys[position], size)
            parent = keys[position - 1] if position else None
            items.append(SealItem(ref, keys[position], parent, position, span_route(keys, position)))
        statuses = await engine.pool.seal(engine.id, items) if items else []
        self.counts["stored"] += statuses.count(SealStatus.SEALED)

    async def _read(self, engine: Engine, size: int, keys: tuple[BlockKey, ...]) -> tuple[Promised, int]:
        result = await engine.acquire(keys, timeout=2.0)
        promised = tuple(zip(result.blocks, keys, strict=False))
        for ref, key in promised:
            assert is_read(engine, size, ref, key) or engine.lost, "a lease was not kept"
        self.counts["read"] += len(promised)
        return promised, result.lease_id

    async def _leave(self, node: str, cells: int, promised: Promised = ()) -> None:
        """It still reads what was promised, or it is in the middle of a write."""
        engine = self._engines.pop((node, cells))
        writing: tuple[BlockRef, ...] = ()
        try:
            if not engine.lost:
                if not promised:
                    writing = tuple(await engine.pool.reserve(engine.id, 4))
                await engine.pool.detach(engine.id)
        except (KVServiceError, OSError):  # its shard was killed
            self.counts["refused"] += 1
        await engine.pool.close()
        self._late.append(Late(engine, sized(cells).layout.payload_bytes, promised, writing))

    def _be_late(self) -> None:
        for late in self._late:
            for ref, key in late.promised:
                is_right = is_read(late.engine, late.size, ref, key)
                self.counts["late_right" if is_right else "late_refused"] += 1
            for ref in late.writing:  # a copy that is under way looks at no header
                late.engine.segment.payload(ref.slot, late.size)[:] = b"late" * (late.size // 4)
        writers = [late for late in self._late if late.writing]
        readers = [late for late in self._late if not late.writing]
        for some in (writers, readers):
            for late in some[:-LATE]:
                late.engine.let_go()
                self._late.remove(late)


def is_read(engine: Engine, size: int, ref: BlockRef, key: BlockKey) -> bool:
    """Read as an engine without digests does: what the headers let pass must be right."""

    def is_promised() -> bool:
        return is_as_promised(engine.segment.header_bytes(ref.slot), engine.attachment.epoch, ref, key, size)

    if not is_promised():
        return False
    data = bytes(engine.segment.payload(ref.slot, size))
    if not is_promised():
        return False
    assert data == content(key, size), f"wrong bytes of {key.hex()} in slot {ref.slot:#x}"
    return True


async def play(seed: int, steps: int) -> Counter[str]:
    with LocalCluster(2, 1, pool_bytes=POOL_BYTES, slab_bytes=MiB, lease_seconds=2.0, keep_segment=True) as cluster:
        rounds = Rounds(cluster, seed)
        await rounds.run(steps)
        for node in cluster.nodes:
            assert cluster.accounting(node).balanced, cluster.accounting(node)
            counters = cluster.stats(node).counters
            for name in ("slabs_moved", "blocks_adopted", "fetched_bytes", "slots_quarantined"):
                rounds.counts[name] += counters.get(name, 0)
        return rounds.counts


@pytest.mark.parametrize("seed", [1, 2])
async def test_what_headers_let_pass_is_right_where_slabs_move(seed: int) -> None:
    counts = await play(seed, STEPS)
    for name in ("read", "late_right", "late_refused", "slabs_moved", "killed", "blocks_adopted"):
        assert counts[name], f"this test saw nothing: {counts}"


if __name__ == "__main__":
    print(asyncio.run(play(int(sys.argv[1]), int(sys.argv[2]))))
