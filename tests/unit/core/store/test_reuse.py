"""Rules of core.store.reuse: credit follows what blocks do, and what is remembered is bounded."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.store import reuse
from kvservice.core.store.eviction import LeafFirstLru, LeafFirstReuse
from kvservice.core.store.reuse import KINDS, USES_MAX, ReuseMemory, kind_of
from kvservice.units import BlockKey


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def live(memory: ReuseMemory, shares: tuple[float, ...], blocks: int, wait: int = 100) -> None:
    """Blocks come, and are used again with the probability of their uses so far, `wait` ticks later."""
    noise = random.Random(1)
    for number in range(blocks):
        uses, tick = memory.on_insert(key(number), number), number
        while noise.random() < shares[kind_of(uses)]:
            uses, tick = memory.on_hit(uses, wait), tick + wait
        memory.on_evict(key(number), uses, tick, block_count=0)


def test_random_use_earns_nobody_credit_worth_mentioning() -> None:
    """There, use says nothing about the future."""
    memory = ReuseMemory(gone_min=100)
    live(memory, (0.5,) * KINDS, 40_000)
    assert max(memory.credits()) < 15, "of a wait of 100"


def test_credit_is_the_wait_times_the_difference_of_log_odds() -> None:
    memory = ReuseMemory(gone_min=100)
    live(memory, (0.2, 0.5, 0.6, 0.8, 0.8, 0.8), 60_000)
    wanted = [100 * (math.log(p / (1 - p)) - math.log(0.25)) for p in (0.2, 0.5, 0.6, 0.8, 0.8, 0.8)]
    found = memory.credits()
    assert found[:3] == pytest.approx(wanted[:3], abs=25)
    assert found[2] < found[3] < wanted[3], "what was seen rarely is drawn to the common share"
    assert len(found) == KINDS and kind_of(USES_MAX) == KINDS - 1


def test_blocks_that_return_less_than_new_are_not_punished() -> None:
    memory = ReuseMemory(gone_min=100)
    live(memory, (0.8, 0.1, 0.1, 0.1, 0.1, 0.1), 20_000)
    assert memory.credits() == (0,) * KINDS


def test_nothing_is_believed_before_something_was_lost_and_found() -> None:
    memory = ReuseMemory(gone_min=10)
    assert memory.credits() == (0,) * KINDS
    for number in range(10_000):
        memory.on_evict(key(number), 0, number, block_count=0)
    assert memory.credits() == (0,) * KINDS


def test_a_change_of_habits_is_followed() -> None:
    memory = ReuseMemory(gone_min=100)
    live(memory, (0.2, 0.7, 0.7, 0.7, 0.7, 0.7), 40_000)
    before = memory.credits()[1]
    for _ in range(12):
        live(memory, (0.5,) * KINDS, 40_000)
    assert before > 100 and memory.credits()[1] < 25


def test_a_block_that_comes_back_is_known_until_it_is_forgotten() -> None:
    memory = ReuseMemory(gone_min=0)
    memory.on_evict(key(1), 2, tick=5, block_count=0)
    assert memory.on_insert(key(1), tick=9) == 3
    assert memory.on_insert(key(1), tick=10) == 0, "it was taken out when it came"
    memory.on_evict(key(2), 1, tick=11, block_count=0)
    for number in range(1000, 1000 + 2 * reuse.GONE_FIRST):
        memory.on_evict(key(number), 0, tick=12, block_count=0)
    assert memory.on_insert(key(2), tick=13) == 0
    memory.check_invariants()


def test_no_more_is_remembered_than_the_bounds_say() -> None:
    memory = ReuseMemory(gone_min=3000)
    for number in range(30_000):
        memory.on_evict(key(number), 0, number, block_count=5000)
        assert len(memory._gone) + len(memory._gone_before) <= 2 * 5000
    memory.check_invariants()


@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "evict", "pin"]), st.integers(0, 9)), max_size=60))
def test_without_anything_learnt_both_policies_choose_alike(steps: list[tuple[str, int]]) -> None:
    policies = (LeafFirstReuse(), LeafFirstLru())
    held: set[int] = set()
    pinned: set[int] = set()
    for what, number in steps:
        chosen = {policy.victim(1) for policy in policies}
        assert len(chosen) == 1
        for policy in policies:
            if what == "add" and number not in held:
                policy.add(
                    key(number),
                    key(number - 1) if number % 3 else None,
                    number % 3,
                    0.0,
                    is_secondary=False,
                    size_class=1,
                )
            elif what == "touch":
                policy.touch([key(number - number % 3 + i) for i in range(3)], 0.0)
            elif what == "pin" and number in held:
                (policy.unpin if number in pinned else policy.pin)([key(number)])
            elif what == "evict" and (victim := policy.victim(1)) is not None:
                policy.remove(victim)
            policy.check_invariants()
        if what == "add":
            held.add(number)
        elif what == "pin" and number in held:
            pinned ^= {number}
        elif what == "evict" and (gone := chosen.pop()) is not None:
            held.discard(int.from_bytes(gone, "big"))


def test_hits_of_a_chain_count_as_those_of_its_blocks() -> None:
    together, alone = ReuseMemory(), ReuseMemory()
    for number in range(400):
        for memory in (together, alone):
            memory.on_evict(key(number), number % 3, number, 100)
        uses = [number % 5, 31, 4]
        hits = [0] * KINDS
        for count in uses:
            hits[kind_of(count)] += 1
            alone.on_hit(count, 7)
        together.on_hits(hits, 7 * len(uses))
        assert together.credits() == alone.credits()
