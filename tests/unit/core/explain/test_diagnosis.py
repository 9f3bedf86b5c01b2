"""The reason given for each block: from the shard's record, from what nodes say now, and from the engine's report."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kvservice.core.explain.diagnosis import (
    BlockHistory,
    BlockOutcome,
    Evidence,
    MissCause,
    RecordedRequest,
    count_outcomes,
    diagnose,
)
from kvservice.core.explain.records import SourceRun
from kvservice.core.messages import MissReason, RequestReport

REQUEST = RecordedRequest(
    "n0", 60.0, 4, 0, 2, (SourceRun(0, 1, "local"), SourceRun(1, 1, "n1")), MissReason.NEVER_STORED, "", True, None
)
NOTHING = Evidence({}, {})


def cause_of(
    request: RecordedRequest,
    *entries: BlockHistory,
    lost: BlockHistory | None = None,
    other_fingerprints: tuple[str, ...] = (),
) -> tuple[MissCause, str]:
    """Of block 2, the first that was missed."""
    evidence = Evidence({2: entries} if entries else {}, {} if lost is None else {2: lost}, other_fingerprints)
    diagnosis = next(one for one in diagnose(request, evidence) if one.start <= 2 < one.start + one.count)
    assert diagnosis.outcome is BlockOutcome.MISSED and diagnosis.miss_cause is not None
    return diagnosis.miss_cause, diagnosis.text


def test_every_block_is_explained_once_in_order() -> None:
    diagnoses = diagnose(replace(REQUEST, report=RequestReport("r", 4, 1, 1, 2)), NOTHING)
    assert [(one.start, one.count, one.outcome) for one in diagnoses] == [
        (0, 1, BlockOutcome.ENGINE),
        (1, 1, BlockOutcome.FETCHED),
        (2, 2, BlockOutcome.MISSED),
    ]
    assert diagnoses[1].node == "n1"
    assert count_outcomes(diagnoses) == {"engine": 1, "local": 0, "fetched": 1, "missed": 2}


def test_a_block_nobody_remembers_was_never_stored() -> None:
    assert cause_of(REQUEST)[0] is MissCause.NEVER_STORED


def test_an_eviction_names_node_time_and_cause() -> None:
    """It came before the request."""
    miss_cause, text = cause_of(REQUEST, BlockHistory("n1", "gone", 72.5, "pressure", "stores of M by engine ab"))
    assert miss_cause is MissCause.EVICTED
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
    _, text = cause_of(REQUEST, BlockHistory("n1", "gone", 72.5, cause, held_seconds=2000.0, idle_seconds=idle))
    assert text.endswith(f", {hint} would have kept it")


def test_an_eviction_by_worth_says_why_this_block_went() -> None:
    """How much larger a pool would have kept it follows from waiting, and worth does not go by waiting alone."""
    gone = BlockHistory("n1", "gone", 72.5, "pressure", "stores of M", idle_seconds=25.0, reason="it was worth least")
    _, text = cause_of(REQUEST, gone)
    assert text.endswith("to make room for stores of M, 25.0 s after its last use; it was worth least")


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ("corrupt", "node n1 found its bytes wrong 12.5 s before"),
        ("cleared", "node n1 cleared it 12.5 s before, as `kvservice clear` said"),
        ("aged", "node n1 dropped it 12.5 s before, because it was older than max_age_seconds"),
    ],
)
def test_what_made_room_for_nobody_is_said_in_words(cause: str, said: str) -> None:
    """No larger pool would have kept it."""
    found = cause_of(REQUEST, BlockHistory("n1", "gone", 72.5, cause, held_seconds=90.0, idle_seconds=20.0))
    assert found == (MissCause.EVICTED, said)


def test_a_block_sealed_meanwhile_was_not_sealed_yet() -> None:
    """Another engine sealed it."""
    asked = replace(REQUEST, engine="me")
    for entry in (BlockHistory("n1", "held", 59.0, engine="other"), BlockHistory("n1", "sealing", 0.0, engine="other")):
        miss_cause, text = cause_of(asked, entry)
        assert miss_cause is MissCause.NOT_SEALED_YET
        assert "engine other of node n1" in text
    ended = replace(asked, ended_age_seconds=50.0)
    assert cause_of(ended, BlockHistory("n1", "held", 55.0, engine="other"))[0] is MissCause.NOT_SEALED_YET
    begun_later = BlockHistory("n1", "held", 40.0, engine="other")  # after this request ended
    assert cause_of(ended, begun_later)[0] is MissCause.NEVER_STORED
    mine_first = (BlockHistory("n1", "held", 55.0, engine="other"), BlockHistory("n0", "held", 56.0, engine="me"))
    assert cause_of(ended, *mine_first)[0] is MissCause.NEVER_STORED


def test_what_the_request_stored_does_not_explain_its_miss() -> None:
    asked, mine = replace(REQUEST, engine="me", ended_age_seconds=50.0), BlockHistory("n0", "held", 59.0, engine="me")
    miss_cause, text = cause_of(asked, mine)
    assert miss_cause is MissCause.NEVER_STORED and text.endswith("; the engine that asked has stored it since")
    copy = BlockHistory("n1", "held", 40.0)
    assert cause_of(asked, mine, copy)[0] is MissCause.NEVER_STORED
    evicted = BlockHistory("n0", "gone", 70.0, "pressure", "stores of M", held_seconds=10.0, idle_seconds=5.0)
    assert cause_of(asked, mine, evicted)[0] is MissCause.EVICTED
    assert cause_of(asked, mine, lost=BlockHistory("n2", "gone", 80.0, "owner_died"))[0] is MissCause.OWNER_GONE


def test_of_two_ends_of_a_block_the_later_counts() -> None:
    evicted, lost = BlockHistory("n1", "gone", 90.0, "pressure"), BlockHistory("n2", "gone", 80.0, "owner_died")
    assert cause_of(REQUEST, evicted, lost=lost)[0] is MissCause.OWNER_GONE
    assert cause_of(REQUEST, evicted, lost=replace(lost, age_seconds=95.0))[0] is MissCause.EVICTED


def test_a_block_evicted_later_was_there_when_it_was_asked_for() -> None:
    entry = BlockHistory("n1", "gone", 3.0, "pressure", held_seconds=80.0)
    assert cause_of(REQUEST, entry)[0] is MissCause.NOT_ANNOUNCED
    stored_later = replace(entry, held_seconds=20.0)  # after the question
    assert cause_of(REQUEST, stored_later)[0] is MissCause.NEVER_STORED


def test_evictions_of_one_reason_are_one_whatever_their_times() -> None:
    entries = {
        2 + i: [BlockHistory("n1", "gone", 90.0 + i, "pressure", "stores of M", idle_seconds=3.0 + i)] for i in range(2)
    }
    (diagnosis,) = diagnose(REQUEST, Evidence(entries, {}))[2:]
    assert (diagnosis.start, diagnosis.count, diagnosis.miss_cause) == (2, 2, MissCause.EVICTED)
    assert "30.0 s before" in diagnosis.text


@pytest.mark.parametrize(("node", "source"), [("n0", "local"), ("n1", "n1")])
def test_what_a_hand_off_brought_says_so_and_how_long_it_took(node: str, source: str) -> None:
    runs = (SourceRun(0, 1, "local"), SourceRun(1, 1, source))
    asked = replace(REQUEST, runs=runs, handoff_node=node, handed_from=1, took_seconds=4.4)
    texts = [one.text for one in diagnose(asked, NOTHING)]
    assert texts[:2] == ["", f"handed off by node {node}, after 4.4 s"]
    assert MissCause.HANDOFF_ENDED is cause_of(asked)[0]
    late = replace(asked, miss=MissReason.DEADLINE)
    assert cause_of(late) == (MissCause.DEADLINE, f"node {node} did not hand it off within 4.4 s")
    elsewhere = replace(asked, runs=(SourceRun(0, 1, "local"), SourceRun(1, 1, "n7")))
    assert [one.text for one in diagnose(elsewhere, NOTHING)][1] == ""


def test_a_block_that_was_held_but_not_known_was_not_announced() -> None:
    assert cause_of(REQUEST, BlockHistory("n1", "held", 61.0))[0] is MissCause.NOT_ANNOUNCED


@pytest.mark.parametrize(("cause", "word"), [("drain", "left"), ("owner_died", "silent"), ("restarted", "restarted")])
def test_a_block_that_went_with_its_node_says_how(cause: str, word: str) -> None:
    miss_cause, text = cause_of(REQUEST, lost=BlockHistory("n2", "gone", 80.0, cause))
    assert miss_cause is MissCause.OWNER_GONE
    assert "n2" in text and word in text


def test_another_fingerprint_or_cache_salt_is_named_last() -> None:
    others = ("node n1 serves M with another one: dtype",)
    assert cause_of(REQUEST, other_fingerprints=others)[0] is MissCause.OTHER_FINGERPRINT
    salted = replace(REQUEST, report=RequestReport("r", 4, 0, 2, 2, salted=True))
    assert cause_of(salted)[0] is MissCause.OTHER_CACHE_SALT
    assert cause_of(salted, BlockHistory("n1", "gone", 80.0, "pressure"))[0] is MissCause.EVICTED


@pytest.mark.parametrize(
    ("miss", "miss_cause"),
    [
        (MissReason.DEADLINE, MissCause.DEADLINE),
        (MissReason.SLOWER_THAN_RECOMPUTE, MissCause.SLOWER_THAN_RECOMPUTE),
        (MissReason.LOOKUP_FAILED, MissCause.LOOKUP_FAILED),
        (MissReason.PEER_FAILED, MissCause.OWNER_GONE),
        (MissReason.STALE, MissCause.EVICTED),
        (MissReason.CORRUPT, MissCause.CORRUPT),
        (MissReason.WINDOW, MissCause.WINDOW),
        (MissReason.NO_ROOM, MissCause.NO_ROOM),
        (MissReason.DRAINING, MissCause.DRAINING),
        (MissReason.DETACHED, MissCause.NO_POOL),
    ],
)
def test_what_the_shard_knew_when_it_answered_counts(miss: MissReason, miss_cause: MissCause) -> None:
    asked = replace(REQUEST, miss=miss, miss_node="n1")
    assert cause_of(asked, BlockHistory("n1", "held", 90.0))[0] is miss_cause
    diagnoses = diagnose(
        asked, Evidence({2: [BlockHistory("n1", "held", 90.0)], 3: [BlockHistory("n1", "held", 90.0)]}, {})
    )
    assert (diagnoses[-1].start, diagnoses[-1].count) == (2, 2)  # the next would have come with it


@pytest.mark.parametrize("miss", MissReason)
def test_every_reason_of_a_shard_has_a_cause(miss: MissReason) -> None:
    assert cause_of(replace(REQUEST, miss=miss, miss_node="n1"))[0] in MissCause


def test_blocks_behind_the_first_gap_are_told_apart_from_it() -> None:
    evidence = Evidence({2: [BlockHistory("n1", "gone", 90.0, "pressure")], 3: [BlockHistory("n1", "held", 90.0)]}, {})
    assert [one.miss_cause for one in diagnose(REQUEST, evidence)[-2:]] == [MissCause.EVICTED, MissCause.BEHIND_A_GAP]


@pytest.mark.parametrize(
    ("report", "miss_cause"),
    [
        (RequestReport("r", 4, 0, 2, 4, load_failed=True), MissCause.LOAD_FAILED),
        (RequestReport("r", 4, 0, 0, 4, gave_up=True), MissCause.ENGINE_DID_NOT_WAIT),
        (RequestReport("r", 4, 0, 0, 4), MissCause.NOT_USED),
    ],
)
def test_what_the_engine_did_with_the_promise_counts(report: RequestReport, miss_cause: MissCause) -> None:
    first = diagnose(replace(REQUEST, report=report), NOTHING)[0]
    assert (first.count, first.outcome, first.miss_cause) == (2, BlockOutcome.MISSED, miss_cause)


def test_a_request_that_did_not_ask_says_so() -> None:
    asked = RecordedRequest(
        "n0", 1.0, 3, 0, 0, (), MissReason.NONE, "", False, RequestReport("r", 3, 1, 0, 2, asked=False)
    )
    assert [(one.outcome, one.miss_cause) for one in diagnose(asked, NOTHING)] == [
        (BlockOutcome.ENGINE, None),
        (BlockOutcome.MISSED, MissCause.NOT_ASKED),
    ]


def test_a_stale_block_is_explained_by_its_eviction() -> None:
    """The peer's answer says only that the block is gone; its history says why."""
    asked = replace(REQUEST, miss=MissReason.STALE, miss_node="n1")
    _, text = cause_of(asked, BlockHistory("n1", "gone", 72.5, "pressure"))
    assert text == "node n1 evicted it 12.5 s before"


