"""The memory of blocks that are gone: bounded, the latest word counts, and old ones are not told."""

from __future__ import annotations

from kvservice.core.explain.evictions import CULPRITS_MAX, KEEP_SECONDS, Cause, Ghost, GhostTable
from kvservice.testing.builders import make_chain

KEYS = make_chain(8)


def test_the_latest_word_of_a_block_is_told() -> None:
    table = GhostTable()
    table.add(KEYS[0], Cause.PRESSURE, "first", 1.0)
    table.add(KEYS[1], Cause.DRAIN, "", 2.0)
    table.add(KEYS[0], Cause.SLAB_MOVED, "second", 3.0)
    assert table.find(KEYS, 4.0) == {
        KEYS[0]: Ghost(Cause.SLAB_MOVED, 3.0, "second"),
        KEYS[1]: Ghost(Cause.DRAIN, 2.0, ""),
    }


def test_a_full_table_forgets_the_oldest() -> None:
    table = GhostTable(capacity=3)
    for moment, key in enumerate(KEYS[:5]):
        table.add(key, Cause.PRESSURE, "", float(moment))
    assert len(table) == 3
    assert set(table.find(KEYS, 5.0)) == set(KEYS[2:5])


def test_the_latest_word_counts_also_where_the_ring_begins_anew() -> None:
    table = GhostTable(capacity=3)
    for moment, key in enumerate([KEYS[0], KEYS[1], KEYS[2], KEYS[1]]):
        table.add(key, Cause.PRESSURE, str(moment), float(moment))
    assert table.find([KEYS[1]], 5.0)[KEYS[1]].by == "3"


def test_what_is_long_ago_is_not_told() -> None:
    table = GhostTable()
    table.add(KEYS[0], Cause.PRESSURE, "", 0.0)
    assert table.find(KEYS, KEEP_SECONDS + 1) == {}


def test_names_are_bounded_too() -> None:
    table = GhostTable()
    for number in range(CULPRITS_MAX + 10):
        table.add(KEYS[number % 8], Cause.PRESSURE, f"engine {number}", 0.0)
    assert table.find(KEYS, 1.0)[KEYS[0]].by == ""  # of the last round: no place was left for its name
