"""Explains why a request hit what it hit, from its shard's record and from what all nodes know of the missing blocks.

Pure, and only for questions of people: `kvservice explain` gathers the evidence from all nodes and calls `diagnose`
once. Ages are seconds before the moment of the question. Each is measured on one clock, so ages of different nodes can
be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from kvservice.core.explain.evictions import EvictionCause
from kvservice.core.explain.records import LOCAL, TIER_MARK, SourceRun, place_name
from kvservice.core.messages import MissReason, RequestReport

CLOSE_SECONDS = 0.05  # two events on two nodes that are closer than this count as simultaneous
SLIGHTLY = 1.1  # a pool that would have to be at most so many times as large: "slightly larger"
LARGER_MAX = 10  # a larger factor is not told: it would look more exact than it is


class BlockOutcome(Enum):
    """Where a block of a request came from."""

    ENGINE = "engine"  # in the engine's own cache
    LOCAL = "local"  # in the pool of its node
    FETCHED = "fetched"  # from another node, or from a tier
    MISSED = "missed"  # computed again


class MissCause(Enum):
    """Why a block was missed. Values are stable: they are part of `kvservice explain -o json`."""

    NEVER_STORED = "never_stored"
    TIER_NOT_OPEN = "tier_not_open"
    TIER_NOT_ASKED = "tier_not_asked"
    OTHER_FINGERPRINT = "other_fingerprint"
    OTHER_CACHE_SALT = "other_cache_salt"
    NOT_SEALED_YET = "not_sealed_yet"
    NOT_ANNOUNCED = "not_announced"
    EVICTED = "evicted"
    OWNER_GONE = "owner_gone"
    BEHIND_A_GAP = "behind_a_gap"
    DEADLINE = "deadline"
    ENGINE_DID_NOT_WAIT = "engine_did_not_wait"
    SLOWER_THAN_RECOMPUTE = "slower_than_recompute"
    LOOKUP_FAILED = "lookup_failed"
    CORRUPT = "corrupt"
    WINDOW = "window"
    LOAD_FAILED = "load_failed"
    NO_ROOM = "no_room"
    QUOTA = "quota"
    DRAINING = "draining"
    NO_POOL = "no_pool"
    NOT_ASKED = "not_asked"
    NOT_USED = "not_used"
    HANDOFF_ENDED = "handoff_ended"


_OF_MISS = {
    MissReason.DEADLINE: MissCause.DEADLINE,
    MissReason.SLOWER_THAN_RECOMPUTE: MissCause.SLOWER_THAN_RECOMPUTE,
    MissReason.LOOKUP_FAILED: MissCause.LOOKUP_FAILED,
    MissReason.PEER_FAILED: MissCause.OWNER_GONE,
    MissReason.STALE: MissCause.EVICTED,
    MissReason.CORRUPT: MissCause.CORRUPT,
    MissReason.WINDOW: MissCause.WINDOW,
    MissReason.NO_ROOM: MissCause.NO_ROOM,
    MissReason.QUOTA: MissCause.QUOTA,
    MissReason.DRAINING: MissCause.DRAINING,
    MissReason.DETACHED: MissCause.NO_POOL,
}
_TEXT = {
    MissCause.NEVER_STORED: "no node had stored it, as far as anybody remembers",
    MissCause.BEHIND_A_GAP: "was there, but a prefix ends at its first missing block",
    MissCause.DEADLINE: "did not arrive within the time that recomputing would take",
    MissCause.ENGINE_DID_NOT_WAIT: "the answer came after the engine's own deadline",
    MissCause.SLOWER_THAN_RECOMPUTE: "fetching it was measured to be slower than recomputing",
    MissCause.LOOKUP_FAILED: "the lookup service did not answer",
    MissCause.WINDOW: "was there, but not the blocks of a sliding window, or the state, that go with it",
    MissCause.NO_ROOM: "no slot could be freed for it here",
    MissCause.QUOTA: "its tenant had all the slots that it may hold, or fill at once",
    MissCause.DRAINING: "the node's own shard was leaving",
    MissCause.NO_POOL: "the engine lost its shard while it asked",
    MissCause.NOT_ASKED: "the engine had no shard to ask, or loads no blocks for this request",
    MissCause.LOAD_FAILED: "was promised, but the load failed and everything was computed",
    MissCause.NOT_USED: "was promised, but the engine scheduled the request without it",
}
_OF_TIER = {
    MissCause.SLOWER_THAN_RECOMPUTE: "bringing it back from the {} was measured to be slower than recomputing",
    MissCause.EVICTED: "the {} did not have it any more when it was read",
    MissCause.OWNER_GONE: "the {} failed to read it",
    MissCause.CORRUPT: "what the {} gave did not match its digest",
    MissCause.TIER_NOT_OPEN: "no node had it, and the {}, which may have it, was not open: see `kvservice status`",
    MissCause.TIER_NOT_ASKED: "no node had it, and the {}, which may have it, could not be asked: it fails or owes an "
    "answer (see `kvservice status`), or was measured to be slower than recomputing",
}
_DROPPED = {  # evictions that made room for nobody
    EvictionCause.CORRUPT.value: "found its bytes wrong {} before",
    EvictionCause.CLEARED.value: "cleared it {} before, as `kvservice clear` said",
    EvictionCause.AGED.value: "dropped it {} before, because it was older than max_age_seconds",
}
_GONE_EVERYWHERE = (EvictionCause.CLEARED.value, EvictionCause.AGED.value)  # from tiers too
_SINCE = "; the engine that asked has stored it since"
_WITHOUT_TIER = {
    MissReason.TIER_NOT_OPEN: MissCause.TIER_NOT_OPEN,
    MissReason.TIER_NOT_ASKED: MissCause.TIER_NOT_ASKED,
}
_NEVER = (MissReason.NEVER_STORED, *_WITHOUT_TIER, MissReason.NONE)
_OF_NODE = {  # how a block was lost with its node
    EvictionCause.DRAIN.value: "left the service, and nobody took it over",
    EvictionCause.OWNER_DIED.value: "fell silent",
    EvictionCause.RESTARTED.value: "restarted without it",
}


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One record of a request, as its shard reports it."""

    node: str
    age_seconds: float
    block_count: int
    skip: int
    promised: int
    runs: tuple[SourceRun, ...]
    miss: MissReason
    miss_node: str
    answered: bool
    report: RequestReport | None
    found_until: int = 0  # the directory knew a holder of each block before this index
    engine: str = ""  # the engine that asked, as HistoryEntry.engine names it
    ended_age_seconds: float | None = None  # None: its engine has not reported the end
    took_seconds: float = 0.0
    handoff_node: str = ""  # the node whose engine computes the missing blocks; "" = no hand-off
    handed_from: int = 0  # with a hand-off: the request waited for the blocks from this index on


