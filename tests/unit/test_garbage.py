"""What the garbage collector looks at in a process of ours."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from kvservice.garbage import (
    EVERYTHING_SECONDS,
    IDLE_SHARE,
    LOOK_SECONDS,
    THRESHOLDS,
    IdleLook,
    _freeze,
    collect_everything,
    keep_tables,
)


class Node:
    """Refers to itself, if told to."""


@pytest.fixture
def frozen() -> Iterator[list[int]]:
    """How many objects each full collection moved out of its way."""
    thresholds, found, before = gc.get_threshold(), [], 0

    def note(phase: str, about: dict[str, int]) -> None:
        nonlocal before
        if phase == "stop" and about["generation"] == 2:
            found.append(gc.get_freeze_count() - before)
            before = gc.get_freeze_count()

    keep_tables()
    before = gc.get_freeze_count()
    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.callbacks.remove(_freeze)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_a_full_collection_looks_at_what_is_new_only(frozen: list[int]) -> None:
    table = {number: [number] for number in range(200_000)}
    assert len(frozen) >= 3, "no full collection came"
    most = THRESHOLDS[0] * (THRESHOLDS[1] + 1) * (THRESHOLDS[2] + 2)
    assert max(frozen) <= most, f"{frozen} objects were looked at"
    assert sum(frozen) > len(table) / 2


def test_cycles_that_come_later_are_still_found(frozen: list[int]) -> None:
    nodes = [Node() for _ in range(100)]
    for node in nodes:
        node.me = node  # type: ignore[attr-defined]
    gone = [weakref.ref(node) for node in nodes]
    del nodes, node
    kept = [[number] for number in range(120_000)]
    assert len(frozen) >= 1
    assert not any(reference() for reference in gone)
    assert len(kept) == 120_000


def test_what_is_frozen_is_freed_when_nobody_has_it(frozen: list[int]) -> None:
    node = Node()
    gone = weakref.ref(node)
    gc.collect()
    del node
    assert gone() is None


def test_it_may_be_called_again(frozen: list[int]) -> None:
    keep_tables()
    assert gc.callbacks.count(_freeze) == 1


def test_a_cycle_that_was_frozen_alive_is_freed_when_idle(frozen: list[int]) -> None:
    node = Node()
    node.me = node  # type: ignore[attr-defined]
    gone = weakref.ref(node)
    gc.collect()
    del node
    gc.collect()
    assert gone() is not None, "it is out of the collector's way"
    collect_everything()
    assert gone() is None
    assert gc.get_freeze_count() > 0


def test_everything_is_collected_when_idle_and_hourly_at_most() -> None:
    look, now, cpu, found = IdleLook(0.0, 0.0), 0.0, 0.0, []
    for minute in range(200):
        now += LOOK_SECONDS
        cpu += LOOK_SECONDS * (IDLE_SHARE * 2 if 50 <= minute < 100 else IDLE_SHARE / 2)
        if look.is_due(now, cpu):
            found.append(now)
    assert found == [101 * LOOK_SECONDS, 101 * LOOK_SECONDS + EVERYTHING_SECONDS]
