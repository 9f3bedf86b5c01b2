"""What the scheduler half tells the workers to do in one step, and what they answer. Plain values, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvservice.core.geometry import Geometry
from kvservice.core.layout import SlotLayout
from kvservice.core.messages import BlockRef
from kvservice.units import BlockKey, BootEpoch


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """Where the pool's memory is; workers map it when it changes."""

    segment_path: str
    geometry: Geometry
    epoch: BootEpoch
    layout: SlotLayout
    liveness_path: str  # "" when the engine owns the pool


@dataclass(frozen=True, slots=True)
class CopyEntry:
    """One block between the engine's cache and a slot."""

    block_id: int  # row of the engine's KV tensors
    ref: BlockRef
    key: BlockKey
    group: int = 0  # the engine's cache group that the block is of
    part: int = 0  # of the slot, where it holds several blocks of this group


@dataclass(frozen=True, slots=True)
class LoadPlan:
    request_id: str
    entries: tuple[CopyEntry, ...]
    may_borrow: bool = False  # another engine of this node may lend these blocks


@dataclass(frozen=True, slots=True)
class StorePlan:
    """`store_id` names the plan in the workers' reports. The engine keeps its blocks until all have reported."""

    store_id: int
    entries: tuple[CopyEntry, ...]


@dataclass(frozen=True, slots=True)
class LendPlan:
    """Blocks that stay as they are until all workers have reported `loan_id` as returned."""

    loan_id: int
    blocks: tuple[tuple[int, BlockKey], ...]  # (row of the engine's KV tensors, key)


@dataclass(slots=True)
class StepPlan:
    pool: PoolInfo | None = None
    loads: list[LoadPlan] = field(default_factory=list)
    stores: list[StorePlan] = field(default_factory=list)
    lends: list[LendPlan] = field(default_factory=list)
    recalls: list[int] = field(default_factory=list)  # ids of loans


@dataclass(slots=True)
class StepReport:
    """Of one worker, or merged over several. Counts say how many workers reported a plan."""

    stored: dict[int, int] = field(default_factory=dict)  # store_id -> workers that copied all of it
    failed: dict[int, int] = field(default_factory=dict)  # store_id -> workers that did not
    counters: dict[str, int] = field(default_factory=dict)
    suspects: set[BlockRef] = field(default_factory=set)  # did not hold what was promised
    returned: set[tuple[int, int]] = field(default_factory=set)  # (loan id, worker): nobody reads it there any more

    def merge(self, other: StepReport) -> StepReport:
        merged = StepReport(
            dict(self.stored),
            dict(self.failed),
            dict(self.counters),
            self.suspects | other.suspects,
            self.returned | other.returned,
        )
        for mine, theirs in (
            (merged.stored, other.stored),
            (merged.failed, other.failed),
        ):
            for store_id, count in theirs.items():
                mine[store_id] = mine.get(store_id, 0) + count
        for name, count in other.counters.items():
            merged.counters[name] = merged.counters.get(name, 0) + count
        return merged
