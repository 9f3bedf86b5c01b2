"""What happens to a shard. A `Call` is answered; every other event is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvservice.core.block.marks import Mark
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
    WarmRequest,
)
from kvservice.core.segment.header import SlotHeader
from kvservice.core.segment.refs import BlockRef
from kvservice.core.tier.tier_block import TierBlock
from kvservice.units import AttachmentId, BlockKey, BootEpoch, HandoffId, LeaseId, NodeId, SlotIndex


@dataclass(frozen=True, slots=True)
class Call:
    """An event whose sender waits for the answer: exactly one Reply or Refuse with this `op`.

    The sender chooses `op`, which must be unique while the call is open.
    """

    op: int


@dataclass(frozen=True, slots=True)
class Attach(Call):
    """`account` is the tenant that the channel's token names. It is never taken from a field of the request."""

    spec: EngineSpec
    account: str = NOBODY


@dataclass(frozen=True, slots=True)
class Detach:
    """The engine left. It promises that none of its processes will write its reservations any more."""

    attachment: AttachmentId


@dataclass(frozen=True, slots=True)
class AttachmentLost:
    """The engine's connection ended without a Detach: the engine's processes may still be writing."""

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
    group: int = 0  # the engine's KV cache group that will use the slots
    call: int = 0  # the engine's number of this call, for its statements; 0 = it sends no statements


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
    statement: Statement | None = None  # what the engine holds; None = it does not say
    suspects: Sequence[BlockRef] = ()  # slots that it did not find as promised (core.acquire.suspects)


@dataclass(frozen=True, slots=True)
class GoOn:
    """It is the turn of this long call again: do its next slice. Ignored for a call that has ended."""

    op: int


@dataclass(frozen=True, slots=True)
class Warm(Call):
    """Answered with a WarmResult. `account` is the tenant whose prompt it is."""

    account: str
    request: WarmRequest


@dataclass(frozen=True, slots=True)
class Unpin(Call):
    """Answered with the Pin that has ended, or None if there is none of this name."""

    account: str
    name: str


