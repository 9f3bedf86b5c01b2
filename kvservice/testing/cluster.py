"""A real cluster on one machine, without Ray: lookup partitions and cache shards as processes that can be killed.

    with LocalCluster(nodes=2) as cluster:
        client = ShardClient(cluster.socket("n0"))

Every process is a `kvservice shard` or `kvservice lookup`, with its files and sockets under a temporary directory;
only with TLS are there ports.
Leaving the block ends all processes and removes what killed ones left behind. A program that is killed in the block
leaves only the directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import grpc

from kvservice.auth.tls import open_blocking_channel, open_tls
from kvservice.core.block.keys import pack_keys
from kvservice.core.directory.mirror import Feed
from kvservice.discovery import ShardRecord, find_copy_workers, find_shards, lookup_socket, node_directory
from kvservice.lookup.mirror_file import mirror_path
from kvservice.lookup.mirror_reader import NodeMirror
from kvservice.memory.segment import segment_path
from kvservice.private_files import is_listening
from kvservice.testing.eventually import eventually
from kvservice.testing.unique import unique_name
from kvservice.units import BlockKey, MiB, NodeId
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc, shard_pb2, shard_pb2_grpc

# For a process to start. A loaded machine of two cores takes tens of seconds. Then the test fails and shows the log.
START_SECONDS = 120.0
# Runs a program that is asked to end when the thread that starts it is gone: a parent that is killed ends nothing.
_ENDS_WITH_PARENT = """import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class LocalCluster:
    def __init__(
        self,
        nodes: int = 2,
        lookup_partitions: int = 2,
        *,
        pool_bytes: int = 64 * MiB,
        transport: str = "auto",
        lease_seconds: float = 10.0,
        slab_bytes: int | None = None,
        mirror_bytes: int | None = None,
        drain_seconds: float = 0.0,
        keep_segment: bool | Collection[str] = False,
        environment: Mapping[str, str] | None = None,
        tls_dir: str = "",
        memory_nodes: int = 0,
        shard_module: str = "kvservice",
    ) -> None:
        """The last `memory_nodes` of the nodes accept what others evict, and have four times the memory.

        `keep_segment`: whether nodes keep their memory over a restart, or which of them do. `shard_module`: what runs
        `shard` in place of the command.
        """
        self.service = f"t{unique_name()}"
        self.nodes = [f"n{i}" for i in range(nodes)]
        self.root = Path(tempfile.gettempdir()) / f"kvs-{uuid.uuid4().hex[:8]}"  # made, and removed, in the block
        self.lookup_addresses = [
            f"127.0.0.1:{free_port()}" if tls_dir else f"unix:{lookup_socket(self.service, index, self.root)}"
            for index in range(lookup_partitions)
        ]
        self._pool_bytes = pool_bytes
        self._transport = transport
        self._lease_seconds = lease_seconds
        self._slab_bytes = slab_bytes
        self._mirror_bytes = mirror_bytes
        self._drain_seconds = drain_seconds
        keeps = self.nodes if keep_segment is True else keep_segment or ()
        self.keeping = frozenset(keeps)
        self._shard_module = shard_module
        own = {"KVSERVICE_TLS_DIR": tls_dir, "KVSERVICE_SERVICE": self.service, "KVSERVICE_RUNTIME_DIR": str(self.root)}
        self._environment = {**os.environ, **own, **(environment or {})}
        self._tls = open_tls(tls_dir)
        self._memory_nodes = self.nodes[nodes - memory_nodes :]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> LocalCluster:
        try:
            self.root.mkdir(mode=0o700)
            for index in range(len(self.lookup_addresses)):
                self.start_lookup(index)
            for node in self.nodes:
                self.start_shard(node, wait=False)
            for node in self.nodes:
                self.wait_for_shard(node)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for node in self.nodes:
            with contextlib.suppress(FileNotFoundError):
                segment_path(self.service, NodeId(node)).unlink()
            with contextlib.suppress(FileNotFoundError):
                mirror_path(segment_path(self.service, NodeId(node))).unlink()
        shutil.rmtree(self.root, ignore_errors=True)

    def start_lookup(self, index: int) -> None:
        address = self.lookup_addresses[index]
        arguments = ["lookup", "--partition", str(index), "--lookup-partitions", str(len(self.lookup_addresses))]
        if not address.startswith("unix:"):
            arguments += ["--port", address.rpartition(":")[2]]
        self._start(f"lookup{index}", ["kvservice", *arguments])
        self._await_start(
            lambda: self._answers(self.lookup_addresses[index]), f"lookup partition {index}", f"lookup{index}"
        )

    def start_shard(self, node: str, *, wait: bool = True) -> None:
        settings = {
            "pool_bytes": self._pool_bytes * (4 if node in self._memory_nodes else 1),
            "transport": self._transport,
            "lease_seconds": self._lease_seconds,
            "slab_bytes": self._slab_bytes,
            "mirror_bytes": self._mirror_bytes,
        }
        arguments = ["shard", "--node", node, "--grace", str(self._drain_seconds)]
        arguments += [word for address in self.lookup_addresses for word in ("--lookup", address)]
        arguments += [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if value is not None]
        if node in self._memory_nodes:
            arguments += ["--accept-spill"]
        if node in self.keeping:
            arguments += ["--keep-blocks"]
        self._start(node, [self._shard_module, *arguments])
        if wait:
            self.wait_for_shard(node)

    def start_copy_worker(self, node: str) -> None:
        """A copy worker for CPU engines of this node, named `copy-worker-n0`, …; blocks until it listens."""
        name = f"copy-worker-{node}"
        self._start(name, ["kvservice", "copy-worker", "--node", node])
        directory = node_directory(self.service, NodeId(node), self.root)
        pid = self._processes[name].pid
        self._await_start(
            lambda: any(r.pid == pid for r in find_copy_workers(directory)), f"copy worker of {node}", name
        )

    def wait_for_shard(self, node: str) -> ShardRecord:
        """Block until this very process of the shard is registered and listening."""
        pid = self._processes[node].pid
        self._await_start(lambda: any(r.pid == pid for r in self._records(node)), f"shard {node}", node)
        return self.record(node)

    def record(self, node: str) -> ShardRecord:
        return self._records(node)[0]

    def socket(self, node: str) -> str:
        return self.record(node).socket

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to 'n0', 'lookup1', …. SIGKILL and SIGTERM also wait for the end of the process."""
        process = self._processes[name]
        process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            process.wait(15)

    def exit_code(self, name: str, seconds: float = 15.0) -> int:
        """Block until this process has ended. Returns its exit code."""
        return self._processes[name].wait(seconds)

    def log(self, name: str) -> Path:
        return self.root / f"{name}.log"

    def channel(self, address: str) -> grpc.Channel:
        """A channel to a part of this cluster, made as its own parts make one. The caller closes it."""
        return open_blocking_channel(address, self._tls)

    def stats(self, node: str) -> shard_pb2.StatsReply:
        with self.channel(self.record(node).peer_address) as channel:
            reply: shard_pb2.StatsReply = shard_pb2_grpc.AdminServiceStub(channel).Stats(
                shard_pb2.StatsRequest(), timeout=5
            )
            return reply

    def accounting(self, node: str) -> shard_pb2.AccountingReply:
        with self.channel(self.record(node).peer_address) as channel:
            reply: shard_pb2.AccountingReply = shard_pb2_grpc.AdminServiceStub(channel).Accounting(
                shard_pb2.AccountingRequest(), timeout=5
            )
            return reply

    def known(self, keys: Sequence[BlockKey]) -> int:
        """The number of these keys for which the lookup partitions know a live holder."""
        found = 0
        for address in self.lookup_addresses:
            with self.channel(address) as channel:
                stub = lookup_pb2_grpc.LookupServiceStub(channel)
                reply = stub.Resolve(lookup_pb2.ResolveRequest(keys=pack_keys(keys)), timeout=5)
                found += sum(run.count for run in reply.runs)
        return found

    def known_to_mirrors(self, keys: Sequence[BlockKey]) -> int:
        """The number of these keys that each node would find in its mirror. A node without a mirror counts as knowing
        all."""
        found = [len(keys)]
        for node in self.nodes:
            mirror = NodeMirror(node_directory(self.service, NodeId(node), self.root))
            now = time.monotonic()
            reader = mirror.reader(now)
            if reader is not None:
                live = all(reader.feed(part, now) is Feed.LIVE for part in range(reader.partition_count))
                runs = reader.resolve(pack_keys(keys)) if live else None
                found.append(len(keys) if runs is None else sum(run.count for run in runs))
            mirror.close()
        return min(found)

    def wait_until_known(self, keys: Sequence[BlockKey], seconds: float = 10.0) -> None:
        """Block until the lookup partitions, and the nodes' mirrors, which learn of keys a moment later, know all these
        keys."""
        what = f"{len(keys)} keys in the directory"
        eventually(lambda: min(self.known(keys), self.known_to_mirrors(keys)) >= len(keys), what, seconds)

    def wait_until_announced(self, node: str, seconds: float = 20.0) -> None:
        """Block until the lookup partitions know as many blocks of this node as it holds."""

        def announced() -> bool:
            slots = self.accounting(node).slots
            rows = [row for stats in self._lookup_stats() for row in stats.nodes if row.node.node_id == node]
            return sum(row.block_count for row in rows) == slots["sealed"] + slots["leased"]

        eventually(announced, f"the blocks of {node} in the directory", seconds)

    def nothing_is_held(self) -> bool:
        """Whether no engine is attached, and no slot leased or being written, on any node. Every slot must be accounted
        for."""
        books = [self.accounting(node) for node in self.nodes]
        assert all(book.balanced for book in books), books
        busy = ("writing", "leased")
        return not any(book.leases or book.attachments or any(book.slots[state] for state in busy) for book in books)

    def directory_size(self) -> int:
        """The number of blocks that the lookup partitions know."""
        return sum(self.directory_sizes())

    def directory_sizes(self) -> list[int]:
        """The same for each partition."""
        return [stats.key_count for stats in self._lookup_stats()]

    def _lookup_stats(self) -> list[lookup_pb2.LookupStatsReply]:
        found = []
        for address in self.lookup_addresses:
            with self.channel(address) as channel:
                stub = lookup_pb2_grpc.LookupServiceStub(channel)
                found.append(stub.LookupStats(lookup_pb2.LookupStatsRequest(), timeout=5))
        return found

    def _records(self, node: str) -> list[ShardRecord]:
        return [record for record in find_shards(self.service, self.root) if record.node_id == node]

    def _start(self, name: str, module: list[str]) -> None:
        command = [sys.executable, "-m", *module]
        if threading.current_thread() is threading.main_thread():  # others may end before the cluster
            command = [sys.executable, "-SEc", _ENDS_WITH_PARENT, str(os.getpid()), *command]
        with self.log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=self._environment
            )

    def _await_start(self, is_there: Callable[[], bool], what: str, name: str) -> None:
        """Wait for a process to start. Raises ChildProcessError if it ended first, NotInTime if it takes too long."""

        def said() -> str:
            return self.log(name).read_text(errors="replace")[-2000:]

        def started() -> bool:
            there, code = is_there(), self._processes[name].poll()
            if not there and code is not None:
                raise ChildProcessError(f"{what} ended with {code} before it was there\n{said()}")
            return there

        eventually(started, what, START_SECONDS, detail=said)

    @staticmethod
    def _answers(address: str) -> bool:
        if address.startswith("unix:"):
            return is_listening(address.removeprefix("unix:"))
        host, port = address.rsplit(":", 1)
        with socket.socket() as probe:
            probe.settimeout(0.5)
            return probe.connect_ex((host, int(port))) == 0
