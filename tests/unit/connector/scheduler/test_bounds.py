"""What the scheduler half remembers of blocks is bounded: what was noted first goes first."""

from __future__ import annotations

from typing import Any

import pytest

from kvservice.connector.scheduler import known_keys, near_eviction, recent_suspects, told
from kvservice.connector.scheduler.known_keys import KnownKeys
from kvservice.connector.scheduler.near_eviction import NearEviction
from kvservice.connector.scheduler.recent_suspects import RecentSuspects
from kvservice.connector.scheduler.request import EngineRequest
from kvservice.connector.scheduler.request_terms import RequestTerms
from kvservice.core.segment.refs import BlockRef
from kvservice.units import Generation, SlotIndex
from tests.unit.connector.line import BLOCK, Line, half, hashes, keys_of, plan_step, report

MOST = 4


def test_known_keys_forget_what_was_learnt_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_keys, "KNOWN_KEYS_MAX", MOST)
    known, keys = KnownKeys(), keys_of(hashes(1, MOST + 2))
    known.learn(keys[:MOST])
    known.learn(keys[:1])  # learnt again, so it is the newest
    known.learn(keys[MOST:])
    assert [key in known for key in keys] == [True, False, False, True, True, True]


def test_names_near_eviction_forget_what_was_noted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_eviction, "NAMES_MAX", MOST)
    chain = hashes(1, MOST + 2)
    nothing: Any = None
    near = NearEviction(nothing, nothing, 1)
    near.note(EngineRequest("r", keys_of(chain)), chain, len(chain))
    assert list(near._names) == chain[2:]


def test_blocks_told_of_beyond_the_bound_are_told_as_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "KNOWN_KEYS_MAX", MOST)
    line, chain = Line(), hashes(1, MOST + 2)
    scheduler = half(line, remember_stored=True)
    scheduler.on_new_request("r", chain, 0.0, terms=RequestTerms(may_load=False))
    plan = plan_step(scheduler, [("r", chain, len(chain) * BLOCK, lambda: range(9))])
    scheduler.reported(report(plan))
    gone, stored = scheduler.take_told()
    assert not gone and [block.block_hash for block in stored] == chain
    assert scheduler.take_told() == (chain[:2], [])


def test_suspects_beyond_the_bound_are_the_newest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_suspects, "SUSPECTS_MAX", MOST)
    suspects = RecentSuspects()
    for first in (0, MOST):
        suspects.add(BlockRef(SlotIndex(first + i), Generation(2)) for i in range(MOST))
    assert {ref.slot for ref in suspects.slots} == set(range(MOST, 2 * MOST))
