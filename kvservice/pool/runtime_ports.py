"""The parts of a pool's runtime as it sees them: its settings, the memory of the slots, the reader of peers' blocks,
and the check whether an engine still writes."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kvservice.core.block.tenants import TenantLimits
from kvservice.core.directory.meetings import MEET_PEERS
from kvservice.core.events import Event
from kvservice.core.segment.geometry import Geometry
from kvservice.core.segment.header import SlotHeader
from kvservice.core.slices import DEFAULT_SLICES, SliceSizes
from kvservice.core.store.eviction import EvictionPolicy
from kvservice.core.store.worth import GuardedWorth
from kvservice.pool.coders import Coders
from kvservice.pool.tier_specs import TierSpec
from kvservice.transfer.job import DoneCallback, PullJob, WritesEndedCallback
from kvservice.units import BootEpoch, NodeId, SlotIndex


class MemoryPort(Protocol):
    """A segment in its present boot. memory.segment.Segment is one."""

    path: Path
    geometry: Geometry
    epoch: BootEpoch
    existed: bool
    used_at: float  # when the boot that left its blocks was last alive, in seconds since 1970

    def touch(self, wall: float) -> None: ...

    def write_header(self, slot: SlotIndex, header: SlotHeader) -> None: ...

    def clear_header(self, slot: SlotIndex) -> None: ...

    def assign_slab(self, slab: int, payload_bytes: int) -> None: ...

    def payload(self, slot: SlotIndex, payload_bytes: int) -> memoryview: ...

    def scan(self) -> Iterable[tuple[SlotIndex, int, SlotHeader]]: ...

    def close(self) -> None: ...

    def unlink(self) -> None: ...

    def is_linked(self) -> bool: ...

    def retire(self) -> None: ...


class PullerPort(Protocol):
    """Verified reads. transfer.puller.Puller is one."""

    @property
    def name(self) -> str: ...

    def describe(self) -> bytes: ...

    def counters(self) -> Mapping[str, int]: ...

    def submit(self, job: PullJob, on_done: DoneCallback, on_writes_ended: WritesEndedCallback) -> None: ...

    def greet(self, peer: NodeId, epoch: BootEpoch, description: bytes, on_met: Callable[[bool], None]) -> None: ...

    def close(self) -> None: ...


# Gives an event to the core, from any thread, in the context of the request that it is about. Without one it is about
# nobody's.
Report = Callable[[Event, contextvars.Context | None], None]
Claim = Callable[[bytes], AbstractContextManager[bool]]  # takes an engine id; see memory.liveness.claim


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The settings of one pool."""

    node_id: NodeId
    segment_path: Path | None  # None: unnamed memory in `directory`, freed when no process maps it any more
    geometry: Geometry
    lease_seconds: float = 10.0
    directory: Path = Path("/dev/shm")
    epoch_floor: int = 1  # the boot epoch is at least this, so that it grows even after the segment was lost
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)  # at the start; see PoolRuntime.set_tenants
    eviction: Callable[[], EvictionPolicy] = GuardedWorth  # makes the policy of this pool; see pool.eviction
    tiers: tuple[TierSpec, ...] = ()  # nearest first
    slices: SliceSizes = DEFAULT_SLICES  # how much of a long call is done at a time
    accept_spill: bool = False
    spill: bool = True  # to nodes that accept it
    max_age_seconds: float = 0.0  # 0 = no limit
    coders: Coders = field(default_factory=Coders)
    mark_files: tuple[Path, ...] = ()  # where it keeps what was cleared
    name_files: tuple[Path, ...] = ()  # and what engines call their blocks
    meet_peers: int = MEET_PEERS  # met before they are needed, at most; 0 = none
    wall_clock: Callable[[], float] = time.time
