"""Why a request hit what it hit: the record of its shard, put together with what every node knows of missing blocks.

Pure, and for people: `kvservice explain` gathers the facts from all nodes and calls `judge` once. Ages are seconds
before the moment of the question; each was measured on one clock, so ages of different nodes can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from kvservice.core.explain.evictions import EvictionCause
from kvservice.core.explain.records import LOCAL, SourceRun
from kvservice.core.messages import MissReason, RequestReport

CLOSE_SECONDS = 0.05  # two moments on two nodes, closer than this, happened together
SLIGHTLY = 1.1  # times as large
LARGER_MAX = 10  # beyond that a figure would only look exact


class Outcome(Enum):
    ENGINE = "engine"  # in the engine's own cache
    LOCAL = "local"  # in the pool of its node
    FETCHED = "fetched"  # from another node
    MISSED = "missed"  # computed again


class Why(Enum):
    """Why a block was missed. Values are stable: they are part of `kvservice explain --json`."""

    NEVER_STORED = "never_stored"
    OTHER_FINGERPRINT = "other_fingerprint"
    OTHER_TENANT = "other_tenant"
    NOT_SEALED_YET = "not_sealed_yet"
    NOT_ANNOUNCED = "not_announced"
    EVICTED = "evicted"
    OWNER_GONE = "owner_gone"
    BEHIND_A_GAP = "behind_a_gap"
    DEADLINE = "deadline"
    ENGINE_DID_NOT_WAIT = "engine_did_not_wait"
    SLOWER_THAN_RECOMPUTE = "slower_than_recompute"
    LOOKUP_FAILED = "lookup_failed"
    DISTRUSTED = "distrusted"
    LOAD_FAILED = "load_failed"
    NO_ROOM = "no_room"
    QUOTA = "quota"
    DRAINING = "draining"
    NO_POOL = "no_pool"
    NOT_USED = "not_used"
    HANDOFF_ENDED = "handoff_ended"


_OF_MISS = {
    MissReason.DEADLINE: Why.DEADLINE,
    MissReason.SLOWER_THAN_RECOMPUTE: Why.SLOWER_THAN_RECOMPUTE,
    MissReason.LOOKUP_FAILED: Why.LOOKUP_FAILED,
    MissReason.PEER_FAILED: Why.OWNER_GONE,
    MissReason.STALE: Why.EVICTED,
    MissReason.CORRUPT: Why.DISTRUSTED,
    MissReason.NO_ROOM: Why.NO_ROOM,
    MissReason.QUOTA: Why.QUOTA,
    MissReason.DRAINING: Why.DRAINING,
    MissReason.DETACHED: Why.NO_POOL,
}
_TEXT = {
    Why.NEVER_STORED: "no node had stored it, as far as anybody remembers",
    Why.BEHIND_A_GAP: "was there, but a prefix ends at its first missing block",
    Why.DEADLINE: "did not arrive within the time that recomputing would take",
    Why.ENGINE_DID_NOT_WAIT: "the answer came after the engine's own deadline",
    Why.SLOWER_THAN_RECOMPUTE: "fetching it was measured to be slower than recomputing",
    Why.LOOKUP_FAILED: "the lookup service did not answer",
    Why.NO_ROOM: "no slot could be freed for it here",
    Why.QUOTA: "its tenant had all the slots that it may hold, or fill at once",
    Why.DRAINING: "the node's own shard was leaving",
    Why.NO_POOL: "the engine had no shard to ask, or lost it",
    Why.LOAD_FAILED: "was promised, but the load failed and everything was computed",
    Why.NOT_USED: "was promised, but the engine scheduled the request without it",
}
_SINCE = "; the engine that asked has stored it since"
_NEVER = (MissReason.NEVER_STORED, MissReason.NONE)
_OF_NODE = {  # how a block went with its node
    EvictionCause.DRAIN.value: "left the service, and nobody took it over",
    EvictionCause.OWNER_DIED.value: "fell silent",
    EvictionCause.RESTARTED.value: "restarted without it",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One record of a request, as its shard tells it."""

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
    sought: int = 0  # blocks before this index had a holder, said the directory
    engine: str = ""  # that asked, as HistoryEntry.engine names it
    ended_age_seconds: float | None = None  # None: its engine has not reported
    took_seconds: float = 0.0
    handoff_node: str = ""  # whose engine was to compute what was missing; "" = no hand-off
    handed_from: int = 0  # of a hand-off: blocks from this index on were waited for


