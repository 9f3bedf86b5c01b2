"""Keeps what engines call their blocks in a file beside the pool's disk, so that a clear of one model or namespace does
not take the blocks of all others from the disk at the next start.

The format is in core.block.engine_names. `load` blocks, and for ever where a network mount is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from kvservice.core.block.engine_names import EngineNames, pack_names, unpack_names
from kvservice.pool.newest_write import NewestWrite
from kvservice.private_files import write_private

log = logging.getLogger("kvservice.pool")

FILE_BYTES_MAX = 4 << 20  # far more than the names of all engines take; a longer file is no file of names
KEEP_SECONDS = 3.0  # for the files to be written; then an engine is attached all the same, which waits for 10 s


class NameFiles:
    """What cannot be kept is not known after a restart: then a block goes with every clear."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._kept: EngineNames = {}
        self._has_failed = False  # at the last write
        self._newest = NewestWrite(self._write, "kvservice-keep-names")

    def add(self, path: Path) -> None:
        """Keep them there too from the next time on."""
        self._paths = (*dict.fromkeys((*self._paths, path)),)
        self._kept = {}

    def load(self) -> EngineNames:
        for path in self._paths:
            with contextlib.suppress(OSError), path.open("rb") as file:
                self._kept = unpack_names(file.read(FILE_BYTES_MAX))
        return self._kept

    async def keep(self, names: EngineNames) -> None:
        """Write the files anew, if that changes them. Returns when they are on the disk, or after KEEP_SECONDS."""
        if self._paths and names != self._kept:
            try:
                await self._newest.write(names, KEEP_SECONDS)
            except asyncio.TimeoutError:
                log.warning("engine_names_not_kept", extra={"error": f"the disk takes more than {KEEP_SECONDS:.0f} s"})

    async def keep_again(self, names: EngineNames) -> None:
        """`keep`, if the last write has failed. A disk that hangs is not asked again: its write goes on."""
        if self._has_failed:
            await self.keep(names)

    def _write(self, names: EngineNames) -> None:
        kept, had_failed, self._has_failed = names, self._has_failed, False
        for path in self._paths:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_private(path, pack_names(names))
            except OSError as error:
                # Some of a block's names are worse than none: a clear by another name would not reach it.
                if not had_failed:
                    log.warning("engine_names_not_kept", extra={"path": str(path), "error": str(error)})
                self._has_failed = True
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                kept = {}
        self._kept = kept
