"""What the header of a block's file or object says about a read. One rule for every tier. Pure."""

from __future__ import annotations

from kvservice.core.events import BroughtBlock, PullResult
from kvservice.core.segment.blockfile import (
    BLOCKFILE_VERSION,
    BlockFileHeader,
    is_file_of,
    unpack_file_header,
    version_of,
)
from kvservice.core.tier.tier_block import TierBlock


def header_of(head: bytes | bytearray | memoryview, size: int, wanted: TierBlock) -> BlockFileHeader | PullResult:
    """The header, if these are the first 4,096 bytes of the block's file and `size` is the length that it says.

    STALE: a whole file of something else, also of another version. CORRUPT: no header at all, or not all of the file.
    """
    header = unpack_file_header(head)
    if header is None:
        return PullResult.CORRUPT if version_of(head) in (None, BLOCKFILE_VERSION) else PullResult.STALE
    if not is_file_of(header, wanted):
        return PullResult.STALE
    return header if header.file_bytes == size else PullResult.CORRUPT


def brought(result: PullResult, header: BlockFileHeader) -> BroughtBlock:
    """What is said of a block whose payload was read with this result."""
    if result is not PullResult.OK:
        return BroughtBlock(result)
    return BroughtBlock(result, header.block.digest, header.block.stored_at)
