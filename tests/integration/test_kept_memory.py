"""A shard that keeps its memory over a restart, in a service where something was cleared before."""

from __future__ import annotations

import asyncio
import signal
import time

from kvservice.client.operator import OperatorClient
from kvservice.core.block.marks import Mark, MarkKind
from kvservice.pool.mark_files import CLEAR_AGAIN_SECONDS
from kvservice.testing.cluster import LocalCluster
from kvservice.units import MiB
from tests.integration.engine import attached, chain
from tests.integration.test_two_nodes import leave

BLOCKS = 8


async def test_kept_memory_outlives_the_word_of_a_clear_before() -> None:
    """The other node tells of the clear, which is older than the blocks. Since the restart nobody knows their age, so
    no other node would keep them: it is given none to read."""
    keys, mark = chain(1, BLOCKS), Mark(MarkKind.EVERYTHING, time.time() - 2 * CLEAR_AGAIN_SECONDS)
    with LocalCluster(2, 1, keep_segment=["n0"], pool_bytes=16 * MiB, mirror_bytes=0) as cluster:
        operator = OperatorClient()
        for node in cluster.nodes:
            await operator.clear(cluster.record(node).peer_address, [mark])
        await operator.close()
        engine = await attached(cluster.socket("n0"))
        await engine.store(keys)
        await asyncio.to_thread(cluster.kill, "n0", signal.SIGTERM)
        await leave(engine)
        await asyncio.to_thread(cluster.start_shard, "n0")
        engine = await attached(cluster.socket("n0"))
        assert len((await engine.read_all(keys)).blocks) == BLOCKS
        await leave(engine)
        await asyncio.to_thread(cluster.wait_until_known, keys)
        reader = await attached(cluster.socket("n1"))
        assert len((await reader.read_all(keys)).blocks) == 0
        counters = cluster.stats("n1").counters
        assert counters["fetches_started"] and not counters.get("fetched_bytes", 0)
        await leave(reader)
