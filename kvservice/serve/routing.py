"""Which replica should compute a prompt: compares the seconds of waiting, moving and computing. Pure: no clock, no I/O.

A prompt is a chain of blocks. For each candidate the chain is cut where moving more blocks costs more than computing
the rest:

    cost = wait + load from the engine's node + fetch from other nodes + compute the rest

Blocks that the engine holds cost nothing. A fetch costs a fixed overhead per other node, and its bytes at that link's
measured bandwidth. Everything is in seconds, so hits and queues need no weights. Runs on the router's event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvservice.core.messages import HolderRun
from kvservice.units import NodeId, div_ceil

TIE_SHARE = 0.05  # Candidates within this share of the best cost are equal: estimates are not more exact.
TIE_SECONDS = 0.001  # Added to that share, so that tiny costs tie as well.
# The share for a prompt most of which is new to every node: it may go almost anywhere, see `decide`.
BEGIN_SHARE = 0.25
# Groups of candidates that are returned. If all of them refuse, a new decision is better than the ninth best.
RANKS_MAX = 8


class Reason(Enum):
    """Why a replica was chosen. Each reason has a counter."""

    HIT = "hit"  # no replica holds more of the prompt, in its engine or on its node
    FETCH = "fetch"  # part of the prompt is fetched from another node
    LOAD = "load"  # another replica has less work with this prompt, but is busier
    COLD = "cold"  # no replica holds anything: the least busy one


@dataclass(frozen=True, slots=True)
class PeerLink:
    """The speed of reading from one other node, as the reader's shard measured it."""

    bytes_per_second: float
    overhead_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a candidate's work costs. All are > 0, except block_bytes, which may be 0 (nothing to move)."""

    seconds_per_token: float  # of prefill
    block_bytes: int
    load_bytes_per_second: float  # from the node's pool into the engine
    link: PeerLink  # to nodes that are not in `links`
    links: Mapping[NodeId, PeerLink] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueWait:
    """The work before a new request. Every field adds to the cost."""

    backlog_seconds: float = 0.0  # prefill work that this router sent and that is not done by its own estimate
    waiting: float = 0.0  # requests from others that are not past their prefill, as a mean
    decoding: float = 0.0  # requests past their prefill
    expected: float = 0.0  # requests that usually are before a new one at the recent utilization

    def seconds(self, request_seconds: float, decoding_share: float) -> float:
        """The waiting time. `request_seconds` is the prefill work of an average request; a decoding one counts as
        `decoding_share` of it."""
        requests = self.waiting + self.expected + decoding_share * self.decoding
        return self.backlog_seconds + request_seconds * requests


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica as this prompt sees it. `runs` are those of the chain under this engine's fingerprint."""

    replica: str
    wait_seconds: float
    speeds: Speeds
    node: NodeId | None = None  # the node of its shard; None if unknown, and then only its engine can hold anything
    engine_blocks: int = 0  # leading blocks that it probably still has from earlier prompts
    runs: tuple[HolderRun, ...] = ()  # ascending, disjoint
    full: bool = False  # takes no request at the moment


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: `block_count` full blocks can be looked up, `tokens` is its whole length."""

    tokens: int
    block_tokens: int
    block_count: int


@dataclass(frozen=True, slots=True)
class Estimate:
    replica: str
    wait_seconds: float
    move_seconds: float  # load and fetch
    compute_seconds: float
    engine_blocks: int
    node_blocks: int
    fetched_blocks: int
    full: bool = False

    @property
    def work_seconds(self) -> float:
        """Seconds until the first token if the replica were idle."""
        return self.move_seconds + self.compute_seconds

    @property
    def seconds(self) -> float:
        return self.wait_seconds + self.move_seconds + self.compute_seconds

    @property
    def hit_blocks(self) -> int:
        return self.engine_blocks + self.node_blocks + self.fetched_blocks


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    end: int
    holders: frozenset[NodeId]
    names: tuple[NodeId, ...]  # the holders, in the order of the lookup service


@dataclass(frozen=True, slots=True)
class Decision:
    """The ranking. `groups` has candidates, best first; within a group the caller takes the shorter queue. There are at
    most RANKS_MAX groups; if all refuse, decide again."""

    groups: tuple[tuple[str, ...], ...]
    reason: Reason
    best: Estimate
    estimates: tuple[Estimate, ...]  # ordered by cost
    tied: frozenset[str]  # as good as the best within the accuracy of the estimates


def decide(prompt: Prompt, candidates: Sequence[Candidate], draws: Sequence[float]) -> Decision:
    """Rank the candidates: at least one, with distinct names. `draws` has a random number for each, which orders
    ties."""
    assert candidates and len(draws) == len(candidates)
    drawn = {candidate.replica: draw for candidate, draw in zip(candidates, draws, strict=True)}
    spans = {id(candidate.runs): _spans(candidate.runs, prompt.block_count) for candidate in candidates}
    found = sorted(
        (_estimate(prompt, candidate, spans[id(candidate.runs)]) for candidate in candidates),
        key=lambda e: (e.full, e.seconds, drawn[e.replica]),
    )
    # If only the beginning of a prompt is shared with others, it may go almost anywhere. Its later turns follow it. If
    # all such prompts went where the first one went, one pool would be full and the others empty.
    begins = 2 * found[0].hit_blocks < prompt.block_count
    limit = found[0].seconds * (1 + (BEGIN_SHARE if begins else TIE_SHARE)) + TIE_SECONDS
    tied = [e for e in found if e.full == found[0].full and e.seconds <= limit]
    # A conversation stays where most of it lies: a second copy would take the room of another conversation.
    moves = {e.replica: 2 * e.fetched_blocks > prompt.block_count for e in tied}
    waits = {e.replica: e.wait_seconds if begins else 0.0 for e in tied}
    tied.sort(key=lambda e: (moves[e.replica], waits[e.replica], drawn[e.replica]))
    # Take two random ones of the equal candidates, and of them the one with the shorter queue. Routers that decide at
    # the same moment do not know of each other, and would otherwise all choose the same replica.
    first = [e for e in tied if moves[e.replica] == moves[tied[0].replica]][:2]
    rest = tied[len(first) :]
    others = found[len(tied) :]
    groups = (tuple(e.replica for e in first), *((e.replica,) for e in [*rest, *others]))[:RANKS_MAX]
    return Decision(groups, _reason(first[0], found), first[0], tuple(found), frozenset(e.replica for e in tied))


def estimate(prompt: Prompt, candidate: Candidate) -> Estimate:
    """The cheapest way for this candidate to have the whole prompt."""
    return _estimate(prompt, candidate, _spans(candidate.runs, prompt.block_count))


def _estimate(prompt: Prompt, candidate: Candidate, spans: Sequence[_Span]) -> Estimate:
    speeds = candidate.speeds
    engine = min(candidate.engine_blocks, prompt.block_count)
    held = engine
    local = fetched = 0
    moved = 0.0
    visited: set[NodeId] = set()
    best = _cut(prompt, candidate, 0.0, engine, 0, 0)
    load = speeds.block_bytes / speeds.load_bytes_per_second
    for span in spans if candidate.node is not None else ():  # without a node nobody knows what its shard could fetch
        count = span.end - max(span.start, held)
        if count <= 0:
            continue
        if span.start > held:
            break
        moved += count * load
        if candidate.node in span.holders:
            local += count
        else:
            moved += _fetch_seconds(span, speeds, visited, count)
            fetched += count
        held = span.end
        cut = _cut(prompt, candidate, moved, engine, local, fetched)
        best = cut if cut.seconds < best.seconds else best
    return best


def _cut(prompt: Prompt, candidate: Candidate, moved: float, engine: int, local: int, fetched: int) -> Estimate:
    held = (engine + local + fetched) * prompt.block_tokens
    # The last token is always computed: it gives the first token of the answer.
    compute = max(prompt.tokens - held, 1) * candidate.speeds.seconds_per_token
    return Estimate(
        candidate.replica, candidate.wait_seconds, moved, compute, engine, local, fetched, full=candidate.full
    )


def _spans(runs: Sequence[HolderRun], block_count: int) -> list[_Span]:
    """The runs within the chain. Computed once for all candidates, because there may be hundreds of holders."""
    spans: list[_Span] = []
    for run in runs:
        names = tuple(holder.node_id for holder in run.holders)
        spans.append(_Span(run.start, min(run.start + run.count, block_count), frozenset(names), names))
    return spans


def _fetch_seconds(span: _Span, speeds: Speeds, visited: set[NodeId], count: int) -> float:
    """Seconds to fetch from the cheapest holder. That holder is added to `visited`, because its overhead is then
    paid."""
    measured = speeds.links.keys() & span.holders
    unmeasured = next((node for node in span.names if node not in measured), None)
    choices = measured | (visited & span.holders) | ({unmeasured} if unmeasured is not None else set())
    found: list[tuple[float, NodeId]] = []
    for node in choices:
        link = speeds.links.get(node, speeds.link)
        overhead = 0.0 if node in visited else link.overhead_seconds
        found.append((overhead + count * speeds.block_bytes / link.bytes_per_second, node))
    seconds, node = min(found)
    visited.add(node)
    return seconds


def _reason(chosen: Estimate, found: Sequence[Estimate]) -> Reason:
    if chosen.fetched_blocks:
        return Reason.FETCH
    least = min(e.work_seconds for e in found)
    if chosen.work_seconds > least * (1 + TIE_SHARE) + TIE_SECONDS:
        return Reason.LOAD
    return Reason.HIT if chosen.hit_blocks else Reason.COLD


def blocks_of(tokens: int, block_tokens: int, blocks_max: int) -> int:
    """Full blocks of a prompt that are worth a lookup. A hit never covers the whole prompt, because an engine always
    computes the last token; so a last block that would is left out."""
    return min(max(div_ceil(tokens, block_tokens) - 1, 0), blocks_max)
