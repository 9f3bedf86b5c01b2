"""Keeps the marks of a pool in small files: beside its memory, and beside its disk, because each may outlive the other.

The format is in core.block.marks. All methods block for a moment.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvservice.core.block.marks import Mark, MarkKind, pack_marks, unpack_marks
from kvservice.errors import ConfigError, Unavailable
from kvservice.pool.tier_specs import DISK, TierSpec
from kvservice.private_files import write_private

log = logging.getLogger("kvservice.pool")

BESIDE_SUFFIX = ".marks"  # of the file beside a disk's folder
FILE_BYTES_MAX = 4 << 20  # far more than all marks and their keys take; a longer file is no file of marks


def marks_beside(tiers: Sequence[TierSpec]) -> tuple[Path, ...]:
    """Where the marks lie that outlive the memory: beside the folders of disks."""
    return tuple(Path(tier.place + BESIDE_SUFFIX) for tier in tiers if tier.name == DISK)


class MarkFiles:
    """All of them say the same, unless one was away when the last mark was set."""

    def __init__(self, paths: Sequence[Path], wall_clock: Callable[[], float] = time.time) -> None:
        self._paths = tuple(paths)
        self._wall_clock = wall_clock

    def load(self) -> tuple[Mark, ...]:
        """The marks of all files. One that is damaged counts as a clear of everything now: in doubt a miss."""
        found: list[Mark] = []
        for path in self._paths:
            data = None
            with contextlib.suppress(FileNotFoundError):
                with path.open("rb") as file:
                    data = file.read(FILE_BYTES_MAX)
                marks = unpack_marks(data)
                if marks is None:
                    log.error("marks_damaged", extra={"path": str(path)})
                    marks = (Mark(MarkKind.EVERYTHING, self._wall_clock()),)
                found += marks
        return tuple(found)

    def keep(self, marks: Sequence[Mark]) -> None:
        """Write all files anew. Raises Unavailable when one cannot be written: a restart might forget the marks."""
        data = pack_marks(marks)
        for path in self._paths:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_private(path, data)
            except (OSError, ConfigError) as error:
                raise Unavailable(f"the marks of what was cleared cannot be kept in {path}: {error}") from error
