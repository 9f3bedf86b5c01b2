"""Loads of slots into an engine's tensors, through the worker half and its checks: what a real engine does, and the
bytes that came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from kvservice.connector.options import Verify
from kvservice.connector.plan import CopyEntry, LoadPlan, PoolInfo, StepPlan
from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.connector.worker.half import WorkerHalf
from kvservice.core.segment.layout import SlotLayout
from kvservice.core.segment.refs import BlockRef
from kvservice.memory.segment import Segment
from kvservice.units import BlockKey


class Loader:
    """An engine's worker with room for `rows` blocks. `counters` are those that it reports."""

    def __init__(
        self, segment: Segment, layout: SlotLayout, rows: int, verify: Verify, kind: type[WorkerHalf] = WorkerHalf
    ) -> None:
        width = layout.cell_bytes // layout.block_tokens
        shape = (rows, layout.layer_count, layout.kv_head_count, layout.block_tokens, width)
        memory = torch.zeros(shape, dtype=torch.uint8)
        self._rows = [memoryview(row.numpy().reshape(-1)) for row in memory]
        self._half = kind(BlockCopier(list(memory.unbind(1)), range(layout.kv_head_count)), verify)
        self._info = PoolInfo(str(segment.path), segment.geometry, segment.epoch, layout, bytes(16))
        self.counters: Counter[str] = Counter()

    def load(self, blocks: Sequence[tuple[BlockRef, BlockKey]]) -> list[bool]:
        """One step: a request for each block, to the row of its place. True where the load was not refused."""
        loads = [LoadPlan(str(row), (CopyEntry(row, ref, key),)) for row, (ref, key) in enumerate(blocks)]
        self._half.start_loads(StepPlan(pool=self._info, loads=loads))
        loaded, failed = self._half.take_loaded()
        assert loaded == {load.request_id for load in loads}
        report = self._half.take_report()
        self.counters.update({} if report is None else report.counters)
        return [load.request_id not in failed for load in loads]

    def row(self, place: int) -> bytes:
        return bytes(self._rows[place])

    def close(self) -> None:
        self._half.close()
