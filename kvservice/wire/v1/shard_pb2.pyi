from kvservice.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Geometry(_message.Message):
    __slots__ = ("slab_bytes", "slab_count")
    SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLAB_COUNT_FIELD_NUMBER: _ClassVar[int]
    slab_bytes: int
    slab_count: int
    def __init__(self, slab_bytes: _Optional[int] = ..., slab_count: _Optional[int] = ...) -> None: ...

class Layout(_message.Message):
    __slots__ = ("layer_count", "kv_head_count", "cell_bytes", "block_tokens", "parts")
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    CELL_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    layer_count: int
    kv_head_count: int
    cell_bytes: int
    block_tokens: int
    parts: int
    def __init__(self, layer_count: _Optional[int] = ..., kv_head_count: _Optional[int] = ..., cell_bytes: _Optional[int] = ..., block_tokens: _Optional[int] = ..., parts: _Optional[int] = ...) -> None: ...

class WindowGroup(_message.Message):
    __slots__ = ("layout", "sliding_tokens", "chunk_tokens", "is_state")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SLIDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_STATE_FIELD_NUMBER: _ClassVar[int]
    layout: Layout
    sliding_tokens: int
    chunk_tokens: int
    is_state: bool
    def __init__(self, layout: _Optional[_Union[Layout, _Mapping]] = ..., sliding_tokens: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., is_state: bool = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "authorization")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    AUTHORIZATION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    authorization: str
    def __init__(self, protocol_version: _Optional[int] = ..., authorization: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("reason", "text", "attributes")
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTES_FIELD_NUMBER: _ClassVar[int]
    reason: str
    text: str
    attributes: _containers.ScalarMap[str, str]
    def __init__(self, reason: _Optional[str] = ..., text: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("engine_id", "model", "namespace", "fingerprint", "layout", "window_groups", "hears_removals", "attempt")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_GROUPS_FIELD_NUMBER: _ClassVar[int]
    HEARS_REMOVALS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    engine_id: bytes
    model: str
    namespace: str
    fingerprint: _common_pb2.Fingerprint
    layout: Layout
    window_groups: _containers.RepeatedCompositeFieldContainer[WindowGroup]
    hears_removals: bool
    attempt: int
    def __init__(self, engine_id: _Optional[bytes] = ..., model: _Optional[str] = ..., namespace: _Optional[str] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., window_groups: _Optional[_Iterable[_Union[WindowGroup, _Mapping]]] = ..., hears_removals: bool = ..., attempt: _Optional[int] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("attachment_id", "node_id", "epoch", "lease_seconds", "segment_path", "geometry", "tenant_key", "public_key", "may_publish", "quota_bytes")
    ATTACHMENT_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_PATH_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    TENANT_KEY_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    MAY_PUBLISH_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    attachment_id: int
    node_id: str
    epoch: int
    lease_seconds: float
    segment_path: str
    geometry: Geometry
    tenant_key: bytes
    public_key: bytes
    may_publish: bool
    quota_bytes: int
    def __init__(self, attachment_id: _Optional[int] = ..., node_id: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., segment_path: _Optional[str] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., tenant_key: _Optional[bytes] = ..., public_key: _Optional[bytes] = ..., may_publish: bool = ..., quota_bytes: _Optional[int] = ...) -> None: ...

class Hints(_message.Message):
    __slots__ = ("pin_seconds", "prefetch", "write_down", "share", "no_store", "reuse_seconds", "last_turn")
    PIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    WRITE_DOWN_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    NO_STORE_FIELD_NUMBER: _ClassVar[int]
    REUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LAST_TURN_FIELD_NUMBER: _ClassVar[int]
    pin_seconds: float
    prefetch: bool
    write_down: bool
    share: bool
    no_store: bool
    reuse_seconds: float
    last_turn: bool
    def __init__(self, pin_seconds: _Optional[float] = ..., prefetch: bool = ..., write_down: bool = ..., share: bool = ..., no_store: bool = ..., reuse_seconds: _Optional[float] = ..., last_turn: bool = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("keys", "skip", "timeout_seconds", "recompute_seconds_per_block", "handoff", "handoff_node", "tail_at", "hints", "request_id")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_SECONDS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_NODE_FIELD_NUMBER: _ClassVar[int]
    TAIL_AT_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    skip: int
    timeout_seconds: float
    recompute_seconds_per_block: float
    handoff: bytes
    handoff_node: str
    tail_at: int
    hints: Hints
    request_id: str
    def __init__(self, keys: _Optional[bytes] = ..., skip: _Optional[int] = ..., timeout_seconds: _Optional[float] = ..., recompute_seconds_per_block: _Optional[float] = ..., handoff: _Optional[bytes] = ..., handoff_node: _Optional[str] = ..., tail_at: _Optional[int] = ..., hints: _Optional[_Union[Hints, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class AcquireReply(_message.Message):
    __slots__ = ("lease_id", "blocks", "fetched_count", "miss", "window_blocks", "window_counts", "not_admitted", "skipped_held", "tier_count", "tail_index", "farthest")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_COUNT_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_COUNTS_FIELD_NUMBER: _ClassVar[int]
    NOT_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_HELD_FIELD_NUMBER: _ClassVar[int]
    TIER_COUNT_FIELD_NUMBER: _ClassVar[int]
    TAIL_INDEX_FIELD_NUMBER: _ClassVar[int]
    FARTHEST_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    blocks: bytes
    fetched_count: int
    miss: str
    window_blocks: bytes
    window_counts: _containers.RepeatedScalarFieldContainer[int]
    not_admitted: bool
    skipped_held: int
    tier_count: int
    tail_index: int
    farthest: str
    def __init__(self, lease_id: _Optional[int] = ..., blocks: _Optional[bytes] = ..., fetched_count: _Optional[int] = ..., miss: _Optional[str] = ..., window_blocks: _Optional[bytes] = ..., window_counts: _Optional[_Iterable[int]] = ..., not_admitted: bool = ..., skipped_held: _Optional[int] = ..., tier_count: _Optional[int] = ..., tail_index: _Optional[int] = ..., farthest: _Optional[str] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("count", "group", "call")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    count: int
    group: int
    call: int
    def __init__(self, count: _Optional[int] = ..., group: _Optional[int] = ..., call: _Optional[int] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: bytes
    def __init__(self, blocks: _Optional[bytes] = ...) -> None: ...

class SealItem(_message.Message):
    __slots__ = ("slot", "generation", "key", "parent", "position", "route", "hints")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    generation: int
    key: bytes
    parent: bytes
    position: int
    route: int
    hints: Hints
    def __init__(self, slot: _Optional[int] = ..., generation: _Optional[int] = ..., key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., position: _Optional[int] = ..., route: _Optional[int] = ..., hints: _Optional[_Union[Hints, _Mapping]] = ...) -> None: ...

class SealRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[SealItem]
    def __init__(self, items: _Optional[_Iterable[_Union[SealItem, _Mapping]]] = ...) -> None: ...

class SealReply(_message.Message):
    __slots__ = ("statuses",)
    STATUSES_FIELD_NUMBER: _ClassVar[int]
    statuses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, statuses: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: bytes
    def __init__(self, blocks: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_ids", "statement", "suspects", "reports")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    SUSPECTS_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    statement: Statement
    suspects: bytes
    reports: _containers.RepeatedCompositeFieldContainer[RequestReport]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ..., statement: _Optional[_Union[Statement, _Mapping]] = ..., suspects: _Optional[bytes] = ..., reports: _Optional[_Iterable[_Union[RequestReport, _Mapping]]] = ...) -> None: ...

class Statement(_message.Message):
    __slots__ = ("calls", "open_calls", "slots", "handoffs")
    CALLS_FIELD_NUMBER: _ClassVar[int]
    OPEN_CALLS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    calls: int
    open_calls: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedScalarFieldContainer[int]
    handoffs: bytes
    def __init__(self, calls: _Optional[int] = ..., open_calls: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[int]] = ..., handoffs: _Optional[bytes] = ...) -> None: ...

class RequestReport(_message.Message):
    __slots__ = ("request_id", "prompt_blocks", "engine_blocks", "loaded_blocks", "computed_blocks", "load_failed", "gave_up", "asked", "salted")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FAILED_FIELD_NUMBER: _ClassVar[int]
    GAVE_UP_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    SALTED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_blocks: int
    engine_blocks: int
    loaded_blocks: int
    computed_blocks: int
    load_failed: bool
    gave_up: bool
    asked: bool
    salted: bool
    def __init__(self, request_id: _Optional[str] = ..., prompt_blocks: _Optional[int] = ..., engine_blocks: _Optional[int] = ..., loaded_blocks: _Optional[int] = ..., computed_blocks: _Optional[int] = ..., load_failed: bool = ..., gave_up: bool = ..., asked: bool = ..., salted: bool = ...) -> None: ...

class RenewReply(_message.Message):
    __slots__ = ("removed", "removed_lost")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_LOST_FIELD_NUMBER: _ClassVar[int]
    removed: bytes
    removed_lost: int
    def __init__(self, removed: _Optional[bytes] = ..., removed_lost: _Optional[int] = ...) -> None: ...

class OpenHandoffRequest(_message.Message):
    __slots__ = ("handoff", "call")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    handoff: bytes
    call: int
    def __init__(self, handoff: _Optional[bytes] = ..., call: _Optional[int] = ...) -> None: ...

class CloseHandoffRequest(_message.Message):
    __slots__ = ("handoff",)
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    handoff: bytes
    def __init__(self, handoff: _Optional[bytes] = ...) -> None: ...

class HandshakeRequest(_message.Message):
    __slots__ = ("protocol_version",)
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    def __init__(self, protocol_version: _Optional[int] = ...) -> None: ...

class HandshakeReply(_message.Message):
    __slots__ = ("node", "geometry", "transport", "description")
    NODE_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.NodeInfo
    geometry: Geometry
    transport: str
    description: bytes
    def __init__(self, node: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., transport: _Optional[str] = ..., description: _Optional[bytes] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("epoch", "keys", "reader", "wait_seconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    keys: bytes
    reader: str
    wait_seconds: float
    def __init__(self, epoch: _Optional[int] = ..., keys: _Optional[bytes] = ..., reader: _Optional[str] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class Handle(_message.Message):
    __slots__ = ("held", "slot", "generation", "length", "digest", "position", "stored_at")
    HELD_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    STORED_AT_FIELD_NUMBER: _ClassVar[int]
    held: bool
    slot: int
    generation: int
    length: int
    digest: int
    position: int
    stored_at: float
    def __init__(self, held: bool = ..., slot: _Optional[int] = ..., generation: _Optional[int] = ..., length: _Optional[int] = ..., digest: _Optional[int] = ..., position: _Optional[int] = ..., stored_at: _Optional[float] = ...) -> None: ...

class LocateReply(_message.Message):
    __slots__ = ("epoch", "lease_id", "lease_seconds", "handles")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    lease_id: int
    lease_seconds: float
    handles: _containers.RepeatedCompositeFieldContainer[Handle]
    def __init__(self, epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., handles: _Optional[_Iterable[_Union[Handle, _Mapping]]] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("epoch", "handoff", "keys", "reader", "wait_seconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    handoff: bytes
    keys: bytes
    reader: str
    wait_seconds: float
    def __init__(self, epoch: _Optional[int] = ..., handoff: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., reader: _Optional[str] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class FollowReply(_message.Message):
    __slots__ = ("state", "epoch", "lease_id", "lease_seconds", "handles")
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    state: str
    epoch: int
    lease_id: int
    lease_seconds: float
    handles: _containers.RepeatedCompositeFieldContainer[Handle]
    def __init__(self, state: _Optional[str] = ..., epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., handles: _Optional[_Iterable[_Union[Handle, _Mapping]]] = ...) -> None: ...

class ReleaseLocatedRequest(_message.Message):
    __slots__ = ("epoch", "lease_id", "reader", "suspects")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    SUSPECTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    lease_id: int
    reader: str
    suspects: bytes
    def __init__(self, epoch: _Optional[int] = ..., lease_id: _Optional[int] = ..., reader: _Optional[str] = ..., suspects: _Optional[bytes] = ...) -> None: ...

class ReleaseLocatedReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("node", "segment_bytes", "slab_count", "slab_free_count", "slots", "counters", "draining", "transport", "uptime_seconds", "slot_bytes", "slab_bytes", "host", "version", "engines", "windows", "pulls", "hits", "accepts_spill", "secondary_bytes", "tenants", "refused", "slowest", "tiers", "drifts", "restricted", "wall_seconds")
    class SlotsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SlotBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NODE_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLAB_COUNT_FIELD_NUMBER: _ClassVar[int]
    SLAB_FREE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLAB_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTS_SPILL_FIELD_NUMBER: _ClassVar[int]
    SECONDARY_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    DRIFTS_FIELD_NUMBER: _ClassVar[int]
    RESTRICTED_FIELD_NUMBER: _ClassVar[int]
    WALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.NodeInfo
    segment_bytes: int
    slab_count: int
    slab_free_count: int
    slots: _containers.ScalarMap[str, int]
    counters: _containers.ScalarMap[str, int]
    draining: bool
    transport: str
    uptime_seconds: float
    slot_bytes: _containers.ScalarMap[str, int]
    slab_bytes: int
    host: str
    version: str
    engines: _containers.RepeatedCompositeFieldContainer[AttachedEngine]
    windows: _containers.RepeatedCompositeFieldContainer[CounterWindow]
    pulls: _containers.RepeatedCompositeFieldContainer[PeerSpeed]
    hits: _containers.RepeatedCompositeFieldContainer[ModelHits]
    accepts_spill: bool
    secondary_bytes: int
    tenants: _containers.RepeatedCompositeFieldContainer[TenantNumbers]
    refused: _containers.RepeatedCompositeFieldContainer[RefusedAttach]
    slowest: _containers.RepeatedCompositeFieldContainer[SlowRequest]
    tiers: _containers.RepeatedCompositeFieldContainer[TierNumbers]
    drifts: _containers.RepeatedCompositeFieldContainer[CodecDrift]
    restricted: bool
    wall_seconds: float
    def __init__(self, node: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ..., segment_bytes: _Optional[int] = ..., slab_count: _Optional[int] = ..., slab_free_count: _Optional[int] = ..., slots: _Optional[_Mapping[str, int]] = ..., counters: _Optional[_Mapping[str, int]] = ..., draining: bool = ..., transport: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., slot_bytes: _Optional[_Mapping[str, int]] = ..., slab_bytes: _Optional[int] = ..., host: _Optional[str] = ..., version: _Optional[str] = ..., engines: _Optional[_Iterable[_Union[AttachedEngine, _Mapping]]] = ..., windows: _Optional[_Iterable[_Union[CounterWindow, _Mapping]]] = ..., pulls: _Optional[_Iterable[_Union[PeerSpeed, _Mapping]]] = ..., hits: _Optional[_Iterable[_Union[ModelHits, _Mapping]]] = ..., accepts_spill: bool = ..., secondary_bytes: _Optional[int] = ..., tenants: _Optional[_Iterable[_Union[TenantNumbers, _Mapping]]] = ..., refused: _Optional[_Iterable[_Union[RefusedAttach, _Mapping]]] = ..., slowest: _Optional[_Iterable[_Union[SlowRequest, _Mapping]]] = ..., tiers: _Optional[_Iterable[_Union[TierNumbers, _Mapping]]] = ..., drifts: _Optional[_Iterable[_Union[CodecDrift, _Mapping]]] = ..., restricted: bool = ..., wall_seconds: _Optional[float] = ...) -> None: ...

class TierNumbers(_message.Message):
    __slots__ = ("name", "state", "detail", "shared", "blocks", "used_bytes", "budget_bytes", "waiting_blocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    detail: str
    shared: bool
    blocks: int
    used_bytes: int
    budget_bytes: int
    waiting_blocks: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., detail: _Optional[str] = ..., shared: bool = ..., blocks: _Optional[int] = ..., used_bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., waiting_blocks: _Optional[int] = ...) -> None: ...

class CodecDrift(_message.Message):
    __slots__ = ("model", "limit", "blocks", "checked", "keys", "values", "off")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    OFF_FIELD_NUMBER: _ClassVar[int]
    model: str
    limit: float
    blocks: int
    checked: int
    keys: float
    values: float
    off: bool
    def __init__(self, model: _Optional[str] = ..., limit: _Optional[float] = ..., blocks: _Optional[int] = ..., checked: _Optional[int] = ..., keys: _Optional[float] = ..., values: _Optional[float] = ..., off: bool = ...) -> None: ...

class ModelHits(_message.Message):
    __slots__ = ("model", "tenant", "asked_blocks", "hit_local_blocks", "hit_remote_blocks", "hit_tier_blocks")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ASKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_LOCAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_REMOTE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_TIER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    model: str
    tenant: str
    asked_blocks: int
    hit_local_blocks: int
    hit_remote_blocks: int
    hit_tier_blocks: int
    def __init__(self, model: _Optional[str] = ..., tenant: _Optional[str] = ..., asked_blocks: _Optional[int] = ..., hit_local_blocks: _Optional[int] = ..., hit_remote_blocks: _Optional[int] = ..., hit_tier_blocks: _Optional[int] = ...) -> None: ...

class AttachedEngine(_message.Message):
    __slots__ = ("engine", "model", "namespace", "fingerprint", "tenant", "block_tokens", "attached_seconds", "seconds_per_block", "pid")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    engine: str
    model: str
    namespace: str
    fingerprint: str
    tenant: str
    block_tokens: int
    attached_seconds: float
    seconds_per_block: float
    pid: int
    def __init__(self, engine: _Optional[str] = ..., model: _Optional[str] = ..., namespace: _Optional[str] = ..., fingerprint: _Optional[str] = ..., tenant: _Optional[str] = ..., block_tokens: _Optional[int] = ..., attached_seconds: _Optional[float] = ..., seconds_per_block: _Optional[float] = ..., pid: _Optional[int] = ...) -> None: ...

class CounterWindow(_message.Message):
    __slots__ = ("name", "seconds", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    counters: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...

class SlowRequest(_message.Message):
    __slots__ = ("request_id", "model", "tenant", "age_seconds", "took_seconds", "asked_blocks", "local_blocks", "fetched_blocks", "miss")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOOK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ASKED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    tenant: str
    age_seconds: float
    took_seconds: float
    asked_blocks: int
    local_blocks: int
    fetched_blocks: int
    miss: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., age_seconds: _Optional[float] = ..., took_seconds: _Optional[float] = ..., asked_blocks: _Optional[int] = ..., local_blocks: _Optional[int] = ..., fetched_blocks: _Optional[int] = ..., miss: _Optional[str] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("start_slot", "states", "model", "tenant", "key_prefix")
    START_SLOT_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_PREFIX_FIELD_NUMBER: _ClassVar[int]
    start_slot: int
    states: _containers.RepeatedScalarFieldContainer[str]
    model: str
    tenant: str
    key_prefix: str
    def __init__(self, start_slot: _Optional[int] = ..., states: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., key_prefix: _Optional[str] = ...) -> None: ...

class ListedBlock(_message.Message):
    __slots__ = ("slot", "state", "payload_bytes", "tenant", "key", "model", "position", "secondary", "age_seconds", "idle_seconds", "uses")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SECONDARY_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    state: str
    payload_bytes: int
    tenant: str
    key: bytes
    model: str
    position: int
    secondary: bool
    age_seconds: float
    idle_seconds: float
    uses: int
    def __init__(self, slot: _Optional[int] = ..., state: _Optional[str] = ..., payload_bytes: _Optional[int] = ..., tenant: _Optional[str] = ..., key: _Optional[bytes] = ..., model: _Optional[str] = ..., position: _Optional[int] = ..., secondary: bool = ..., age_seconds: _Optional[float] = ..., idle_seconds: _Optional[float] = ..., uses: _Optional[int] = ...) -> None: ...

class ListBlocksReply(_message.Message):
    __slots__ = ("blocks", "next_slot", "more")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEXT_SLOT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[ListedBlock]
    next_slot: int
    more: bool
    def __init__(self, blocks: _Optional[_Iterable[_Union[ListedBlock, _Mapping]]] = ..., next_slot: _Optional[int] = ..., more: bool = ...) -> None: ...

class TenantNumbers(_message.Message):
    __slots__ = ("name", "used_bytes", "quota_bytes", "in_flight", "counters", "disk_used_bytes", "disk_quota_bytes")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DISK_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    used_bytes: int
    quota_bytes: int
    in_flight: int
    counters: _containers.ScalarMap[str, int]
    disk_used_bytes: int
    disk_quota_bytes: int
    def __init__(self, name: _Optional[str] = ..., used_bytes: _Optional[int] = ..., quota_bytes: _Optional[int] = ..., in_flight: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., disk_used_bytes: _Optional[int] = ..., disk_quota_bytes: _Optional[int] = ...) -> None: ...

class AccountingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AccountingReply(_message.Message):
    __slots__ = ("slots", "capacity", "balanced", "violation", "leases", "attachments")
    class SlotsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    BALANCED_FIELD_NUMBER: _ClassVar[int]
    VIOLATION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENTS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.ScalarMap[str, int]
    capacity: int
    balanced: bool
    violation: str
    leases: int
    attachments: int
    def __init__(self, slots: _Optional[_Mapping[str, int]] = ..., capacity: _Optional[int] = ..., balanced: bool = ..., violation: _Optional[str] = ..., leases: _Optional[int] = ..., attachments: _Optional[int] = ...) -> None: ...

class TakeOverRequest(_message.Message):
    __slots__ = ("leaver", "epoch", "payload_bytes", "keys", "parents", "positions", "routes", "idle_seconds", "wait_seconds", "account_tags", "fingerprints", "names")
    LEAVER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_TAGS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    leaver: _common_pb2.NodeInfo
    epoch: int
    payload_bytes: int
    keys: bytes
    parents: bytes
    positions: _containers.RepeatedScalarFieldContainer[int]
    routes: _containers.RepeatedScalarFieldContainer[int]
    idle_seconds: _containers.RepeatedScalarFieldContainer[float]
    wait_seconds: float
    account_tags: _containers.RepeatedScalarFieldContainer[int]
    fingerprints: bytes
    names: _containers.RepeatedCompositeFieldContainer[EngineName]
    def __init__(self, leaver: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ..., epoch: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., keys: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., positions: _Optional[_Iterable[int]] = ..., routes: _Optional[_Iterable[int]] = ..., idle_seconds: _Optional[_Iterable[float]] = ..., wait_seconds: _Optional[float] = ..., account_tags: _Optional[_Iterable[int]] = ..., fingerprints: _Optional[bytes] = ..., names: _Optional[_Iterable[_Union[EngineName, _Mapping]]] = ...) -> None: ...

class EngineName(_message.Message):
    __slots__ = ("fingerprint", "namespace", "model")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    namespace: str
    model: str
    def __init__(self, fingerprint: _Optional[bytes] = ..., namespace: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class TakeOverReply(_message.Message):
    __slots__ = ("kept", "full")
    KEPT_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    kept: _containers.RepeatedScalarFieldContainer[bool]
    full: bool
    def __init__(self, kept: _Optional[_Iterable[bool]] = ..., full: bool = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("undo", "timeout_seconds", "handover", "exit")
    UNDO_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    undo: bool
    timeout_seconds: float
    handover: bool
    exit: bool
    def __init__(self, undo: bool = ..., timeout_seconds: _Optional[float] = ..., handover: bool = ..., exit: bool = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("leases", "phase", "blocks_total", "blocks_handed", "blocks_elsewhere", "blocks_lost", "bytes_handed", "seconds", "note", "receivers")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HANDED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LOST_FIELD_NUMBER: _ClassVar[int]
    BYTES_HANDED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    leases: int
    phase: str
    blocks_total: int
    blocks_handed: int
    blocks_elsewhere: int
    blocks_lost: int
    bytes_handed: int
    seconds: float
    note: str
    receivers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, leases: _Optional[int] = ..., phase: _Optional[str] = ..., blocks_total: _Optional[int] = ..., blocks_handed: _Optional[int] = ..., blocks_elsewhere: _Optional[int] = ..., blocks_lost: _Optional[int] = ..., bytes_handed: _Optional[int] = ..., seconds: _Optional[float] = ..., note: _Optional[str] = ..., receivers: _Optional[_Iterable[str]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class SourceRun(_message.Message):
    __slots__ = ("start", "count", "source")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    source: str
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class RequestRecord(_message.Message):
    __slots__ = ("request_id", "model", "namespace", "fingerprint", "age_seconds", "took_seconds", "answered", "keys", "skip", "promised", "runs", "miss", "miss_at", "miss_node", "report", "found_until", "engine", "ended_age_seconds", "handoff_node", "handed_from")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOOK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    MISS_AT_FIELD_NUMBER: _ClassVar[int]
    MISS_NODE_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    FOUND_UNTIL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENDED_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_NODE_FIELD_NUMBER: _ClassVar[int]
    HANDED_FROM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    namespace: str
    fingerprint: str
    age_seconds: float
    took_seconds: float
    answered: bool
    keys: bytes
    skip: int
    promised: int
    runs: _containers.RepeatedCompositeFieldContainer[SourceRun]
    miss: str
    miss_at: int
    miss_node: str
    report: RequestReport
    found_until: int
    engine: str
    ended_age_seconds: float
    handoff_node: str
    handed_from: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., namespace: _Optional[str] = ..., fingerprint: _Optional[str] = ..., age_seconds: _Optional[float] = ..., took_seconds: _Optional[float] = ..., answered: bool = ..., keys: _Optional[bytes] = ..., skip: _Optional[int] = ..., promised: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[SourceRun, _Mapping]]] = ..., miss: _Optional[str] = ..., miss_at: _Optional[int] = ..., miss_node: _Optional[str] = ..., report: _Optional[_Union[RequestReport, _Mapping]] = ..., found_until: _Optional[int] = ..., engine: _Optional[str] = ..., ended_age_seconds: _Optional[float] = ..., handoff_node: _Optional[str] = ..., handed_from: _Optional[int] = ...) -> None: ...

class RefusedAttach(_message.Message):
    __slots__ = ("age_seconds", "model", "namespace", "message", "differences", "difference_count")
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    age_seconds: float
    model: str
    namespace: str
    message: str
    differences: _containers.RepeatedCompositeFieldContainer[FieldDifference]
    difference_count: int
    def __init__(self, age_seconds: _Optional[float] = ..., model: _Optional[str] = ..., namespace: _Optional[str] = ..., message: _Optional[str] = ..., differences: _Optional[_Iterable[_Union[FieldDifference, _Mapping]]] = ..., difference_count: _Optional[int] = ...) -> None: ...

class FieldDifference(_message.Message):
    __slots__ = ("name", "refused", "attached")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    name: str
    refused: str
    attached: str
    def __init__(self, name: _Optional[str] = ..., refused: _Optional[str] = ..., attached: _Optional[str] = ...) -> None: ...

class AttachedModel(_message.Message):
    __slots__ = ("model", "namespace", "fingerprint", "engines")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    model: str
    namespace: str
    fingerprint: _common_pb2.Fingerprint
    engines: int
    def __init__(self, model: _Optional[str] = ..., namespace: _Optional[str] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ..., engines: _Optional[int] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("records", "matching", "remembered", "keep_seconds", "refused", "models", "node_id", "host")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    MATCHING_FIELD_NUMBER: _ClassVar[int]
    REMEMBERED_FIELD_NUMBER: _ClassVar[int]
    KEEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[RequestRecord]
    matching: int
    remembered: int
    keep_seconds: float
    refused: _containers.RepeatedCompositeFieldContainer[RefusedAttach]
    models: _containers.RepeatedCompositeFieldContainer[AttachedModel]
    node_id: str
    host: str
    def __init__(self, records: _Optional[_Iterable[_Union[RequestRecord, _Mapping]]] = ..., matching: _Optional[int] = ..., remembered: _Optional[int] = ..., keep_seconds: _Optional[float] = ..., refused: _Optional[_Iterable[_Union[RefusedAttach, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[AttachedModel, _Mapping]]] = ..., node_id: _Optional[str] = ..., host: _Optional[str] = ...) -> None: ...

class BlockHistoryRequest(_message.Message):
    __slots__ = ("keys", "age_seconds")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    age_seconds: float
    def __init__(self, keys: _Optional[bytes] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class HistoryEntry(_message.Message):
    __slots__ = ("index", "state", "age_seconds", "cause", "caused_by", "engine", "held_seconds", "idle_seconds", "reason")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    CAUSED_BY_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    HELD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    index: int
    state: str
    age_seconds: float
    cause: str
    caused_by: str
    engine: str
    held_seconds: float
    idle_seconds: float
    reason: str
    def __init__(self, index: _Optional[int] = ..., state: _Optional[str] = ..., age_seconds: _Optional[float] = ..., cause: _Optional[str] = ..., caused_by: _Optional[str] = ..., engine: _Optional[str] = ..., held_seconds: _Optional[float] = ..., idle_seconds: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class BlockHistoryReply(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[HistoryEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[HistoryEntry, _Mapping]]] = ...) -> None: ...

class EngineStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineKind(_message.Message):
    __slots__ = ("namespace", "model", "fingerprint", "layout", "attached", "seconds_per_block")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    model: str
    fingerprint: _common_pb2.Fingerprint
    layout: Layout
    attached: int
    seconds_per_block: float
    def __init__(self, namespace: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[_Union[_common_pb2.Fingerprint, _Mapping]] = ..., layout: _Optional[_Union[Layout, _Mapping]] = ..., attached: _Optional[int] = ..., seconds_per_block: _Optional[float] = ...) -> None: ...

class PeerSpeed(_message.Message):
    __slots__ = ("node_id", "bytes_per_second", "overhead_seconds", "pulled_bytes")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PULLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    bytes_per_second: float
    overhead_seconds: float
    pulled_bytes: int
    def __init__(self, node_id: _Optional[str] = ..., bytes_per_second: _Optional[float] = ..., overhead_seconds: _Optional[float] = ..., pulled_bytes: _Optional[int] = ...) -> None: ...

class EngineStatsReply(_message.Message):
    __slots__ = ("node", "engines", "peers", "draining", "tenant_key", "public_key")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TENANT_KEY_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.NodeInfo
    engines: _containers.RepeatedCompositeFieldContainer[EngineKind]
    peers: _containers.RepeatedCompositeFieldContainer[PeerSpeed]
    draining: bool
    tenant_key: bytes
    public_key: bytes
    def __init__(self, node: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ..., engines: _Optional[_Iterable[_Union[EngineKind, _Mapping]]] = ..., peers: _Optional[_Iterable[_Union[PeerSpeed, _Mapping]]] = ..., draining: bool = ..., tenant_key: _Optional[bytes] = ..., public_key: _Optional[bytes] = ...) -> None: ...

class WarmRequest(_message.Message):
    __slots__ = ("fingerprint", "keys", "timeout_seconds", "hold_seconds")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HOLD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    keys: bytes
    timeout_seconds: float
    hold_seconds: float
    def __init__(self, fingerprint: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., timeout_seconds: _Optional[float] = ..., hold_seconds: _Optional[float] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("fingerprint", "keys", "timeout_seconds", "name")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    keys: bytes
    timeout_seconds: float
    name: str
    def __init__(self, fingerprint: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., timeout_seconds: _Optional[float] = ..., name: _Optional[str] = ...) -> None: ...

class WarmSource(_message.Message):
    __slots__ = ("node_id", "blocks")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    blocks: int
    def __init__(self, node_id: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

class WarmReply(_message.Message):
    __slots__ = ("asked", "local", "fetched", "held", "held_seconds", "miss")
    ASKED_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HELD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    asked: int
    local: int
    fetched: _containers.RepeatedCompositeFieldContainer[WarmSource]
    held: int
    held_seconds: float
    miss: str
    def __init__(self, asked: _Optional[int] = ..., local: _Optional[int] = ..., fetched: _Optional[_Iterable[_Union[WarmSource, _Mapping]]] = ..., held: _Optional[int] = ..., held_seconds: _Optional[float] = ..., miss: _Optional[str] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ("pin",)
    PIN_FIELD_NUMBER: _ClassVar[int]
    pin: Pinned
    def __init__(self, pin: _Optional[_Union[Pinned, _Mapping]] = ...) -> None: ...

class Pinned(_message.Message):
    __slots__ = ("name", "tenant", "model", "blocks", "bytes", "age_seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    tenant: str
    model: str
    blocks: int
    bytes: int
    age_seconds: float
    def __init__(self, name: _Optional[str] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPinsReply(_message.Message):
    __slots__ = ("pins",)
    PINS_FIELD_NUMBER: _ClassVar[int]
    pins: _containers.RepeatedCompositeFieldContainer[Pinned]
    def __init__(self, pins: _Optional[_Iterable[_Union[Pinned, _Mapping]]] = ...) -> None: ...

class ClearMark(_message.Message):
    __slots__ = ("kind", "at", "name", "keys")
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    at: float
    name: str
    keys: bytes
    def __init__(self, kind: _Optional[str] = ..., at: _Optional[float] = ..., name: _Optional[str] = ..., keys: _Optional[bytes] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("marks",)
    MARKS_FIELD_NUMBER: _ClassVar[int]
    marks: _containers.RepeatedCompositeFieldContainer[ClearMark]
    def __init__(self, marks: _Optional[_Iterable[_Union[ClearMark, _Mapping]]] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ("blocks", "bytes", "reading", "tier_blocks")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    READING_FIELD_NUMBER: _ClassVar[int]
    TIER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    bytes: int
    reading: int
    tier_blocks: int
    def __init__(self, blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., reading: _Optional[int] = ..., tier_blocks: _Optional[int] = ...) -> None: ...

class ListMarksRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListMarksReply(_message.Message):
    __slots__ = ("marks",)
    MARKS_FIELD_NUMBER: _ClassVar[int]
    marks: _containers.RepeatedCompositeFieldContainer[ClearMark]
    def __init__(self, marks: _Optional[_Iterable[_Union[ClearMark, _Mapping]]] = ...) -> None: ...
