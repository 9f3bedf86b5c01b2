"""A program of one simulated node that was promised each block there once, and looks at all of them for ever.

It maps the memory as an engine does, and knows of no boot but the one that made the promise, like api.mapped. It looks
at no digest, so what the headers let pass must be right.
"""

from __future__ import annotations

from kvservice.core.segment.header_checks import is_as_promised
from kvservice.core.segment.refs import BlockRef
from kvservice.core.shard import ShardState
from kvservice.testing.sim.memory import MappedFile, SegmentMemory
from kvservice.testing.sim.world import Violation, World
from kvservice.units import BlockKey, BootEpoch


class LateReader:
    def __init__(self, world: World, name: str, memory: SegmentMemory) -> None:
        self._world = world
        self._name = name
        self._memory = memory
        self._promises: dict[tuple[BootEpoch, BlockRef, BlockKey], tuple[MappedFile, int]] = {}

    def check(self, state: ShardState | None) -> None:
        """Raises Violation if a header lets a block pass whose bytes are not its own. Remembers the blocks that the
        node has now, None: it does not serve. Not for memory that a fault has changed."""
        kept = 0
        for (epoch, ref, key), (file, size) in self._promises.items():
            if is_as_promised(file.header_bytes(ref.slot), epoch, ref, key, size):
                kept += 1
                if file.read(ref.slot, size) != self._world.right[key]:
                    raise Violation(f"slot {ref.slot:#x} of {self._name} has other bytes than its header promises")
        self._world.counters["promises_kept"] += kept
        self._world.counters["promises_ended"] += len(self._promises) - kept
        for block in () if state is None else state.blocks():
            ref = BlockRef(block.slot.index, block.slot.generation)
            self._promises[self._memory.epoch, ref, block.key] = self._memory.file, block.payload_bytes
