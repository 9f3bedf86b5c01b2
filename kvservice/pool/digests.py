"""Digests of slots, computed on threads: of blocks that an engine sealed, and of blocks that an earlier boot left."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvservice.aio import in_thread
from kvservice.core import events as ev
from kvservice.core.actions import Digest
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.header import SlotHeader
from kvservice.observe.failpoints import failpoint
from kvservice.observe.timings import Timings
from kvservice.pool.runtime_ports import MemoryPort
from kvservice.units import BlockKey, SlotIndex

THREADS = 2  # xxh3 reads at memory speed, so two threads use what a node can spare beside its engines
T = TypeVar("T")


class Digests:
    """Made and called on the pool's event loop. The coroutines that it returns are awaited there."""

    def __init__(self, segment: MemoryPort, timings: Timings, counters: Counter[str]) -> None:
        self._segment = segment
        self._timings = timings
        self._counters = counters
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvservice-digest")

    def of(self, digests: list[Digest]) -> list[Coroutine[None, None, list[ev.Digested]]]:
        """One coroutine for each thread's part of the work. A digest is None when the segment was closed meanwhile."""
        return [self._piece(batch) for batch in _shares(digests)]

    async def _piece(self, batch: list[Digest]) -> list[ev.Digested]:
        def compute() -> list[ev.Digested]:
            failpoint("shard.digest")
            began = time.perf_counter()
            events = [
                ev.Digested(work.slot, work.key, self._of(work.slot, work.payload_bytes, work.key)) for work in batch
            ]
            self._timings.add("digest_seconds", time.perf_counter() - began)
            return events

        self._counters["digested_bytes"] += sum(work.payload_bytes for work in batch)
        return await in_thread(compute, self._threads)

    async def verified(self) -> list[ev.Adopt]:
        """Every block in the segment, and whether its bytes match its header. Takes seconds for a large pool."""
        found = await asyncio.to_thread(lambda: list(self._segment.scan()))

        def verify(part: list[tuple[SlotIndex, int, SlotHeader]]) -> list[ev.Adopt]:
            failpoint("shard.adopt")
            events: list[ev.Adopt] = []
            for slot, payload_bytes, header in part:
                is_whole = header.is_stable and header.length == payload_bytes
                verified = is_whole and self._of(slot, payload_bytes, header.key) == header.digest
                events.append(ev.Adopt(slot, payload_bytes, header, verified))
            return events

        loop = asyncio.get_running_loop()
        work = [loop.run_in_executor(self._threads, verify, part) for part in _shares(found)]
        parts = await asyncio.gather(*work)
        return [event for part in parts for event in part]

    def shutdown(self) -> None:
        """Wait for the digests that are being computed. Blocks."""
        self._threads.shutdown()

    def _of(self, slot: SlotIndex, payload_bytes: int, key: BlockKey) -> int | None:
        try:
            return digest_payload(self._segment.payload(slot, payload_bytes), key)
        except (ValueError, BufferError):  # the segment was closed while this ran: the pool is shutting down
            return None


def _shares(work: list[T]) -> list[list[T]]:
    half = len(work) // THREADS + 1
    return [work[start : start + half] for start in range(0, len(work), half)]
