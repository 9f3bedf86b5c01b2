"""Who has gone away without a word is noticed, on both ends of a connection."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import grpc
import pytest

from kvservice.auth.tls import open_channel
from kvservice.testing.cluster import LocalCluster, free_port
from kvservice.wire.serving import CHANNEL_OPTIONS, MESSAGE_BYTES_MAX, server_options
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc
from kvservice.wire.versions import PROTOCOL_VERSION

pytestmark = pytest.mark.faults

NOTICED_SECONDS = 25.0  # 13 s, and what a loaded machine takes
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, SETTINGS_READ = b"\0\0\0\4\0\0\0\0\0", b"\0\0\0\4\1\0\0\0\0"


async def test_a_stopped_server_ends_the_calls_of_its_clients() -> None:
    with LocalCluster(0, 1) as cluster:
        async with open_channel(cluster.lookup_addresses[0], None, CHANNEL_OPTIONS) as channel:
            asked = lookup_pb2.WatchRequest(protocol_version=PROTOCOL_VERSION)
            watching = lookup_pb2_grpc.LookupServiceStub(channel).Watch(asked)
            assert (await watching.read()).snapshot_end  # type: ignore[union-attr]
            os.kill(cluster.pid("lookup0"), signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError):
                await watching.read()
            assert time.monotonic() - began < NOTICED_SECONDS


async def test_a_stopped_client_loses_its_connection() -> None:
    server = grpc.aio.server(options=server_options(MESSAGE_BYTES_MAX))
    address = f"127.0.0.1:{free_port()}"
    server.add_insecure_port(address)
    await server.start()
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(PREFACE + SETTINGS + SETTINGS_READ)
    async with asyncio.timeout(NOTICED_SECONDS):
        while await reader.read(1 << 16):  # pings, which nobody answers
            pass
    writer.close()
    await server.stop(None)
