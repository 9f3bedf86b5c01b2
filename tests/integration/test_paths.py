"""The way of a hit is short: how many files of the product a prefix passes between the scheduler's ask and its answer.

A file counts when one of its functions is given the chain of keys, the request, or what answers it. What a file does
with one block at a time, and what runs beside the request, does not count.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from types import FrameType

import pytest

import kvservice
from kvservice import discovery
from kvservice.client.shard import ShardClient
from kvservice.config import ServiceConfig
from kvservice.connector.scheduler.half import SchedulerHalf
from kvservice.connector.scheduler.ports import Promise
from kvservice.core.block.keys import block_keys, chain_hashes
from kvservice.lookup.server import LookupServer
from kvservice.session.session import Session
from kvservice.shard.server import ShardServer
from kvservice.shard.server_config import ShardServerConfig
from kvservice.testing.eventually import eventually_async
from kvservice.units import BlockHash, BlockKey, MiB, NodeId
from tests.integration.engine import LAYOUT, Engine, chain, spec

ROOT = os.path.dirname(kvservice.__file__)  # noqa: PTH120  compared with code objects' names
BLOCKS = 32
NODES = ("a", "b")
CARRIERS = frozenset({"AcquireRequest", "AcquireResult", "Acquire", "Locate", "LocateResult", "Pull", "PullJob"})


class Trace:
    """Files of kvservice whose functions were given `keys`, or an object that carries it, while `recording`."""

    def __init__(self, keys: tuple[BlockKey, ...]) -> None:
        self._first = keys[0]
        self.files: dict[str, str] = {}  # -> the function that was first
        self.recording = False

    def __enter__(self) -> Trace:
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if not self.recording or event != "call" or not path.startswith(ROOT):
            return
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(self._is_carried(frame.f_locals.get(name)) for name in names if name != "self"):
            self.files.setdefault(path.removeprefix(ROOT + "/"), code.co_name)

    def _is_carried(self, value: object) -> bool:
        if isinstance(value, tuple | list):
            return bool(value) and isinstance(value[0], bytes) and value[0] == self._first
        return type(value).__name__ in CARRIERS


class Nodes:
    """Two shards and a lookup partition in this process. Node a stores one chain."""

    def __init__(self, hashes: list[BlockHash], sockets: dict[str, str]) -> None:
        self.hashes = hashes
        self._sockets = sockets

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        return tuple(block_keys(spec().fingerprint.digest, self.hashes))

    def files_of_a_hit(self, node: str, trace: Trace) -> dict[str, str]:
        """Blocks. Ask node's shard for the chain as an engine's scheduler does."""

        async def open_pool() -> ShardClient:
            return ShardClient(self._sockets[node])

        session = Session(open_pool, spec(), lambda: True)
        make_keys = functools.partial(block_keys, spec().fingerprint.digest)
        half = SchedulerHalf(
            session,
            make_keys,
            lambda _: None,
            block_tokens=LAYOUT.block_tokens,  # type: ignore[arg-type, return-value]
            worker_count=1,
            fetch_timeout_seconds=20.0,
        )
        try:
            assert session.start(20.0) is not None
            trace.recording = True
            half.on_new_request("r", self.hashes, time.monotonic())
            session.wait_for_answer(20.0)
            trace.recording = False
            promise = half.matched("r", 0, (BLOCKS + 1) * LAYOUT.block_tokens, time.monotonic())
            assert promise == Promise(BLOCKS * LAYOUT.block_tokens)
        finally:
            session.close()
        return trace.files


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Callable[[], Nodes]]:
    hashes = chain_hashes(list(range(BLOCKS * LAYOUT.block_tokens)), LAYOUT.block_tokens)
    async with AsyncExitStack() as stack:
        lookup = LookupServer(f"unix:{tmp_path}/lookup.sock")
        address = await lookup.start()
        stack.push_async_callback(lookup.stop)
        sockets = {}
        for node in NODES:
            settings = ServiceConfig(
                service="paths",
                pool_bytes=16 * MiB,
                runtime_dir=str(tmp_path / "run"),
                transport="shm",
                heartbeat_seconds=0.2,
            )
            server = ShardServer(ShardServerConfig(settings, NodeId(node), (address,), segment_dir=tmp_path))
            await server.start()
            stack.push_async_callback(server.stop)
            sockets[node] = str(discovery.shard_socket("paths", NodeId(node), tmp_path / "run"))
        found = Nodes(hashes, sockets)
        engine = await Engine.attach(ShardClient(sockets["a"]))
        await engine.store(found.keys)
        probe = chain(seed=1, count=1)  # announced after the chain, on the same way
        await engine.store(probe)

        async def is_known() -> bool:
            reader = await Engine.attach(ShardClient(sockets["b"]))
            try:
                return len((await reader.acquire(probe)).blocks) == 1
            finally:
                await reader.pool.close()
                reader.let_go()

        await eventually_async(is_known, "node b finds what node a stored")
        yield lambda: found
        await engine.pool.close()
        engine.let_go()


async def in_new_thread(work: Callable[[], dict[str, str]]) -> dict[str, str]:
    """The shards run on this thread's loop; the scheduler asks from another, which must be new to be traced."""
    with ThreadPoolExecutor(1) as thread:
        return await asyncio.get_running_loop().run_in_executor(thread, work)


@pytest.mark.parametrize(("node", "files_max"), [("a", 14), ("b", 21)], ids=["local", "remote"])
async def test_a_hit_passes_few_files(nodes: Callable[[], Nodes], node: str, files_max: int) -> None:
    """Each file on the way is one more that a reader opens to follow a request."""
    place = nodes()
    with Trace(place.keys) as trace:
        files = await in_new_thread(lambda: place.files_of_a_hit(node, trace))
    assert "core/acquire/acquisitions.py" in files
    assert ("transfer/puller.py" in files) == (node == "b")
    assert len(files) <= files_max, "\n".join(f"{path}: {function}" for path, function in files.items())
