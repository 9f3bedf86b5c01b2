"""`python -m tests.netns.blocks SOCKET`: a small engine on the host this runs on, asked by JSON lines on its input.

{"verb": "store", "seed": 1, "count": 20} is answered with how many blocks were sealed; "read" with how many were
promised (each byte checked), how many of them came from elsewhere, why no more, and how long it took; "books" with what
is taken in its shard.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from kvservice.client.shard import ShardClient
from kvservice.core.messages import SealStatus
from kvservice.discovery import RPC_SOCKET_NAME
from kvservice.wire.v1 import shard_pb2, shard_pb2_grpc
from tests.integration.engine import Engine, chain
from tests.netns.hosts import Host


async def work(engine: Engine, verb: str, seed: int, count: int, timeout: float = 5.0) -> dict[str, Any]:
    keys = chain(seed, count)
    if verb == "store":
        return {"sealed": (await engine.store(keys)).count(SealStatus.SEALED)}
    started = time.monotonic()
    result = await engine.read_all(keys, timeout=timeout)
    answer = {"promised": len(result.blocks), "fetched": result.fetched_count, "miss": result.miss.value}
    return {**answer, "seconds": time.monotonic() - started}


async def books(socket: str) -> dict[str, Any]:
    address = f"unix:{Path(socket).with_name(RPC_SOCKET_NAME)}"
    async with grpc.aio.insecure_channel(address) as channel:
        request = shard_pb2.AccountingRequest()
        reply: shard_pb2.AccountingReply = await shard_pb2_grpc.AdminServiceStub(channel).Accounting(request, timeout=5)
    return {"balanced": reply.balanced, "leases": reply.leases, "slots": dict(reply.slots)}


async def serve(socket: str) -> None:
    client = ShardClient(socket)
    engine = await Engine.attach(client)
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            answer = await books(socket) if order["verb"] == "books" else await work(engine, **order)
            print(json.dumps(answer), flush=True)
    finally:
        engine.let_go()
        await client.close()


class RemoteEngine:
    """Such an engine on another host, from here; `variables` are for its environment."""

    def __init__(self, host: Host, socket: str, **variables: str) -> None:
        command = [*host.prefix, sys.executable, "-m", "tests.netns.blocks", socket]
        environment = {**os.environ, **variables}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> RemoteEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate(timeout=20)

    def ask(self, verb: str, **order: float) -> dict[str, Any]:
        """Blocks until it answers. An engine that ended by an exception is an error here, with its last words above."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"verb": verb, **order}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline() or "{}")
        assert answer, f"the engine ended: {self._process.wait(10)}"
        return answer


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
