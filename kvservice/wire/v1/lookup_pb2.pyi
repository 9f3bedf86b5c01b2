from kvservice.wire.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ResolveRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    def __init__(self, keys: _Optional[bytes] = ...) -> None: ...

class ResolveRun(_message.Message):
    __slots__ = ("start", "count", "holders")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    holders: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ..., holders: _Optional[_Iterable[int]] = ...) -> None: ...

class ResolveReply(_message.Message):
    __slots__ = ("runs", "nodes")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[ResolveRun]
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.NodeInfo]
    def __init__(self, runs: _Optional[_Iterable[_Union[ResolveRun, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[_common_pb2.NodeInfo, _Mapping]]] = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("node", "sequence", "added", "removed", "full_begin", "full_end", "partition", "partition_count", "leaving", "protocol_version")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    FULL_BEGIN_FIELD_NUMBER: _ClassVar[int]
    FULL_END_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.NodeInfo
    sequence: int
    added: bytes
    removed: bytes
    full_begin: bool
    full_end: bool
    partition: int
    partition_count: int
    leaving: bool
    protocol_version: int
    def __init__(self, node: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ..., sequence: _Optional[int] = ..., added: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., full_begin: bool = ..., full_end: bool = ..., partition: _Optional[int] = ..., partition_count: _Optional[int] = ..., leaving: bool = ..., protocol_version: _Optional[int] = ...) -> None: ...

class AnnounceReply(_message.Message):
    __slots__ = ("outcome", "lookup_epoch", "shown_since")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[AnnounceReply.Outcome]
        OUTCOME_APPLIED: _ClassVar[AnnounceReply.Outcome]
        OUTCOME_RESYNC: _ClassVar[AnnounceReply.Outcome]
        OUTCOME_STALE_EPOCH: _ClassVar[AnnounceReply.Outcome]
    OUTCOME_UNSPECIFIED: AnnounceReply.Outcome
    OUTCOME_APPLIED: AnnounceReply.Outcome
    OUTCOME_RESYNC: AnnounceReply.Outcome
    OUTCOME_STALE_EPOCH: AnnounceReply.Outcome
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHOWN_SINCE_FIELD_NUMBER: _ClassVar[int]
    outcome: AnnounceReply.Outcome
    lookup_epoch: int
    shown_since: int
    def __init__(self, outcome: _Optional[_Union[AnnounceReply.Outcome, str]] = ..., lookup_epoch: _Optional[int] = ..., shown_since: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("heartbeat_seconds", "protocol_version")
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    heartbeat_seconds: float
    protocol_version: int
    def __init__(self, heartbeat_seconds: _Optional[float] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class WatchEvent(_message.Message):
    __slots__ = ("node", "added", "removed", "reset", "snapshot_end", "hidden")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_END_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.NodeInfo
    added: bytes
    removed: bytes
    reset: bool
    snapshot_end: bool
    hidden: bool
    def __init__(self, node: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ..., added: _Optional[bytes] = ..., removed: _Optional[bytes] = ..., reset: bool = ..., snapshot_end: bool = ..., hidden: bool = ...) -> None: ...

class FindNodeRequest(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class FindNodeReply(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.NodeInfo
    def __init__(self, node: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ...) -> None: ...

class LookupStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LookupNodeStats(_message.Message):
    __slots__ = ("node", "block_count", "heartbeat_age_seconds", "alive")
    NODE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.NodeInfo
    block_count: int
    heartbeat_age_seconds: float
    alive: bool
    def __init__(self, node: _Optional[_Union[_common_pb2.NodeInfo, _Mapping]] = ..., block_count: _Optional[int] = ..., heartbeat_age_seconds: _Optional[float] = ..., alive: bool = ...) -> None: ...

class LookupStatsReply(_message.Message):
    __slots__ = ("partition", "partition_count", "lookup_epoch", "key_count", "nodes", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    PARTITION_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEY_COUNT_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    partition: int
    partition_count: int
    lookup_epoch: int
    key_count: int
    nodes: _containers.RepeatedCompositeFieldContainer[LookupNodeStats]
    counters: _containers.ScalarMap[str, int]
    def __init__(self, partition: _Optional[int] = ..., partition_count: _Optional[int] = ..., lookup_epoch: _Optional[int] = ..., key_count: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[LookupNodeStats, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...

class LostBlocksRequest(_message.Message):
    __slots__ = ("keys", "age_seconds")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    age_seconds: float
    def __init__(self, keys: _Optional[bytes] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class LostBlock(_message.Message):
    __slots__ = ("index", "node_id", "cause", "age_seconds")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    node_id: str
    cause: str
    age_seconds: float
    def __init__(self, index: _Optional[int] = ..., node_id: _Optional[str] = ..., cause: _Optional[str] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class LostBlocksReply(_message.Message):
    __slots__ = ("lost",)
    LOST_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedCompositeFieldContainer[LostBlock]
    def __init__(self, lost: _Optional[_Iterable[_Union[LostBlock, _Mapping]]] = ...) -> None: ...
