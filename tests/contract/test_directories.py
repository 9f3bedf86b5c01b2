"""One contract, every directory: the lookup service over gRPC, the fake, and the one of the simulator."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvservice.core.directory.announce import Announcer
from kvservice.core.messages import Holder
from kvservice.lookup.server import LookupServer
from kvservice.lookup.shard_directory import ShardDirectory
from kvservice.testing.builders import make_holder
from kvservice.testing.directory_contract import (
    DirectoryBench,
    DirectoryContract,
    DirectoryNode,
    HandoverDirectoryContract,
)
from kvservice.testing.fake_directory import FakeDirectory, FakeLookup
from kvservice.testing.sim.lookup import Herald, LookupPartition
from kvservice.testing.sim.loop import ProcessLoop
from kvservice.testing.sim.remote import SimDirectory
from kvservice.testing.sim.world import Process, World
from kvservice.units import BlockKey, NodeId, SpanRoute

HERE, THERE = make_holder("here"), make_holder("there")
HEARTBEAT_SECONDS = 0.05
VIRTUAL_SECONDS = 30.0  # that a scenario of the simulator may take; its heartbeats are one second apart


class TestLookupService(HandoverDirectoryContract):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[DirectoryBench]:
        with asyncio.Runner() as runner:
            servers = [LookupServer(f"unix:{tmp_path}/{part}", part, 2) for part in range(2)]
            addresses = [runner.run(server.start()) for server in servers]
            here, there = [runner.run(self.joined(holder, addresses)) for holder in (HERE, THERE)]
            yield DirectoryBench(here, there, runner.run)
            for node in (here, there):
                assert isinstance(node.directory, ShardDirectory)
                runner.run(node.directory.stop(leaving=True))
            for server in servers:
                runner.run(server.stop())

    @staticmethod
    async def joined(holder: Holder, addresses: list[str]) -> DirectoryNode:
        held: dict[BlockKey, SpanRoute] = {}
        directory = ShardDirectory(addresses, lambda: list(held.items()))
        directory.start(lambda: holder, HEARTBEAT_SECONDS, lambda: None)
        return DirectoryNode(holder, directory, held)


class TestFake(HandoverDirectoryContract):
    @pytest.fixture
    def bench(self) -> DirectoryBench:
        lookup = FakeLookup()
        here, there = (DirectoryNode(holder, FakeDirectory(lookup, holder)) for holder in (HERE, THERE))
        return DirectoryBench(here, there, asyncio.run)


class SimulatedNode(Process):
    """What the simulator's directory needs of a node: its life, and the announcements of what it holds."""

    def __init__(self, world: World, node: Holder, lookups: list[LookupPartition]) -> None:
        super().__init__(world, str(node.node_id), str(node.node_id))
        self.node_id, self._node = NodeId(node.node_id), node
        held: dict[BlockKey, SpanRoute] = {}
        announcer = Announcer(len(lookups), lambda: list(held.items()))
        self._herald: Herald | None = None
        self.loop = ProcessLoop(self)
        self.loop.start(self.announce_for_ever(announcer, lookups))
        self.known = DirectoryNode(node, SimDirectory(self, lookups, announcer), held)  # type: ignore[arg-type]

    async def announce_for_ever(self, announcer: Announcer, lookups: list[LookupPartition]) -> None:
        self._herald = Herald(self, announcer, lookups, self.holder, lambda: None)
        await self._herald.run()

    def kick(self) -> None:
        if self._herald is not None:
            self._herald.kick()

    def holder(self) -> Holder:
        return self._node


class TestSimulator(DirectoryContract):
    """Hand-overs of leaving shards are not simulated."""

    @pytest.fixture
    def bench(self) -> Iterator[DirectoryBench]:
        world = World(random.Random(1))
        lookups = [LookupPartition(world, part) for part in range(2)]
        here, there = (SimulatedNode(world, holder, lookups) for holder in (HERE, THERE))

        def play(scenario: Coroutine[Any, Any, None]) -> None:
            task, end = here.loop.start(scenario), world.now + VIRTUAL_SECONDS
            while not task.done() and world.step(end):
                pass
            assert task.done(), f"not within {VIRTUAL_SECONDS} virtual seconds"
            task.result()

        yield DirectoryBench(here.known, there.known, play)
        world.end()
