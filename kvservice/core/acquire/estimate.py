"""Decides whether fetching is faster than computing, from measured bandwidth and overhead and the engine's own speed.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvservice.core.bounded_table import NODES_MAX, BoundedTable
from kvservice.core.messages import Holder, PeerSpeed
from kvservice.core.tier.rules import is_tier
from kvservice.units import NodeId

WEIGHT = 0.3  # of the newest sample in an average: it follows a changed link within a handful of pulls
# After refusals a little is fetched whatever the estimate says, because an estimate without samples never changes. That
# happens once such a probe costs at most PROBE_SHARE of the time spent on computing since, or after REFUSALS_MAX.
PROBE_SHARE = 0.03
PROBE_BYTES = 64 << 20  # size of a probe: enough to measure a bandwidth
REFUSALS_MAX = 32  # refusals in a row before a probe is made at any cost


@dataclass(slots=True)
class FetchEstimate:
    """Moving averages of one peer. They are None until the first sample; until then fetching is tried."""

    bytes_per_second: float | None = None
    overhead_seconds: float | None = None
    pulled_bytes: int = 0  # in all
    refusals: int = 0  # consecutive ones
    recomputed_seconds: float = 0.0  # spent on computing because of them

    def observe_pull(self, byte_count: int, seconds: float) -> None:
        self.pulled_bytes += byte_count
        if byte_count > 0 and seconds > 0:
            self.bytes_per_second = _blend(self.bytes_per_second, byte_count / seconds)

    def observe_overhead(self, seconds: float) -> None:
        self.overhead_seconds = _blend(self.overhead_seconds, max(seconds, 0.0))

    def seconds(self, block_count: int, block_bytes: int) -> float | None:
        """How long fetching takes; None when it was not measured."""
        if self.bytes_per_second is None:
            return None
        return (self.overhead_seconds or 0.0) + block_count * block_bytes / self.bytes_per_second

    def asks(self, block_count: int, block_bytes: int, recompute_seconds: float) -> bool:
        """Whether to ask this source for blocks that it may not have: when fetching them would be faster than
        computing, or `worthwhile` would try it by now. A refusal counts as one of `worthwhile`."""
        seconds = self.seconds(block_count, block_bytes)
        if seconds is None or recompute_seconds <= 0 or seconds <= block_count * recompute_seconds:
            return True
        if self.refusals >= REFUSALS_MAX or self._may_probe(block_bytes):
            return True
        self._refuse(block_count * recompute_seconds)
        return False

    def _refuse(self, computing_seconds: float) -> None:
        self.refusals += 1
        self.recomputed_seconds += computing_seconds

    def worthwhile(self, block_count: int, block_bytes: int, recompute_seconds: float, remaining_seconds: float) -> int:
        """How many of the first `block_count` blocks to fetch: all, as many as fit into the time left, or none.

        `recompute_seconds` is the engine's time for one block; 0 when it has not measured any yet.
        """
        count = self._fitting(block_count, block_bytes, recompute_seconds, remaining_seconds)
        if count == 0 and self.refusals < REFUSALS_MAX and not self._may_probe(block_bytes):
            self._refuse(block_count * recompute_seconds)
            return 0
        self.refusals, self.recomputed_seconds = 0, 0.0
        return count or min(block_count, _probe_blocks(block_bytes))

    def _may_probe(self, block_bytes: int) -> bool:
        if self.bytes_per_second is None or not self.refusals:
            return False
        seconds = (self.overhead_seconds or 0.0) + _probe_blocks(block_bytes) * block_bytes / self.bytes_per_second
        return seconds <= PROBE_SHARE * self.recomputed_seconds

    def _fitting(self, block_count: int, block_bytes: int, recompute_seconds: float, remaining_seconds: float) -> int:
        if self.bytes_per_second is None:
            return block_count
        overhead = self.overhead_seconds or 0.0
        seconds_per_block = block_bytes / self.bytes_per_second
        fits = int(max(remaining_seconds - overhead, 0.0) / seconds_per_block)
        count = min(block_count, fits)
        if recompute_seconds > 0 and overhead + count * seconds_per_block > count * recompute_seconds:
            return 0
        return count


class FetchEstimates:
    """One estimate for each peer and each tier that was fetched from lately."""

    def __init__(self) -> None:
        self._by_node: BoundedTable[NodeId, FetchEstimate] = BoundedTable(NODES_MAX)

    def of(self, holder: Holder) -> FetchEstimate:
        return self._by_node.get(holder.node_id) or self._by_node.put(holder.node_id, FetchEstimate())

    def best_node_seconds(self, block_count: int, block_bytes: int) -> float | None:
        """The shortest time in which another node would give so many blocks; None when none was measured."""
        nodes = (estimate for node, estimate in self._by_node.items() if not is_tier(node))
        times = (estimate.seconds(block_count, block_bytes) for estimate in nodes)
        return min((seconds for seconds in times if seconds is not None), default=None)

    def speeds(self) -> tuple[PeerSpeed, ...]:
        """Of other nodes."""
        return tuple(
            PeerSpeed(node, estimate.bytes_per_second or 0.0, estimate.overhead_seconds or 0.0, estimate.pulled_bytes)
            for node, estimate in sorted(self._by_node.items())
            if not is_tier(node)
        )


def _probe_blocks(block_bytes: int) -> int:
    return max(1, PROBE_BYTES // max(block_bytes, 1))


def _blend(average: float | None, sample: float) -> float:
    return sample if average is None else (1 - WEIGHT) * average + WEIGHT * sample
