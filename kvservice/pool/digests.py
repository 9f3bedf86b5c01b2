"""Digests of slots, computed on threads: of blocks that an engine sealed, and of blocks that an earlier boot left."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from kvservice.core import events as ev
from kvservice.core.actions import Digest
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.header import SlotHeader
from kvservice.observe.failpoints import failpoint
from kvservice.observe.timings import Timings
from kvservice.pool.runtime_ports import MemoryPort
from kvservice.units import BlockKey, SlotIndex, div_ceil

THREADS = 2  # xxh3 reads at memory speed, so two threads use what a node can spare beside its engines
DIGESTED_MAX = 16  # of one event: the core takes less than a millisecond for them, tiers included
T = TypeVar("T")


class Digests:
    """Made and called on the pool's event loop."""

    def __init__(self, segment: MemoryPort, timings: Timings, counters: Counter[str]) -> None:
        self._segment = segment
        self._timings = timings
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="kvservice-digest")

    def begin(self, digests: Sequence[Digest], answer: Callable[[ev.Digested], None]) -> None:
        """Compute them on both threads. `answer` is called on the loop, for DIGESTED_MAX blocks at a time at most."""
        for batch in _shares(digests):
            self._counters["digested_bytes"] += sum(work.payload_bytes for work in batch)
            # without a task: an engine waits for the thread to start, and each turn of the loop holds it up
            try:
                future = self._loop.run_in_executor(self._threads, self._compute, batch)
            except RuntimeError:  # the interpreter shuts down, and its threads take no more work
                future = self._loop.create_future()
                future.set_result(self._compute(batch))
            future.add_done_callback(partial(_answer, answer))

    def _compute(self, batch: Sequence[Digest]) -> list[ev.Digested]:
        failpoint("shard.digest")
        began = time.perf_counter()
        found = [
            ev.SlotDigest(work.slot, work.key, self._of(work.slot, work.payload_bytes, work.key)) for work in batch
        ]
        self._timings.add("digest_seconds", time.perf_counter() - began)
        starts = range(0, len(found), DIGESTED_MAX)
        return [ev.Digested(tuple(found[start : start + DIGESTED_MAX])) for start in starts]

    async def verified(self) -> list[ev.Adopt]:
        """Every block in the segment, and whether its bytes match its header. Takes seconds for a large pool."""
        found = await asyncio.to_thread(lambda: list(self._segment.scan()))

        def verify(part: Sequence[tuple[SlotIndex, int, SlotHeader]]) -> list[ev.Adopt]:
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


def _answer(answer: Callable[[ev.Digested], None], future: asyncio.Future[list[ev.Digested]]) -> None:
    for event in future.result():
        answer(event)


def _shares(work: Sequence[T]) -> list[Sequence[T]]:
    half = max(div_ceil(len(work), THREADS), 1)
    return [work[start : start + half] for start in range(0, len(work), half)]
