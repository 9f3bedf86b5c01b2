"""What happens to a shard. A `Call` is answered; everything else is news."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kvservice.core.block.tenants import NOBODY, TenantLimits
from kvservice.core.messages import (
    AcquireRequest,
    EngineSpec,
    FollowResult,
    Holder,
    HolderRun,
    LocateResult,
    Peer,
    RequestReport,
    SealItem,
    Statement,
    TakeOverItem,
    TakeOverResult,
)
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.refs import BlockRef
from kvservice.units import AttachmentId, BlockKey, BootEpoch, HandoffId, LeaseId, NodeId, SlotIndex


@dataclass(frozen=True, slots=True)
class Call:
    """Somebody waits for the answer: exactly one Reply or Refuse with this `op`. The caller chooses it, unique while
    the call is open."""

    op: int


@dataclass(frozen=True, slots=True)
class Attach(Call):
    """`account`: the tenant that the channel says, never a field of the request."""

    spec: EngineSpec
    account: str = NOBODY


@dataclass(frozen=True, slots=True)
class Detach:
    """The engine left and promises that none of its processes will write its reservations any more."""

    attachment: AttachmentId


@dataclass(frozen=True, slots=True)
class AttachmentLost:
    """The stream ended without a word: its processes may still be writing."""

    attachment: AttachmentId


@dataclass(frozen=True, slots=True)
class EngineGone:
    engine_id: bytes


@dataclass(frozen=True, slots=True)
class Acquire(Call):
    attachment: AttachmentId
    request: AcquireRequest


@dataclass(frozen=True, slots=True)
class Reserve(Call):
    attachment: AttachmentId
    count: int
    group: int = 0  # KV cache group of the engine that they are for
    call: int = 0  # the engine's number of this call, for its statements; 0 = it makes none


@dataclass(frozen=True, slots=True)
class Seal(Call):
    attachment: AttachmentId
    items: tuple[SealItem, ...]


@dataclass(frozen=True, slots=True)
class Abort(Call):
    attachment: AttachmentId
    refs: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class Release(Call):
    attachment: AttachmentId
    lease_ids: tuple[LeaseId, ...]


@dataclass(frozen=True, slots=True)
class Renew(Call):
    attachment: AttachmentId
    lease_ids: tuple[LeaseId, ...]
    reports: tuple[RequestReport, ...] = ()
    statement: Statement | None = None  # what the engine holds, if it says so


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for the answer of this call any more; it is not answered. No answer belongs to the event itself."""

    op: int


@dataclass(frozen=True, slots=True)
class OpenHandoff(Call):
    attachment: AttachmentId
    handoff: HandoffId
    call: int = 0  # as in Reserve


@dataclass(frozen=True, slots=True)
class CloseHandoff(Call):
    """Everything the writer will store for it is sealed."""

    attachment: AttachmentId
    handoff: HandoffId


@dataclass(frozen=True, slots=True)
class PeerFollow(Call):
    reader: NodeId
    epoch: BootEpoch
    handoff: HandoffId
    keys: tuple[BlockKey, ...]
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class PeerLocate(Call):
    reader: NodeId
    epoch: BootEpoch
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class PeerRelease(Call):
    reader: NodeId
    epoch: BootEpoch
    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class Digested:
    """digest is None when the bytes could not be read."""

    slot: SlotIndex
    key: BlockKey
    digest: int | None


@dataclass(frozen=True, slots=True)
class Resolved:
    """`complete` is False when part of the directory did not answer: unknown is then not the same as absent."""

    op: int
    runs: tuple[HolderRun, ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class Located:
    """result is None when the peer failed or refused. sent_at: local clock before the request, for the lease."""

    fetch: int
    result: LocateResult | None
    sent_at: float


@dataclass(frozen=True, slots=True)
class Followed:
    """What the writer's node said; result is None when it failed, refused or is not known. sent_at as in Located."""

    follow: int
    op: int
    holder: Holder | None
    result: FollowResult | None
    sent_at: float


class PullResult(Enum):
    OK = "ok"
    STALE = "stale"
    CORRUPT = "corrupt"
    FAILED = "failed"  # nothing arrived and nothing will
    STUCK = "stuck"  # it may still arrive: the slot must not be reused until WritesEnded


@dataclass(frozen=True, slots=True)
class Pulled:
    job: int
    results: tuple[PullResult, ...]


@dataclass(frozen=True, slots=True)
class WritesEnded:
    job: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """A header found at start. `verified`: its digest matched its payload."""

    slot: SlotIndex
    payload_bytes: int
    header: SlotHeader
    verified: bool


@dataclass(frozen=True, slots=True)
class PeerTakeOver(Call):
    """A node that leaves offers blocks."""

    epoch: BootEpoch  # of this shard
    leaver: Holder
    payload_bytes: int
    items: tuple[TakeOverItem, ...]
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class TakersFound:
    peers: tuple[Peer, ...]
    holders: Mapping[BlockKey, tuple[Holder, ...]]  # other nodes, as far as the directory knows


@dataclass(frozen=True, slots=True)
class Offered:
    """result is None when the peer failed or refused."""

    offer: int
    result: TakeOverResult | None


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no writes any more; with a timeout, also leave within it. `undo` takes it back, before it is too late."""

    undo: bool = False
    timeout_seconds: float = 0.0
    handover: bool = True


@dataclass(frozen=True, slots=True)
class SetTenants:
    """Who there is now, and what each may hold. No answer."""

    limits: Mapping[str, TenantLimits]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; also sent when `ShardState.next_deadline` is reached."""


Event = (
    Attach
    | Detach
    | AttachmentLost
    | EngineGone
    | Acquire
    | Reserve
    | Seal
    | Abort
    | Release
    | Renew
    | Cancel
    | OpenHandoff
    | CloseHandoff
    | PeerFollow
    | PeerLocate
    | PeerRelease
    | Digested
    | Resolved
    | Located
    | Followed
    | Pulled
    | WritesEnded
    | Adopt
    | PeerTakeOver
    | TakersFound
    | Offered
    | Drain
    | SetTenants
    | Tick
)