@dataclass(frozen=True, slots=True)
class BlockHistory:
    """What one node knows of one block."""

    node: str
    state: str  # "held", "sealing" or "gone"
    age_seconds: float  # since it was sealed, or evicted
    cause: str = ""
    caused_by: str = ""
    engine: str = ""  # the engine that stored it or is storing it; "" = fetched, adopted or not known
    held_seconds: float = 0.0  # for state "gone": how long it had been held
    idle_seconds: float = 0.0  # for state "gone": since its last use, at its eviction
    reason: str = ""  # for state "gone": why the policy chose it, in words; "" when it had waited longest

    def was_held(self, age_seconds: float) -> bool:
        """Whether the node held the block so long ago. It must have had it for CLOSE_SECONDS at least."""
        held_since = self.age_seconds + self.held_seconds
        still = self.state == "held" or (self.state == "gone" and self.age_seconds < age_seconds - CLOSE_SECONDS)
        return still and held_since > age_seconds + CLOSE_SECONDS


@dataclass(frozen=True, slots=True)
class Evidence:
    """What all nodes say about the blocks of a request, by their index in its chain."""

    entries: Mapping[int, Sequence[BlockHistory]]
    lost: Mapping[int, BlockHistory]  # blocks that the directory lost together with their node
    other_fingerprints: tuple[str, ...] = ()  # nodes with another fingerprint of the same model, and the differences


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`count` consecutive blocks with the same explanation."""

    start: int
    count: int
    outcome: BlockOutcome
    node: str = ""
    miss_cause: MissCause | None = None
    text: str = ""
    eviction_cause: str = ""  # value of core.explain.evictions.EvictionCause
    caused_by: str = ""  # of an eviction: who needed the room

    def continues(self, after: Diagnosis) -> bool:
        """Evictions are merged when their cause and `caused_by` are equal. The first block's times are told."""
        ours, theirs = (
            (d.outcome, d.node, d.miss_cause, d.eviction_cause, d.caused_by, "" if d.eviction_cause else d.text)
            for d in (self, after)
        )
        return ours == theirs


def diagnose(request: RecordedRequest, evidence: Evidence) -> tuple[Diagnosis, ...]:
    """Explain every block of the request, in order; consecutive blocks with the same explanation are merged."""
    diagnoses: list[Diagnosis] = []
    for index in range(request.block_count):
        diagnosis = _diagnose_block(request, evidence, index)
        last = diagnoses[-1] if diagnoses else None
        if last is not None and diagnosis.continues(last):
            diagnoses[-1] = replace(last, count=last.count + 1)
        else:
            diagnoses.append(diagnosis)
    return tuple(diagnoses)


