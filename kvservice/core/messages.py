"""What engines, shards and peers say to each other, as frozen values. kvservice.wire.codec maps them to protobuf.

The embedded mode passes the same values without a wire, so the connector cannot tell the two apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.tenants import TenantUsage
from kvservice.core.block.window_groups import WindowGroup
from kvservice.core.segment.geometry import Geometry
from kvservice.core.segment.layout import SlotLayout
from kvservice.core.segment.refs import BlockHandle, BlockRef
from kvservice.units import (
    AttachmentId,
    BlockKey,
    BootEpoch,
    HandoffId,
    LeaseId,
    NodeId,
    SlotIndex,
    SpanRoute,
)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Who attaches. Equal `model` and `namespace` with another fingerprint are refused while the first is attached."""

    engine_id: bytes  # 16 bytes, kept by the engine over re-attachments
    model: str
    fingerprint: Fingerprint
    layout: SlotLayout
    namespace: str = ""  # lets engines of one model with different fingerprints live side by side
    window_groups: tuple[WindowGroup, ...] = ()  # KV cache groups 1, 2, … of the engine; `layout` is that of group 0
    attempt: int = 0  # grows with each attach of this engine; one that was overtaken is refused. 0: not counted


@dataclass(frozen=True, slots=True)
class Attachment:
    """What an engine needs to use the pool. Valid until the attach stream ends."""

    attachment_id: AttachmentId
    node_id: NodeId
    epoch: BootEpoch
    lease_seconds: float  # read leases end this long after the request that made or renewed them was *sent*
    segment_path: str  # file to map, read and write
    geometry: Geometry
    node_directory: str  # where the copy workers of its node register; "" when the pool is the engine's own
    tenant_key: bytes = field(default=b"", repr=False)  # secret: its blocks' keys derive from it; empty = the default
    public_key: bytes = field(default=b"", repr=False)  # the same for public blocks; empty = it may use none
    may_publish: bool = False
    quota_bytes: int = 0  # the most its tenant may hold here; 0 = the whole pool


@dataclass(frozen=True, slots=True)
class Statement:
    """What an engine holds at the moment when it composes a heartbeat; see core.reconcile for what follows from it."""

    calls: int  # the last number that it has given to a call that grants something; the first is 1
    open_calls: tuple[int, ...]  # those whose answers it may still use
    slots: tuple[SlotIndex, ...]  # that it, or a worker of it, may write
    handoffs: tuple[HandoffId, ...]  # that it has open


class MissReason(Enum):
    """Why an acquired prefix ended where it did. Counted by name; NONE when everything asked was promised."""

    NONE = "none"
    NEVER_STORED = "never_stored"  # the directory knows no holder
    DEADLINE = "deadline"  # did not arrive before the engine's deadline
    SLOWER_THAN_RECOMPUTE = "slower_than_recompute"  # not fetched: measured bandwidth says recomputing wins
    LOOKUP_FAILED = "lookup_failed"  # the lookup service did not answer
    PEER_FAILED = "peer_failed"  # the holder is gone, refused, or the transfer failed
    STALE = "stale"  # the holder's slot changed: epoch, generation, key or length differ
    CORRUPT = "corrupt"  # the digest did not match
    WINDOW = "window"  # the prefix is here, but not what layers with a window need at its end
    NO_ROOM = "no_room"  # no slot could be freed for the fetched block
    QUOTA = "quota"  # its tenant may hold, or write, no more blocks
    DRAINING = "draining"
    DETACHED = "detached"  # the engine was gone before the answer


class HandoffState(Enum):
    UNKNOWN = "unknown"  # not opened yet, or forgotten
    OPEN = "open"  # its writer may still seal blocks
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Handoff:
    """A prompt that another engine computes just now, for this one to continue."""

    handoff_id: HandoffId
    node_id: NodeId  # whose shard the writer stores into


@dataclass(frozen=True, slots=True)
class AcquireRequest:
    """Make this prefix local and promise it.

    `keys` is the whole chain from its first block; the engine holds the first `skip` blocks itself, so they are
    neither leased nor fetched.
    """

    keys: tuple[BlockKey, ...]
    skip: int
    timeout_seconds: float  # the answer comes no later than this
    recompute_seconds_per_block: float = 0.0  # measured by the engine; 0 = unknown, then fetch whatever there is
    handoff: Handoff | None = None  # wait for what this writer seals, and only then ask the directory
    request_id: str = ""  # the engine's, for `kvservice explain`; "" = nothing is remembered


