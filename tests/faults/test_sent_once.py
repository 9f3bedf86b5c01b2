"""What is sent once and gets lost, because somebody was stopped for a while: afterwards the slots that are written are
those that engines hold, and no hand-off stays open."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from kvservice.client.shard import ShardClient
from kvservice.core.messages import AcquireRequest, AcquireResult, Attachment, Handoff
from kvservice.pool.port import PoolPort
from kvservice.session.session import Session
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import HandoffId, MiB, NodeId
from tests.faults.paused_engine import CALL_SECONDS
from tests.faults.rounds import rounds
from tests.integration.engine import Engine, chain, spec

pytestmark = pytest.mark.faults

LEASE_SECONDS = 2.0
LOST_SECONDS = 4 * CALL_SECONDS  # of a pause in which every call that is under way fails
PAUSES = (1.0, 0.6, 2.0, 7.0, 14.0, 20.0, 60.0)  # of anybody; in CI the first few


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes=1, lookup_partitions=1, pool_bytes=64 * MiB, lease_seconds=LEASE_SECONDS) as made:
        yield made


class Line:
    """A session of this process, and its shard, which can be stopped."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.session = Session(self._open, spec(), lambda: True)
        attachment = self.session.start(60.0)
        assert attachment is not None
        self.attachment: Attachment = attachment

    async def _open(self) -> PoolPort:
        return ShardClient(self.cluster.socket("n0"))

    @property
    def held(self) -> int:
        return len(self.session._ledger.slots)

    @property
    def writing(self) -> int:
        return self.cluster.accounting("n0").slots["writing"]

    def settled(self) -> bool:
        return 0 < self.held == self.writing

    def stop_shard(self, seconds: float, meanwhile: Callable[[], None]) -> None:
        os.kill(self.cluster.pid("n0"), signal.SIGSTOP)
        try:
            meanwhile()
            time.sleep(seconds)
        finally:
            os.kill(self.cluster.pid("n0"), signal.SIGCONT)


@pytest.fixture
def line(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    monkeypatch.setattr("kvservice.client.shard.CALL_SECONDS", CALL_SECONDS)
    made = Line(cluster)
    yield made
    made.session.close()


def test_a_stock_given_back_to_a_stopped_shard_is_free_again(line: Line) -> None:
    """Before, 472 of 504 slots were lost until the engine ended."""
    line.session.expect(2000)
    eventually(lambda: line.held > 300, "slots for the prompt")
    line.stop_shard(LOST_SECONDS, lambda: line.session.expect(-2000))
    eventually(lambda: line.settled() and line.writing < 100, "the slots to be given back")
    assert line.session.attachment is line.attachment


def test_slots_whose_answer_or_abort_is_lost_are_free_again(line: Line) -> None:
    eventually(line.settled, "the engine to settle")
    for _ in range(rounds(2, failed_before=1.0, campaign=4)):
        taken = line.session.take_slots(line.attachment.attachment_id, 4)

        def lose(taken: list = taken) -> None:  # type: ignore[type-arg]
            line.session.expect(100)  # a prompt comes: a Reserve of some hundred slots is sent
            time.sleep(0.1)
            line.session.abort(line.attachment.attachment_id, taken)

        line.stop_shard(LOST_SECONDS, lose)
        line.session.expect(-100)
        eventually(lambda: line.settled() and line.writing < 100, "the slots to be given back")
    assert line.session.attachment is line.attachment


async def test_a_reader_hears_of_an_open_and_a_close_that_were_lost(cluster: LocalCluster, line: Line) -> None:
    loop = asyncio.get_running_loop()
    handoff = HandoffId(os.urandom(16))
    keys = chain(seed=5, count=8)
    reader = await Engine.attach(ShardClient(cluster.socket("n0")))

    async def read() -> tuple[AcquireResult, float]:
        started = time.monotonic()
        request = AcquireRequest(keys, 0, 50.0, 0.0, Handoff(handoff, NodeId("n0")), "reader")
        result = await reader.pool.acquire(reader.attachment.attachment_id, request)
        return result, time.monotonic() - started

    def count(name: str) -> int:
        return cluster.stats("n0").counters.get(name, 0)

    await loop.run_in_executor(None, line.stop_shard, LOST_SECONDS, lambda: line.session.open_handoff(handoff))
    await loop.run_in_executor(None, eventually, lambda: count("handoffs_opened") == 1, "the hand-off at the shard")
    reading = asyncio.ensure_future(read())
    await asyncio.sleep(0.5)

    def close() -> None:
        line.session.close_handoff(line.attachment.attachment_id, handoff)

    await loop.run_in_executor(None, line.stop_shard, LOST_SECONDS, close)
    result, seconds = await reading
    assert not result.blocks
    assert seconds < 30.0, "the reader waited for its own deadline"
    assert count("handoffs_closed") == 1 and line.session.attachment is line.attachment
    await reader.pool.close()


def test_whoever_is_stopped_the_shard_says_what_the_engine_holds(cluster: LocalCluster) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.paused_engine", cluster.socket("n0")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert engine.stdin is not None and engine.stdout is not None
    chance = random.Random(3)
    try:
        assert engine.stdout.readline().strip() == "ready"
        for number in range(rounds(2, failed_before=1.0, campaign=len(PAUSES))):
            for pid in (cluster.pid("n0"), engine.pid, cluster.pid("lookup0")):
                time.sleep(chance.uniform(0.1, 0.5))
                os.kill(pid, signal.SIGSTOP)
                time.sleep(PAUSES[number % len(PAUSES)])
                os.kill(pid, signal.SIGCONT)
        engine.send_signal(signal.SIGUSR1)

        def held() -> int:
            engine.stdin.write("?\n")  # type: ignore[union-attr]
            engine.stdin.flush()  # type: ignore[union-attr]
            return int(engine.stdout.readline())  # type: ignore[union-attr]

        def settled() -> bool:
            accounting, counters = cluster.accounting("n0"), cluster.stats("n0").counters
            is_same = 0 < held() == accounting.slots["writing"] and not accounting.slots["quarantined"]
            return is_same and counters["handoffs_opened"] == counters["handoffs_closed"] > 0

        eventually(settled, "engine and shard to agree")
        time.sleep(2 * LEASE_SECONDS)
        assert settled()
        assert cluster.accounting("n0").balanced
    finally:
        engine.kill()
        engine.wait()