@dataclass(frozen=True, slots=True)
class Fate:
    """What a node knows of one block."""

    node: str
    state: str  # "held", "sealing" or "gone"
    age_seconds: float  # since it was sealed, or gone
    cause: str = ""
    by: str = ""
    engine: str = ""  # that stored it, or is storing it; "" = fetched, adopted or not known
    held_seconds: float = 0.0  # of a gone one: how long it had been held
    idle_seconds: float = 0.0  # of a gone one: since its last use when it went

    def was_held(self, age_seconds: float) -> bool:
        """So long ago. What happened within CLOSE_SECONDS of that does not count."""
        held_since = self.age_seconds + self.held_seconds
        still = self.state == "held" or (self.state == "gone" and self.age_seconds < age_seconds - CLOSE_SECONDS)
        return still and held_since > age_seconds + CLOSE_SECONDS


@dataclass(frozen=True, slots=True)
class Facts:
    """What the other nodes say about the blocks of a request, by index in its chain."""

    fates: Mapping[int, Sequence[Fate]]
    lost: Mapping[int, Fate]  # gone with their node, says the directory
    strangers: tuple[str, ...] = ()  # nodes that serve the same model under another fingerprint, and how they differ


@dataclass(frozen=True, slots=True)
class Verdict:
    """`count` consecutive blocks with one explanation."""

    start: int
    count: int
    outcome: Outcome
    node: str = ""
    why: Why | None = None
    text: str = ""
    cause: str = ""  # of an eviction: value of core.explain.evictions.EvictionCause
    by: str = ""  # of an eviction: who needed the room

    def goes_on(self, after: Verdict) -> bool:
        """Evictions are one when cause and culprit are: their times differ, and the first block's are told."""
        one, other = ((v.outcome, v.node, v.why, v.cause, v.by, "" if v.cause else v.text) for v in (self, after))
        return one == other


def judge(asked: Asked, facts: Facts) -> tuple[Verdict, ...]:
    """Every block of the request once, in order."""
    verdicts: list[Verdict] = []
    for index in range(asked.block_count):
        one = _judge_block(asked, facts, index)
        last = verdicts[-1] if verdicts else None
        if last is not None and one.goes_on(last):
            verdicts[-1] = replace(last, count=last.count + 1)
        else:
            verdicts.append(one)
    return tuple(verdicts)


