"""A transport between segments of one process, with faults that a test switches on.

Deterministic: nothing happens before `poll`, and each poll completes one transfer, the oldest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvservice.errors import TransferError
from kvservice.memory.segment import Segment
from kvservice.transfer.base import Completion, Copy, PeerHandle, TransferId, TransferOutcome


@dataclass(slots=True)
class Faults:
    """The faults from now on. A test changes it while transfers run."""

    hold: bool = False  # transfers do not complete, as on a link that hangs
    holds: Callable[[Sequence[Copy]], bool] | None = None  # transfers for which it returns True do not complete
    newest_first: bool = False  # no transport promises an order
    fail: bool = False  # transfers end as FAILED without having moved a byte
    refuse: bool = False  # post_read raises
    corrupt: bool = False  # one byte of every run arrives wrong
    duplicate: bool = False  # completions are reported twice, against the contract
    delay_polls: int = 0  # this many polls return nothing before each completion
    poll_error: Exception | None = None  # poll raises it, against the contract
    polls: int = 0  # made so far
    before_copy: Callable[[], None] | None = None  # runs right before bytes are read, for example to rewrite the source


@dataclass(slots=True)
class FakeNetwork:
    """Connects FakeTransports by the address in their description."""

    segments: dict[bytes, Segment] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)

    def transport(self, segment: Segment) -> FakeTransport:
        address = b"fake:%d" % len(self.segments)
        self.segments[address] = segment
        return FakeTransport(self, address, segment)


class FakeTransport:
    """Satisfies transfer.base.Transport. Make it with FakeNetwork.transport."""

    def __init__(self, network: FakeNetwork, address: bytes, segment: Segment) -> None:
        self._network = network
        self._address = address
        self._segment = segment
        self._peers: dict[PeerHandle, Segment] = {}
        self._open: dict[TransferId, tuple[PeerHandle, tuple[Copy, ...]]] = {}
        self._finished: list[Completion] = []
        self._next_id = 1
        self._waited = 0

    @property
    def name(self) -> str:
        return "fake"

    def describe(self) -> bytes:
        return self._address

    def connect(self, description: bytes) -> PeerHandle:
        if description not in self._network.segments:
            raise TransferError(f"no fake peer {description!r}")
        handle = PeerHandle(self._next_id)
        self._next_id += 1
        self._peers[handle] = self._network.segments[description]
        return handle

    def post_read(self, peer: PeerHandle, copies: Sequence[Copy]) -> TransferId:
        if peer not in self._peers or self._network.faults.refuse:
            raise TransferError("the peer is not connected")
        remote, local = self._peers[peer].geometry.segment_bytes, self._segment.geometry.segment_bytes
        if not copies or not all(copy.fits(remote, local) for copy in copies):
            raise TransferError("a run lies outside of a segment")
        transfer = TransferId(self._next_id)
        self._next_id += 1
        self._open[transfer] = (peer, tuple(copies))
        return transfer

    def poll(self) -> list[Completion]:
        faults = self._network.faults
        faults.polls += 1
        if faults.poll_error is not None:
            raise faults.poll_error
        if self._open and self._waited < faults.delay_polls:
            self._waited += 1
        elif ready := self._ready():
            self._waited = 0
            transfer = ready[-1] if faults.newest_first else ready[0]
            peer, copies = self._open.pop(transfer)
            if faults.fail:
                self._finished.append(Completion(transfer, TransferOutcome.FAILED, "told to fail"))
            else:
                self._move(self._peers[peer], copies)
                self._finished.append(Completion(transfer, TransferOutcome.DONE))
        finished, self._finished = self._finished, []
        return finished * 2 if faults.duplicate else finished

    def _ready(self) -> list[TransferId]:
        faults = self._network.faults
        if faults.hold:
            return []
        return [t for t, (_, copies) in self._open.items() if faults.holds is None or not faults.holds(copies)]

    def disconnect(self, peer: PeerHandle) -> None:
        self._peers.pop(peer, None)
        for transfer in [t for t, (owner, _) in self._open.items() if owner == peer]:
            del self._open[transfer]
            self._finished.append(Completion(transfer, TransferOutcome.FAILED, "the peer was disconnected"))

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)

    def _move(self, source: Segment, copies: Sequence[Copy]) -> None:
        if self._network.faults.before_copy is not None:
            self._network.faults.before_copy()
        for copy in copies:
            data = bytearray(source.buffer[copy.remote_offset : copy.remote_offset + copy.length])
            if self._network.faults.corrupt:
                data[len(data) // 2] ^= 0x10
            self._segment.buffer[copy.local_offset : copy.local_offset + copy.length] = data
