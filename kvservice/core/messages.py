"""The values that engines, shards and peers exchange, all frozen. kvservice.wire.codec maps them to protobuf.

The embedded mode passes the same values without protobuf, so the connector sees no difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvservice.core.block.engine_names import EngineNames
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.tenants import TenantUsage
from kvservice.core.block.window_groups import STATE_EVERY, WindowGroup
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
    """The engine that attaches.

    An engine with an equal `model` and `namespace` and another fingerprint is refused while the first is attached.
    """

    engine_id: bytes  # 16 bytes, kept by the engine over re-attachments
    model: str
    fingerprint: Fingerprint
    layout: SlotLayout
    namespace: str = ""  # lets engines of one model with different fingerprints attach to the same shard
    window_groups: tuple[WindowGroup, ...] = ()  # KV cache groups 1, 2, … of the engine; `layout` is that of group 0
    attempt: int = 0  # grows with each attach of this engine; an attach that a later one overtook is refused. 0 = none
    hears_removals: bool = False  # its heartbeats are answered with the blocks that left the pool

    @property
    def names(self) -> EngineNames:
        """What it calls its blocks."""
        return {self.fingerprint.block_mark: frozenset({(self.namespace, self.model)})}

    def slots_for(self, group: int, positions: int) -> int:
        """The slots of a group to keep ready for an engine that is about to fill so many positions."""
        return positions // STATE_EVERY if group and self.window_groups[group - 1].window.is_state else positions


@dataclass(frozen=True, slots=True)
class Attachment:
    """What an engine needs to use the pool. Valid until the attachment ends."""

    attachment_id: AttachmentId
    node_id: NodeId
    epoch: BootEpoch
    lease_seconds: float  # read leases end this long after the request that made or renewed them was *sent*
    segment_path: str  # file to map, read and write
    geometry: Geometry
    node_directory: str  # where the copy workers of its node register; "" when the pool is the engine's own
    tenant_key: bytes = field(default=b"", repr=False)  # secret from which its block keys derive; empty = no tenants
    public_key: bytes = field(default=b"", repr=False)  # the same for public blocks; empty = it may not use them
    may_publish: bool = False
    quota_bytes: int = 0  # the most its tenant may hold here; 0 = the whole pool


@dataclass(frozen=True, slots=True)
class Statement:
    """What an engine holds at the moment when it composes a heartbeat. core.reconcile says what follows from it."""

    calls: int  # the highest number that it has given to a call that grants something; the first is 1
    open_calls: tuple[int, ...]  # numbers of calls whose answers it may still use
    slots: tuple[SlotIndex, ...]  # slots that it, or a worker of it, may write
    handoffs: tuple[HandoffId, ...]  # hand-offs that it has open


@dataclass(frozen=True, slots=True)
class Hints:
    """What a client says about the future of a prompt's blocks. All of it is advice; nothing depends on it."""

    pin_seconds: float = 0.0  # hold the blocks so long, within the budget of warmed ones; 0 = no pin
    prefetch: bool = False  # bring what is missing to this node, also where computing it is faster
    write_down: bool = False  # the blocks are not needed for a while
    share: bool = False  # other engines will ask for them
    no_store: bool = False  # they are not to be kept
    reuse_seconds: float = 0.0  # expected until the next use; 0 = not said
    last_turn: bool = False  # nobody continues this prompt

    @property
    def says_something(self) -> bool:
        return self is not NO_HINTS and self != NO_HINTS


NO_HINTS = Hints()


