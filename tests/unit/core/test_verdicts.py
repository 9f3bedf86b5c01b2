"""The reason given for each block: from the shard's record, from what nodes say now, and from the engine's report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvservice.core.explain.diagnosis import Asked, Facts, Fate, Outcome, Why, counts, judge
from kvservice.core.explain.records import SourceRun
from kvservice.core.messages import MissReason, RequestReport

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


@pytest.mark.parametrize(
    ("cause", "idle", "hint"),
    [
        ("pressure", 25.0, "25.0 s after its last use; at that rate a pool about 1.5 times as large"),
        ("slab_moved", 0.5, "0.5 s after its last use; at that rate a pool more than 10 times as large"),
        ("quota", 12.5, "12.5 s after its last use; at that rate a quota about 2.0 times as large"),
        ("pressure", 1250.0, "21 min after its last use; a slightly larger pool"),
    ],
)
def test_an_eviction_says_what_would_have_kept_the_block(cause: str, idle: float, hint: str) -> None:
    _, text = why_of(ASKED, Fate("n1", "gone", 72.5, cause, held_seconds=2000.0, idle_seconds=idle))
    assert text.endswith(f", {hint} would have kept it")


def test_a_block_that_another_engine_sealed_meanwhile_was_not_sealed_yet() -> None:
    asked = replace(ASKED, engine="me")
    for fate in (Fate("n1", "held", 59.0, engine="other"), Fate("n1", "sealing", 0.0, engine="other")):
        why, text = why_of(asked, fate)
        assert why is Why.NOT_SEALED_YET
        assert "engine other of node n1" in text
    ended = replace(asked, ended_age_seconds=50.0)
    assert why_of(ended, Fate("n1", "held", 55.0, engine="other"))[0] is Why.NOT_SEALED_YET
    assert why_of(ended, Fate("n1", "held", 40.0, engine="other"))[0] is Why.NEVER_STORED  # begun after this one ended
    mine_first = (Fate("n1", "held", 55.0, engine="other"), Fate("n0", "held", 56.0, engine="me"))
    assert why_of(ended, *mine_first)[0] is Why.NEVER_STORED


def test_what_the_request_stored_itself_is_no_answer_to_why_it_missed() -> None:
    asked, mine = replace(ASKED, engine="me", ended_age_seconds=50.0), Fate("n0", "held", 59.0, engine="me")
    why, text = why_of(asked, mine)
    assert why is Why.NEVER_STORED and text.endswith("; the engine that asked has stored it since")
    copy = Fate("n1", "held", 40.0)
    assert why_of(asked, mine, copy)[0] is Why.NEVER_STORED
    evicted = Fate("n0", "gone", 70.0, "pressure", "stores of M", held_seconds=10.0, idle_seconds=5.0)
    assert why_of(asked, mine, evicted)[0] is Why.EVICTED
    assert why_of(asked, mine, lost=Fate("n2", "gone", 80.0, "owner_died"))[0] is Why.OWNER_GONE


def test_of_two_ends_of_a_block_the_later_counts() -> None:
    evicted, lost = Fate("n1", "gone", 90.0, "pressure"), Fate("n2", "gone", 80.0, "owner_died")
    assert why_of(ASKED, evicted, lost=lost)[0] is Why.OWNER_GONE
    assert why_of(ASKED, evicted, lost=replace(lost, age_seconds=95.0))[0] is Why.EVICTED


def test_a_block_that_was_evicted_after_the_request_was_there_when_it_asked() -> None:
    fate = Fate("n1", "gone", 3.0, "pressure", held_seconds=80.0)
    assert why_of(ASKED, fate)[0] is Why.NOT_ANNOUNCED
    assert why_of(ASKED, replace(fate, held_seconds=20.0))[0] is Why.NEVER_STORED  # stored after the question


def test_evictions_at_different_times_for_the_same_reason_are_one() -> None:
    fates = {2 + i: [Fate("n1", "gone", 90.0 + i, "pressure", "stores of M", idle_seconds=3.0 + i)] for i in range(2)}
    (verdict,) = judge(ASKED, Facts(fates, {}))[2:]
    assert (verdict.start, verdict.count, verdict.why) == (2, 2, Why.EVICTED)
    assert "30.0 s before" in verdict.text


@pytest.mark.parametrize(("node", "source"), [("n0", "local"), ("n1", "n1")])
def test_what_a_hand_off_brought_says_so_and_how_long_it_took(node: str, source: str) -> None:
    runs = (SourceRun(0, 1, "local"), SourceRun(1, 1, source))
    asked = replace(ASKED, runs=runs, handoff_node=node, handed_from=1, took_seconds=4.4)
    texts = [one.text for one in judge(asked, NOTHING)]
    assert texts[:2] == ["", f"handed off by node {node}, after 4.4 s"]
    assert Why.HANDOFF_ENDED is why_of(asked)[0]
    late = replace(asked, miss=MissReason.DEADLINE)
    assert why_of(late) == (Why.DEADLINE, f"node {node} did not hand it off within 4.4 s")
    elsewhere = replace(asked, runs=(SourceRun(0, 1, "local"), SourceRun(1, 1, "n7")))
    assert [one.text for one in judge(elsewhere, NOTHING)][1] == ""


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
