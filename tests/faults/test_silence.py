"""Who has gone away without a word is noticed, on both ends of a connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import grpc
import pytest

from kvservice.auth.tls import TlsFiles, open_channel
from kvservice.core.messages import Holder
from kvservice.testing.cluster import LocalCluster, free_port
from kvservice.testing.eventually import eventually
from kvservice.units import BootEpoch, NodeId
from kvservice.wire.codec import encode_holder
from kvservice.wire.serving import CHANNEL_OPTIONS, MESSAGE_BYTES_MAX, server_options
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc
from kvservice.wire.versions import PROTOCOL_VERSION
from tests.integration.certificates import write

pytestmark = pytest.mark.faults

NOTICED_SECONDS = 40.0  # 20 s, and what a loaded machine takes
END_SECONDS = 20.0  # far more than an end takes on a busy machine
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


@pytest.mark.parametrize(
    ("encrypted", "said"),
    [(False, PREFACE + SETTINGS + SETTINGS_READ), (True, b""), (True, b"\x16\x03\x01\x02\x00\x01")],
    ids=["stopped", "no handshake", "half a handshake"],
)
async def test_a_client_that_says_no_more_is_cut_off(tmp_path: Path, encrypted: bool, said: bytes) -> None:
    server = grpc.aio.server(options=server_options(MESSAGE_BYTES_MAX))
    address = f"127.0.0.1:{free_port()}"
    if encrypted:
        server.add_secure_port(address, TlsFiles(write(tmp_path / "tls")).server_credentials())
    else:
        server.add_insecure_port(address)
    await server.start()
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(said)
    async with asyncio.timeout(NOTICED_SECONDS):
        while await reader.read(1 << 16):  # pings, which nobody answers
            pass
    writer.close()
    await server.stop(None)


def test_a_log_that_nobody_reads_keeps_no_shard_from_its_end() -> None:
    """As a pipe to a program that hangs, or a terminal after Ctrl-S."""
    with LocalCluster(nodes=1, lookup_partitions=1) as cluster:
        cluster.kill("n0", signal.SIGTERM)
        cluster.log("n0").unlink()
        os.mkfifo(cluster.log("n0"))
        reader = os.open(cluster.log("n0"), os.O_RDONLY | os.O_NONBLOCK)
        cluster.start_shard("n0")
        os.set_blocking(reader, True)
        said = b""
        while b"serves peers" not in said or not said.endswith(b"\n"):  # the last line of its start
            said += os.read(reader, 1 << 16)
        writer = os.open(cluster.log("n0"), os.O_WRONLY | os.O_NONBLOCK)
        for size in (4096, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(writer, b"x" * size)
        cluster.kill("lookup0")  # the shard has something to log
        os.kill(cluster.pid("n0"), signal.SIGTERM)
        assert cluster.exit_code("n0", END_SECONDS) == 0
        os.close(writer)
        os.close(reader)


def test_a_stopped_watcher_keeps_no_partition_from_its_end() -> None:
    with LocalCluster(nodes=1, lookup_partitions=1) as cluster, cluster.channel(cluster.lookup_addresses[0]) as channel:
        eventually(lambda: cluster.stats("n0").counters.get("mirror_live_partitions"), "the node to watch")
        os.kill(cluster.pid("n0"), signal.SIGSTOP)
        stub, other = lookup_pb2_grpc.LookupServiceStub(channel), Holder(NodeId("other"), "127.0.0.1:1", BootEpoch(5))
        for sequence in range(1, 200):  # more than the watcher's socket holds
            keys = os.urandom(16 * 4096)
            request = lookup_pb2.AnnounceRequest(
                node=encode_holder(other),
                sequence=sequence,
                added=keys,
                full_begin=True,
                full_end=True,
                partition_count=1,
                protocol_version=PROTOCOL_VERSION,
            )
            assert stub.Announce(request, timeout=10).outcome == lookup_pb2.AnnounceReply.OUTCOME_APPLIED
        os.kill(cluster.pid("lookup0"), signal.SIGTERM)
        assert cluster.exit_code("lookup0", END_SECONDS) == 0
        assert "connections_not_closed" in cluster.log("lookup0").read_text()