@dataclass(frozen=True, slots=True)
class Clear(Call):
    """Blocks are cleared, here and everywhere. Answered with a core.acquire.clearing.ClearResult."""

    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for the answer of the call `op` any more, so it gets none. Cancel itself has no answer."""

    op: int


@dataclass(frozen=True, slots=True)
class OpenHandoff(Call):
    attachment: AttachmentId
    handoff: HandoffId
    call: int = 0  # as in Reserve


@dataclass(frozen=True, slots=True)
class CloseHandoff(Call):
    """The writer has sealed everything that it will store for this hand-off."""

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
    wait_seconds: float = 0.0  # blocks that are only in a tier here are brought back if that takes no longer


@dataclass(frozen=True, slots=True)
class PeerRelease(Call):
    reader: NodeId
    epoch: BootEpoch
    lease_id: LeaseId
    suspects: Sequence[BlockRef] = ()  # leased slots that did not hold what was leased (core.acquire.suspects)


class SlotDigest(NamedTuple):
    """`digest` is None when the bytes could not be read."""

    slot: SlotIndex
    key: BlockKey
    digest: int | None


@dataclass(frozen=True, slots=True)
class Digested:
    """Some of the slots that Digest asked for."""

    found: tuple[SlotDigest, ...]


@dataclass(frozen=True, slots=True)
class Resolved:
    """`complete` is False when a part of the directory did not answer: then an unknown block may still exist."""

    op: int
    runs: tuple[HolderRun, ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class Located:
    """`result` is None when the peer failed or refused.

    `sent_at` is the local clock before the request was sent: the peer's lease is counted from then.
    """

    fetch: int
    result: LocateResult | None
    sent_at: float


@dataclass(frozen=True, slots=True)
class Followed:
    """The answer of the writer's node. `result` is None when the node failed, refused or is not known.

    `sent_at` is as in Located.
    """

    follow: int
    op: int
    holder: Holder | None
    result: FollowResult | None
    sent_at: float


class PullResult(Enum):
    OK = "ok"
    STALE = "stale"
    CORRUPT = "corrupt"
    FAILED = "failed"  # the bytes did not arrive and will not arrive later
    STUCK = "stuck"  # the bytes may still arrive: the slot must not be reused until WritesEnded


@dataclass(frozen=True, slots=True)
class Pulled:
    job: int
    results: tuple[PullResult, ...]


@dataclass(frozen=True, slots=True)
class BroughtBlock:
    """What a tier says of one block that it was asked for. Digest and time are those of its header, which was verified;
    0 where the result is not OK."""

    result: PullResult
    digest: int = 0  # of the bytes that are now in the slot
    stored_at: float = 0.0  # when they were computed, in seconds since 1970; 0 = not known


@dataclass(frozen=True, slots=True)
class BroughtBack:
    """The end of a BringBack. Nothing writes its slots any more."""

    job: int
    blocks: tuple[BroughtBlock, ...]


@dataclass(frozen=True, slots=True)
class WritesEnded:
    job: int


@dataclass(frozen=True, slots=True)
class WrittenDown:
    """The end of a WriteDown: for each of its blocks, whether the tier has it now. `is_full`: the tier itself has no
    room for more, whatever its budget says."""

    job: int
    written: tuple[bool, ...]
    is_full: bool = False
    stored_bytes: tuple[int, ...] = ()  # of each block, as in TierBlock


@dataclass(frozen=True, slots=True)
class Probed:
    """The answer of a tier: how many blocks from the asked index on it has. 0 also when it did not answer in time."""

    op: int
    tier: str
    count: int
    is_end: bool = False  # it is certain that the tier lacks the block behind them


@dataclass(frozen=True, slots=True)
class TierFound:
    """Blocks that a tier of this node kept over a restart. They are announced as found, and verified as read."""

    tier: str
    blocks: tuple[TierBlock, ...]
    more: bool = False  # others follow: until then the tier may have any block


@dataclass(frozen=True, slots=True)
class Adopt:
    """A slot header found in the segment at start. `verified` says that the payload matches its digest."""

    slot: SlotIndex
    payload_bytes: int
    header: SlotHeader
    verified: bool


@dataclass(frozen=True, slots=True)
class PeerTakeOver(Call):
    """A node that leaves, or is short of memory, offers blocks."""

    epoch: BootEpoch  # of this shard
    leaver: Holder
    payload_bytes: int
    items: tuple[TakeOverItem, ...]
    wait_seconds: float


@dataclass(frozen=True, slots=True)
class TakersFound:
    peers: tuple[Peer, ...]
    holders: Mapping[BlockKey, tuple[Holder, ...]]  # other nodes with the block, as far as the directory knows
    is_spill: bool = False  # as in FindTakers


@dataclass(frozen=True, slots=True)
class Offered:
    """`result` is None when the peer failed or refused."""

    offer: int
    result: TakeOverResult | None
    refusal: str = ""  # what a peer that refused has answered, for people


@dataclass(frozen=True, slots=True)
class Drain:
    """Stop accepting writes; with a timeout, also leave within it. `undo` cancels the drain if it is not too late."""

    undo: bool = False
    timeout_seconds: float = 0.0
    handover: bool = True


@dataclass(frozen=True, slots=True)
class SetTenants:
    """The tenants that exist now and their limits. Not answered."""

    limits: Mapping[str, TenantLimits]


@dataclass(frozen=True, slots=True)
class ClockSet:
    """The wall clock was set, or the machine slept. `wall_offset` makes seconds since 1970 of the shard's clock. Not
    answered."""

    wall_offset: float


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
    | Warm
    | Unpin
    | Clear
    | Cancel
    | GoOn
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
    | BroughtBack
    | WritesEnded
    | WrittenDown
    | Probed
    | TierFound
    | Adopt
    | PeerTakeOver
    | TakersFound
    | Offered
    | Drain
    | SetTenants
    | ClockSet
    | Tick
)