def counts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Blocks by outcome."""
    found = {outcome.value: 0 for outcome in Outcome}
    for verdict in verdicts:
        found[verdict.outcome.value] += verdict.count
    return found


def _judge_block(asked: Asked, facts: Facts, index: int) -> Verdict:
    report = asked.report
    if index < (asked.skip if report is None else max(report.engine_blocks, asked.skip)):
        return Verdict(index, 1, Outcome.ENGINE)
    if index < asked.skip + asked.promised:
        why = _unused(report, index)
        if why is not None:
            return _missed(index, why)
        source = next(run.source for run in asked.runs if run.start <= index < run.start + run.count)
        outcome, node = (Outcome.LOCAL, "") if source == LOCAL else (Outcome.FETCHED, source)
        handed = asked.handoff_node == (node or asked.node) and index >= asked.handed_from
        return Verdict(index, 1, outcome, node, text=_handed(asked) if handed else "")
    return _judge_miss(asked, facts, index)


def _unused(report: RequestReport | None, index: int) -> Why | None:
    """Why the engine did not take a block it was promised."""
    if report is None:
        return None
    if report.gave_up:
        return Why.ENGINE_DID_NOT_WAIT
    if report.load_failed:
        return Why.LOAD_FAILED
    return None if index < report.engine_blocks + report.loaded_blocks else Why.NOT_USED


def _judge_miss(asked: Asked, facts: Facts, index: int) -> Verdict:
    if not asked.answered:
        return _missed(index, Why.NO_POOL if asked.report is not None else Why.DEADLINE)
    if asked.handoff_node and index >= asked.handed_from and asked.miss in (MissReason.DEADLINE, *_NEVER):
        return _not_handed(asked, index)
    first = index == asked.skip + asked.promised
    certain = asked.miss not in _NEVER
    if first and certain:
        return _certain(asked, facts, index)
    found = _from_fates(asked, facts, index)
    if certain and (found.why is Why.BEHIND_A_GAP or index < asked.sought):  # it would have come with the first
        return _certain(asked, facts, index)
    if first and found.why is Why.BEHIND_A_GAP:
        return _missed(index, Why.NOT_ANNOUNCED, found.node, f"node {found.node} held it, but had not announced it yet")
    return found


def _certain(asked: Asked, facts: Facts, index: int) -> Verdict:
    """The shard knew the reason when it answered."""
    why, node = _OF_MISS[asked.miss], asked.miss_node
    if why is Why.EVICTED:
        found = _from_fates(asked, facts, index)
        if found.why is Why.EVICTED:
            return found
        return _missed(index, why, node, f"node {node} had evicted it, or was about to, when it was read")
    if why is Why.OWNER_GONE:
        return _missed(index, why, node, f"node {node} held it and did not answer")
    if why is Why.DISTRUSTED:
        return _missed(index, why, node, f"what node {node} sent did not match its digest")
    return _missed(index, why, node)


def _from_fates(asked: Asked, facts: Facts, index: int) -> Verdict:
    """What the nodes say now about a block that nobody was known to hold then."""
    fates, age = facts.fates.get(index, ()), asked.age_seconds
    there = next((fate for fate in fates if fate.was_held(age)), None)
    if there is not None:
        return _missed(index, Why.BEHIND_A_GAP, there.node)
    ends = [fate for fate in fates if fate.state == "gone"]
    ends += [facts.lost[index]] if index in facts.lost else []
    ends = [fate for fate in ends if fate.age_seconds + CLOSE_SECONDS > age]
    last = min(ends, key=lambda fate: fate.age_seconds, default=None)
    if last is not None and last.cause in _OF_NODE:
        return _missed(index, Why.OWNER_GONE, last.node, f"node {last.node} {_OF_NODE[last.cause]}")
    if last is not None:
        text = _evicted(last, max(last.age_seconds - age, 0.0))
        return Verdict(index, 1, Outcome.MISSED, last.node, Why.EVICTED, text, last.cause or "unknown", last.by)
    later = sorted((fate for fate in fates if fate.state != "gone" and fate.engine), key=lambda fate: -fate.age_seconds)
    first = later[0] if later else None  # who had it first after the question
    if first is not None and first.engine != asked.engine and _was_beside(first, asked):
        what = "is writing it just now" if first.state == "sealing" else "sealed it only after it was asked for"
        return _missed(index, Why.NOT_SEALED_YET, first.node, f"engine {first.engine} of node {first.node} {what}")
    if asked.report is not None and asked.report.salted:
        text = "no node stored it for this request's cache_salt; blocks of other salts are never shared"
        return _missed(index, Why.OTHER_TENANT, "", text)
    if facts.strangers:
        return _missed(index, Why.OTHER_FINGERPRINT, "", f"never stored under this fingerprint; {facts.strangers[0]}")
    own = first is not None and first.engine == asked.engine
    return _missed(index, Why.NEVER_STORED, "", _TEXT[Why.NEVER_STORED] + (_SINCE if own else ""))


def _was_beside(fate: Fate, asked: Asked) -> bool:
    """The block was sealed while the request was being computed, so two engines computed it at the same time."""
    return asked.ended_age_seconds is None or (
        fate.state == "held" and fate.age_seconds > asked.ended_age_seconds - CLOSE_SECONDS
    )


def _handed(asked: Asked) -> str:
    return f"handed off by node {asked.handoff_node}, after {_seconds(asked.took_seconds)}"


def _not_handed(asked: Asked, index: int) -> Verdict:
    node, took = asked.handoff_node, _seconds(asked.took_seconds)
    if asked.miss is MissReason.DEADLINE:
        return _missed(index, Why.DEADLINE, node, f"node {node} did not hand it off within {took}")
    return _missed(index, Why.HANDOFF_ENDED, node, f"the hand-off from node {node} ended after {took} without it")


def _evicted(fate: Fate, before_seconds: float) -> str:
    """When it went and for whom, and what would have kept it."""
    if fate.cause == EvictionCause.CORRUPT.value:
        return f"node {fate.node} found its bytes wrong {_seconds(before_seconds)} before"
    room = f", to make room for {fate.by}" if fate.by else ""
    if fate.cause == EvictionCause.QUOTA.value:
        room = ", for another block of the same tenant, which had its quota"
    slab = " of another block size" if fate.cause == EvictionCause.SLAB_MOVED.value else ""
    when = f"node {fate.node} evicted it {_seconds(before_seconds)} before{room}{slab}"
    if fate.idle_seconds <= 0:
        return when
    what = "quota" if fate.cause == EvictionCause.QUOTA.value else "pool"
    return (
        f"{when}, {_seconds(fate.idle_seconds)} after its last use; {_larger(what, fate.idle_seconds, before_seconds)}"
    )


def _larger(what: str, idle_seconds: float, before_seconds: float) -> str:
    """Memory is used up in the order of use, so what is kept so much longer needs so much more of it."""
    times = (idle_seconds + before_seconds) / idle_seconds
    if times < SLIGHTLY:
        return f"a slightly larger {what} would have kept it"
    size = f"about {times:.1f} times" if times < LARGER_MAX else f"more than {LARGER_MAX} times"
    return f"at that rate a {what} {size} as large would have kept it"


def _missed(index: int, why: Why, node: str = "", text: str = "") -> Verdict:
    return Verdict(index, 1, Outcome.MISSED, node, why, text or _TEXT.get(why, ""))


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
