"""Holds the index of a disk tier's folder against its files, and each file against itself. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvservice.core.segment.blockfile import BLOCKFILE_VERSION, FILE_HEADER_BYTES, unpack_file, version_of
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import TierError
from kvservice.tier.block_files import DRAFTS, TierFolder
from kvservice.tier.index import INDEX_VERSION, ParsedIndex, read_index
from kvservice.units import BlockKey


@dataclass(slots=True)
class FolderCheck:
    """What was found. Lists have keys in hex digits."""

    path: str
    blocks: int = 0  # files that are whole
    bytes: int = 0  # of them
    encoded: int = 0  # of them, those that a codec stored: their digest is checked only when they are read
    missing: list[str] = field(default_factory=list)  # the index names them, and there is no file
    orphaned: list[str] = field(default_factory=list)  # whole files that the index does not name
    differing: list[str] = field(default_factory=list)  # whole files of which the index says something else
    damaged: list[str] = field(default_factory=list)  # files with a wrong header, length or digest
    other_versions: list[str] = field(default_factory=list)  # files of another version of the format
    unreadable: list[str] = field(default_factory=list)  # files that cannot be opened or read
    unfinished: int = 0  # files that were being written when their process was killed
    index: str = "whole"  # or what is wrong with it

    @property
    def is_sound(self) -> bool:
        wrong = (self.missing, self.orphaned, self.differing, self.damaged, self.other_versions, self.unreadable)
        return not any(wrong) and not self.unfinished and self.index == "whole"


def check_folder(path: Path, tell: Callable[[int, int], None] = lambda done, all: None) -> FolderCheck:
    """Read every file of the folder. `tell` hears how many are done, of how many. Blocks for as long as the disk needs.

    Raises TierError when there are no blocks, or a process uses them.
    """
    folder = TierFolder(path, make=False)
    try:
        index = read_index(folder.descriptor)
        found = FolderCheck(str(path), index=_index_state(index), unfinished=len(folder.names(DRAFTS)))
        keys = sorted(folder.listed())
        for done, key in enumerate(keys):
            tell(done, len(keys))
            _check_file(folder, key, index.blocks.pop(key, None), found)
        tell(len(keys), len(keys))
        found.missing = sorted(key.hex() for key in index.blocks)
        return found
    except OSError as error:
        raise TierError(f"{path} cannot be read: {error.strerror}", path=path) from error
    finally:
        folder.close()


def _index_state(index: ParsedIndex) -> str:
    if index.version is None:
        return "none"
    if index.version != INDEX_VERSION:
        return f"of version {index.version}; this is version {INDEX_VERSION}"
    return "whole" if index.is_whole else f"damaged after {index.rows} rows"


def _check_file(folder: TierFolder, key: BlockKey, row: TierBlock | None, found: FolderCheck) -> None:
    name = key.hex()
    try:
        _, size = folder.first_bytes(key, 0)
        data, _ = folder.first_bytes(key, size)
    except OSError:
        found.unreadable.append(name)
        return
    whole = unpack_file(data)
    version = version_of(data[:FILE_HEADER_BYTES])
    if whole is None or whole[0].block.key != key:
        (found.other_versions if version not in (None, BLOCKFILE_VERSION) else found.damaged).append(name)
        return
    header, _ = whole
    found.blocks += 1
    found.bytes += size
    found.encoded += bool(header.codec)
    if row is None:
        found.orphaned.append(name)
    elif replace(row, stored_at=0.0) != replace(header.listed, stored_at=0.0):
        found.differing.append(name)
