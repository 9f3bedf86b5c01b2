"""Blocks that are found by a name alone: what is stored comes back, elsewhere too, and nothing else does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvservice.api.layout import Layout
from kvservice.api.named import NamedBlocks, PromisedBlock
from kvservice.session.options import Mode, PoolOptions
from kvservice.testing.eventually import eventually
from kvservice.units import KiB, MiB

LAYOUT = Layout(block_tokens=16, shape=(4 * KiB,), dtype="uint8")
SECONDS = 5.0  # for blocks that are here at once


def opened(**changes: Any) -> NamedBlocks:
    options = PoolOptions(mode=Mode.EMBEDDED, memory=8 * MiB)
    given: dict[str, Any] = {"identity": {"weights": "w1"}, "namespace": "test", "check_digests": True, **changes}
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
    assert blocks.put(names, stored).result() == 3
    unknown, third, first = held(blocks, [b"unknown", names[2], names[0]])
    assert unknown is None and third is not None and first is not None
    targets = np.zeros((2, *LAYOUT.shape), np.uint8)
    assert blocks.read([third, first], list(targets)).result() == [True, True]
    assert np.array_equal(targets, stored[[2, 0]]) and leases(blocks) == 2 and not third.was_fetched
    blocks.release([third, first])
    eventually(lambda: leases(blocks) == 0, "the leases are given back")


def test_what_is_stored_again_counts_as_stored(blocks: NamedBlocks) -> None:
    names = [b"a" * 32, b"b" * 32]
    assert blocks.put(names[:1], some(1)).result() == 1
    assert blocks.put(names, some(2)).result() == 2


def test_a_full_pool_stores_the_leading_blocks() -> None:
    blocks = opened(layout=Layout(block_tokens=16, shape=(500 * KiB,), dtype="uint8"))
    try:
        names = [os.urandom(32) for _ in range(40)]
        promised = []
        for name in names:
            if not blocks.put([name], [np.zeros(500 * KiB, np.uint8)]).result():
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
    target = np.zeros(LAYOUT.shape, np.uint8)
    swapped = PromisedBlock(promised.mapped, promised.key, other.ref, promised.result)
    assert blocks.read([swapped], [target]).result() == [False]
    promised.mapped._segment.payload(promised.ref.slot, 1)[0] ^= 1
    assert blocks.read([promised], [target]).result() == [False]
    promised.mapped.close()
    assert blocks.read([other], [target]).result() == [False]


def test_without_a_pool_nothing_is_found_or_stored() -> None:
    options = PoolOptions(mode=Mode.SERVICE, socket="/nowhere/shard.sock")
    blocks = NamedBlocks(options, "model", LAYOUT, {}, namespace="test")
    try:
        assert not blocks.is_attached and "no shard listens" in blocks.failure and blocks.mode == "service"
        assert held(blocks, [b"n"]) == [None] and blocks.put([b"n"], some(1)).result() == 0
    finally:
        blocks.close()
