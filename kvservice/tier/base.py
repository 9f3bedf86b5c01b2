"""The seam below the pool: what a tier does with blocks. kvservice.testing.tier_contract holds every tier to it.

A tier writes blocks down from slots and brings them back into slots. It decides nothing: which blocks go where, and
what is erased to make room, is decided by core.tier. A tier may lose any block at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from kvservice.core.block.marks import Mark
from kvservice.core.events import BroughtBlock
from kvservice.core.tier.tier_block import TierBlock
from kvservice.units import BlockKey

INTERFACE_VERSION = 1  # of this file; a tier of another package names the one that it was written for


class WriteResult(Enum):
    OK = "ok"
    FULL = "full"  # the tier has no room, whatever its budget says
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TierWrite:
    """Blocks to write down. Nobody changes or frees the payloads before the job is answered."""

    job_id: int
    items: tuple[tuple[TierBlock, memoryview], ...]  # (block, its payload: page-aligned, of `payload_bytes` bytes)


@dataclass(frozen=True, slots=True)
class TierRead:
    """Blocks to bring back, each into a slot that is reserved for it."""

    job_id: int
    items: tuple[tuple[TierBlock, memoryview], ...]  # (block, where its payload goes: page-aligned, writable)
    deadline: float  # on time.monotonic; an item that has not begun by then is answered with FAILED
    urgent: bool = True  # an engine waits for it; False: it is warmed up, and lets urgent reads pass


ReadCallback = Callable[[int, tuple[BroughtBlock, ...]], None]


class WriteCallback(Protocol):
    """Hears one result for each block, and how many bytes its payload takes in the tier (TierBlock.stored_bytes). A
    tier that does not say it is taken to store blocks as they are."""

    def __call__(
        self, job_id: int, results: tuple[WriteResult, ...], stored_bytes: tuple[int, ...] = (), /
    ) -> None: ...


class ProbeCallback(Protocol):
    """Hears how many blocks are there, and whether it is certain that the one behind them is not."""

    def __call__(self, count: int, is_end: bool = False) -> None: ...


class Tier(Protocol):
    """One tier. Its methods return at once and may be called from any thread, but for `start` and `close`.

    Callbacks run on the tier's own threads, once for each job, and must not block. A read is answered only when nothing
    will write its targets any more, however late that is: who waits for it gives up by himself.
    """

    name: str  # "disk", "objects"; what people and metrics call it

    def start(self) -> list[TierBlock]:
        """Open the tier, prove that it keeps bytes (one write, read and compare), and return the blocks found in it.

        Blocks, for seconds if many are found. A tier that is shared with other nodes lists nothing: it is probed.
        Raises TierError when the tier cannot be used.
        """
        ...

    def write(self, job: TierWrite, on_done: WriteCallback) -> None:
        """Write each block, with one result for each. A block that is there already is written again."""
        ...

    def read(self, job: TierRead, on_done: ReadCallback) -> None:
        """Read each block into its target, with one answer for each: STALE when it is not there or its header names
        another block, length, fingerprint or version, or an earlier time; CORRUPT when header or bytes do not have the
        digest, or are not all there; FAILED otherwise. What is OK has the digest and the time of its header, whatever
        the job says of them. Reads pass everything else that waits."""
        ...

    def erase(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks. Those that are not there are ignored. Not answered. Erasing passes writes that wait."""
        ...

    def probe(self, keys: Sequence[BlockKey], deadline: float, on_done: ProbeCallback) -> None:
        """How many blocks at the beginning of this chain the tier has, as far as it knows at the deadline (on
        time.monotonic). A tier that cannot tell says 0."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Totals since the start, by name."""
        ...

    def close(self) -> None:
        """Drop what waits, answer it as FAILED, wait for what runs, and end all threads. Blocks."""
        ...


@runtime_checkable
class TellsTrouble(Protocol):
    """What a tier may do besides: say that it is open and gives and takes nothing for the moment."""

    def trouble(self) -> str:
        """Why; empty while it works. Returns at once, on any thread."""
        ...


@runtime_checkable
class TellsWriteTrouble(Protocol):
    """What a tier may do besides: say that it does not take every block for the moment, and still gives what it has."""

    def write_trouble(self) -> str:
        """Why; empty while it takes every block. Returns at once, on any thread."""
        ...


@runtime_checkable
class KeepsMarks(Protocol):
    """What a shared tier may do besides: keep the marks of clears for nodes that were away. Both methods block, raise
    TierError, and are called while the tier is open. It gives no block that it has had for as long as marks count
    (core.block.marks.MARK_SECONDS): what cleared it may be forgotten."""

    def load_marks(self) -> tuple[Mark, ...]:
        """All marks that any node has kept here and that still count."""
        ...

    def keep_marks(self, marks: Sequence[Mark]) -> None:
        """Add marks. Those that are there already do no harm."""
        ...
