"""The eviction history: bounded, the latest entry of a block counts, and old ones are not told."""

from __future__ import annotations

from kvservice.core.explain.evictions import KEEP_SECONDS, NAMES_MAX, Eviction, EvictionCause, EvictionHistory
from kvservice.testing.builders import make_chain

KEYS = make_chain(8)


def test_latest_eviction_of_a_block_is_told() -> None:
    history = EvictionHistory()
    history.add(KEYS[0], EvictionCause.PRESSURE, "first", 1.0)
    history.add(KEYS[1], EvictionCause.DRAIN, "", 2.0)
    history.add(KEYS[0], EvictionCause.SLAB_MOVED, "second", 3.0)
    assert history.find(KEYS, 4.0, 4.0) == {
        KEYS[0]: Eviction(EvictionCause.SLAB_MOVED, 3.0, "second"),
        KEYS[1]: Eviction(EvictionCause.DRAIN, 2.0, ""),
    }


def test_reason_of_an_eviction_is_kept() -> None:
    history = EvictionHistory(capacity=1)
    for reason in (7, 65_535):
        history.add(KEYS[0], EvictionCause.PRESSURE, "", 1.0, reason=reason)
        assert history.find(KEYS, 2.0, 2.0)[KEYS[0]].reason == reason


def test_full_history_forgets_the_oldest() -> None:
    history = EvictionHistory(capacity=3)
    for moment, key in enumerate(KEYS[:5]):
        history.add(key, EvictionCause.PRESSURE, "", float(moment))
    assert len(history) == 3
    assert set(history.find(KEYS, 5.0, 5.0)) == set(KEYS[2:5])


def test_latest_eviction_counts_where_the_ring_wraps() -> None:
    history = EvictionHistory(capacity=3)
    for moment, key in enumerate([KEYS[0], KEYS[1], KEYS[2], KEYS[1]]):
        history.add(key, EvictionCause.PRESSURE, str(moment), float(moment))
    assert history.find([KEYS[1]], 5.0, 5.0)[KEYS[1]].caused_by == "3"


def test_what_is_long_ago_is_not_told() -> None:
    history = EvictionHistory()
    history.add(KEYS[0], EvictionCause.PRESSURE, "", 0.0)
    assert history.find(KEYS, KEEP_SECONDS + 1, KEEP_SECONDS + 1) == {}


def test_names_are_bounded_too() -> None:
    history = EvictionHistory()
    for number in range(NAMES_MAX + 10):
        history.add(KEYS[number % 8], EvictionCause.PRESSURE, f"engine {number}", 0.0)
    assert history.find(KEYS, 1.0, 1.0)[KEYS[0]].caused_by == ""  # of the last round: no place was left for its name
