"""What the parts of a simulated node, and of a simulated engine, may use of the whole. Keeps their imports one way."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Literal

from kvservice.connector.plan import LoadPlan
from kvservice.core.messages import AcquireRequest, AcquireResult, EngineSpec, Holder
from kvservice.pool.runtime import PoolRuntime
from kvservice.testing.sim.ages import Ages
from kvservice.testing.sim.clears import Clears
from kvservice.testing.sim.loop import ProcessLoop
from kvservice.testing.sim.memory import SegmentMemory
from kvservice.testing.sim.world import Process
from kvservice.units import AttachmentId, NodeId

Unanswered = Literal["handshakes", "reads"]


class NodeParts(Process):
    """`node.Node` is the only one."""

    node_id: NodeId
    memory: SegmentMemory
    peers: Mapping[str, NodeParts]
    runtime: PoolRuntime | None  # None while it does not serve
    loop: ProcessLoop
    clears: Clears
    ages: Ages
    hang_seconds: float  # of the next read
    garbles: bool  # the next read
    accepts_spill: bool  # what others evict
    maps_peers: bool  # all nodes are of one machine

    @abstractmethod
    def is_mute(self, what: Unanswered) -> bool: ...

    @abstractmethod
    def kick(self) -> None: ...

    @abstractmethod
    def holder(self) -> Holder: ...

    @abstractmethod
    def quota_of(self, tenant: str) -> int: ...

    @abstractmethod
    def quotas_kept(self, attachment: AttachmentId) -> AbstractContextManager[None]: ...


class EngineParts(Process):
    """`engine.Engine` is the only one."""

    node: NodeParts
    spec: EngineSpec
    tenant: str
    tenant_key: bytes
    loop: ProcessLoop
    verifies_loads: bool
    copy_delay: float
    on_store: Callable[[], None] | None

    @abstractmethod
    def check_promised(self, request: AcquireRequest, result: AcquireResult) -> None: ...

    @abstractmethod
    def promised(self, result: AcquireResult) -> None: ...

    @abstractmethod
    def check_loaded(self, load: LoadPlan) -> None: ...

    @abstractmethod
    def write_block(self, block: int, half: int, payload: bytes) -> None: ...

    @abstractmethod
    def read_block(self, block: int) -> bytes: ...
