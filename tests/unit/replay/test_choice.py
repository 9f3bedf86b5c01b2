"""Rules of kvservice.replay.choice: the oracle is one, and the decision comes close to it."""

from __future__ import annotations

import pytest

from kvservice.replay.choice import Choices, compare_choices, known_prefixes
from kvservice.replay.trace import Request, key_of, trace_of

BLOCK_BYTES = 64 << 20
PREFILL = 8000.0  # a block of 512 tokens in 64 ms: break-even is a link of 1.05 GB/s
PREFIXES = [(1 + i % 20, 1 + i % 20 + i % 7) for i in range(3000)]


def compare(bytes_per_second: float) -> Choices:
    return compare_choices(PREFIXES, bytes_per_second, 0.002, BLOCK_BYTES, PREFILL)


@pytest.mark.parametrize("speed", [0.1e9, 0.5e9, 1e9, 1.5e9, 3e9, 12e9])
def test_the_oracle_is_never_slower_than_any_other_way(speed: float) -> None:
    """The others are each fixed way, and the decision."""
    found = compare(speed)
    assert found.oracle_seconds <= min(found.seconds, found.always_seconds, found.never_seconds) + 1e-9
    assert found.lost_share < 0.16, "near break-even a decision from the past is wrong now and then, but not by much"


def test_far_from_break_even_the_decision_is_the_oracles() -> None:
    assert compare(25e9).differ == 0
    slow = compare(0.1e9)
    assert slow.differ_share < 0.05 and slow.lost_share < 0.06, "only probes"
    assert slow.oracle_seconds == pytest.approx(slow.never_seconds)
    assert slow.always_seconds > 1.5 * slow.seconds


def test_the_same_seed_meets_the_same_link_and_engine() -> None:
    assert compare(1e9) == compare(1e9)
    other = compare_choices(PREFIXES, 1e9, 0.002, BLOCK_BYTES, PREFILL, seed=2)
    assert other.seconds != compare(1e9).seconds


def test_a_prefix_is_known_as_far_as_earlier_prompts_had_it() -> None:
    rows = [[1, 2, 3], [1, 2, 4], [5], [1, 2, 4, 3]]
    trace = trace_of("rows", [Request(float(i), tuple(map(key_of, row)), 512, 0) for i, row in enumerate(rows)])
    assert known_prefixes(trace) == [(2, 3), (4, 4)], "a block counts with what is before it, here by its id alone"
