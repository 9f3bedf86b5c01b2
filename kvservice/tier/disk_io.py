"""Which way block files are read and written, by the setting `disk_io` and one write, read and compare at the start."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice

from kvservice.codec.coder import Coder
from kvservice.core.events import PullResult
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import PAGE_BYTES
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import TierError, TransferError
from kvservice.tier.base import WriteResult
from kvservice.tier.block_files import BlockFiles, TierFolder
from kvservice.tier.file_io import FileIO, VectoredIO, aligned_memory
from kvservice.tier.mounts import FileAccess, decide_access, mounts_here
from kvservice.tier.nixl_io import NixlIO
from kvservice.units import BlockKey, SpanRoute

log = logging.getLogger("kvservice.tier")

PROOF_BYTES = 16 * PAGE_BYTES + 1  # of the block that proves a way: whole pages, and an end that is none
SACRIFICED_MAX = 4  # blocks that go to make room for the proof; a file system that needs more is not ours to fill
PROOF_KEY = BlockKey(b"kvservice/proof\0")  # no block of an engine has it: keys are hashes


class DiskIO(Enum):
    """How block files are read and written."""

    AUTO = "auto"  # directly where the file system's table says so
    DIRECT = "direct"  # O_DIRECT whatever the table says
    BUFFERED = "buffered"  # through the page cache
    NIXL_POSIX = "nixl-posix"  # NIXL's POSIX plug-in
    GDS = "gds"  # NIXL's GDS plug-in: cuFile, where driver and file system have it


_PLUGINS = {DiskIO.NIXL_POSIX: "POSIX", DiskIO.GDS: "GDS"}
_FORCED = {DiskIO.DIRECT: True, DiskIO.BUFFERED: False}


@dataclass(frozen=True, slots=True)
class FileWay:
    """A way that was proven to keep bytes."""

    name: DiskIO  # never AUTO
    access: FileAccess
    make: Callable[[], FileIO]  # one for each thread
    refused: tuple[str, ...] = ()  # the ways that were tried before and why they failed


def choose_way(folder: TierFolder, wanted: DiskIO) -> FileWay:
    """The first way that keeps bytes in this folder.

    What was asked for comes first. Then direct access follows where the table allows it, then the page cache. Blocks
    for some writes and reads. Raises TierError when the folder keeps no bytes, or direct access was demanded in vain.
    Its attribute `transient` says that the disk was full.
    """
    refused: list[str] = []
    is_full = False
    for way in _ways(folder, wanted):
        problem, result = _try(folder, way)
        if not problem:
            return replace(way, refused=tuple(refused))
        is_full = is_full or result is WriteResult.FULL
        refused.append(f"{way.name.value}: {problem}")
        log.warning("disk_io_refused", extra={"disk_io": way.name.value, "reason": problem, "path": str(folder.path)})
        if wanted is DiskIO.DIRECT:
            break
    raise TierError(
        f"{folder.path} does not keep what is written there ({'; '.join(refused)}): set disk_path to a folder on "
        "another file system, or disk_io to auto",
        path=folder.path,
        transient=is_full,
    )


def _ways(folder: TierFolder, wanted: DiskIO) -> Iterator[FileWay]:
    access = decide_access(folder.path.resolve(), mounts_here(), direct=_FORCED.get(wanted))
    plugin = _PLUGINS.get(wanted)
    if plugin is not None:
        yield FileWay(wanted, access, lambda: NixlIO(plugin))
    if access.direct:
        yield FileWay(DiskIO.DIRECT, access, VectoredIO)
    if not access.direct or _FORCED.get(wanted) is None:
        yield FileWay(DiskIO.BUFFERED, replace(access, direct=False), VectoredIO)


def _try(folder: TierFolder, way: FileWay) -> tuple[str, WriteResult]:
    """Why a block that is written this way does not come back, "" when it does; and what became of the write."""
    written, found = aligned_memory(PROOF_BYTES)[:PROOF_BYTES], aligned_memory(PROOF_BYTES)[:PROOF_BYTES]
    written[:] = os.urandom(PROOF_BYTES)
    block = TierBlock(PROOF_KEY, PROOF_BYTES, digest_payload(written, PROOF_KEY), 0, SpanRoute(0))
    try:
        io = way.make()
    except TransferError as error:
        return error.message, WriteResult.FAILED
    files = BlockFiles(folder, io, Coder(), direct=way.access.direct)
    try:
        result, _ = files.write(block, written)
        for key in islice(folder.listed(), SACRIFICED_MAX if result is WriteResult.FULL else 0):
            folder.remove(key)  # blocks on a full disk are worth more than the few that make room for the proof
            result, _ = files.write(block, written)
        if result is not WriteResult.OK:
            return f"writing a block: {files.problem or result.value}", result
        result_read = files.read(block, found).result
        if result_read is not PullResult.OK or found != written:
            return f"reading the block back: {files.problem or result_read.value}", result
        return "", result
    finally:
        folder.remove(PROOF_KEY)
        files.close()
