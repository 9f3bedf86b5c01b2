"""What the shard's core asks its performer to do. kvservice.pool.runtime performs actions in order, without waiting.

An action that has an answer is answered later by an event (kvservice.core.events) with the same id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from kvservice.core.messages import Handoff, Holder, TakeOverItem
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.refs import BlockHandle, BlockRef
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import KVServiceError
from kvservice.units import BlockKey, BootEpoch, LeaseId, SlotIndex, SpanRoute


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of one call. `value` has the type that the call's PoolPort method or peer RPC returns."""

    op: int
    value: object


@dataclass(frozen=True, slots=True)
class Refuse:
    op: int
    error: KVServiceError


@dataclass(frozen=True, slots=True)
class NextTurn:
    """A slice of a long call is done, and there are more. Send the event GoOn at the next turn of this call's caller. A
    number that is of no open call belongs to the shard itself: then after everything else that waits now."""

    op: int


@dataclass(frozen=True, slots=True)
class WriteHeader:
    """Write a slot's header. It must be visible in the segment before any later action is performed."""

    slot: SlotIndex
    header: SlotHeader


@dataclass(frozen=True, slots=True)
class ClearHeader:
    slot: SlotIndex


@dataclass(frozen=True, slots=True)
class AssignSlab:
    """Record in the segment the payload size of a slab; 0 = it has none. The slab's headers are cleared first."""

    slab: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Digest:
    """Compute the payload digest of a written slot. Answered by Digested."""

    slot: SlotIndex
    payload_bytes: int
    key: BlockKey


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the directory that this shard holds a block."""

    key: BlockKey
    route: SpanRoute


@dataclass(frozen=True, slots=True)
class Retract:
    key: BlockKey
    route: SpanRoute


@dataclass(frozen=True, slots=True)
class Resolve:
    """Ask the directory which nodes hold the chain from index `start` on. Answered by Resolved."""

    op: int
    chain: tuple[BlockKey, ...]
    start: int
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Locate:
    """Lease blocks of a peer for reading. Answered by Located.

    The peer may take `wait_seconds` of the timeout to bring back blocks that it has only in a tier.
    """

    fetch: int
    holder: Holder
    keys: tuple[BlockKey, ...]
    timeout_seconds: float
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Follow:
    """Ask the writer's node for blocks of a hand-off as they are sealed. Answered by Followed.

    The peer may take `wait_seconds` to answer.
    """

    follow: int
    op: int
    handoff: Handoff
    keys: tuple[BlockKey, ...]
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Pull:
    """Read and verify blocks of a peer. Answered by Pulled, and later by WritesEnded when a result was STUCK."""

    job: int
    holder: Holder
    epoch: BootEpoch
    payload_bytes: int
    items: tuple[tuple[BlockHandle, SlotIndex], ...]
    deadline: float  # on the clock of `now`; nothing that arrives later may be accepted


@dataclass(frozen=True, slots=True)
class ReleaseRemote:
    holder: Holder
    epoch: BootEpoch
    lease_id: LeaseId
    suspects: tuple[BlockRef, ...] = ()  # leased slots that did not hold what was leased (core.acquire.suspects)


@dataclass(frozen=True, slots=True)
class WriteDown:
    """Write blocks of these slots into a tier. The slots stay pinned until the answer, WrittenDown."""

    job: int
    tier: str
    items: tuple[tuple[TierBlock, SlotIndex], ...]


@dataclass(frozen=True, slots=True)
class BringBack:
    """Read and verify blocks of a tier into reserved slots. Answered by BroughtBack."""

    job: int
    tier: str
    items: tuple[tuple[TierBlock, SlotIndex], ...]
    deadline: float  # on the clock of `now`; a block whose reading has not begun by then is not read
    urgent: bool = True  # an engine waits for it; False: it lets urgent reads pass


@dataclass(frozen=True, slots=True)
class Erase:
    """Remove blocks from a tier. Not answered."""

    tier: str
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask a tier how many blocks of this chain it has from index `start` on. Answered by Probed."""

    op: int
    tier: str
    chain: tuple[BlockKey, ...]
    start: int
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class WatchEngine:
    """Report EngineGone when no process of this engine holds its liveness lock and none can take it any more."""

    engine_id: bytes


@dataclass(frozen=True, slots=True)
class FindTakers:
    """Ask the directory for the other nodes, how much room they have, and which of them hold these blocks.

    Answered by TakersFound.
    """

    blocks: tuple[tuple[BlockKey, SpanRoute], ...]
    is_spill: bool = False  # for blocks that are cold here; False: this node leaves


@dataclass(frozen=True, slots=True)
class Offer:
    """Ask a peer to take over these blocks within `wait_seconds`. Answered by Offered."""

    offer: int
    peer: Holder
    payload_bytes: int
    items: tuple[TakeOverItem, ...]
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Farewell:
    """Tell the directory that this node leaves. The directory forgets the node's blocks at once."""


# The actions that ask or tell other nodes or the directory something.
Outgoing = Resolve | Locate | Follow | ReleaseRemote | FindTakers | Offer | Farewell
# The actions that a tier performs.
TierWork = WriteDown | BringBack | Erase | Probe

Action = (
    Reply
    | Refuse
    | NextTurn
    | WriteHeader
    | ClearHeader
    | AssignSlab
    | Digest
    | Announce
    | Retract
    | Pull
    | WatchEngine
    | TierWork
    | Outgoing
)


def nobody_performs(action: NoReturn) -> NoReturn:  # pragma: no cover  mypy proves that nothing gets here
    """The last case of a `match` over Action. mypy reports a match that has no case for one kind of action."""
    raise AssertionError(f"{action!r} is not performed")
