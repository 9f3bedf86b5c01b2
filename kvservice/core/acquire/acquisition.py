"""The state of one Acquire call, and of one fetch from a peer. `acquisitions` decides what becomes of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvservice.core.block.tenants import NOBODY
from kvservice.core.messages import AcquireRequest, Holder, HolderRun, MissReason
from kvservice.core.store.slots import Slot
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import InvalidRequest
from kvservice.units import AttachmentId, BlockKey, NodeId

TIMEOUT_SECONDS_MAX = 600.0  # ten minutes, as long as the longest lease; a longer timeout is a mistake and refused


def check_seconds(what: str, seconds: float) -> None:
    """Raises InvalidRequest for a time that nobody may ask a call to take."""
    if not 0 <= seconds <= TIMEOUT_SECONDS_MAX:
        raise InvalidRequest(f"{what} {seconds} s is not within 0 to {TIMEOUT_SECONDS_MAX} s")


class AcquisitionState(Enum):
    STARTING = "starting"  # what is here is being pinned, a slice at a time
    WATCHING = "watching"  # a writer on this node computes the missing blocks; they are seen when they are sealed
    ASKING = "asking"  # a writer on another node computes them; that node is asked for blocks as they are sealed
    RESOLVING = "resolving"  # the directory is asked which nodes hold the missing blocks
    WAITING = "waiting"  # nothing more is looked for: each missing block is on its way, or does not come
    OVER = "over"

    __hash__ = object.__hash__  # Enum's own is written in Python, and every step of every call looks two members up


class AcquisitionEvent(Enum):
    WATCH = "watch"
    ASK = "ask"  # also again, for the next blocks
    RESOLVE = "resolve"
    WAIT = "wait"
    ANSWER = "answer"
    CANCEL = "cancel"  # nobody waits for the answer any more

    __hash__ = object.__hash__


_S, _E = AcquisitionState, AcquisitionEvent
TRANSITIONS: dict[tuple[AcquisitionState, AcquisitionEvent], AcquisitionState] = {
    (_S.STARTING, _E.WATCH): _S.WATCHING,
    (_S.STARTING, _E.ASK): _S.ASKING,
    (_S.STARTING, _E.RESOLVE): _S.RESOLVING,
    (_S.STARTING, _E.WAIT): _S.WAITING,
    (_S.STARTING, _E.ANSWER): _S.OVER,
    (_S.STARTING, _E.CANCEL): _S.OVER,
    (_S.WATCHING, _E.RESOLVE): _S.RESOLVING,
    (_S.WATCHING, _E.WAIT): _S.WAITING,
    (_S.WATCHING, _E.ANSWER): _S.OVER,
    (_S.WATCHING, _E.CANCEL): _S.OVER,
    (_S.ASKING, _E.ASK): _S.ASKING,
    (_S.ASKING, _E.RESOLVE): _S.RESOLVING,
    (_S.ASKING, _E.WAIT): _S.WAITING,
    (_S.ASKING, _E.ANSWER): _S.OVER,
    (_S.ASKING, _E.CANCEL): _S.OVER,
    (_S.RESOLVING, _E.WAIT): _S.WAITING,
    (_S.RESOLVING, _E.ANSWER): _S.OVER,
    (_S.RESOLVING, _E.CANCEL): _S.OVER,
    (_S.WAITING, _E.ANSWER): _S.OVER,
    (_S.WAITING, _E.CANCEL): _S.OVER,
}
DIRECTORY = "directory"  # among the sources that an acquisition awaits
FOLLOWING = frozenset((AcquisitionState.WATCHING, AcquisitionState.ASKING))


@dataclass(slots=True)
class Acquisition:
    """One Acquire call, or a part of one. Mutable: `Acquisitions` keeps it until its answer."""

    op: int
    attachment: AttachmentId
    account: str  # the tenant that is charged for fetched blocks
    request: AcquireRequest
    payload_bytes: int
    deadline: float
    started: float
    break_at: int  # index of the first block that is known not to come
    state: AcquisitionState = AcquisitionState.STARTING
    reason: MissReason = MissReason.NONE
    base: int = 0  # position of the first key
    on_answer: OnAnswer | None = None  # called in place of an answer, when this is a part of a larger acquisition
    question: int = 0  # the number of the question that is open while ASKING; 0 = none
    run: list[Slot] = field(default_factory=list)  # pinned by this acquisition: the blocks from `skip` on
    held: dict[int, Slot] = field(default_factory=dict)  # pinned as well, by index in the chain: those behind a gap
    pending: set[int] = field(default_factory=set)  # indices of blocks on their way
    origins: dict[int, NodeId] = field(default_factory=dict)  # the node or tier that each fetched block came from
    found_until: int = 0  # the directory knew a holder of each block before this index
    is_for_here: bool = False  # nobody else is asked: only what is here or in a tier of this node counts
    awaits: set[str] = field(default_factory=set)  # while RESOLVING: DIRECTORY and shared tiers that have not answered
    runs: tuple[HolderRun, ...] = ()  # the directory's answer
    is_complete: bool = True  # whether every part of the directory has answered
    probed: dict[str, int] = field(default_factory=dict)  # by shared tier: the end of the run that it has
    not_asked: str = ""  # a shared tier, as a node, that was left out or could not say what it has
    probes_from: int = 0  # the index that the probes began at
    asked_at: float = 0.0
    handed_from: int | None = None  # index of the first block that it waited for in a hand-off
    miss_node: str = ""  # the node that was asked for the block at break_at and did not deliver it

    @property
    def run_end(self) -> int:
        """The index behind the run."""
        return self.request.skip + len(self.run)

    def unfilled(self, start: int, end: int) -> Sequence[int]:
        """The blocks from `start` up to `end` that are neither pinned nor on their way."""
        indices = range(max(start, self.run_end), end)
        if not self.held and not self.pending:
            return indices
        return [i for i in indices if i not in self.held and i not in self.pending]

    def grow_run(self) -> None:
        """Take into the run what adjoins it by now."""
        while (slot := self.held.pop(self.run_end, None)) is not None:
            self.run.append(slot)

    def end(self, index: int, reason: MissReason, miss_node: str = "") -> None:
        if index < self.break_at:
            self.break_at, self.reason, self.miss_node = index, reason, miss_node


# Called in place of an answer: (the part, slots pinned for it from `skip` on, how many were fetched, now).
OnAnswer = Callable[[Acquisition, list[Slot], int, float], None]


@dataclass(slots=True)
class Fetch:
    """One pull for acquisitions. The blocks that it does not bring are requested from the next holder."""

    number: int  # of its pull
    holder: Holder
    alternates: list[Holder]  # other holders, not tried yet
    chain: tuple[BlockKey, ...]
    indices: list[int]  # of the blocks in the chain
    payload_bytes: int
    base: int = 0  # position of chain[0]
    account: str = NOBODY  # the tenant that is charged for its blocks
    model: str = ""  # of the engine that it is for
    started: float = 0.0
    give_up_at: float = 0.0  # waiting for its blocks ends here, even if its answer never comes
    until: float = 0.0  # the deadline of the acquisition that it was begun for
    urgent: bool = True  # an engine waits for it
    fingerprint: bytes = b""  # first bytes of the digest of its engine's, for a tier; b"" = not known
    blocks: dict[BlockKey, TierBlock] = field(default_factory=dict)  # of a tier: those being read
    later: list[int] = field(default_factory=list)  # of a tier: those read after these, as its share of memory allows


def holders_by_index(runs: Sequence[HolderRun], end: int, own: NodeId) -> dict[int, tuple[Holder, ...]]:
    """The other nodes that have each block before `end`, in the directory's order. Blocks without one are left out."""
    by_index: dict[int, tuple[Holder, ...]] = {}
    for run in runs:
        others = tuple(dict.fromkeys(holder for holder in run.holders if holder.node_id != own))
        if others:
            by_index.update(dict.fromkeys(range(run.start, min(run.start + run.count, end)), others))
    return by_index
