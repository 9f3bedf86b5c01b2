"""The one seam for bytes between nodes: the Transport protocol.

A transport reads remote segment memory into the local segment, one-sided. It only enqueues; completions are polled.
One thread owns a transport: no method may be called from two threads. Offsets are relative to the start of each
segment, which was registered once, when the transport was made; a transport never touches bytes outside of it.

Guarantees an implementation gives (checked by kvservice.testing.transport_contract):
* after DONE for a transfer, all its bytes are visible to the local process;
* a transfer is *terminal* after DONE or FAILED: nothing will write its destination any more;
* there is no order between transfers, and no promise about the destination's bytes before DONE or after FAILED;
* a transfer that is not terminal stays so until `poll` reports it; closing the transport makes all of them terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

TransferId = NewType("TransferId", int)
PeerHandle = NewType("PeerHandle", int)


@dataclass(frozen=True, slots=True)
class Copy:
    """`length` bytes from `remote_offset` in the peer's segment to `local_offset` in ours."""

    remote_offset: int
    local_offset: int
    length: int

    def fits(self, remote_bytes: int, local_bytes: int) -> bool:
        """Inside both segments, and not empty."""
        return (
            self.length > 0
            and 0 <= self.remote_offset <= remote_bytes - self.length
            and 0 <= self.local_offset <= local_bytes - self.length
        )


class TransferOutcome(Enum):
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Completion:
    transfer: TransferId
    outcome: TransferOutcome
    detail: str = ""


class Transport(Protocol):
    """Six methods. None but `connect` and `close` may block for longer than a memory copy."""

    @property
    def name(self) -> str:
        """For people and metrics: 'nixl', 'shm', 'fake'."""
        ...

    def describe(self) -> bytes:
        """Opaque bytes that a peer's `connect` needs; at most 64 KiB; safe to send over gRPC."""
        ...

    def connect(self, description: bytes) -> PeerHandle:
        """Reach a peer by its description. May block up to seconds. Raises TransferError for junk or no route."""
        ...

    def post_read(self, peer: PeerHandle, copies: Sequence[Copy]) -> TransferId:
        """Enqueue one read of many runs. Raises TransferError when nothing was enqueued (peer unknown or gone)."""
        ...

    def poll(self) -> list[Completion]:
        """Completions since the last call. Never blocks. Each transfer is reported exactly once."""
        ...

    def disconnect(self, peer: PeerHandle) -> None:
        """Forget a peer. Its open transfers become FAILED and are still reported. Unknown peers are ignored."""
        ...

    def close(self) -> None:
        """Release registrations. Idempotent."""
        ...
