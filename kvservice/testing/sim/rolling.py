"""A rolling restart of all simulated nodes: each hands over what it holds, ends, and comes back empty.

The whole cluster is looked at before and after each drain. No block becomes primary on a second node. As long as the
other nodes have room, a block that had a primary copy has one, and no primary copy is pushed out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from kvservice.core.drain.receiver import room_bytes
from kvservice.core.drain.sender import DrainPhase
from kvservice.testing.sim.node import LEASE_SECONDS, Node
from kvservice.testing.sim.run import SimulatedRun
from kvservice.testing.sim.schedule import Schedule, make_wide_schedule
from kvservice.testing.sim.world import Violation
from kvservice.units import BlockKey

NODES, SLABS = 6, 3  # of four blocks each: copies of others' blocks fill the pools
DRAIN_SECONDS = 10.0  # far more than a hand-over takes here
DOWN_SECONDS = 0.5  # until it boots again: its lookup partitions still remember it
KNOWN_SECONDS = 8.0  # until the directory knows all of a node that is back, and has forgotten what it held before


def make_rolling_schedule(seed: int) -> Schedule:
    """Requests to a few nodes, and no faults."""
    return replace(make_wide_schedule(seed, NODES), slabs=SLABS, faults=())


class RollingRestart(SimulatedRun):
    def play(self) -> None:
        super().play()
        for node in self.nodes:
            self._restart(node)

    def _restart(self, leaver: Node) -> None:
        """Drain one node, and start it anew without its memory."""
        others = [node for node in self.nodes if node is not leaver]
        held = {} if leaver.state is None else {block.key: block for block in leaver.state.blocks()}
        primary, had, evicted = self._primary(self.nodes), self._holders(others), self._evicted(others)
        room = sum(map(_room, others)) - sum(block.payload_bytes for key, block in held.items() if key not in had)
        self._drain(leaver)
        after, have = self._primary(others), self._holders(others)
        self.world.counters["blocks_drained"] += sum(have[key] > had[key] for key in held)
        for key, block in held.items():
            where = f"block {block.position} that {leaver.name} held"
            if after[key] > max(primary[key], 1):
                raise Violation(f"{after[key]} copies of {where} are primary, {primary[key]} were")
            # Where none was, all holders take their copies for spare ones.
            if room >= 0 and primary[key] and not after[key]:
                raise Violation(f"no copy of {where} is primary any more: {have[key]} nodes hold it")
        if room >= 0 and self._evicted(others) > evicted:
            raise Violation(f"the drain of {leaver.name} pushed primary copies out, although others have room")
        self._crash_node(leaver, DOWN_SECONDS, with_memory=True)
        self._until(self.world.now + KNOWN_SECONDS + LEASE_SECONDS, lambda: False)
        self._check_end()

    def _drain(self, leaver: Node) -> None:
        runtime = leaver.runtime
        assert runtime is not None
        runtime.drain(timeout_seconds=DRAIN_SECONDS)
        self._until(self.world.now + 2 * DRAIN_SECONDS, lambda: runtime.state.drain_phase is DrainPhase.GONE)
        if runtime.state.drain_phase is not DrainPhase.GONE:
            raise Violation(f"the drain of {leaver.name} does not end")

    @staticmethod
    def _primary(nodes: list[Node]) -> Counter[BlockKey]:
        """On how many of these nodes each block is primary."""
        known = [node.state for node in nodes if node.state is not None]
        return Counter(block.key for state in known for block in state.blocks() if not block.is_secondary)

    @staticmethod
    def _holders(nodes: list[Node]) -> Counter[BlockKey]:
        return Counter(block.key for node in nodes if node.state is not None for block in node.state.blocks())

    @staticmethod
    def _evicted(nodes: list[Node]) -> int:
        return sum(node.state.counters["evicted_primary"] for node in nodes if node.state is not None)


def _room(node: Node) -> int:
    stats = None if node.runtime is None else node.runtime.stats()
    if stats is None or node.runtime is None:
        return 0
    slab_bytes = node.runtime.geometry.slab_bytes
    return room_bytes(stats.slab_free_count, slab_bytes, stats.slot_bytes, stats.secondary_bytes)
