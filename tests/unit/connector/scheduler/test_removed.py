"""Blocks that were told as stored are told as removed once, when the pool has them no more."""

from __future__ import annotations

from kvservice.connector.scheduler.half import SchedulerHalf
from kvservice.connector.scheduler.request_terms import RequestTerms
from tests.unit.connector.line import BLOCK, Line, hashes, keys_of, pool_info, report, run_step

CHAIN = hashes(1, 3)


def half_that_tells(line: Line) -> SchedulerHalf:
    """Three blocks are stored, and told."""
    half = SchedulerHalf(
        line,
        keys_of,
        pool_info,
        block_tokens=BLOCK,
        worker_count=1,
        fetch_timeout_seconds=2.0,
        remember_stored=True,
    )
    half.on_new_request("r", CHAIN, 0.0, terms=RequestTerms(may_load=False))
    half.reported(report(run_step(half, "r", CHAIN, 3 * BLOCK)))
    assert [block.block_hash for block in half.take_stored()] == CHAIN
    assert half.take_removed() == []
    return half


def test_removed_block_is_told_once_in_the_engines_own_hash() -> None:
    line = Line()
    half = half_that_tells(line)
    line.gone = [keys_of(CHAIN)[1], keys_of(hashes(7, 1))[0]]
    assert half.take_removed() == [CHAIN[1]], "the other one was not this engine's"
    line.gone = [keys_of(CHAIN)[1]]
    assert half.take_removed() == []


def test_pool_that_is_gone_takes_every_told_block_with_it() -> None:
    line = Line()
    half = half_that_tells(line)
    line.gone = None
    assert half.take_removed() == CHAIN
    line.gone = None
    assert half.take_removed() == []


def test_after_a_reset_nothing_told_before_is_there() -> None:
    line = Line()
    half = half_that_tells(line)
    half.reset(b"term")
    assert half.take_removed() == CHAIN