@dataclass(frozen=True, slots=True)
class AcquireResult:
    """The longest local, verified run that starts at `skip`, leased. `lease_id` is 0 when `blocks` is empty.

    `window_blocks`: for each window group of the engine the blocks that it needs of this prefix, up to its end.
    `admitted` is False where nothing is reused: the rest of this chain is better not stored (core.store.admission)."""

    lease_id: LeaseId
    blocks: tuple[BlockRef, ...]
    fetched_count: int  # how many of `blocks` came from another node for this request
    miss: MissReason
    window_blocks: tuple[tuple[BlockRef, ...], ...] = ()
    admitted: bool = True


@dataclass(frozen=True, slots=True)
class RequestReport:
    """What became of one request of an engine, in full blocks of its prompt; sent once, after it ended."""

    request_id: str
    prompt_blocks: int
    engine_blocks: int  # in the engine's own cache
    loaded_blocks: int  # from the pool
    computed_blocks: int
    load_failed: bool = False  # what was loaded was given up and computed
    gave_up: bool = False  # the engine did not wait for the answer any longer
    asked: bool = True  # the pool was asked at all
    salted: bool = False  # its blocks are its tenant's own (cache_salt)


@dataclass(frozen=True, slots=True)
class SealItem:
    """A written slot to publish. `parent` is the previous block of the chain, None for the first. A block of a
    window group has none, and WINDOW_BIT set in its position."""

    ref: BlockRef
    key: BlockKey
    parent: BlockKey | None
    position: int
    route: SpanRoute


class SealStatus(Enum):
    SEALED = "sealed"
    DUPLICATE = "duplicate"  # the pool already holds this key; the slot went back
    STALE = "stale"  # not this engine's reservation any more: epoch, generation or owner differ
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LocateResult:
    """A peer's answer: the blocks of the asked run that it holds, leased for the reader. Positions match the request;
    None where it does not hold the block."""

    epoch: BootEpoch
    lease_id: LeaseId
    lease_seconds: float
    handles: tuple[BlockHandle | None, ...]


@dataclass(frozen=True, slots=True)
class FollowResult:
    """A peer's answer about a hand-off: the leading blocks of the asked run that are sealed by now, leased."""

    state: HandoffState
    located: LocateResult


@dataclass(frozen=True, slots=True)
class Holder:
    """A node as the directory knows it."""

    node_id: NodeId
    peer_address: str  # host:port of the shard's peer service
    epoch: BootEpoch


@dataclass(frozen=True, slots=True)
class TakeOverItem:
    """One block that a leaving node offers."""

    key: BlockKey
    parent: BlockKey | None
    position: int
    route: SpanRoute
    idle_seconds: float  # since its last use: a receiver gives no block for it that was used later
    account_tag: int = 0  # core.block.tenants.tag_of whom it is charged to


@dataclass(frozen=True, slots=True)
class TakeOverResult:
    """A receiver's answer: which of the offered blocks it holds now."""

    kept: tuple[bool, ...]
    full: bool  # no more room: offer the rest to somebody else


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node, as one that leaves sees it."""

    holder: Holder
    free_bytes: int
    capacity_bytes: int
    age_seconds: float  # since its shard started
    draining: bool = False


@dataclass(frozen=True, slots=True)
class HolderRun:
    """`count` consecutive keys of a lookup, starting at index `start`, that all these holders have."""

    start: int
    count: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Engines attached to one shard that name and fill their blocks alike."""

    namespace: str
    model: str
    fingerprint: Fingerprint
    layout: SlotLayout
    attached: int
    seconds_per_block: float  # of prefill, as one of them measured it last; 0 = not yet
    tenant_key: bytes = field(default=b"", repr=False)  # as in Attachment, for who asked with a tenant's token
    public_key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class PeerSpeed:
    """How fast one shard reads from another node. 0 = not measured yet."""

    node_id: NodeId
    bytes_per_second: float
    overhead_seconds: float


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What a router wants to know of one node."""

    engines: tuple[EngineKind, ...]
    peers: tuple[PeerSpeed, ...]
    draining: bool = False


@dataclass(frozen=True, slots=True)
class PoolStats:
    """One shard's numbers at one moment."""

    node_id: NodeId
    epoch: BootEpoch
    segment_bytes: int
    slab_count: int
    slab_free_count: int
    slots: dict[str, int] = field(default_factory=dict)  # by state name; sums to the capacity of the assigned slabs
    counters: dict[str, int] = field(default_factory=dict)
    draining: bool = False
    tenants: tuple[TenantUsage, ...] = ()
