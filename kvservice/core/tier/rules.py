"""What the core knows of each tier: its name, its budget, and when blocks are written into it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvservice.core.explain.records import TIER_MARK
from kvservice.core.messages import Holder
from kvservice.units import BootEpoch, NodeId


class WriteMoment(Enum):
    """When a block is written into a tier. The values are those of the settings."""

    EVICTED = "evicted"  # ahead of its eviction from memory: a cleaner writes the coldest blocks
    STORED = "stored"  # when an engine has sealed it, or a leaving node handed it over
    REUSED = "reused"  # when it is used for the first time after that


@dataclass(frozen=True, slots=True)
class TierRules:
    """One tier of this node, or one that all nodes share."""

    name: str
    is_shared: bool = False  # it is probed, and what it has is not this node's: no books, and nothing is evicted
    budget_bytes: int = 0  # of files, with their headers, in whole pages; without a meaning for a shared tier
    write: WriteMoment = WriteMoment.EVICTED
    extra_bytes: int = 0  # most that a codec may add to a block


@dataclass(frozen=True, slots=True)
class TierUsage:
    """One tier's figures at one moment."""

    name: str
    is_shared: bool
    blocks: int  # of a shared tier: those that this node knows to be in it
    used_bytes: int
    budget_bytes: int
    waiting: int  # blocks that wait to be written
    writing_bytes: int
    reading_bytes: int


def tier_holder(name: str) -> Holder:
    """The tier as a source of blocks, beside other nodes."""
    return Holder(NodeId(TIER_MARK + name), "", BootEpoch(0))


def name_of_tier(node: str) -> str:
    return node.removeprefix(TIER_MARK)


def is_tier(node: str) -> bool:
    return node.startswith(TIER_MARK)