def test_a_block_with_wrong_bytes_is_said_to_be_so() -> None:
    _, text = cause_of(REQUEST, BlockHistory("n1", "gone", 72.5, "corrupt"))
    assert text == "node n1 found its bytes wrong 12.5 s before"


@pytest.mark.parametrize(
    ("miss", "miss_cause", "text"),
    [
        (MissReason.SLOWER_THAN_RECOMPUTE, MissCause.SLOWER_THAN_RECOMPUTE, "the disk tier was measured to be slower"),
        (MissReason.STALE, MissCause.EVICTED, "the disk tier did not have it any more"),
        (MissReason.PEER_FAILED, MissCause.OWNER_GONE, "the disk tier failed to read it"),
        (MissReason.CORRUPT, MissCause.CORRUPT, "what the disk tier gave did not match"),
        (MissReason.TIER_NOT_OPEN, MissCause.TIER_NOT_OPEN, "the disk tier, which may have it, was not open"),
        (MissReason.TIER_NOT_ASKED, MissCause.TIER_NOT_ASKED, "the disk tier, which may have it, could not be"),
    ],
)
def test_a_miss_of_a_tier_names_the_tier(miss: MissReason, miss_cause: MissCause, text: str) -> None:
    found, said = cause_of(replace(REQUEST, miss=miss, miss_node="~disk"))
    assert found is miss_cause and text in said and "~" not in said


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        ("pressure", "which may have it, could not be asked: .*; node n1 evicted it 12.5 s before$"),
        ("restarted", "which may have it, could not be asked: .*; node n1 restarted without it$"),
    ],
)
def test_a_tier_that_may_have_it_is_named_before_its_loss(cause: str, text: str) -> None:
    """A larger pool would not have been needed, had the tier answered."""
    asked = replace(REQUEST, miss=MissReason.TIER_NOT_ASKED, miss_node="~objects")
    found, said = cause_of(asked, BlockHistory("n1", "gone", 72.5, cause))
    assert found is MissCause.TIER_NOT_ASKED and re.search(text, said)


@pytest.mark.parametrize("cause", ["cleared", "aged"])
def test_no_tier_may_have_what_was_dropped_everywhere(cause: str) -> None:
    asked = replace(REQUEST, miss=MissReason.TIER_NOT_ASKED, miss_node="~objects")
    assert cause_of(asked, BlockHistory("n1", "gone", 72.5, cause))[0] is MissCause.EVICTED
