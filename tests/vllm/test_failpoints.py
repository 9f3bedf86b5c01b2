"""Real engines killed and stopped among the copies of a step, before anybody is told of them: what they leave is
nobody's, and what the other engine of the node is given is right."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.failpoints import Failpoints
from tests.vllm.replica import Replica, close_all
from tests.vllm.test_service_failures import ENGINE, PROMPTS

pytestmark = pytest.mark.vllm

LEASE_SECONDS = 2.0
SETTLED_SECONDS = 20.0
OTHERS = [prompt.replace("pilot", "gunner") for prompt in PROMPTS]


@dataclass
class Setup:
    cluster: LocalCluster
    failpoints: Failpoints
    off: Replica
    one: Replica
    two: Replica

    def until_settled(self, taken: set[str]) -> None:
        """No slot is in one of these states, and no lease is left."""

        def is_settled() -> bool:
            books = self.cluster.accounting("n0")
            assert books.balanced, books.violation
            return not books.leases and not any(books.slots[state] for state in taken)

        what = f"no lease, and no slot {' or '.join(sorted(taken))}"
        eventually(is_settled, what, SETTLED_SECONDS, detail=lambda: self.cluster.accounting("n0"))


@pytest.fixture(scope="module")
def setup(without_cache: Replica, shallow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    root = tmp_path_factory.mktemp("engines")
    points = Failpoints(tmp_path_factory.mktemp("failpoints"))
    with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=384 * MiB, lease_seconds=LEASE_SECONDS) as cluster:
        extra: dict[str, object] = {"mode": "service", "socket": cluster.socket("n0"), "verify_load": "full"}
        engines = [
            Replica(shallow_model, extra, root / f"{name}.log", variables=points.environment, **ENGINE)
            for name in ("one", "two")
        ]
        try:
            yield Setup(cluster, points, without_cache.ready(), *(engine.ready() for engine in engines))
        finally:
            close_all(engines)


def held(setup: Setup, engine: Replica, where: str, prompts: list[str]) -> None:
    """`engine` is asked, and is in the middle of copying when this returns."""
    setup.failpoints.arm(where)
    engine.send(prompts=prompts, max_tokens=12)
    assert setup.failpoints.hit(where) == engine.pid


@pytest.mark.parametrize("where", ["engine.store", "engine.load"])
def test_engine_that_sleeps_midway_in_a_copy_does_no_harm(setup: Setup, where: str) -> None:
    """It is given nothing wrong, and leaves nothing wrong."""
    one, two = setup.one, setup.two
    wanted, others = setup.off.tokens(PROMPTS, 12), setup.off.tokens(OTHERS, 12)
    one.reset()
    held(setup, one, where, PROMPTS)
    os.kill(one.pid, signal.SIGSTOP)
    time.sleep(2 * LEASE_SECONDS)  # what it held is no longer its own
    assert two.tokens(PROMPTS, 12) == wanted
    assert two.tokens(OTHERS, 12) == others
    setup.failpoints.release(where)
    os.kill(one.pid, signal.SIGCONT)
    assert [output["token_ids"] for output in one.answer()["outputs"]] == wanted
    for engine in (one, two):
        engine.reset()
        assert engine.tokens(PROMPTS, 12) == wanted
        assert engine.tokens(OTHERS, 12) == others
    assert two.counters()["load_verified_blocks"] > 0 and not two.counters()["load_corrupt"]
    setup.until_settled({"leased", "quarantined"})


def test_engine_killed_midway_in_a_copy_leaves_no_slot_taken(setup: Setup) -> None:
    fresh = [prompt.replace("pilot", "bosun") for prompt in PROMPTS]
    wanted = setup.off.tokens(fresh, 12)
    held(setup, setup.one, "engine.store", fresh)
    setup.one.kill()
    setup.until_settled({"leased", "quarantined"})
    assert setup.two.tokens(fresh, 12) == wanted, "half a block was taken for a whole one"
    setup.two.reset()
    held(setup, setup.two, "engine.load", fresh)
    setup.two.kill()
    setup.until_settled({"leased", "quarantined", "writing"})