def count_outcomes(diagnoses: Sequence[Diagnosis]) -> dict[str, int]:
    """The number of blocks by outcome."""
    found = {outcome.value: 0 for outcome in BlockOutcome}
    for diagnosis in diagnoses:
        found[diagnosis.outcome.value] += diagnosis.count
    return found


def _diagnose_block(request: RecordedRequest, evidence: Evidence, index: int) -> Diagnosis:
    report = request.report
    if index < (request.skip if report is None else max(report.engine_blocks, request.skip)):
        return Diagnosis(index, 1, BlockOutcome.ENGINE)
    if index < request.skip + request.promised:
        cause = _unused(report, index)
        if cause is not None:
            return _missed(index, cause)
        source = next((run.source for run in request.runs if run.start <= index < run.start + run.count), LOCAL)
        outcome, node = (BlockOutcome.LOCAL, "") if source == LOCAL else (BlockOutcome.FETCHED, source)
        handed = request.handoff_node == (node or request.node) and index >= request.handed_from
        return Diagnosis(index, 1, outcome, node, text=_handed(request) if handed else "")
    return _diagnose_miss(request, evidence, index)


def _unused(report: RequestReport | None, index: int) -> MissCause | None:
    """Why the engine did not load a block that it was promised."""
    if report is None:
        return None
    if report.gave_up:
        return MissCause.ENGINE_DID_NOT_WAIT
    if report.load_failed:
        return MissCause.LOAD_FAILED
    return None if index < report.engine_blocks + report.loaded_blocks else MissCause.NOT_USED


def _unanswered(report: RequestReport | None, index: int) -> Diagnosis:
    if report is None:
        return _missed(index, MissCause.DEADLINE)
    if not report.asked:
        return _missed(index, MissCause.NOT_ASKED)
    text = "its engine gave the question up before the answer, as when a client goes away"
    return _missed(index, MissCause.ENGINE_DID_NOT_WAIT, "", text)


def _diagnose_miss(request: RecordedRequest, evidence: Evidence, index: int) -> Diagnosis:
    if not request.answered:
        return _unanswered(request.report, index)
    if request.handoff_node and index >= request.handed_from and request.miss in (MissReason.DEADLINE, *_NEVER):
        return _not_handed(request, index)
    first = index == request.skip + request.promised
    certain = request.miss not in _NEVER
    if first and certain:
        return _known_reason(request, evidence, index)
    found = _from_history(request, evidence, index)
    would_have_come = found.miss_cause is MissCause.BEHIND_A_GAP or index < request.found_until
    if certain and would_have_come:
        return _known_reason(request, evidence, index)
    if first and found.miss_cause is MissCause.BEHIND_A_GAP:
        text = f"node {found.node} held it, but had not announced it yet"
        return _missed(index, MissCause.NOT_ANNOUNCED, found.node, text)
    return found


def _known_reason(request: RecordedRequest, evidence: Evidence, index: int) -> Diagnosis:
    """The diagnosis when the shard itself knew the reason at the time of its answer."""
    cause, node = _OF_MISS[request.miss], request.miss_node
    if node.startswith(TIER_MARK) and cause in _OF_TIER:
        return _missed(index, cause, node, _OF_TIER[cause].format(place_name(node)))
    if cause is MissCause.EVICTED:
        found = _from_history(request, evidence, index)
        if found.miss_cause is MissCause.EVICTED:
            return found
        text = f"node {node} had evicted or cleared it, or was about to, when it was read"
        return _missed(index, cause, node, text)
    if cause is MissCause.OWNER_GONE:
        return _missed(index, cause, node, f"node {node} held it and did not answer")
    if cause is MissCause.CORRUPT:
        return _missed(index, cause, node, f"what node {node} sent did not match its digest")
    return _missed(index, cause, node)


