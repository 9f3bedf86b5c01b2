"""Which replica should compute a prompt: seconds of waiting, moving and computing, compared. Pure: no clock, no I/O.

A prompt is a chain of blocks. For each candidate the chain is cut where going on costs more than computing the rest:

    cost = wait + load from the engine's node + fetch from other nodes + compute the rest

Blocks the engine holds cost nothing. Fetching is one overhead per other node and then bytes over that link's measured
bandwidth. Everything is in seconds, so hits and queues need no weights. Runs on the router's event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvservice.core.messages import HolderRun
from kvservice.units import NodeId, div_ceil

TIE_SHARE = 0.05  # of the best cost; estimates are not better than that
TIE_SECONDS = 0.001
BEGIN_SHARE = 0.25  # the same, for a prompt most of which is new to every node
RANKS_MAX = 8


class Reason(Enum):
    """Why the chosen replica was chosen. Counted by name."""

    HIT = "hit"  # nobody holds more of the prompt: in its engine or on its node
    FETCH = "fetch"  # part of the prompt is brought from another node
    LOAD = "load"  # another replica has less to do for this prompt, but is busier
    COLD = "cold"  # nobody holds anything: the least busy one


@dataclass(frozen=True, slots=True)
class PeerLink:
    """Reading from one other node, as measured by the reader's shard."""

    bytes_per_second: float
    overhead_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Speeds:
    """What a candidate's work costs. All > 0 but for block_bytes, which may be 0 (nothing to move)."""

    seconds_per_token: float  # of prefill
    block_bytes: int
    load_bytes_per_second: float  # from the node's pool into the engine
    link: PeerLink  # to nodes that are not in `links`
    links: Mapping[NodeId, PeerLink] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueWait:
    """What is before a new request. Every field only ever adds to the cost."""

    backlog_seconds: float = 0.0  # prefill work this router sent that is not done by its own estimate
    waiting: float = 0.0  # requests that others sent, as far as they are not past their prefill
    decoding: float = 0.0  # requests past their prefill
    expected: float = 0.0  # requests that usually are before a new one, at the utilization there was of late

    def seconds(self, request_seconds: float, decoding_share: float) -> float:
        """`request_seconds`: prefill work of an average request; a decoding one counts as `decoding_share` of it."""
        requests = self.waiting + self.expected + decoding_share * self.decoding
        return self.backlog_seconds + request_seconds * requests


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica as far as this prompt is concerned. `runs` are those of the chain with this engine's fingerprint."""

    replica: str
    wait_seconds: float
    speeds: Speeds
    node: NodeId | None = None  # its shard; None: unknown, then only its engine can hold anything
    engine_blocks: int = 0  # leading blocks that it probably still has from earlier prompts
    runs: tuple[HolderRun, ...] = ()  # ascending, disjoint
    full: bool = False  # takes no request at the moment


@dataclass(frozen=True, slots=True)
class Prompt:
    """`block_count` full blocks could be looked up; `tokens` is all there is to have in the end."""

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
        """Until the first token, were the replica idle."""
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
    names: tuple[NodeId, ...]  # of the holders, in the order of the lookup service


@dataclass(frozen=True, slots=True)
class Decision:
    """`groups`: candidates, best first; within a group the caller takes the shorter queue. At most RANKS_MAX groups:
    when all of them refuse, it is time to decide anew."""

    groups: tuple[tuple[str, ...], ...]
    reason: Reason
    best: Estimate
    estimates: tuple[Estimate, ...]  # by cost
    tied: frozenset[str]  # not worse than the best beyond what estimates are good for


def decide(prompt: Prompt, candidates: Sequence[Candidate], draws: Sequence[float]) -> Decision:
    """Rank the candidates (at least one, distinct names). `draws`: a random number for each, which orders ties."""
    assert candidates and len(draws) == len(candidates)
    drawn = {candidate.replica: draw for candidate, draw in zip(candidates, draws, strict=True)}
    spans = {id(candidate.runs): _spans(candidate.runs, prompt.block_count) for candidate in candidates}
    found = sorted(
        (_estimate(prompt, candidate, spans[id(candidate.runs)]) for candidate in candidates),
        key=lambda e: (e.full, e.seconds, drawn[e.replica]),
    )
    # What has only its beginning in common with others may go on almost anywhere: the turns that follow will go there
    # too, and if all went where the first one went, one pool would be full and the others empty.
    begins = 2 * found[0].hit_blocks < prompt.block_count
    limit = found[0].seconds * (1 + (BEGIN_SHARE if begins else TIE_SHARE)) + TIE_SECONDS
    tied = [e for e in found if e.full == found[0].full and e.seconds <= limit]
    # A conversation stays where most of it lies: a second copy would take the room of another one.
    moves = {e.replica: 2 * e.fetched_blocks > prompt.block_count for e in tied}
    waits = {e.replica: e.wait_seconds if begins else 0.0 for e in tied}
    tied.sort(key=lambda e: (moves[e.replica], waits[e.replica], drawn[e.replica]))
    # Two random ones of those that are as good, and of them the shorter queue: routers that decide at the same moment,
    # each without knowing of the others, do not all send to the same replica.
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
    for span in spans if candidate.node is not None else ():  # else nobody knows what its shard could bring
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
    # The last token is always computed: it gives the first one of the answer.
    compute = max(prompt.tokens - held, 1) * candidate.speeds.seconds_per_token
    return Estimate(
        candidate.replica, candidate.wait_seconds, moved, compute, engine, local, fetched, full=candidate.full
    )


def _spans(runs: Sequence[HolderRun], block_count: int) -> list[_Span]:
    """The runs as far as the chain was asked. Made once for all candidates: it may have hundreds of holders."""
    spans: list[_Span] = []
    for run in runs:
        names = tuple(holder.node_id for holder in run.holders)
        spans.append(_Span(run.start, min(run.start + run.count, block_count), frozenset(names), names))
    return spans


def _fetch_seconds(span: _Span, speeds: Speeds, visited: set[NodeId], count: int) -> float:
    """From the cheapest holder, which is `visited` from then on: its overhead is paid."""
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
    """Full blocks of a prompt that are worth a lookup. The block that would make the hit the whole prompt is not: an
    engine always computes the last token."""
    return min(max(div_ceil(tokens, block_tokens) - 1, 0), blocks_max)
