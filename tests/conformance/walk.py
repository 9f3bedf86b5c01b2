"""A small engine that tests step by hand: both halves of the connector, a session, and a real pool in this process.

Only the engine's own block pool is a stand-in: its blocks are rows of `tensors`, and `pins` counts who holds them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from kvservice.connector.cache_groups import OneGroup
from kvservice.connector.options import DeferStores, Verify
from kvservice.connector.plan import PoolInfo, StepPlan
from kvservice.connector.scheduler.half import SchedulerHalf
from kvservice.connector.scheduler.ports import Promise, Wait
from kvservice.connector.scheduler.tailed import TailedScheduler
from kvservice.connector.worker.block_copier import BlockCopier
from kvservice.connector.worker.half import WorkerHalf
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.keys import block_keys, chain_hashes
from kvservice.core.messages import Attachment, EngineSpec
from kvservice.core.segment.geometry import Geometry
from kvservice.core.segment.layout import SlotLayout
from kvservice.pool.port import PoolPort
from kvservice.pool.runtime import PoolRuntime
from kvservice.pool.runtime_ports import PoolConfig
from kvservice.session.session import Session
from kvservice.testing.eventually import eventually
from kvservice.units import BlockHash, NodeId
from tests.settled import has_slots
from tests.unit.connector.line import Pins

BLOCK = 16  # tokens
HEADS, WIDTH = 8, 32  # kv heads, and numbers of K and V of one token and head
LAYOUT = SlotLayout(layer_count=3, kv_head_count=HEADS, cell_bytes=BLOCK * WIDTH * 2, block_tokens=BLOCK)
DEVICE_BLOCKS = 256


class Walk:
    """One engine with a pool of fifty slots, each of which holds `parts` of its blocks. With `tails` it also keeps the
    beginnings of blocks."""

    def __init__(self, defer_stores: DeferStores = DeferStores.OFF, parts: int = 1, *, tails: bool = False) -> None:
        self.layout = replace(LAYOUT, block_tokens=parts * BLOCK, parts=parts)
        # One slab of exactly fifty slots: a page of headers, and fifty payloads of six pages a part.
        self.geometry = Geometry(slab_bytes=4096 + 50 * self.layout.payload_bytes, slab_count=1)
        assert self.geometry.slots_per_slab(self.layout.payload_bytes) == 50
        self.spec = EngineSpec(b"w" * 16, "m", Fingerprint.of({"model": "m"}), self.layout)
        self.tensors = list(torch.randn(3, DEVICE_BLOCKS, HEADS, BLOCK, WIDTH).to(torch.bfloat16).unbind(0))
        self.pins = Pins()
        self.runtime: PoolRuntime | None = None
        self.session = Session(self._open, self.spec, lambda: self.scheduler.may_reattach())
        self.tokens: dict[str, Sequence[int]] = {}
        self.scheduler = (TailedScheduler if tails else SchedulerHalf)(
            self.session,
            partial(block_keys, self.spec.fingerprint.digest),
            self._info,
            block_tokens=self.layout.block_tokens,
            worker_count=1,
            fetch_timeout_seconds=5.0,
            grouping=OneGroup(parts),
        )
        self.scheduler.pin_with(self.pins)
        if isinstance(self.scheduler, TailedScheduler):
            self.scheduler.name_tails_with(self._tail)
        self.worker = WorkerHalf(BlockCopier(self.tensors, range(HEADS)), Verify.FULL, defer_stores=defer_stores)
        self.prompts: dict[str, list[BlockHash]] = {}
        assert self.session.start(10.0) is not None
        eventually(lambda: has_slots(self.session), "slots in stock")

    async def _open(self) -> PoolPort:
        self.runtime = await PoolRuntime.open(PoolConfig(NodeId("walk"), None, self.geometry))
        return self.runtime

    def _info(self, of: Attachment) -> PoolInfo:
        return PoolInfo(of.segment_path, of.geometry, of.epoch, self.layout, self.spec.engine_id, of.node_directory)

    def slots(self) -> dict[str, int]:
        """How many slots are in which state, asked on the pool's own thread."""

        async def ask() -> dict[str, int]:
            assert self.runtime is not None
            return self.runtime.stats().slots

        assert self.session._loop is not None
        return asyncio.run_coroutine_threadsafe(ask(), self.session._loop).result(30.0)

    def _tail(self, request: str, begin: int, end: int) -> BlockHash | None:
        tail, before = self.tokens[request][begin:end], begin // BLOCK
        return chain_hashes(tail, len(tail), after=self.prompts[request][before - 1] if before else None)[0]

    def arrive(self, request: str, tokens: Sequence[int]) -> None:
        self.tokens[request], self.prompts[request] = tokens, chain_hashes(tokens, BLOCK)
        self.scheduler.on_new_request(request, self.prompts[request], 0.0, tokens=len(tokens))

    def matched(self, request: str, total_tokens: int, computed_tokens: int = 0) -> Promise:
        """The answer, once it is there: until then the engine is told to ask again in a later step."""

        def answered() -> Promise | None:
            answer = self.scheduler.matched(request, computed_tokens, total_tokens, 0.1)
            return None if isinstance(answer, Wait) else answer

        return eventually(answered, f"the answer about {request}")

    def step(
        self,
        computed: dict[str, tuple[int, list[int]]] | None = None,
        forward: Callable[[], object] = lambda: None,
    ) -> StepPlan:
        """One step of an engine: plan, loads, forward, stores, report.

        Args:
            computed: per scheduled request the tokens that are computed when the step ends, and its block table.
            forward: what the model does between the loads and the stores.
        """
        plan = StepPlan()
        self.scheduler.begin_step(plan, 0.2)
        scheduled = [
            (name, self.prompts[name], tokens, partial(list, table))
            for name, (tokens, table) in (computed or {}).items()
        ]
        self.scheduler.plan_stores(plan, scheduled)
        self.worker.start_loads(plan)
        forward()
        self.worker.store(plan)
        loaded, failed = self.worker.take_loaded()
        report = self.worker.take_report()
        if report is not None:
            self.scheduler.reported(report)
        for name in loaded:
            self.scheduler.loaded(name, failed=name in failed)
        self.scheduler.check_invariants()
        return plan

    def finish(self, request: str, computed: int, table: list[int]) -> None:
        self.scheduler.finished(request, self.prompts[request], computed, table, store_rest=True)

    def close(self) -> None:
        self.session.close()
        self.worker.close()
