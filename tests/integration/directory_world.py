"""Real lookup partitions, and nodes that announce, ask and mirror, beside a plain model of who holds what.

Each partition is reached through a gate that can hold its bytes back or cut its connections. Everything runs on one
loop; `World.step` does something at random, and `World.rest` ends all faults and waits until every node's answers, from
its mirror and from the partitions, are those of the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvservice.core.actions import Announce, Retract
from kvservice.core.block.keys import span_route
from kvservice.core.messages import Holder
from kvservice.discovery import MIRROR_NAME
from kvservice.lookup.client import LookupClient
from kvservice.lookup.mirror_reader import NodeMirror
from kvservice.lookup.mirror_writer import DirectoryMirror
from kvservice.lookup.server import LookupServer
from kvservice.lookup.shard_directory import ShardDirectory
from kvservice.testing.builders import make_chain
from kvservice.testing.eventually import eventually_async
from kvservice.units import BlockKey, BootEpoch, NodeId
from tests.settled import mirrored_answer

CHAINS = [make_chain(150, f"chain {number}") for number in range(3)]  # three spans each
ROUTES = {key: span_route(chain, index) for chain in CHAINS for index, key in enumerate(chain)}
SILENCE = (0.6, 2.0)  # after which a node is hidden, and forgotten
HEARTBEAT_SECONDS = 0.15
MIRROR_BYTES = 8 << 20
Truth = dict[BlockKey, set[Holder]]


class Gate:
    """A socket in front of a partition's own."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path, self.target = path, target
        self.is_open = asyncio.Event()
        self.is_open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers = set()

    def close(self) -> None:
        self.is_open.set()
        self.cut()
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            await self.is_open.wait()
            inner_reader, inner_writer = await asyncio.open_unix_connection(self.target)
            self._writers.add(inner_writer)
            await asyncio.gather(self._carry(reader, inner_writer), self._carry(inner_reader, writer))
        writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self.is_open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


@dataclass
class WorldNode:
    """A node over its boots. `directory` is None while it is down."""

    name: str
    epoch: int = 0
    held: set[BlockKey] = field(default_factory=set)
    directory: ShardDirectory | None = None
    holder: Holder | None = None
    readers: list[LookupClient] = field(default_factory=list)  # without a mirror, and of another process of the node


