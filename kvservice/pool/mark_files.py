"""Keeps the marks of a pool in small files: beside its memory, and beside its disk, because each may outlive the other.

The format is in core.block.marks. `load` and `keep` block, and for ever where a network mount is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path

from kvservice.core.block.marks import (
    FUTURE_SECONDS_MAX,
    MARK_SECONDS,
    Mark,
    MarkKind,
    pack_marks,
    unpack_marks,
    without_repeated,
)
from kvservice.errors import Unavailable
from kvservice.pool.newest_write import NewestWrite
from kvservice.private_files import write_private

log = logging.getLogger("kvservice.pool")

FILE_BYTES_MAX = 4 << 20  # far more than all marks and their keys take; a longer file is no file of marks
KEEP_SECONDS = 10.0  # for all files to be written
CLEAR_AGAIN_SECONDS = 3600.0  # longer than a request reads blocks


def unfinished(marks: Sequence[Mark], used_at: float, wall: float) -> list[Mark]:
    """The clears to do again in memory whose last boot was alive until `used_at`; now it is `wall`.

    A block that was being read when it was cleared may still have been there when that boot ended. A mark of the future
    is of a clock that was set back since.
    """
    since = max(min(used_at, wall) - CLEAR_AGAIN_SECONDS, wall - MARK_SECONDS)
    return [replace(mark, at=min(mark.at, wall)) for mark in marks if mark.at > since]


def missed(marks: Sequence[Mark], known: Set[Mark], wall: float) -> tuple[list[Mark], list[Mark]]:
    """(the marks that a node takes over, those that are ahead of its clock). `known` are those that it has, and `wall`
    is its time now. Where a later mark repeats an earlier one, it takes only the later, and neither if it has that."""
    ahead = [mark for mark in marks if mark not in known and mark.at >= wall + FUTURE_SECONDS_MAX]
    told = without_repeated([*known, *(mark for mark in dict.fromkeys(marks) if mark not in ahead)])
    return [mark for mark in told if mark not in known and mark.at > wall - MARK_SECONDS], ahead


class MarkFiles:
    """All of them say the same, unless one was away when the last mark was set."""

    def __init__(
        self, paths: Sequence[Path], wall_clock: Callable[[], float] = time.time, unusable: Sequence[str] = ()
    ) -> None:
        """`unusable` says of each disk that cannot be used why: the marks beside it are neither read nor written."""
        self._paths = tuple(paths)
        self._unusable = tuple(unusable)
        self._wall_clock = wall_clock
        self._keeping = asyncio.Lock()
        self._newest = NewestWrite(self.keep, "kvservice-keep-marks")

    def add(self, path: Path, unusable: str) -> None:
        """Keep them there too from the next time on. `unusable` is what was said of its disk, which answers now."""
        self._paths = (*dict.fromkeys((*self._paths, path)),)
        self._unusable = tuple(each for each in self._unusable if each != unusable)

    def load(self) -> tuple[Mark, ...]:
        """The marks of all files. One that is damaged, of another version, or cannot be read, counts as a clear of
        everything now: in doubt a miss."""
        found: list[Mark] = []
        for path in self._paths:
            marks, reason = None, "damaged, or of another version"
            try:
                with path.open("rb") as file:
                    marks = unpack_marks(file.read(FILE_BYTES_MAX))
            except FileNotFoundError:
                continue
            except OSError as error:
                reason = str(error)
            if marks is None:
                log.error("marks_damaged", extra={"path": str(path), "reason": reason})
                marks = (Mark(MarkKind.EVERYTHING, self._wall_clock()),)
            found += marks
        return tuple(found)

    async def keep_in_time(self, marks: Sequence[Mark]) -> None:
        """`keep`, on a thread, one after the other. Raises Unavailable also when it takes longer than KEEP_SECONDS."""
        async with self._keeping:
            try:
                await self._newest.write(tuple(marks), KEEP_SECONDS)
            except asyncio.TimeoutError:
                where = ", ".join(map(str, self._paths))
                text = f"the marks of what was cleared are not kept after {KEEP_SECONDS:.0f} s: {where}"
                raise Unavailable(text, transient=True) from None

    def keep(self, marks: Sequence[Mark]) -> None:
        """Write all files anew. Raises Unavailable when one cannot be written, or is beside a disk that cannot be used:
        a restart might forget the marks."""
        data = pack_marks(marks)
        problems = list(self._unusable)
        for path in self._paths:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_private(path, data)
            except OSError as error:  # the next file may outlive this one
                problems.append(f"{path}: {error}")
        if problems:
            text = f"the marks of what was cleared cannot be kept everywhere: {'; '.join(problems)}"
            raise Unavailable(text, transient=True)
