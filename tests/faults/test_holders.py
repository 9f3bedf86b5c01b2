"""Blocks that a node has lost since the directory named it as their holder."""

from __future__ import annotations

import pytest

from kvservice.core.acquire.pulls import LEASE_MARGIN_SECONDS
from kvservice.core.messages import MissReason
from kvservice.testing.builders import make_located, run_of
from tests.unit.core.acquire.test_fetch import CHAIN, OK, A, B, make, nothing_left

pytestmark = pytest.mark.faults


def test_what_one_holder_has_lost_since_is_asked_of_the_next() -> None:
    harness, engine = make()
    op = harness.acquire(engine, CHAIN)
    harness.resolved(op, run_of(0, 4, A, B))
    harness.located(harness.locates[0], make_located([CHAIN[0], CHAIN[1], None, CHAIN[3]]))
    assert (harness.locates[1].holder, harness.locates[1].keys) == (B, CHAIN[2:])
    harness.pulled(harness.pulls[0], OK)
    assert harness.open(op), "its prefix may still become whole"
    harness.located(harness.locates[1], make_located(CHAIN[2:]))
    harness.pulled(harness.pulls[1], OK)
    answer = harness.result(op)
    assert (len(answer.blocks), answer.miss) == (4, MissReason.NONE)
    nothing_left(harness)


def test_reading_stops_before_the_peers_lease_ends() -> None:
    harness, engine = make()
    op = harness.acquire(engine, CHAIN)
    harness.resolved(op, run_of(0, 4, A))
    harness.located(harness.locates[0], make_located(CHAIN, lease_seconds=7.0))
    assert harness.pulls[0].deadline <= harness.now + 7.0 - LEASE_MARGIN_SECONDS < harness.now + 7.0


def test_what_both_holders_have_lost_ends_the_prefix() -> None:
    harness, engine = make()
    op = harness.acquire(engine, CHAIN)
    harness.resolved(op, run_of(0, 4, A, B))
    harness.located(harness.locates[0], make_located([*CHAIN[:3], None]))
    harness.located(harness.locates[1], make_located([None]))
    harness.pulled(harness.pulls[0], OK)
    answer = harness.result(op)
    assert (len(answer.blocks), answer.miss, len(harness.locates)) == (3, MissReason.STALE, 2)
    nothing_left(harness)
