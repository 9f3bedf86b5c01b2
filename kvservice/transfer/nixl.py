"""NIXL: one-sided READs between the segments of two shards over UCX (RDMA, shared memory or TCP, as UCX chooses).

The only file that imports NIXL. The whole segment is registered once. A peer is described by a small binary record of
our own (agent metadata, base address, length), never by NIXL's pickled descriptors. Every run is checked against the
length that the peer advertised before it is posted. One thread owns an instance.

UCX cannot cancel a read. After a handle was released or the peer removed, a read that was in flight still writes its
destination (seen over TCP, even minutes later when the peer had been stopped). So a transfer counts as ended only when
NIXL says so. After `disconnect`, `poll` waits for that; only destroying the agent stops the reads that remain.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import struct
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from kvservice.breaker import Breaker
from kvservice.core.bounded_table import NODES_MAX, BoundedTable
from kvservice.errors import TransferError
from kvservice.memory.segment import Segment
from kvservice.observe import logs
from kvservice.transfer.base import Completion, Copy, PeerHandle, TransferId, TransferOutcome
from kvservice.transfer.devices import LOOPBACK, devices_for

# With UCX's TCP defaults (8 KiB segments) a link reaches a third of its speed; these were the best values we tried.
UCX_DEFAULTS = {
    "UCX_TCP_TX_SEG_SIZE": "512k",
    "UCX_TCP_RX_SEG_SIZE": "512k",
    "UCX_TCP_SNDBUF": "4m",
    "UCX_TCP_RCVBUF": "4m",
}
DEVICES_VARIABLE = "UCX_NET_DEVICES"
DESCRIPTION_MAGIC = b"KVSNIXL1"
# What Transport.describe promises; an agent's takes some KiB. Longer ones are refused.
DESCRIPTION_BYTES_MAX = 64 << 10
_DESCRIPTION = struct.Struct("<8sQQI")  # magic, base address, segment bytes, crc32 of all the rest; then agent metadata
_CRC_BYTES = 4  # of a crc32
# An attempt to connect that fails may leave a socket open inside UCX for as long as the agent lives. So a peer that
# cannot be reached is tried again after a second, and then after pauses that double up to this.
UNREACHABLE_SECONDS_MAX = 30.0
CLOSE_DRAIN_SECONDS = 1.0  # wait for open reads, because a source may crash inside UCX when its reader goes away in one
PROGRESS_PAUSE_US = 1000  # the progress thread wakes at least so often; events wake it at once
# `nixl` comes last: it imports torch to choose one of the others, which costs a shard 1.7 s and 180 MiB.
_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
DRAM_DEVICE = 0  # NIXL's number of the device of host memory, of which there is one


def nixl_available() -> bool:
    return any(importlib.util.find_spec(name) is not None for name in _PACKAGES)


def load_nixl() -> tuple[ModuleType, tuple[type[Exception], ...]]:
    """The API module and its exception types, which have no common base. Raises TransferError without NIXL."""
    for name, value in UCX_DEFAULTS.items():
        os.environ.setdefault(name, value)
    reasons: list[str] = []
    for package in _PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
            bindings = api.nixlBind
        except (ImportError, AttributeError) as error:
            reasons.append(f"{package}: {error}")
            continue
        logs.take_over("nixl")  # its import installs a handler that writes to stdout
        kinds = [getattr(bindings, name) for name in dir(bindings) if name.endswith("Error")]
        return api, tuple(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception))
    raise TransferError(
        f"NIXL cannot be loaded ({'; '.join(reasons)}): it comes with the extra 'nixl' (pip install nixl-cu12)"
    )


@contextlib.contextmanager
def ucx_devices_of(host: str) -> Iterator[None]:
    """UCX contexts that are made inside use only the network device with this address, and RDMA devices.

    Over TCP, UCX answers whoever connects, on every interface, and checks no key. UCX_NET_DEVICES takes precedence.
    """
    devices = devices_for(host)
    if DEVICES_VARIABLE in os.environ or not devices:
        yield
        return
    os.environ[DEVICES_VARIABLE] = ",".join(devices)
    try:
        yield
    finally:
        del os.environ[DEVICES_VARIABLE]


def make_agent(api: ModuleType, name: str) -> Any:
    """An agent whose progress thread sleeps on events.

    NIXL's Python API sets the thread's pause to 0, with which it uses a whole core all the time, even when idle. With
    a pause it waits in poll(2) and is as fast (measured on shared memory and TCP). The pause can only be set on the
    binding's own config, hence the wrapped constructor.
    """
    bindings = api.nixlBind
    construct = bindings.nixlAgent

    def paused(agent_name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_PAUSE_US
        return construct(agent_name, config)

    bindings.nixlAgent = paused
    try:
        return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
    finally:
        bindings.nixlAgent = construct


def make_storage_agent(api: ModuleType, name: str, plugin: str) -> Any:
    """An agent for files alone, with this plug-in: "POSIX", "GDS". It has no thread: whoever waits polls.

    Raises NIXL's own errors where the plug-in cannot be loaded.
    """
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend(plugin)
    return agent


@dataclass(slots=True)
class _NixlPeer:
    name: str
    base: int
    length: int
    description: bytes


@dataclass(slots=True)
class _Transfer:
    handle: Any  # nixl_xfer_handle
    peer: PeerHandle
    failure: str = ""  # why it will be reported as FAILED, however it ends


def _names(metadata: bytes, agent: str) -> bool:
    """Whether it is of this agent. The length belongs to it: a short name would be found in everybody's metadata."""
    name = agent.encode()
    return b"Agent" + len(name).to_bytes(8, "little") + name in metadata


