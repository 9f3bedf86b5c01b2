"""Rules of kvservice.replay.optimum: no policy finds more, and it is really reached."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.replay.optimum import belady_hits
from kvservice.replay.trace import Request, Trace, key_of, trace_of

names = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), min_size=1, max_size=7)


def make(rows: list[list[int]]) -> Trace:
    return trace_of("tiny", [Request(float(i), tuple(map(key_of, row)), 512, 0) for i, row in enumerate(rows)])


def best_hits(trace: Trace, capacity: int, count_from: int) -> int:
    """Every way to keep or drop, tried."""
    reached: dict[frozenset[bytes], int] = {frozenset(): 0}
    for number, request in enumerate(trace.requests):
        for key in request.keys:
            found: dict[frozenset[bytes], int] = {}
            for held, hits in reached.items():
                score = hits + (key in held and number >= count_from)
                choice = held | {key}
                for size in range(min(capacity, len(choice)) + 1):
                    for kept in map(frozenset, combinations(choice, size)):
                        found[kept] = max(found.get(kept, 0), score)
            reached = found
    return max(reached.values())


@settings(max_examples=60)
@given(rows=names, capacity=st.integers(1, 3))
def test_the_optimum_is_what_trying_everything_finds(rows: list[list[int]], capacity: int) -> None:
    trace = make(rows)
    assert belady_hits(trace, capacity) == best_hits(trace, capacity, 0)


def test_warm_up_requests_are_not_counted_but_keep_blocks() -> None:
    trace = make([[1, 2], [1, 2], [1, 3]])
    assert belady_hits(trace, 2) == 3
    assert belady_hits(trace, 2, count_from=2) == 1


def test_with_room_for_everything_only_first_times_miss() -> None:
    trace = make([[1, 2, 3], [1, 2, 4], [1, 5], [1, 2, 3]])
    assert belady_hits(trace, 100) == trace.block_count - trace.unique_count