class MissReason(Enum):
    """Why an acquired prefix ended where it did; NONE when every block asked for was promised.

    An acquire that was cut is counted under its reason.
    """

    NONE = "none"
    NEVER_STORED = "never_stored"  # the directory knows no holder
    TIER_NOT_OPEN = "tier_not_open"  # nobody else is known to have it, and a tier of this node was not open
    TIER_NOT_ASKED = "tier_not_asked"  # nor a tier that may have it: it fails, owes an answer or is slow
    DEADLINE = "deadline"  # the block did not arrive before the engine's deadline
    SLOWER_THAN_RECOMPUTE = "slower_than_recompute"  # not fetched: by the measured bandwidth, computing is faster
    LOOKUP_FAILED = "lookup_failed"  # the lookup service did not answer
    PEER_FAILED = "peer_failed"  # the holder is gone, refused, or the transfer failed
    STALE = "stale"  # the holder's slot changed: epoch, generation, key or length differ
    CORRUPT = "corrupt"  # the digest did not match
    WINDOW = "window"  # the prefix is here, but not the window blocks that its end needs
    NO_ROOM = "no_room"  # no slot could be freed for the fetched block
    QUOTA = "quota"  # its tenant may not hold, or not write, more blocks
    DRAINING = "draining"
    DETACHED = "detached"  # the engine was gone before the answer


class HandoffState(Enum):
    UNKNOWN = "unknown"  # not opened yet, or forgotten
    OPEN = "open"  # its writer may still seal blocks
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Handoff:
    """A prompt that another engine is computing and that this engine will continue."""

    handoff_id: HandoffId
    node_id: NodeId  # the node whose shard the writer stores into


@dataclass(frozen=True, slots=True)
class AcquireRequest:
    """Ask the shard to make this prefix local and to lease it.

    `keys` is the whole chain from its first block; the engine holds the first `skip` blocks itself, so they are
    neither leased nor fetched.
    """

    keys: tuple[BlockKey, ...]
    skip: int
    timeout_seconds: float  # the answer comes no later than this
    recompute_seconds_per_block: float = 0.0  # measured by the engine; 0 = unknown, then every known block is fetched
    handoff: Handoff | None = None  # wait for the blocks that this writer seals, and only then ask the directory
    request_id: str = ""  # the engine's id, for `kvservice explain`; "" = nothing is recorded
    trace: str = ""  # W3C traceparent of the engine's request; on the wire it is gRPC metadata, and only spans read it
    hold_seconds: float = 0.0  # > 0: nobody reads now. The blocks are held so long, and their reads let others pass
    # Not None: `keys` are the block before position `tail_at` and then names of partial tails of that position. One of
    # them is wanted, the first that somebody has (core.acquire.tails). `skip` is 1.
    tail_at: int | None = None
    hints: Hints = NO_HINTS


@dataclass(frozen=True, slots=True)
class WarmRequest:
    """Make this prefix local, and hold it for a while without an engine that reads it (core.acquire.warming)."""

    fingerprint: bytes  # digest of the engines that it is for, one of which is attached to the shard
    keys: tuple[BlockKey, ...]  # the whole chain from its first block
    timeout_seconds: float
    hold_seconds: float
    pin: str = ""  # hold it under this name until it is unpinned; `hold_seconds` then says nothing


@dataclass(frozen=True, slots=True)
class WarmResult:
    """What a Warm found, counted in blocks of the prompt."""

    asked: int
    local: int  # leading blocks that were here
    fetched: tuple[tuple[NodeId, int], ...]  # by where they came from
    held: int  # leading blocks that are held now; those behind them are here, and may be evicted
    held_seconds: float  # 0 = until it is unpinned
    miss: MissReason  # why it ended before `asked`


@dataclass(frozen=True, slots=True)
class Pin:
    """A prompt that is held by name."""

    name: str
    account: str
    model: str
    blocks: int  # of all KV cache groups
    bytes: int
    age_seconds: float