class World:
    def __init__(self, root: Path, seed: int, node_count: int = 4, partition_count: int = 3) -> None:
        self._root = root
        self._chance = random.Random(seed)
        self._nodes = [WorldNode(f"n{number}") for number in range(node_count)]
        self._gates = [Gate(root / f"g{number}", root / f"l{number}" / "s") for number in range(partition_count)]
        self._servers: list[LookupServer | None] = [None] * partition_count
        self._fenced: list[str] = []  # nodes that were told of a newer boot, which there never is

    async def start(self) -> None:
        for partition, gate in enumerate(self._gates):
            await gate.start()
            await self._start_partition(partition)
        for node in self._nodes:
            await self._start_node(node)

    async def stop(self) -> None:
        for node in self._nodes:
            await self._stop_node(node, leaving=False)
        for partition in range(len(self._servers)):
            await self._stop_partition(partition)
        for gate in self._gates:
            gate.close()

    async def step(self) -> str:
        """Returns what was done."""
        node, partition = self._chance.choice(self._nodes), self._chance.randrange(len(self._servers))
        gate, server = self._gates[partition], self._servers[partition]
        does = self._chance.choices(
            ["store", "evict", "partition", "hold", "cut", "node", "wait"], [30, 25, 10, 7, 6, 10, 12]
        )[0]
        if does == "store":
            self._store(node)
        elif does == "evict":
            self._evict(node)
        elif does == "partition":
            await self._stop_partition(partition)
            if server is None or self._chance.random() < 0.5:
                await self._start_partition(partition)
        elif does == "hold":
            (gate.is_open.clear if gate.is_open.is_set() else gate.is_open.set)()
        elif does == "cut":
            gate.cut()
        elif does == "node":
            await self._restart(node)
        else:
            await asyncio.sleep(self._chance.choice([0.0, 0.01, 0.1, 0.7]))
        return f"{does} {node.name} {partition}"

    async def rest(self) -> None:
        for partition, gate in enumerate(self._gates):
            gate.is_open.set()
            if self._servers[partition] is None:
                await self._start_partition(partition)
        truth: Truth = {}
        for node in self._nodes:
            if node.directory is not None and node.holder is not None:
                for key in node.held:
                    truth.setdefault(key, set()).add(node.holder)
        for node in self._nodes:
            if node.directory is not None:
                for reader in (node.directory.lookup, *node.readers):
                    await eventually_async(lambda reader=reader: _knows(reader, truth), f"what {node.name} asks")
                await eventually_async(
                    lambda node=node: mirrored_answer(node.directory.lookup, CHAINS[0]), f"the mirror of {node.name}"
                )
        for server in self._servers:
            assert server is not None
            server._directory.check_invariants()
        assert not self._fenced

    # -- nodes ----

    def _store(self, node: WorldNode) -> None:
        chain, first = self._chance.choice(CHAINS), self._chance.randrange(150)
        keys = chain[first : first + self._chance.randrange(1, 90)]
        node.held.update(keys)
        if node.directory is not None:
            node.directory.tell([Announce(key, ROUTES[key]) for key in keys])

    def _evict(self, node: WorldNode) -> None:
        keys = self._chance.sample(sorted(node.held), min(len(node.held), self._chance.randrange(60)))
        node.held.difference_update(keys)
        if node.directory is not None:
            node.directory.tell([Retract(key, ROUTES[key]) for key in keys])

    async def _restart(self, node: WorldNode) -> None:
        was_up = node.directory is not None
        await self._stop_node(node, leaving=self._chance.random() < 0.5)
        if not was_up or self._chance.random() < 0.6:
            node.held = set(self._chance.sample(sorted(node.held), len(node.held) // 2))
            await self._start_node(node)

    async def _start_node(self, node: WorldNode) -> None:
        node.epoch += 1
        addresses = [f"unix:{gate.path}" for gate in self._gates]
        home = self._root / node.name
        home.mkdir(exist_ok=True)
        mirror = DirectoryMirror.open(home / "memory", home / MIRROR_NAME, addresses, MIRROR_BYTES, node.epoch)
        assert mirror is not None
        secret = node.name.encode()
        holder = node.holder = Holder(NodeId(node.name), f"{node.name}:{node.epoch}", BootEpoch(node.epoch))
        node.directory = ShardDirectory(addresses, _inventory(node.held), secret=secret, mirror=mirror)
        node.directory.start(lambda: holder, HEARTBEAT_SECONDS, lambda: self._fenced.append(node.name))
        node.readers = [LookupClient(addresses), LookupClient(addresses, mirror=NodeMirror(home))]

    async def _stop_node(self, node: WorldNode, *, leaving: bool) -> None:
        directory, node.directory = node.directory, None
        if directory is not None:
            await directory.stop(leaving)
            for reader in node.readers:
                await reader.close()

    # -- partitions ----

    async def _start_partition(self, partition: int) -> None:
        path, count = self._gates[partition].target, len(self._servers)
        server = self._servers[partition] = LookupServer(f"unix:{path}", partition, count, silence=SILENCE)
        await server.start()

    async def _stop_partition(self, partition: int) -> None:
        server, self._servers[partition] = self._servers[partition], None
        if server is not None:
            await server.stop(0)


def _inventory(held: set[BlockKey]) -> Callable[[], Sequence[tuple[BlockKey, int]]]:
    return lambda: [(key, ROUTES[key]) for key in held]


async def _knows(reader: LookupClient, truth: Truth) -> bool:
    """Whether the answers for all chains are exactly the truth."""
    for chain in CHAINS:
        answer = await reader.resolve(chain, 0, 2.0)
        found = {key: set(run.holders) for run in answer.runs for key in chain[run.start : run.start + run.count]}
        if not answer.complete or found != {key: truth[key] for key in chain if key in truth}:
            return False
    return True
