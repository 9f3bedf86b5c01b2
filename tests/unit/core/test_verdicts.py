"""The reason given for each block: from the shard's record, from what nodes say now, and from the engine's report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvservice.core.explain import SourceRun
from kvservice.core.messages import MissReason, RequestReport
from kvservice.core.verdicts import Asked, Facts, Fate, Outcome, Why, counts, judge

ASKED = Asked("n0", 60.0, 4, 0, 2, (SourceRun(0, 1, "local"), SourceRun(1, 1, "n1")), MissReason.NEVER_STORED, "",
              True, None)  # fmt: skip
NOTHING = Facts({}, {})


def why_of(asked: Asked, *fates: Fate, lost: Fate | None = None, strangers: tuple[str, ...] = ()) -> tuple[Why, str]:
    """Of block 2, the first that was missed."""
    facts = Facts({2: fates} if fates else {}, {} if lost is None else {2: lost}, strangers)
    verdict = next(one for one in judge(asked, facts) if one.start <= 2 < one.start + one.count)
    assert verdict.outcome is Outcome.MISSED and verdict.why is not None
    return verdict.why, verdict.text


def test_every_block_is_judged_once_in_order() -> None:
    verdicts = judge(replace(ASKED, report=RequestReport("r", 4, 1, 1, 2)), NOTHING)
    assert [(one.start, one.count, one.outcome) for one in verdicts] == [
        (0, 1, Outcome.ENGINE), (1, 1, Outcome.FETCHED), (2, 2, Outcome.MISSED),
    ]  # fmt: skip
    assert verdicts[1].node == "n1"
    assert counts(verdicts) == {"engine": 1, "local": 0, "fetched": 1, "missed": 2}


def test_a_block_nobody_remembers_was_never_stored() -> None:
    assert why_of(ASKED)[0] is Why.NEVER_STORED


def test_an_eviction_before_the_request_names_node_time_and_who_needed_the_room() -> None:
    why, text = why_of(ASKED, Fate("n1", "gone", 72.5, "pressure", "stores of M by engine ab"))
    assert why is Why.EVICTED
    assert text == "node n1 evicted it 12.5 s before, to make room for stores of M by engine ab"


def test_a_block_sealed_after_the_request_was_not_sealed_yet() -> None:
    assert why_of(ASKED, Fate("n1", "held", 59.0))[0] is Why.NOT_SEALED_YET
    assert why_of(ASKED, Fate("n1", "sealing", 0.0))[0] is Why.NOT_SEALED_YET
    assert why_of(ASKED, Fate("n1", "gone", 3.0, "pressure"))[0] is Why.NOT_SEALED_YET  # sealed and evicted since


def test_a_block_that_was_held_but_not_known_was_not_announced() -> None:
    assert why_of(ASKED, Fate("n1", "held", 61.0))[0] is Why.NOT_ANNOUNCED


@pytest.mark.parametrize(("cause", "word"), [("drain", "left"), ("owner_died", "silent"), ("restarted", "restarted")])
def test_a_block_that_went_with_its_node_says_how(cause: str, word: str) -> None:
    why, text = why_of(ASKED, lost=Fate("n2", "gone", 80.0, cause))
    assert why is Why.OWNER_GONE
    assert "n2" in text and word in text


def test_another_fingerprint_or_tenant_is_named_where_nothing_else_explains_it() -> None:
    assert why_of(ASKED, strangers=("node n1 serves M with another one: dtype",))[0] is Why.OTHER_FINGERPRINT
    salted = replace(ASKED, report=RequestReport("r", 4, 0, 2, 2, salted=True))
    assert why_of(salted)[0] is Why.OTHER_TENANT
    assert why_of(salted, Fate("n1", "gone", 80.0, "pressure"))[0] is Why.EVICTED


@pytest.mark.parametrize(
    ("miss", "why"),
    [
        (MissReason.DEADLINE, Why.DEADLINE),
        (MissReason.SLOWER_THAN_RECOMPUTE, Why.SLOWER_THAN_RECOMPUTE),
        (MissReason.LOOKUP_FAILED, Why.LOOKUP_FAILED),
        (MissReason.PEER_FAILED, Why.OWNER_GONE),
        (MissReason.STALE, Why.EVICTED),
        (MissReason.CORRUPT, Why.DISTRUSTED),
        (MissReason.NO_ROOM, Why.NO_ROOM),
        (MissReason.DRAINING, Why.DRAINING),
        (MissReason.DETACHED, Why.NO_POOL),
    ],
)
def test_what_the_shard_knew_when_it_answered_counts(miss: MissReason, why: Why) -> None:
    asked = replace(ASKED, miss=miss, miss_node="n1")
    assert why_of(asked, Fate("n1", "held", 90.0))[0] is why
    verdicts = judge(asked, Facts({2: [Fate("n1", "held", 90.0)], 3: [Fate("n1", "held", 90.0)]}, {}))
    assert (verdicts[-1].start, verdicts[-1].count) == (2, 2)  # the next would have come with it


def test_blocks_behind_the_first_gap_are_told_apart_from_it() -> None:
    facts = Facts({2: [Fate("n1", "gone", 90.0, "pressure")], 3: [Fate("n1", "held", 90.0)]}, {})
    assert [one.why for one in judge(ASKED, facts)[-2:]] == [Why.EVICTED, Why.BEHIND_A_GAP]


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (RequestReport("r", 4, 0, 2, 4, load_failed=True), Why.LOAD_FAILED),
        (RequestReport("r", 4, 0, 0, 4, gave_up=True), Why.ENGINE_DID_NOT_WAIT),
        (RequestReport("r", 4, 0, 0, 4), Why.NOT_USED),
    ],
)
def test_what_the_engine_did_with_the_promise_counts(report: RequestReport, why: Why) -> None:
    first = judge(replace(ASKED, report=report), NOTHING)[0]
    assert (first.count, first.outcome, first.why) == (2, Outcome.MISSED, why)


def test_a_request_that_had_no_pool_says_so() -> None:
    asked = Asked("n0", 1.0, 3, 0, 0, (), MissReason.NONE, "", False, RequestReport("r", 3, 1, 0, 2, asked=False))
    assert [(one.outcome, one.why) for one in judge(asked, NOTHING)] == [
        (Outcome.ENGINE, None), (Outcome.MISSED, Why.NO_POOL),
    ]  # fmt: skip
