"""What was cleared on one simulated node and when, and the check that nothing from before comes back there.

It goes by what the world knows: which tenant and model a key belongs to, and when an engine last computed its bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvservice.core.block.marks import Mark, MarkKind
from kvservice.core.segment.blockfile import FILE_HEADER_BYTES, unpack_file_header
from kvservice.pool.runtime import PoolRuntime
from kvservice.testing.sim.world import Violation, World
from kvservice.units import BlockKey

STARTED_AT = 1_800_000_000.0  # seconds since 1970 when a simulated world begins


class Clears:
    """Outlives the node's processes. A mark counts from the moment the node has said that it applied it."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self.applied: list[Mark] = []

    def wall(self) -> float:
        """Seconds since 1970."""
        return STARTED_AT + self._world.now

    async def apply(self, runtime: PoolRuntime, marks: Sequence[Mark]) -> None:
        await runtime.clears.clear(marks)
        self._world.counters["clears_applied"] += 1
        self.applied += marks

    async def learn(self, runtime: PoolRuntime, others: Iterable[PoolRuntime]) -> None:
        """What a node does before it announces anything: it asks the others what was cleared while it was away."""
        marks = [mark for other in others for mark in other.state.freshness.marks.all()]
        await runtime.clears.take(marks)
        self.applied += [mark for mark in dict.fromkeys(marks) if mark not in self.applied]

    def cleared_at(self, key: BlockKey) -> float:
        """When the key was last cleared here, in seconds since 1970; 0 = never."""
        return max((mark.at for mark in self.applied if self._covers(mark, key)), default=0.0)

    def check_promised(self, keys: Iterable[BlockKey], cleared: Sequence[Mark]) -> None:
        """Check an answer to a question that came when `cleared` had been applied."""
        for key in keys if cleared else ():
            at = max((mark.at for mark in cleared if self._covers(mark, key)), default=0.0)
            if STARTED_AT + self._world.computed.get(key, 0.0) < at:
                raise Violation(f"{self._name} promised a block from before a clear that it had applied")

    def check(self, runtime: PoolRuntime, disks: Iterable[Mapping[BlockKey, bytes]]) -> None:
        """Check that memory has nothing from before a clear, and that no books name a file from before one."""
        if not self.applied:
            return
        for block in runtime.state.blocks():
            if block.stored_at < self.cleared_at(block.key):
                raise Violation(f"{self._name} has block {block.position} in memory, from before a clear")
        in_memory = {block.key for block in runtime.state.blocks()}
        named = {key for key, _ in runtime.inventory()} - in_memory
        for files in disks:
            for key in named & files.keys():
                header = unpack_file_header(files[key][:FILE_HEADER_BYTES])
                if header is not None and header.block.key == key and header.block.stored_at < self.cleared_at(key):
                    raise Violation(f"{self._name} names a file of its disk that is from before a clear")

    def _covers(self, mark: Mark, key: BlockKey) -> bool:
        tenant, model = self._world.owners[key]
        match mark.kind:
            case MarkKind.EVERYTHING:
                return True
            case MarkKind.TENANT:
                return mark.name == tenant
            case MarkKind.MODEL:
                return mark.name == model
            case _:
                return key in mark.keys
