"""What is in the folder of a disk tier: the log of its index, held against the files that are there."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvservice.core.block.marks import MARK_SECONDS
from kvservice.core.segment.blockfile import BLOCKFILE_VERSION, unpack_file_header, version_of
from kvservice.core.tier.tier_block import TierBlock
from kvservice.tier.block_files import TierFolder, name_of
from kvservice.tier.index import INDEX_NAME, INDEX_VERSION, read_index
from kvservice.units import BlockKey

log = logging.getLogger("kvservice.tier")

SCAN_THREADS = 2  # read headers that the index does not name; more would take the disk from whoever starts beside us


@dataclass(slots=True)
class FoundBlocks:
    blocks: list[TierBlock] = field(default_factory=list)
    missing: int = 0  # rows of the index without a file
    scanned: int = 0  # files that the index does not name, whose headers were read
    removed: int = 0  # files that are no block, damaged or of another version, and blocks that may have been cleared
    versions: set[int] = field(default_factory=set)  # other ones that were met


def find_blocks(folder: TierFolder) -> FoundBlocks:
    """The blocks of this folder, by the index or by their headers. Their bytes are verified when they are read.

    Blocks for a listing of 256 folders, and for a read of 4 KiB for each file that the index does not name. Files that
    are no block are removed, and blocks that may be of before a clear that nobody remembers. Raises OSError.
    """
    index = read_index(folder.descriptor)
    if index.version not in (None, INDEX_VERSION):
        log.warning("tier_index_of_another_version", extra={"version": index.version, "known": INDEX_VERSION})
    found, unnamed = FoundBlocks(), list[BlockKey]()
    for key in folder.listed():
        block = index.blocks.pop(key, None)
        if block is None:
            unnamed.append(key)
        else:
            found.blocks.append(block)
    found.missing = len(index.blocks)
    found.scanned = len(unnamed)
    pieces = [unnamed[start::SCAN_THREADS] for start in range(SCAN_THREADS)]
    with ThreadPoolExecutor(SCAN_THREADS, "kvservice-disk-scan") as threads:
        for part in threads.map(lambda piece: _read_headers(folder, piece), pieces):
            found.blocks += part.blocks
            found.removed += part.removed
            found.versions |= part.versions
    if found.versions:
        log.warning("block_files_of_another_version", extra={"versions": sorted(found.versions), "removed": True})
    _remove_forgotten(folder, found)
    found.blocks.sort(key=lambda block: -block.position)  # the first are the oldest: ends of prompts are to go first
    return found


def _remove_forgotten(folder: TierFolder, found: FoundBlocks) -> None:
    """While nobody used the folder its blocks may have been cleared, and after MARK_SECONDS no mark says so. A block
    whose time is known is left to the core; of others the file's time counts."""
    limit = time.time() - MARK_SECONDS
    if folder.changed_at(INDEX_NAME) > limit:
        return
    kept: list[TierBlock] = []
    for block in found.blocks:
        if block.stored_at or folder.changed_at(name_of(block.key)) > limit:
            kept.append(block)
        else:
            found.removed += folder.remove(block.key)
    found.blocks = kept


def _read_headers(folder: TierFolder, keys: Sequence[BlockKey]) -> FoundBlocks:
    found = FoundBlocks()
    for key in keys:
        try:
            data, size = folder.first_bytes(key)
        except OSError:  # a link, or the device's error: it is left for whoever reads it
            continue
        header = unpack_file_header(data)
        if header is not None and header.block.key == key and header.file_bytes == size:
            found.blocks.append(header.listed)
            continue
        version = version_of(data)
        if version not in (None, BLOCKFILE_VERSION):
            found.versions.add(version)
        found.removed += folder.remove(key)
    return found