def _from_history(request: RecordedRequest, evidence: Evidence, index: int) -> Diagnosis:
    """The diagnosis from what the nodes say now about a block without a known holder at that time."""
    entries, age = evidence.entries.get(index, ()), request.age_seconds
    there = next((entry for entry in entries if entry.was_held(age)), None)
    if there is not None:
        return _missed(index, MissCause.BEHIND_A_GAP, there.node)
    ends = [entry for entry in entries if entry.state == "gone"]
    ends += [evidence.lost[index]] if index in evidence.lost else []
    ends = [entry for entry in ends if entry.age_seconds + CLOSE_SECONDS > age]
    last = min(ends, key=lambda entry: entry.age_seconds, default=None)
    if last is not None:
        found = _lost(index, last, age)
        without = None if last.cause in _GONE_EVERYWHERE else _WITHOUT_TIER.get(request.miss)
        if without is None:
            return found
        text = f"{_OF_TIER[without].format(place_name(request.miss_node))}; {found.text}"
        return replace(found, node=request.miss_node, miss_cause=without, text=text)
    later = [entry for entry in entries if entry.state != "gone" and entry.engine]
    first = max(later, key=lambda entry: entry.age_seconds, default=None)  # had it first after the request
    if first is not None and first.engine != request.engine and _was_beside(first, request):
        what = "is writing it just now" if first.state == "sealing" else "sealed it only after it was asked for"
        text = f"engine {first.engine} of node {first.node} {what}"
        return _missed(index, MissCause.NOT_SEALED_YET, first.node, text)
    if request.report is not None and request.report.salted:
        text = "no node stored it for this request's cache_salt; blocks of other salts are never shared"
        return _missed(index, MissCause.OTHER_CACHE_SALT, "", text)
    if evidence.other_fingerprints:
        text = f"never stored under this fingerprint; {evidence.other_fingerprints[0]}"
        return _missed(index, MissCause.OTHER_FINGERPRINT, "", text)
    without = _WITHOUT_TIER.get(request.miss)
    if without is not None:
        return _missed(index, without, request.miss_node, _OF_TIER[without].format(place_name(request.miss_node)))
    own = first is not None and first.engine == request.engine
    return _missed(index, MissCause.NEVER_STORED, "", _TEXT[MissCause.NEVER_STORED] + (_SINCE if own else ""))


def _lost(index: int, last: BlockHistory, age_seconds: float) -> Diagnosis:
    """How the last node that had the block lost it."""
    if last.cause in _OF_NODE:
        return _missed(index, MissCause.OWNER_GONE, last.node, f"node {last.node} {_OF_NODE[last.cause]}")
    text = _evicted(last, max(last.age_seconds - age_seconds, 0.0))
    return Diagnosis(
        index, 1, BlockOutcome.MISSED, last.node, MissCause.EVICTED, text, last.cause or "unknown", last.caused_by
    )


def _was_beside(entry: BlockHistory, request: RecordedRequest) -> bool:
    """Whether the block was sealed while the request was being computed: then two engines computed it at one time."""
    return request.ended_age_seconds is None or (
        entry.state == "held" and entry.age_seconds > request.ended_age_seconds - CLOSE_SECONDS
    )


def _handed(request: RecordedRequest) -> str:
    return f"handed off by node {request.handoff_node}, after {_seconds(request.took_seconds)}"


def _not_handed(request: RecordedRequest, index: int) -> Diagnosis:
    node, took = request.handoff_node, _seconds(request.took_seconds)
    if request.miss is MissReason.DEADLINE:
        return _missed(index, MissCause.DEADLINE, node, f"node {node} did not hand it off within {took}")
    return _missed(index, MissCause.HANDOFF_ENDED, node, f"the hand-off from node {node} ended after {took} without it")


def _evicted(entry: BlockHistory, before_seconds: float) -> str:
    """The text of an eviction: when and for whom, and why this block, or what would have prevented it."""
    if entry.cause in _DROPPED:
        return f"node {entry.node} {_DROPPED[entry.cause].format(_seconds(before_seconds))}"
    room = f", to make room for {entry.caused_by}" if entry.caused_by else ""
    if entry.cause == EvictionCause.QUOTA.value:
        room = ", for another block of the same tenant, which had its quota"
    slab = " of another block size" if entry.cause == EvictionCause.SLAB_MOVED.value else ""
    when = f"node {entry.node} evicted it {_seconds(before_seconds)} before{room}{slab}"
    if entry.idle_seconds <= 0:
        return when
    if entry.reason:
        return f"{when}, {_seconds(entry.idle_seconds)} after its last use; {entry.reason}"
    what = "quota" if entry.cause == EvictionCause.QUOTA.value else "pool"
    larger = _larger(what, entry.idle_seconds, before_seconds)
    return f"{when}, {_seconds(entry.idle_seconds)} after its last use; {larger}"


def _larger(what: str, idle_seconds: float, before_seconds: float) -> str:
    """Memory is used up in the order of use, so keeping blocks longer needs memory in proportion."""
    times = (idle_seconds + before_seconds) / idle_seconds
    if times < SLIGHTLY:
        return f"a slightly larger {what} would have kept it"
    size = f"about {times:.1f} times" if times < LARGER_MAX else f"more than {LARGER_MAX} times"
    return f"at that rate a {what} {size} as large would have kept it"


def _missed(index: int, cause: MissCause, node: str = "", text: str = "") -> Diagnosis:
    return Diagnosis(index, 1, BlockOutcome.MISSED, node, cause, text or _TEXT.get(cause, ""))


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
