"""Blocks that are found by a name alone: what is stored comes back, elsewhere too, and nothing else does."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvservice.api.layout import Layout
from kvservice.api.named import ASKED_MAX, NamedBlocks, PromisedBlock
from kvservice.api.program import AttachedProgram
from kvservice.api.silence import SILENT_SECONDS
from kvservice.core.messages import AcquireRequest, AcquireResult, Attachment, SealItem, SealStatus
from kvservice.session.options import Mode, PoolOptions
from kvservice.testing.eventually import eventually
from kvservice.units import KiB, MiB

LAYOUT = Layout(block_tokens=16, shape=(4 * KiB,), dtype="uint8")
SECONDS = 5.0  # for blocks that are here at once


def opened(**changes: Any) -> NamedBlocks:
    options = PoolOptions(mode=Mode.EMBEDDED, memory=8 * MiB)
    given: dict[str, Any] = {"identity": {"weights": "w1"}, "namespace": "test", "verify": "full", **changes}
    return NamedBlocks(options, "model", given.pop("layout", LAYOUT), given.pop("identity"), **given)


@pytest.fixture
def blocks() -> Iterator[NamedBlocks]:
    made = opened()
    yield made
    made.close()


def some(count: int) -> Any:
    return np.random.default_rng(count).integers(0, 256, (count, *LAYOUT.shape), np.uint8)


def held(blocks: NamedBlocks, names: list[bytes]) -> list[PromisedBlock | None]:
    return blocks.hold(names, SECONDS).result()


def leases(blocks: NamedBlocks) -> int:
    runtime = blocks._thread._runtime
    assert runtime is not None
    return runtime.state.lease_count


def test_a_block_is_found_by_its_name_alone(blocks: NamedBlocks) -> None:
    names, stored = [os.urandom(32) for _ in range(3)], some(3)
    assert held(blocks, names) == [None] * 3
    assert blocks.put(names, stored).result() == [True] * 3
    unknown, third, first = held(blocks, [b"unknown", names[2], names[0]])
    assert unknown is None and third is not None and first is not None and leases(blocks) == 2
    blocks.release([third, first])
    eventually(lambda: leases(blocks) == 0, "the leases are given back")


def test_a_load_copies_what_is_held_and_what_is_not(blocks: NamedBlocks) -> None:
    names, stored = [os.urandom(32) for _ in range(3)], some(3)
    blocks.put(names, stored).result()
    (second,) = held(blocks, names[1:2])
    assert second is not None
    targets = np.zeros((4, *LAYOUT.shape), np.uint8)
    went = blocks.load([*names, b"unknown"], {names[1]: second}, list(targets), SECONDS).result()
    assert went == [True, True, True, False] and np.array_equal(targets[:3], stored)
    eventually(lambda: leases(blocks) == 0, "the leases are given back")


def test_what_is_stored_again_counts_as_stored(blocks: NamedBlocks) -> None:
    names = [b"a" * 32, b"b" * 32]
    assert blocks.put(names[:1], some(1)).result() == [True]
    assert blocks.put(names, some(2)).result() == [True, True]


def test_a_full_pool_stores_the_leading_blocks() -> None:
    blocks = opened(layout=Layout(block_tokens=16, shape=(500 * KiB,), dtype="uint8"))
    try:
        names = [os.urandom(32) for _ in range(40)]
        promised = []
        for name in names:
            if not all(blocks.put([name], [np.zeros(500 * KiB, np.uint8)]).result()):
                break
            promised += [each for each in held(blocks, [name]) if each is not None]
        assert 0 < len(promised) < len(names)  # held blocks are not evicted
        blocks.release(promised)
    finally:
        blocks.close()


def test_blocks_of_another_term_have_other_names(blocks: NamedBlocks) -> None:
    blocks.put([b"n"], some(1)).result()
    blocks.term = os.urandom(16)
    assert held(blocks, [b"n"]) == [None]


def test_a_broken_promise_is_not_read(blocks: NamedBlocks) -> None:
    """The slot was given to another block meanwhile, or its bytes are not those that were stored."""
    blocks.put([b"n", b"m"], some(2)).result()
    promised, other = held(blocks, [b"n", b"m"])
    assert promised is not None and other is not None
    target = [np.zeros(LAYOUT.shape, np.uint8)]
    swapped = PromisedBlock(promised.mapped, promised.key, other.ref, promised.result)
    assert blocks.load([b"n"], {b"n": swapped}, target, SECONDS).result() == [False]
    promised.mapped._segment.payload(promised.ref.slot, 1)[0] ^= 1
    assert blocks.load([b"n"], {}, target, SECONDS).result() == [False]
    promised.mapped.close()
    assert blocks.load([b"m"], {b"m": other}, target, SECONDS).result() == [False]


def test_blocks_share_the_time_of_a_question(blocks: NamedBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are. What is on this node is found, and a silent shard is not asked for each."""
    names, ask, asked, is_silent = [os.urandom(32) for _ in range(3 * ASKED_MAX)], AttachedProgram.ask, 0, False
    assert all(blocks.put(names, some(len(names))).result())

    async def slow(self: AttachedProgram, attachment: Attachment, request: AcquireRequest) -> AcquireResult | None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(request.timeout_seconds)
        return None if is_silent else await ask(self, attachment, replace(request, timeout_seconds=0.0))

    monkeypatch.setattr(AttachedProgram, "ask", slow)
    began = time.monotonic()
    promises = blocks.hold(names, 0.5).result()
    assert all(promises) and 0.5 <= time.monotonic() - began < 1.0
    blocks.release([promise for promise in promises if promise is not None])
    asked, is_silent = 0, True
    assert blocks.hold(names, 0.1).result() == [None] * len(names) and asked == ASKED_MAX


def test_a_silent_shard_costs_one_question_its_time(blocks: NamedBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind it are answered at once, and it is used again as soon as it answers."""
    name, asked = os.urandom(32), 0
    assert blocks.put([name], some(1)).result() == [True]

    async def silent(self: AttachedProgram, attachment: Attachment, request: AcquireRequest) -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(SILENT_SECONDS)

    with monkeypatch.context() as patched:
        patched.setattr(AttachedProgram, "ask", silent)
        assert [blocks.hold([name], SILENT_SECONDS).result() for _ in range(3)] == [[None]] * 3
    assert asked == 1

    def is_found() -> bool:
        (promise,) = held(blocks, [name])
        blocks.release([] if promise is None else [promise])
        return promise is not None

    eventually(is_found, "the shard is tried again")


def test_a_silent_shard_does_not_hold_up_a_store(blocks: NamedBlocks, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(attachment: Attachment, items: Sequence[SealItem]) -> list[SealStatus]:
        await asyncio.sleep(60)
        return []

    monkeypatch.setattr(blocks._program.session, "store", silent)
    assert blocks.put([b"n"], some(1), 0.1).result(30) == [False]


def test_without_a_pool_nothing_is_found_or_stored() -> None:
    options = PoolOptions(mode=Mode.SERVICE, socket="/nowhere/shard.sock")
    blocks = NamedBlocks(options, "model", LAYOUT, {}, namespace="test")
    try:
        assert not blocks.is_attached and "no shard listens" in blocks.failure and blocks.mode == "service"
        assert held(blocks, [b"n"]) == [None] and blocks.put([b"n"], some(1)).result() == [False]
    finally:
        blocks.close()