@dataclass(frozen=True, slots=True)
class AcquireResult:
    """The longest local and verified run of blocks that starts at `skip`, leased. `lease_id` is 0 when it is empty.

    `window_blocks` holds, for each window group of the engine, the blocks that this prefix needs at its end.
    `admitted` is False when this node sees no reuse; the engine should then not store the rest of the chain
    (core.store.admission).
    """

    lease_id: LeaseId
    blocks: Sequence[BlockRef]
    fetched_count: int  # how many of `blocks` came from another node for this request
    miss: MissReason
    window_blocks: tuple[Sequence[BlockRef], ...] = ()
    admitted: bool = True
    skipped_held: int = 0  # how many of the `skip` blocks this node holds, from the first on; they are not leased
    tier_count: int = 0  # how many of `blocks` were brought back from a tier for this request
    farthest: str = ""  # where a block came from: "peer" or the name of a tier, the one that takes longest; "" = here
    tail_index: int = 0  # of the names of a tail: the one that `blocks` holds


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that left the pool since the last heartbeat of an engine."""

    keys: tuple[BlockKey, ...] = ()
    lost: int = 0  # further ones, whose keys are not known any more


@dataclass(frozen=True, slots=True)
class RequestReport:
    """What became of one request of an engine, counted in full blocks of its prompt. Sent once, after it ended."""

    request_id: str
    prompt_blocks: int
    engine_blocks: int  # in the engine's own cache
    loaded_blocks: int  # from the pool
    computed_blocks: int
    load_failed: bool = False  # loaded blocks were given up and computed
    gave_up: bool = False  # the engine stopped waiting for the answer
    asked: bool = True  # False: the pool was not asked
    salted: bool = False  # the request has a cache_salt, so its blocks are its own


class SealItem(NamedTuple):  # a step makes one for each block, and this is four times as quick as a dataclass
    """A written slot to publish. `parent` is the previous block of the chain, None for the first.

    A block of a window group has no parent, and its position has WINDOW_BIT set.
    """

    ref: BlockRef
    key: BlockKey
    parent: BlockKey | None
    position: int
    route: SpanRoute
    hints: Hints = NO_HINTS  # of the request that it was computed for


class SealStatus(Enum):
    SEALED = "sealed"
    DUPLICATE = "duplicate"  # the pool already holds this key; the slot went back
    STALE = "stale"  # the slot is not this engine's reservation any more: epoch, generation or owner differ
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LocateResult:
    """A peer's answer: which of the requested blocks it holds, leased for the reader.

    `handles` has a position for each requested key; it is None for a block that the peer does not hold.
    """

    epoch: BootEpoch
    lease_id: LeaseId
    lease_seconds: float
    handles: tuple[BlockHandle | None, ...]


@dataclass(frozen=True, slots=True)
class FollowResult:
    """A peer's answer about a hand-off: the leading blocks of the request that are sealed by now, leased."""

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
    idle_seconds: float  # since its last use: a receiver evicts no block for it that was used more recently
    account_tag: int = 0  # core.block.tenants.tag_of the tenant that it is charged to
    fingerprint: bytes = b""  # as in BlockOrigin; b"": not known, and then there are no names
    names: frozenset[tuple[str, str]] = frozenset()  # (namespace, model) of the engines with this fingerprint

    @property
    def model(self) -> str:
        """Of its engines. "": not known, or they have several."""
        models = {model for _, model in self.names}
        return models.pop() if len(models) == 1 else ""


def names_of(items: Iterable[TakeOverItem]) -> EngineNames:
    """What the engines of offered blocks are called."""
    return {item.fingerprint: item.names for item in items if item.fingerprint}


