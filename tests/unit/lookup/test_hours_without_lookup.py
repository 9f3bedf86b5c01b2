"""A lookup service that is gone for hours costs a shard one line of log and little else."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from kvservice.core.directory.announce import Announcer, Update
from kvservice.core.messages import Holder
from kvservice.errors import Unavailable
from kvservice.lookup.announce_pump import BACKOFF_SECONDS_MAX, AnnouncePump
from kvservice.testing.sim.loop import ProcessLoop
from kvservice.testing.sim.world import Process, World
from kvservice.units import BootEpoch, NodeId
from kvservice.wire.v1 import lookup_pb2

HOURS = 3.0


class _Unanswered(AnnouncePump):
    asked = 0

    async def _announce(self, partition: int, update: Update, timeout: float) -> lookup_pb2.AnnounceReply:
        self.asked += 1
        await asyncio.sleep(0.001)
        raise Unavailable("nobody listens")


def test_a_lookup_service_that_is_gone_for_hours_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world, made = World(random.Random(1)), list[_Unanswered]()
    process = Process(world, "shard", "shard")

    async def serve() -> None:
        made.append(
            _Unanswered(
                Announcer(1, list),
                ["nowhere:1"],
                lambda: Holder(NodeId("n"), "n:1", BootEpoch(1)),
                1.0,
                lambda: None,
                process.clock,
                rng=world.random,
            )
        )
        await made[0].run()

    ProcessLoop(process).start(serve())
    while world.step(HOURS * 3600):
        pass
    process.die()
    world.end()
    assert [record.getMessage() for record in caplog.records] == ["announce_failed"]
    assert 1000 < made[0].asked < HOURS * 3600 / (BACKOFF_SECONDS_MAX / 2) + 100, "it gave up, or asks without pause"
