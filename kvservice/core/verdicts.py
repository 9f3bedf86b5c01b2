"""Why a request hit what it hit: the record of its shard, put together with what every node knows of missing blocks.

Pure, and for people: `kvservice explain` gathers the facts from all nodes and calls `judge` once. Ages are seconds
before the moment of the question; each was measured on one clock, so ages of different nodes can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvservice.core.explain import LOCAL, SourceRun
from kvservice.core.ghosts import Cause
from kvservice.core.messages import MissReason, RequestReport

CLOSE_SECONDS = 0.05  # two moments on two nodes, closer than this, happened together


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
    Why.NEVER_STORED: "no node ever stored it, as far as anybody remembers",
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


@dataclass(frozen=True, slots=True)
class Fate:
    """What a node knows of one block."""

    node: str
    state: str  # "held", "sealing" or "gone"
    age_seconds: float
    cause: str = ""
    by: str = ""


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


def judge(asked: Asked, facts: Facts) -> tuple[Verdict, ...]:
    """Every block of the request once, in order."""
    verdicts: list[Verdict] = []
    for index in range(asked.block_count):
        one = _judge_block(asked, facts, index)
        last = verdicts[-1] if verdicts else None
        if last is not None and (last.outcome, last.node, last.why, last.text) == (
            one.outcome, one.node, one.why, one.text,
        ):  # fmt: skip
            verdicts[-1] = Verdict(last.start, last.count + 1, last.outcome, last.node, last.why, last.text)
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
        return Verdict(
            index, 1, Outcome.LOCAL if source == LOCAL else Outcome.FETCHED, source if source != LOCAL else ""
        )
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
    first = index == asked.skip + asked.promised
    certain = asked.miss not in (MissReason.NEVER_STORED, MissReason.NONE)
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
    fates = facts.fates.get(index, ())
    before = [fate for fate in fates if fate.age_seconds > asked.age_seconds + CLOSE_SECONDS]
    held = next((fate for fate in before if fate.state == "held"), None)
    if held is not None:
        return _missed(index, Why.BEHIND_A_GAP, held.node)
    gone = min((fate for fate in before if fate.state == "gone"), key=lambda fate: fate.age_seconds, default=None)
    later = [fate for fate in fates if fate not in before]
    lost = facts.lost.get(index)
    if gone is not None:
        return _missed(index, Why.EVICTED, gone.node, _evicted(gone, asked.age_seconds))
    if lost is not None and lost.age_seconds + CLOSE_SECONDS > asked.age_seconds:
        return _missed(index, Why.OWNER_GONE, lost.node, _gone(lost))
    if later:
        fate = later[0]
        what = f"node {fate.node} sealed it only after it was asked for"
        if fate.state == "sealing":
            what = f"node {fate.node} is still writing it"
        return _missed(index, Why.NOT_SEALED_YET, fate.node, what)
    if asked.report is not None and asked.report.salted:
        text = "no node stored it for this request's cache_salt; blocks of other salts are never shared"
        return _missed(index, Why.OTHER_TENANT, "", text)
    if facts.strangers:
        return _missed(index, Why.OTHER_FINGERPRINT, "", f"never stored under this fingerprint; {facts.strangers[0]}")
    return _missed(index, Why.NEVER_STORED)


def _evicted(fate: Fate, age_seconds: float) -> str:
    when = f"node {fate.node} evicted it {_seconds(fate.age_seconds - age_seconds)} before"
    if fate.cause == Cause.CORRUPT.value:
        return f"node {fate.node} found its bytes wrong {_seconds(fate.age_seconds - age_seconds)} before"
    room = f", to make room for {fate.by}" if fate.by else ""
    if fate.cause == Cause.QUOTA.value:
        return f"{when}, for another block of the same tenant, which had its quota"
    slab = " of another block size" if fate.cause == Cause.SLAB_MOVED.value else ""
    return f"{when}{room}{slab}"


def _gone(fate: Fate) -> str:
    return {
        Cause.DRAIN.value: f"node {fate.node} left the service, and nobody took it over",
        Cause.OWNER_DIED.value: f"node {fate.node} fell silent",
        Cause.RESTARTED.value: f"node {fate.node} restarted without it",
    }.get(fate.cause, f"node {fate.node} is gone")


def _missed(index: int, why: Why, node: str = "", text: str = "") -> Verdict:
    return Verdict(index, 1, Outcome.MISSED, node, why, text or _TEXT.get(why, ""))


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
