"""What the scheduler half tells the workers to do in one step, and what they answer. Plain values without tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from kvservice.core.messages import Attachment
from kvservice.core.segment.geometry import Geometry
from kvservice.core.segment.layout import SlotLayout
from kvservice.core.segment.refs import BlockRef
from kvservice.units import BlockKey, BootEpoch

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """Where the pool's memory is. Workers map it when it changes."""

    segment_path: str
    geometry: Geometry
    epoch: BootEpoch
    layout: SlotLayout
    engine_id: bytes  # names the lock that a writer of slots holds
    node_directory: str = ""  # where copy workers register; "" if the engine owns the pool

    @classmethod
    def of(cls, attachment: Attachment, layout: SlotLayout, engine_id: bytes) -> PoolInfo:
        return cls(
            attachment.segment_path,
            attachment.geometry,
            attachment.epoch,
            layout,
            engine_id,
            attachment.node_directory,
        )


class CopyEntry(NamedTuple):  # a step makes one for each block, and this is four times as quick as a dataclass
    """One block to copy between the engine's cache and a slot."""

    block_id: int  # row of the engine's KV tensors
    ref: BlockRef
    key: BlockKey
    engine_group: int = 0  # index of the engine's KV cache group that the block belongs to
    part: int = 0  # of the slot, if it holds several blocks of this engine group
    tokens: int = 0  # of a store: only so many of the block are of this prompt, and the slot has zeros behind them


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One request's load. `layered` means that it is copied layer by layer during the forward of this step, which
    computes the rest of the request."""

    request_id: str
    entries: tuple[CopyEntry, ...]
    may_borrow: bool = False  # another engine of this node may lend these blocks
    layered: bool = False


@dataclass(frozen=True, slots=True)
class StorePlan:
    """One store. `store_id` names it in the workers' reports. The engine keeps the blocks until all workers have
    reported."""

    store_id: int
    entries: tuple[CopyEntry, ...]


@dataclass(frozen=True, slots=True)
class LendPlan:
    """Blocks that do not change until all workers have reported `loan_id` as returned."""

    loan_id: int
    blocks: tuple[tuple[int, BlockKey], ...]  # (row of the engine's KV tensors, key)


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """A prompt that this step has computed to its end, for workers to compare their K and V of it with the model's."""

    token_ids: tuple[int, ...]  # whole pages
    block_ids: tuple[int, ...]  # rows of the engine's KV tensors


@dataclass(slots=True)
class StepPlan:
    pool: PoolInfo | None = None
    loads: list[LoadPlan] = field(default_factory=list)
    stores: list[StorePlan] = field(default_factory=list)
    lends: list[LendPlan] = field(default_factory=list)
    recalls: list[int] = field(default_factory=list)  # ids of loans
    invalid_blocks: list[int] = field(default_factory=list)  # of the engine: promised for this step but not loaded
    probe: ProbePlan | None = None


@dataclass(slots=True)
class StepReport:
    """The report of one worker, or of several merged. Counts say how many workers reported a plan."""

    stored: dict[int, int] = field(default_factory=dict)  # store_id -> workers that copied all of it
    failed: dict[int, int] = field(default_factory=dict)  # store_id -> workers that did not
    counters: dict[str, int] = field(default_factory=dict)
    suspects: set[BlockRef] = field(default_factory=set)  # slots that did not hold what was promised
    # (loan id, worker): nobody reads the loan at this worker any more
    returned: set[tuple[int, int]] = field(default_factory=set)
    layered: dict[str, int] = field(default_factory=dict)  # request -> workers whose layered load was sound
    layered_failed: dict[str, int] = field(default_factory=dict)
    # the engine's number of each adapter that was loaded since the last report -> its path; the last one, if several
    adapters: dict[int, str] = field(default_factory=dict)

    def merge(self, other: StepReport) -> StepReport:
        return StepReport(
            _sum(self.stored, other.stored),
            _sum(self.failed, other.failed),
            _sum(self.counters, other.counters),
            self.suspects | other.suspects,
            self.returned | other.returned,
            _sum(self.layered, other.layered),
            _sum(self.layered_failed, other.layered_failed),
            self.adapters | other.adapters,  # all workers load the same
        )


def _sum(one: Mapping[K, int], other: Mapping[K, int]) -> dict[K, int]:
    return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
