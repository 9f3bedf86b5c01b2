"""Where and when block copies run: at once, on a CUDA stream of their own, or in another process (`remote_mover`).

Owned by one worker and used from its main thread only. Decides no contents: the plan says which blocks and slots, and
whether they may be copied is the worker half's part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import torch

from kvservice.connector.copier import Copier
from kvservice.connector.plan import CopyEntry, PoolInfo
from kvservice.errors import TransferError
from kvservice.mover.message import Direction
from kvservice.mover.pinning import Pinning
from kvservice.observe.failpoints import failpoint
from kvservice.units import BlockKey


class Ticket(Protocol):
    """Copies that were started."""

    def query(self) -> bool:
        """They have all ended: nothing more is read or written for them."""
        ...

    def synchronize(self) -> None:
        """Wait until they have."""
        ...

    def succeeded(self) -> bool:
        """Once they have ended: all bytes are where they should be."""
        ...

    @property
    def borrowed(self) -> int:
        """Once they have ended: blocks that came from another engine's KV cache instead of their slots."""
        ...


class Loan(Protocol):
    """Blocks of this engine that others may copy."""

    @property
    def is_taken(self) -> bool:
        """A reader has what it wanted of them."""
        ...

    @property
    def is_over(self) -> bool:
        """Nobody reads them, nor ever will."""
        ...


class Mover(Protocol):
    def adopt(self, memory: torch.Tensor, pool: PoolInfo) -> None:
        """Copies will run between the engine and this host memory of the pool, until `release`."""
        ...

    def release(self) -> None:
        """The memory is about to be unmapped; no copy is under way."""
        ...

    def run(self, direction: Direction, entries: Sequence[CopyEntry], *, may_borrow: bool = False) -> Ticket:
        """Copy these blocks, after everything that the engine has started so far. They may wait for `flush`.
        `may_borrow`: loads, of which other engines may lend the blocks; the slots hold the same."""
        ...

    def flush(self) -> None:
        """Start what `run` was given. Once a step and direction; does not block."""
        ...

    def lend(self, blocks: Sequence[tuple[int, BlockKey]]) -> Loan | None:
        """Let other engines copy these (block id, key), after everything that this engine has started so far. None, and
        nothing is lent, where there is no way."""
        ...

    def recall(self, loan: Loan) -> None:
        """Ask for the end of a loan of this mover. Does not block; idempotent."""
        ...

    def take_counters(self) -> dict[str, int]:
        """What was counted since the last call."""
        ...

    def close(self) -> None:
        """The engine ends. After `release`."""
        ...


class Done:
    """Ticket of copies that have ended."""

    borrowed = 0

    def __init__(self, *, copied: bool = True) -> None:
        self._copied = copied

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def succeeded(self) -> bool:
        return self._copied


class InlineMover:
    """Copies end before `run` returns: for KV tensors in host memory."""

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._pool: PoolInfo | None = None
        self.counters: Counter[str] = Counter()

    def adopt(self, memory: torch.Tensor, pool: PoolInfo) -> None:
        self._pool = pool

    def release(self) -> None:
        self._pool = None

    def run(self, direction: Direction, entries: Sequence[CopyEntry], *, may_borrow: bool = False) -> Ticket:
        assert self._pool is not None
        copy_entries(self._copier, self._pool, direction, entries)
        return Done()

    def flush(self) -> None:
        return

    def lend(self, blocks: Sequence[tuple[int, BlockKey]]) -> Loan | None:
        return None

    def recall(self, loan: Loan) -> None:
        return

    def take_counters(self) -> dict[str, int]:
        counters, self.counters = self.counters, Counter()
        return dict(counters)

    def close(self) -> None:
        return


class _Recorded:
    borrowed = 0

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def succeeded(self) -> bool:
        return True  # a copy that fails makes the context unusable, and the engine with it


class CudaMover(InlineMover):
    """Copies run on a stream of their own. They start when the forwards launched so far have ended, so a block is never
    copied before it is written, nor overwritten while an earlier forward reads it; the next forward does not wait.

    Has not run on a GPU yet.
    """

    def __init__(self, copier: Copier) -> None:
        super().__init__(copier)
        self._device = copier.device
        self._stream = torch.cuda.Stream(self._device)
        self._pinning: Pinning | None = None

    def adopt(self, memory: torch.Tensor, pool: PoolInfo) -> None:
        super().adopt(memory, pool)
        # Until its memory is pinned, a copy goes through a buffer of the driver's and holds up the calling thread.
        self._pinning = Pinning(
            memory.data_ptr(), pool.geometry, _pin, _unpin, lambda: torch.cuda.set_device(self._device)
        )  # fmt: skip

    def release(self) -> None:
        super().release()
        if self._pinning is not None:
            self._pinning.undo()
            self._pinning = None

    def run(self, direction: Direction, entries: Sequence[CopyEntry], *, may_borrow: bool = False) -> Ticket:
        assert self._pool is not None
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(computed)
            copy_entries(self._copier, self._pool, direction, entries)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        return _Recorded(copied)


def _pin(address: int, byte_count: int) -> None:
    error = int(torch.cuda.cudart().cudaHostRegister(address, byte_count, 0))
    if error:
        raise TransferError(f"cudaHostRegister: CUDA error {error}")


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def copy_entries(copier: Copier, pool: PoolInfo, direction: Direction, entries: Sequence[CopyEntry]) -> None:
    """Block by block, through the copier; see its `store` and `load` for when that has ended."""
    for entry in entries:
        own = copier.of(entry.group)
        offset = pool.geometry.payload_offset(entry.ref.slot, own.payload_bytes)
        if direction is Direction.LOAD:
            own.load(offset, entry.block_id, entry.part)
        else:
            own.store(entry.block_id, offset, entry.part)
        failpoint(f"engine.{direction.name.lower()}")


def in_process_mover(copier: Copier) -> InlineMover:
    return CudaMover(copier) if copier.device.type == "cuda" else InlineMover(copier)
