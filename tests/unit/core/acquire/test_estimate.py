"""Rules of core.acquire.estimate: fetch what pays off, and never give a peer up for good."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.acquire.estimate import PROBE_BYTES, REFUSALS_MAX, FetchEstimate

BLOCK = 1000


def measured(bytes_per_second: float = 1000.0, overhead: float = 0.0) -> FetchEstimate:
    estimate = FetchEstimate()
    estimate.observe_pull(int(bytes_per_second * 8), 8.0)
    estimate.observe_overhead(overhead)
    return estimate


def test_an_unknown_peer_is_tried() -> None:
    assert FetchEstimate().worthwhile(7, BLOCK, recompute_seconds=1e-9, remaining_seconds=1e-9) == 7


def test_everything_is_fetched_when_it_is_faster_and_fits() -> None:
    assert measured().worthwhile(5, BLOCK, recompute_seconds=1.01, remaining_seconds=5.0) == 5


def test_slower_than_recompute_is_not_fetched() -> None:
    assert measured().worthwhile(5, BLOCK, recompute_seconds=0.99, remaining_seconds=100.0) == 0


def test_only_what_fits_the_time_left_is_fetched() -> None:
    assert measured().worthwhile(5, BLOCK, recompute_seconds=2.0, remaining_seconds=3.5) == 3
    assert measured(overhead=1.0).worthwhile(5, BLOCK, recompute_seconds=2.0, remaining_seconds=3.5) == 2
    assert measured(overhead=4.0).worthwhile(5, BLOCK, recompute_seconds=2.0, remaining_seconds=3.5) == 0


def test_overhead_counts_against_short_runs_only() -> None:
    estimate = measured(overhead=2.0)
    assert estimate.worthwhile(2, BLOCK, recompute_seconds=1.5, remaining_seconds=100.0) == 0
    assert estimate.worthwhile(10, BLOCK, recompute_seconds=1.5, remaining_seconds=100.0) == 10


def test_an_engine_of_unknown_speed_fetches_what_fits() -> None:
    assert measured().worthwhile(5, BLOCK, recompute_seconds=0.0, remaining_seconds=100.0) == 5


def test_after_many_refusals_one_fetch_is_tried() -> None:
    """A single slow sample, say of the first connection, would otherwise rule a peer out for ever."""
    estimate = measured(1.0)

    def ask() -> int:
        return estimate.worthwhile(5, BLOCK, recompute_seconds=0.001, remaining_seconds=1.0)

    for _ in range(2):
        assert [ask() for _ in range(REFUSALS_MAX)] == [0] * REFUSALS_MAX
        assert ask() == 5


def test_a_slow_link_is_tried_again_with_a_little() -> None:
    """It is tried as soon as that is cheap.

    At a link nearly as fast as recomputing, a stale estimate would cost far more than another sample."""
    block_bytes = PROBE_BYTES // 4
    close, slow = FetchEstimate(), FetchEstimate()
    close.observe_pull(block_bytes, 1.1)
    slow.observe_pull(block_bytes, 30.0)

    def refusals(estimate: FetchEstimate) -> int:
        for count in range(2 * REFUSALS_MAX):
            fetched = estimate.worthwhile(100, block_bytes, recompute_seconds=1.0, remaining_seconds=1e6)
            if fetched:
                assert fetched == 4, "a probe is only as large as a measurement needs"
                return count
        raise AssertionError("never tried again")

    assert refusals(close) == 2  # 4 × 1.1 s after 200 s of recomputing
    assert refusals(slow) == REFUSALS_MAX


def test_refusals_count_only_in_a_row() -> None:
    estimate = measured()
    for _ in range(3 * REFUSALS_MAX):
        assert estimate.worthwhile(5, BLOCK, recompute_seconds=0.5, remaining_seconds=9.0) == 0
        assert estimate.worthwhile(5, BLOCK, recompute_seconds=1.5, remaining_seconds=9.0) == 5


def test_a_changed_link_is_followed_within_a_handful_of_pulls() -> None:
    estimate = measured(1000.0)
    for _ in range(6):
        estimate.observe_pull(100_000, 1.0)
    assert estimate.bytes_per_second is not None
    assert estimate.bytes_per_second > 85_000


@pytest.mark.parametrize(("byte_count", "seconds"), [(0, 1.0), (1, 0.0), (1, -1.0)])
def test_impossible_samples_are_ignored(byte_count: int, seconds: float) -> None:
    estimate = FetchEstimate()
    estimate.observe_pull(byte_count, seconds)
    assert estimate.bytes_per_second is None


def test_a_clock_that_seems_to_go_back_is_no_negative_overhead() -> None:
    estimate = FetchEstimate()
    estimate.observe_overhead(-5.0)
    assert estimate.overhead_seconds == 0.0


@given(
    st.integers(1, 100),
    st.floats(0, 100),
    st.floats(-10, 100),
    st.floats(1, 1e9),
    st.floats(0, 10),
)
def test_the_answer_is_a_part_of_what_was_asked(
    count: int, recompute: float, remaining: float, speed: float, overhead: float
) -> None:
    estimate = measured(speed, overhead)
    answer = estimate.worthwhile(count, BLOCK, recompute, remaining)
    assert 0 <= answer <= count
    if answer and recompute and estimate.bytes_per_second:
        assert overhead + answer * BLOCK / estimate.bytes_per_second <= answer * recompute * 1.000001
