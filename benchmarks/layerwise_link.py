"""The connector behind a link of a given speed: the module that the engines of `benchmarks.layerwise` load.

Copies into the engine last at least as long as such a link would need for their bytes; the speed, in GB/s, is read from
the file KVSERVICE_BENCH_LINK at every step, none for the machine's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from kvservice.connector.layerwise.copies import BlockRun, HostLayers
from kvservice.connector.plan import CopyEntry
from kvservice.connector.vllm import KVServiceConnector as Plain
from kvservice.connector.worker.copier import InlineCopier, Ticket
from kvservice.copying.message import Direction

_copy_layer, _run = HostLayers.copy, InlineCopier.run
_speed = [0.0]  # bytes a second; 0: not limited


def _pace(byte_count: int, started: float) -> None:
    if _speed[0]:
        time.sleep(max(0.0, started + byte_count / _speed[0] - time.perf_counter()))


def _paced_layer(self: HostLayers, direction: Direction, layer: int, runs: Sequence[BlockRun]) -> None:
    started = time.perf_counter()
    _copy_layer(self, direction, layer, runs)
    if direction is Direction.LOAD:
        _pace(sum(run.count for run in runs) * self._layout.layer_bytes, started)


def _paced_blocks(self: InlineCopier, direction: Direction, entries: Sequence[CopyEntry], **how: bool) -> Ticket:
    started = time.perf_counter()
    ticket = _run(self, direction, entries, **how)
    if direction is Direction.LOAD and self._pool is not None:
        _pace(len(entries) * self._pool.layout.payload_bytes, started)
    return ticket


HostLayers.copy = _paced_layer  # type: ignore[method-assign]
InlineCopier.run = _paced_blocks  # type: ignore[method-assign]


class KVServiceConnector(Plain):
    """The connector unchanged, except that its copies are slowed down to the speed of the link."""

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        if self._worker is not None and (plan := self._plan()) is not None and plan.loads:
            text = Path(os.environ["KVSERVICE_BENCH_LINK"]).read_text()
            _speed[0] = float(text) * 1e9 if text else 0.0
        super().start_load_kv(forward_context, **kwargs)