@dataclass(frozen=True, slots=True)
class TakeOverResult:
    """A receiver's answer: which of the offered blocks it holds now."""

    kept: tuple[bool, ...]
    full: bool  # the receiver has no more room: offer the rest to another node


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node, as one sees it that offers blocks."""

    holder: Holder
    free_bytes: int  # with secondary copies, which make way
    capacity_bytes: int
    age_seconds: float  # since its shard started
    draining: bool = False
    accepts_spill: bool = False  # it takes blocks of nodes that stay


@dataclass(frozen=True, slots=True)
class HolderRun:
    """`count` consecutive keys of a lookup, starting at index `start`. Each of `holders` has all of them."""

    start: int
    count: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Engines attached to one shard that make the same block keys and bytes."""

    namespace: str
    model: str
    fingerprint: Fingerprint
    layout: SlotLayout
    attached: int
    seconds_per_block: float  # of prefill, as one of them measured it last; 0 = not measured yet
    tenant_key: bytes = field(default=b"", repr=False)  # as in Attachment, for a caller with a tenant's token
    public_key: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class PeerSpeed:
    """How fast one shard reads from another node. 0 = not measured yet."""

    node_id: NodeId
    bytes_per_second: float
    overhead_seconds: float
    pulled_bytes: int = 0  # since the shard started


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What a router needs to know of one node."""

    engines: tuple[EngineKind, ...]
    peers: tuple[PeerSpeed, ...]
    draining: bool = False


@dataclass(frozen=True, slots=True)
class UsageRow:
    """Blocks of one model and tenant, since the shard started. core.explain.usage says which rows there are."""

    model: str
    tenant: str  # "" in a service without tenants
    asked_blocks: int
    hit_local_blocks: int
    hit_remote_blocks: int
    hit_tier_blocks: int


@dataclass(frozen=True, slots=True)
class AttachedEngine:
    """One engine that is attached to a shard."""

    engine: str  # the beginning of its id
    model: str
    namespace: str
    fingerprint: str  # the beginning of its digest, in hex
    account: str  # its tenant
    block_tokens: int
    attached_seconds: float
    seconds_per_block: float  # of prefill, as it measured last; 0 = not measured yet
    attachment: AttachmentId


@dataclass(frozen=True, slots=True)
class ListedSlot:
    """A slot, as `kvservice blocks` shows it. Times are on the shard's clock."""

    slot: SlotIndex
    state: str  # as in ShardState.slot_usage
    payload_bytes: int
    account: str  # the tenant that is charged for it
    key: BlockKey | None = None  # None: it holds no block, and the following fields are empty
    model: str = ""  # "" = not known, for example after a restart
    position: int = 0  # in its chain
    is_secondary: bool = False  # fetched: another node has the primary copy
    age_seconds: float = 0.0  # since it was sealed here
    idle_seconds: float = 0.0  # since its last use
    uses: int = 0  # times it was used again, as the eviction policy counts them


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One tier of a node at one moment, for people."""

    name: str
    state: str  # opening, open, failed or closed
    detail: str = ""  # why it failed, or does not take every block while it is open
    is_shared: bool = False
    blocks: int = 0
    used_bytes: int = 0
    budget_bytes: int = 0  # 0 = no bound
    waiting_blocks: int = 0  # to be written


@dataclass(frozen=True, slots=True)
class CodecDrift:
    """What a lossy codec lost of one model's blocks, as its guard has seen it since the start."""

    model: str
    limit: float  # a block that drifts further switches the codec off for the model
    blocks: int = 0  # encoded
    checked: int = 0  # of them, looked at
    keys: float = 0.0  # the largest drift of a block's K, or of all its rows when K and V cannot be told apart
    values: float = 0.0  # of its V
    is_off: bool = False


@dataclass(frozen=True, slots=True)
class PoolStats:
    """One shard's figures at one moment."""

    node_id: NodeId
    epoch: BootEpoch
    segment_bytes: int
    slab_count: int
    slab_free_count: int
    slots: dict[str, int] = field(default_factory=dict)  # by state as in ShardState.slot_usage
    counters: dict[str, int] = field(default_factory=dict)
    draining: bool = False
    tenants: tuple[TenantUsage, ...] = ()
    usage: tuple[UsageRow, ...] = ()
    slot_bytes: dict[str, int] = field(default_factory=dict)  # payload bytes of `slots`
    tiers: tuple[TierFigures, ...] = ()
    drifts: tuple[CodecDrift, ...] = ()  # at most DRIFTS_MAX, the worst first
    secondary_bytes: int = 0  # of slot_bytes, those of copies that were fetched from other nodes
