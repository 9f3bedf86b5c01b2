"""Stores, reads, hand-offs, warms, pins and clears together, on real nodes with tiers below their memory, while parts
of the service die, stop, drain and lose files. Each seed is another mixture.

The seed comes from the commit, so that each commit plays others; KVSERVICE_TEST_MIXED_SEED plays one again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import grpc
import pytest

from kvservice.client.block_list import BlockFilter, list_blocks
from kvservice.client.channels import Channels
from kvservice.client.operator import OperatorClient
from kvservice.client.shard import ShardClient
from kvservice.core.block.keys import pack_keys
from kvservice.core.block.marks import Mark, MarkKind
from kvservice.core.messages import Handoff, SealStatus, WarmRequest
from kvservice.discovery import node_directory
from kvservice.errors import KVServiceError
from kvservice.memory.segment import segment_path
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually_async
from kvservice.units import BlockKey, HandoffId, MiB, NodeId
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc
from tests.integration.engine import Engine, chain, spec

pytestmark = [pytest.mark.slow, pytest.mark.processes]
ROOT = Path(__file__).parent.parent.parent
SEED_VARIABLE = "KVSERVICE_TEST_MIXED_SEED"
SEEDS, ROUNDS, FAULTS = 3, 2, 6
MODELS, PROMPTS, BLOCKS, WORKERS = ("m1", "m2"), 14, 40, 4
LEASE_SECONDS, QUIET_SECONDS = 2.0, 60.0
TROUBLE = (" ERROR ", " CRITICAL ", "Traceback", "never retrieved")
EXPECTED = "segment_removed"  # the file that a fault removes


def seeds() -> list[int]:
    given = os.environ.get(SEED_VARIABLE)
    if given:
        return [int(given)]
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return [int(asked.stdout[:6] or "0", 16) + number for number in range(SEEDS)]


class MixedWorld:
    def __init__(self, seed: int, folder: Path) -> None:
        chance = self._chance = random.Random(seed)
        self._disk = folder / "disk"
        self._has_disk = chance.random() < 0.7
        variables: dict[str, str] = {}
        if self._has_disk:
            variables["KVSERVICE_DISK_PATH"] = str(self._disk)
            variables["KVSERVICE_DISK_BYTES"] = str(chance.choice([8, 64]) * MiB)
            variables["KVSERVICE_DISK_WRITE"] = chance.choice(["evicted", "stored", "reused"])
            variables["KVSERVICE_DISK_CODEC"] = chance.choice(["none", "planes"])
        if chance.random() < 0.5:
            variables["KVSERVICE_OBJECTS_URL"] = f"file://{folder}/objects"
            variables["KVSERVICE_OBJECTS_WRITE"] = chance.choice(["evicted", "stored", "reused"])
            (folder / "objects").mkdir()
        self.cluster = LocalCluster(
            nodes=3,
            transport="shm",
            pool_bytes=chance.choice([8, 12, 24]) * MiB,
            lease_seconds=LEASE_SECONDS,
            drain_seconds=chance.choice([0.0, 2.0]),
            memory_nodes=chance.choice([0, 1]),
            keep_segment=chance.sample(["n0", "n1", "n2"], chance.choice([0, 1])),
            environment=variables,
        )
        self._operator = OperatorClient()
        self._stored: dict[BlockKey, float] = {}  # when it was last sealed, or may have been
        self._clears: list[tuple[Mark, float, set[str]]] = []  # when each had ended, and the nodes that it reached
        self.hits = 0

    # -- engines ----

    async def _work(self, over: asyncio.Event) -> None:
        while not over.is_set():
            node, model, engine = self._chance.choice(self.cluster.nodes), self._chance.choice(MODELS), None
            with contextlib.suppress(KVServiceError, OSError, IndexError):  # its node is away, or goes
                engine = await Engine.attach(ShardClient(self.cluster.socket(node)), spec(model))
                while not over.is_set() and self._chance.random() < 0.9:
                    await self._step(node, engine, model)
            if engine is not None:
                await self._end(engine)
            await asyncio.sleep(0.1)

    async def _end(self, engine: Engine) -> None:
        with contextlib.suppress(KVServiceError):
            await engine.pool.close()
        engine.let_go()

    async def _step(self, node: str, engine: Engine, model: str) -> None:
        keys = chain(self._chance.randrange(PROMPTS), BLOCKS, model)[: self._chance.randrange(1, BLOCKS)]
        digest, address = spec(model).fingerprint.digest, self.cluster.record(node).peer_address
        steps: list[Callable[[], Awaitable[object]]] = [
            partial(self._store, engine, keys),
            partial(self._read, node, engine, keys),
            partial(self._hand_off, node, engine, keys, model),
            lambda: engine.pool.reserve(engine.id, 5),
            lambda: self._operator.warm(address, WarmRequest(digest, keys, 2.0, 1.0)),
            lambda: self._operator.warm(address, WarmRequest(digest, keys, 2.0, 0.0, self._chance.choice("ab"))),
            lambda: self._operator.unpin(address, self._chance.choice("ab")),
        ]
        await self._chance.choices(steps, [30, 50, 8, 4, 4, 3, 3])[0]()

    async def _store(self, engine: Engine, keys: Sequence[BlockKey], start: int = 0) -> list[SealStatus]:
        self._stored.update(dict.fromkeys(keys[start:], float("inf")))
        try:
            return await engine.store(keys, start)
        finally:
            self._stored.update(dict.fromkeys(keys[start:], time.time()))

    async def _read(self, node: str, engine: Engine, keys: Sequence[BlockKey], handoff: Handoff | None = None) -> None:
        """Every byte is compared, and nothing is served that was cleared before."""
        begun = time.time()
        result = await engine.read_all(keys, timeout=2.0, handoff=handoff)
        self.hits += len(result.blocks)
        for mark, ended, nodes in self._clears:
            if ended < begun and node in nodes:
                for key in keys[: len(result.blocks)]:
                    is_covered = mark.kind is MarkKind.EVERYTHING or key in mark.keys
                    assert not is_covered or self._stored[key] >= mark.at, f"{node} served what {mark.kind} cleared"

    async def _hand_off(self, node: str, engine: Engine, keys: Sequence[BlockKey], model: str) -> None:
        handoff, there = Handoff(HandoffId(os.urandom(16)), NodeId(node)), self._chance.choice(self.cluster.nodes)
        reader = await Engine.attach(ShardClient(self.cluster.socket(there)), spec(model))
        try:
            await engine.pool.open_handoff(engine.id, handoff.handoff_id)
            reading = asyncio.create_task(self._read(there, reader, keys, handoff))
            for end in range(8, len(keys), 8):
                await self._store(engine, keys[:end], end - 8)
            await engine.pool.close_handoff(engine.id, handoff.handoff_id)
            await reading
        finally:
            await self._end(reader)

    # -- faults ----

    async def _clear(self) -> None:
        mark, reached = Mark(MarkKind.EVERYTHING, time.time()), set[str]()
        if self._stored and self._chance.random() < 0.6:
            known = sorted(self._stored)
            mark = Mark(MarkKind.PROMPT, mark.at, keys=tuple(self._chance.sample(known, min(60, len(known)))))
        for node in self.cluster.nodes:
            with contextlib.suppress(KVServiceError, IndexError):
                await self._operator.clear(self.cluster.record(node).peer_address, [mark], 5.0)
                reached.add(node)
        self._clears.append((mark, time.time(), reached))

    async def _fault(self) -> None:
        cluster, node = self.cluster, self._chance.choice(self.cluster.nodes)
        what = self._chance.choice(
            ["kill", "end", "stop", "lookup", "stop lookup", "segment", "folder", "clear", "clear"]
        )
        print(what, node)  # shown when it fails
        if what == "clear":
            await self._clear()
        elif what in ("kill", "end"):
            await asyncio.to_thread(cluster.kill, node, signal.SIGKILL if what == "kill" else signal.SIGTERM)
            await asyncio.to_thread(cluster.start_shard, node)
        elif what == "lookup":
            await asyncio.to_thread(cluster.kill, "lookup0")
            await asyncio.to_thread(cluster.start_lookup, 0)
        elif what == "segment":
            segment_path(cluster.service, NodeId(node)).unlink(missing_ok=True)
        elif what == "folder":
            shutil.rmtree(node_directory(cluster.service, NodeId(node), cluster.root), ignore_errors=True)
        else:
            name = "lookup1" if what == "stop lookup" else node
            cluster.kill(name, signal.SIGSTOP)
            await asyncio.sleep(self._chance.uniform(0.5, 6.0))
            cluster.kill(name, signal.SIGCONT)

    # -- rest ----

    async def play(self) -> None:
        over = asyncio.Event()
        workers = [asyncio.create_task(self._work(over)) for _ in range(WORKERS)]
        for _ in range(FAULTS):
            await asyncio.sleep(self._chance.uniform(0.5, 2.0))
            await self._fault()
        over.set()
        await asyncio.gather(*workers)
        for node in self.cluster.nodes:
            await eventually_async(lambda node=node: self._unpinned(node), f"{node} without pins")
        await eventually_async(self._is_quiet, "what nodes hold, and what the directory says", QUIET_SECONDS)

    async def _unpinned(self, node: str) -> bool:
        with contextlib.suppress(KVServiceError, IndexError):
            address = self.cluster.record(node).peer_address
            for name in "ab":
                await self._operator.unpin(address, name)
            return not await self._operator.pins(address)
        return False

    async def _is_quiet(self) -> bool:
        """Nothing is held that nobody holds, and the directory and all mirrors know exactly what there is."""
        try:
            if not self.cluster.nothing_is_held():
                return False
            held, known = await self._held(), self._known()
        except (grpc.RpcError, IndexError):
            return False
        keys = [BlockKey(bytes.fromhex(key)) for key in held]
        return held == known and self.cluster.known_to_mirrors(keys) == len(keys)

    async def _held(self) -> dict[str, set[str]]:
        """The nodes that have each block, in memory or on their disk."""
        held: dict[str, set[str]] = {}
        addresses = {node: self.cluster.record(node).peer_address for node in self.cluster.nodes}
        async with Channels() as channels:
            listed = await list_blocks(channels, addresses, BlockFilter(), 100_000)
        for row in listed.blocks:
            held.setdefault(row.key, set()).add(row.node_id)
        for path in self._disk.rglob("*.safetensors"):
            held.setdefault(path.stem, set()).add(path.parts[-3])
        return held

    def _known(self) -> dict[str, set[str]]:
        keys, known = sorted(self._stored), dict[str, set[str]]()
        for address in self.cluster.lookup_addresses:
            with self.cluster.channel(address) as channel:
                stub = lookup_pb2_grpc.LookupServiceStub(channel)
                reply = stub.Resolve(lookup_pb2.ResolveRequest(keys=pack_keys(keys)), timeout=5)
            for run in reply.runs:
                nodes = {reply.nodes[index].node_id for index in run.holders}
                for key in keys[run.start : run.start + run.count]:
                    known.setdefault(key.hex(), set()).update(nodes)
        return known

    def trouble(self) -> list[str]:
        logs = [log for log in self.cluster.root.glob("*.log") for log in log.read_text(errors="replace").splitlines()]
        return [line for line in logs if any(word in line for word in TROUBLE) and EXPECTED not in line]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", seeds())
async def test_every_mixture_rests_with_right_bytes_and_books(seed: int, tmp_path: Path) -> None:
    world = MixedWorld(seed, tmp_path)
    with world.cluster:
        for _ in range(ROUNDS):
            await world.play()
        assert not world.trouble()
        assert world.hits > 50, "hardly anything was read"
