"""What the shard's core asks to be done. kvservice.pool.runtime performs actions in order, without waiting in between;
those with an answer come back as an event (kvservice.core.events) that names the same id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from kvservice.core.messages import Handoff, Holder, TakeOverItem
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.refs import BlockHandle
from kvservice.errors import KVServiceError
from kvservice.units import BlockKey, BootEpoch, LeaseId, SlotIndex, SpanRoute


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of one call; `value` has the type that the PoolPort method or peer RPC of that event returns."""

    op: int
    value: object


@dataclass(frozen=True, slots=True)
class Refuse:
    op: int
    error: KVServiceError


@dataclass(frozen=True, slots=True)
class WriteHeader:
    """Must be visible in the segment before any later action is performed."""

    slot: SlotIndex
    header: SlotHeader


@dataclass(frozen=True, slots=True)
class ClearHeader:
    slot: SlotIndex


@dataclass(frozen=True, slots=True)
class AssignSlab:
    """Record in the segment which payload size the slab has now; 0 = none. Its headers are cleared first."""

    slab: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class Digest:
    """Compute the payload digest of a written slot; comes back as Digested."""

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
    """Ask the directory who holds the chain from `start` on; comes back as Resolved."""

    op: int
    chain: tuple[BlockKey, ...]
    start: int
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Locate:
    """Lease blocks of a peer for reading; comes back as Located."""

    fetch: int
    holder: Holder
    keys: tuple[BlockKey, ...]
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Follow:
    """Ask the writer's node for blocks of a hand-off as they are sealed; comes back as Followed. The peer may take
    `wait_seconds` to answer."""

    follow: int
    op: int
    handoff: Handoff
    keys: tuple[BlockKey, ...]
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Pull:
    """Read and verify blocks of a peer; comes back as Pulled, and as WritesEnded when a result was STUCK."""

    job: int
    holder: Holder
    epoch: BootEpoch
    payload_bytes: int
    items: tuple[tuple[BlockHandle, SlotIndex], ...]
    deadline: float  # on the clock of `now`; past it nothing may be accepted


@dataclass(frozen=True, slots=True)
class ReleaseRemote:
    holder: Holder
    epoch: BootEpoch
    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class WatchEngine:
    """Report EngineGone once no process of this engine holds its liveness lock, and while none can take it."""

    engine_id: bytes


@dataclass(frozen=True, slots=True)
class FindTakers:
    """Who else is there, with how much room, and who of them holds these blocks; comes back as TakersFound."""

    blocks: tuple[tuple[BlockKey, SpanRoute], ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """Ask a peer to take these blocks over within `wait_seconds`; comes back as Offered."""

    offer: int
    peer: Holder
    payload_bytes: int
    items: tuple[TakeOverItem, ...]
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class Farewell:
    """Tell the directory that this node leaves: it forgets its blocks at once."""


# What other nodes or the directory are asked, or told.
Outgoing = Resolve | Locate | Follow | ReleaseRemote | FindTakers | Offer | Farewell

Action = (
    Reply
    | Refuse
    | WriteHeader
    | ClearHeader
    | AssignSlab
    | Digest
    | Announce
    | Retract
    | Pull
    | WatchEngine
    | Outgoing
)


def nobody_performs(action: NoReturn) -> NoReturn:
    """The last case of a `match` over Action. mypy reports the match when one kind of action has no case of its own."""
    raise AssertionError(f"{action!r} is not performed")
