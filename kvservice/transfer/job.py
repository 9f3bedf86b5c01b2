"""What a puller is asked: which blocks of which peer to read, into which slots, by when, and who hears of the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvservice.core.events import PullResult
from kvservice.core.segment.geometry import Geometry
from kvservice.core.segment.refs import BlockHandle
from kvservice.units import BootEpoch, NodeId, SlotIndex

DoneCallback = Callable[[int, tuple[PullResult, ...]], None]
WritesEndedCallback = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class PullItem:
    """One block to read, and the local slot that it is read into."""

    handle: BlockHandle
    destination: SlotIndex


@dataclass(frozen=True, slots=True)
class PullJob:
    """Blocks of one peer to read and verify."""

    job_id: int
    peer: NodeId
    peer_epoch: BootEpoch
    description: bytes  # what the peer's Puller.describe() returned
    geometry: Geometry  # of the peer's segment
    payload_bytes: int  # of every item
    items: tuple[PullItem, ...]
    deadline: float  # on the puller's clock; nothing that ends later is accepted
