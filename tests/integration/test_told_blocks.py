"""What a router believes of an engine's blocks is what the pool has, also where blocks come and go all the time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from kvservice.connector.scheduler.half import SchedulerHalf
from kvservice.connector.scheduler.request_terms import RequestTerms
from kvservice.core.segment.geometry import plan_geometry
from kvservice.core.segment.layout import SlotLayout
from kvservice.pool.runtime import PoolRuntime
from kvservice.session.options import PoolOptions
from kvservice.session.pool_choice import embedded
from kvservice.session.session import Session
from kvservice.testing.eventually import eventually
from kvservice.units import BlockHash, MiB, NodeId
from tests.unit.connector.line import BLOCK, Pins, hashes, keys_of, plan_step, pool_info, report
from tests.unit.session.test_session import SPEC

LAYOUT = SlotLayout(layer_count=2, kv_head_count=2, cell_bytes=16384, block_tokens=BLOCK)  # 14 slots in a slab of 1 MiB
PROMPTS, BLOCKS = 40, 8  # more than the pool has room for
STEPS, STEP_SECONDS = 600, 0.005  # a few heartbeats


@pytest.fixture
def session() -> Iterator[Session]:
    opened = embedded(PoolOptions(memory="16MiB"), plan_geometry(16 * MiB), NodeId("n"))
    made = Session(opened, replace(SPEC, layout=LAYOUT, hears_removals=True), lambda: True)
    assert made.start(10.0) is not None, made.failure
    yield made
    made.close()


class ToldEngine:
    """An engine that computes every prompt anew, and the router that it tells."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.half = SchedulerHalf(
            session,
            keys_of,
            pool_info,
            block_tokens=BLOCK,
            worker_count=1,
            fetch_timeout_seconds=2.0,
            remember_stored=True,
        )
        self.half.pin_with(Pins())
        self.believed: set[BlockHash] = set()
        self.count = 0

    def prompt(self, number: int) -> None:
        chain, name = hashes(1 + number, BLOCKS), f"r{self.count}"
        self.count += 1
        self.half.on_new_request(name, chain, time.monotonic(), terms=RequestTerms(may_load=False))
        self.half._known.forget(keys_of(chain))  # as an acquire does that misses
        ids = list(range(BLOCKS + 1))
        plan = plan_step(self.half, [(name, chain, BLOCKS * BLOCK, lambda: ids)])
        self.half.reported(report(plan))
        self.tell()
        self.half.finished(name, chain, BLOCKS * BLOCK, ids, store_rest=False)

    def tell(self) -> None:
        gone, stored = self.half.take_told()
        self.believed.difference_update(gone)
        self.believed.update(block.block_hash for block in stored)

    def in_pool(self) -> set[BlockHash]:
        pool = self.session._pool
        assert isinstance(pool, PoolRuntime)
        held = {block.key for block in pool._state.blocks()}
        every = [block for number in range(PROMPTS) for block in hashes(1 + number, BLOCKS)]
        return {block for block, key in zip(every, keys_of(every), strict=True) if key in held}


def test_a_router_believes_what_the_pool_has(session: Session) -> None:
    engine, random = ToldEngine(session), Random(1)
    for count in range(STEPS):
        often = count % 5 + count // 60  # five prompts that are used again and again, for a while
        engine.prompt(random.choice([random.randrange(PROMPTS), often % PROMPTS]))
        time.sleep(STEP_SECONDS)

    def is_true() -> bool:
        engine.tell()
        return not engine.half.has_pending_work(time.monotonic()) and engine.believed == engine.in_pool()

    eventually(is_true, "the router and the pool agree")
    assert session.counters["seal_sealed"] > len(engine.believed), "blocks were evicted"
