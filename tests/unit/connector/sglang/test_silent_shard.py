"""Beside a shard that hangs SGLang waits once, and uses it again as soon as it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from kvservice.api.pool_thread import PoolThread
from kvservice.api.program import AttachedProgram
from kvservice.api.silence import SILENT_SECONDS
from kvservice.connector.sglang import page_pool
from kvservice.core.messages import AcquireRequest, AcquireResult, Attachment, SealItem, SealStatus
from kvservice.testing.eventually import eventually
from tests.unit.connector.sglang.host_memory import (
    PROMPT,
    HostMemory,
    LatentMemory,
    page_hashes,
    places,
    storage,
    wanted,
)


def test_a_silent_shard_costs_one_call_its_time(thread: PoolThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of stores and questions, on all pools. SGLang ends itself when it is flushed while a call takes 10 s."""
    memory, pages = HostMemory(), page_hashes(PROMPT)
    made = storage(memory, thread=thread)
    made.register("mamba", LatentMemory(), places([0]))
    (program, _), ask, asked = thread.attached, AttachedProgram.ask, 0

    async def seal(attachment: Attachment, items: Sequence[SealItem]) -> list[SealStatus]:
        await asyncio.sleep(60)
        return []

    async def counted(self: AttachedProgram, attachment: Attachment, request: AcquireRequest) -> AcquireResult | None:
        nonlocal asked
        asked += 1
        return await ask(self, attachment, request)

    monkeypatch.setattr(page_pool, "STORE_SECONDS", 2 * SILENT_SECONDS)
    monkeypatch.setattr(AttachedProgram, "ask", counted)
    began = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(program.session, "store", seal)
        assert made.store([], wanted(pages, [0, 1, 2, 3, 4, 5])) == [False] * 6
    assert 2 * SILENT_SECONDS <= time.monotonic() - began < 5
    assert made.store([], wanted(pages, [0, 1, 2, 3, 4, 5], "mamba")) == [False] * 6
    assert made.find([], pages) == 0 and not asked
    assert (made.counters["dropped_unavailable"], made.counters["missed_unavailable"]) == (12, 6)
    eventually(lambda: all(made.store([], wanted(pages, [0, 1, 2, 3, 4, 5]))), "the shard is tried again")
    assert made.find([], pages) == 6


def test_what_is_not_stored_anyway_tries_no_silent_shard(thread: PoolThread) -> None:
    """Else nobody would learn for seconds that the shard answers again."""
    pages = page_hashes(PROMPT)
    made = storage(HostMemory(), thread=thread)
    assert made.store([], wanted(pages, [0, 1, 2, 3, 4, 5])) == [True] * 6
    made._pools["kv"]._refused.put(pages[0], True)
    made._silence._breaker.failed(-10.0)  # long ago: the next call tries
    assert made.store([], wanted(pages, [0, 1, 2, 3, 4, 5])) == [True] * 6
    assert made.counters["dropped_not_admitted"] == 6
    assert made.find([], pages) == 6