class NixlTransport:
    """Satisfies transfer.base.Transport."""

    def __init__(self, segment: Segment, node_name: str, host: str = LOOPBACK) -> None:
        """Register the segment. UCX listens at `host` only, as the service does.

        Blocks while it pins memory and starts the backend. Raises TransferError.
        """
        self._segment = segment
        api, self._errors = load_nixl()
        self._peers: dict[PeerHandle, _NixlPeer] = {}
        self._leaving: dict[PeerHandle, _NixlPeer] = {}  # disconnected; forgotten once their last transfer has ended
        self._open: dict[TransferId, _Transfer] = {}
        self._finished: list[Completion] = []
        self._unreachable: BoundedTable[bytes, Breaker] = BoundedTable(NODES_MAX)  # by description
        self._next_id = 1
        self._closed = False
        try:
            with ucx_devices_of(host):
                # Each boot has a new name: peers refuse an agent name that they have seen before.
                self._agent = make_agent(api, f"{node_name}-{uuid.uuid4().hex[:12]}")
            region = [(segment.address, segment.geometry.segment_bytes, DRAM_DEVICE, "")]
            self._registration = self._agent.register_memory(region, "DRAM")
            self._metadata = bytes(self._agent.get_agent_metadata())
        except self._errors as error:
            raise TransferError(f"NIXL cannot register the segment: {type(error).__name__}: {error}") from error

    @property
    def name(self) -> str:
        return "nixl"

    def describe(self) -> bytes:
        head = _DESCRIPTION.pack(DESCRIPTION_MAGIC, self._segment.address, self._segment.geometry.segment_bytes, 0)
        head = head[:-_CRC_BYTES]
        return head + _crc(head, self._metadata) + self._metadata

    def connect(self, description: bytes) -> PeerHandle:
        if not _DESCRIPTION.size < len(description) <= DESCRIPTION_BYTES_MAX:
            raise TransferError(f"a NIXL peer description of {len(description)} bytes is not valid")
        magic, base, length, crc = _DESCRIPTION.unpack_from(description)
        metadata = description[_DESCRIPTION.size :]
        head = description[: _DESCRIPTION.size - _CRC_BYTES]
        if magic != DESCRIPTION_MAGIC or crc != int.from_bytes(_crc(head, metadata), "little"):
            raise TransferError("this is not a NIXL peer description of this version")
        for handle, peer in self._peers.items():
            if peer.description == description:
                return handle
        # NIXL forgets the open transfers of an agent that is added again, although they still write. A peer that lies
        # may bring the agent of another one.
        if any(_names(metadata, peer.name) for peer in (*self._peers.values(), *self._leaving.values())):
            raise TransferError("it names an agent that is connected, or whose reads are still in flight")
        breaker = self._unreachable.get(description)
        if breaker is not None and not breaker.allows(time.monotonic()):
            raise TransferError("the peer could not be reached, and is not tried again yet")
        try:
            name = self._agent.add_remote_agent(metadata)
            text = name.decode() if isinstance(name, bytes) else str(name)
            self._agent.make_connection(text)
        except self._errors as error:
            if breaker is None:
                breaker = Breaker(open_seconds_max=UNREACHABLE_SECONDS_MAX, failures_to_open=1)
                self._unreachable.put(description, breaker)
            breaker.failed(time.monotonic())
            raise TransferError(f"NIXL cannot reach the peer: {type(error).__name__}: {error}") from error
        self._unreachable.pop(description)
        handle = PeerHandle(self._next_id)
        self._next_id += 1
        self._peers[handle] = _NixlPeer(text, base, length, description)
        return handle

    def post_read(self, peer: PeerHandle, copies: Sequence[Copy]) -> TransferId:
        known = self._peers.get(peer)
        if known is None:
            raise TransferError("the peer is not connected")
        own = self._segment.geometry.segment_bytes
        if not copies or not all(copy.fits(known.length, own) for copy in copies):
            raise TransferError(f"a run lies outside of the peer's {known.length} or our own {own} bytes")
        remote = np.array([(c.remote_offset, c.length, DRAM_DEVICE) for c in copies], dtype=np.uint64)
        local = np.array([(c.local_offset, c.length, DRAM_DEVICE) for c in copies], dtype=np.uint64)
        remote[:, 0] += np.uint64(known.base)
        local[:, 0] += np.uint64(self._segment.address)
        try:
            descriptors = [self._agent.get_xfer_descs(rows, "DRAM") for rows in (local, remote)]
            handle = self._agent.initialize_xfer("READ", *descriptors, known.name)
        except self._errors as error:
            raise TransferError(f"NIXL refused the read: {type(error).__name__}: {error}") from error
        transfer = TransferId(self._next_id)
        self._next_id += 1
        self._open[transfer] = _Transfer(handle, peer)
        try:
            state = self._agent.transfer(handle)
        except self._errors as error:  # a part of the read may be under way: `poll` finds out
            self._open[transfer].failure = f"{type(error).__name__}: {error}"
        else:
            self._note(transfer, state)
        return transfer

    def poll(self) -> list[Completion]:
        for transfer, opened in list(self._open.items()):
            try:
                state = self._agent.check_xfer_state(opened.handle)
            except self._errors as error:
                self._finish(transfer, opened.failure or f"{type(error).__name__}: {error}")
            else:
                self._note(transfer, state)
        finished, self._finished = self._finished, []
        return finished

    def disconnect(self, peer: PeerHandle) -> None:
        known = self._peers.pop(peer, None)
        if known is None:
            return
        self._leaving[peer] = known
        for opened in self._open.values():
            if opened.peer == peer:
                opened.failure = opened.failure or "the peer was disconnected"
        self._forget_if_idle(peer)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in list(self._peers):
            self.disconnect(peer)
        deadline = time.monotonic() + CLOSE_DRAIN_SECONDS
        while self._open and time.monotonic() < deadline:
            self._finished += self.poll()
            time.sleep(0.001)
        for transfer in list(self._open):
            self._finish(transfer, "the transport was closed")
        self._open.clear()
        with contextlib.suppress(*self._errors):  # the agent is destroyed right after
            self._agent.deregister_memory(self._registration)
        del self._agent

    def _note(self, transfer: TransferId, state: str) -> None:
        if state == "DONE":
            self._finish(transfer, self._open[transfer].failure)
        elif state != "PROC":
            self._finish(transfer, self._open[transfer].failure or f"state {state}")

    def _finish(self, transfer: TransferId, failure: str) -> None:
        """Report a transfer when its handle is released. While NIXL refuses that, it is in flight and polled again."""
        opened = self._open[transfer]
        try:
            opened.handle.release()
        except self._errors:
            return
        del self._open[transfer]
        outcome = TransferOutcome.FAILED if failure else TransferOutcome.DONE
        self._finished.append(Completion(transfer, outcome, failure))
        self._forget_if_idle(opened.peer)

    def _forget_if_idle(self, peer: PeerHandle) -> None:
        if peer in self._leaving and not any(opened.peer == peer for opened in self._open.values()):
            with contextlib.suppress(*self._errors):  # the connection may be dead already
                self._agent.remove_remote_agent(self._leaving.pop(peer).name)


def _crc(head: bytes, metadata: bytes) -> bytes:
    return zlib.crc32(metadata, zlib.crc32(head)).to_bytes(_CRC_BYTES, "little")
