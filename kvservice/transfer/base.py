"""The one seam through which bytes move between nodes: the Transport protocol.

A transport reads a peer's segment into the local segment, one-sided. It only enqueues reads; completions are polled.
One thread owns a transport: no method may be called from two threads. Offsets are relative to the start of each
segment. A segment is registered once, when the transport is made, and a transport never touches bytes outside of it.

Every implementation guarantees (checked by kvservice.testing.transport_contract):
* after DONE, all bytes of the transfer are visible to the local process;
* after DONE or FAILED a transfer is *terminal*: nothing will write its destination any more;
* there is no order between transfers, and no promise about the destination's bytes before DONE or after FAILED;
* a transfer stays open until `poll` reports it as terminal; closing the transport makes all transfers terminal.
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
        """Whether the copy is not empty and inside both segments."""
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
    """The end of one transfer. `detail` says why it failed."""

    transfer: TransferId
    outcome: TransferOutcome
    detail: str = ""


class Transport(Protocol):
    """Six methods. Only `connect` and `close` may block for longer than a memory copy."""

    @property
    def name(self) -> str:
        """For people and metrics: 'nixl', 'shm', 'fake'."""
        ...

    def describe(self) -> bytes:
        """Opaque bytes that a peer's `connect` needs: at most 64 KiB, safe to send over gRPC."""
        ...

    def connect(self, description: bytes) -> PeerHandle:
        """Reach a peer by its description. May block for seconds.

        Raises TransferError when the description is not valid or the peer cannot be reached.
        """
        ...

    def post_read(self, peer: PeerHandle, copies: Sequence[Copy]) -> TransferId:
        """Enqueue one read of many runs. Raises TransferError when nothing was enqueued (peer unknown or gone)."""
        ...

    def poll(self) -> list[Completion]:
        """Completions since the last call. Never blocks. Each transfer is reported exactly once."""
        ...

    def disconnect(self, peer: PeerHandle) -> None:
        """Forget a peer. Its open transfers become FAILED and are still reported. An unknown peer is ignored."""
        ...

    def close(self) -> None:
        """Release the registration, and make every open transfer terminal. May block. Idempotent."""
        ...
