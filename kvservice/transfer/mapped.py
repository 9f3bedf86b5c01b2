"""Reads a peer of the same machine without a transport: maps the peer's segment, and copies and digests in one pass.

Who may do that is decided by the kernel. The segment is a file that only its user opens (mode 0600), so the peer knows
its reader; the reader opens the inode that the peer named in the handshake, and takes it only if it belongs to its own
user and shows the boot epoch that was asked for. It is mapped read-only. What is read is trusted as over a network: the
digests of the bytes that arrived, and the slots' headers, with generation and epoch, after the last of them.

A segment that is cut short under the mapping would be SIGBUS. The copies of the C module end with an error instead;
without it nothing is mapped, and the bytes are read from the file, whose end is only a short read. Nothing else here
touches the mapping.
"""

from __future__ import annotations

import functools
import mmap
import os
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvservice.core.segment.copy_runs import Offsets, merge_runs
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import HEADER_BYTES
from kvservice.core.segment.native import Words
from kvservice.errors import TransferError
from kvservice.memory.runs import copy_blocks, copy_runs, in_one_pass
from kvservice.memory.segment import Segment, epoch_of, not_ours
from kvservice.units import BlockKey, BootEpoch

NAME = "shm"  # of this way, in handshakes and metrics
DESCRIPTION_MAGIC = b"KVSSHM02"
PATH_BYTES_MAX = 4096  # PATH_MAX of Linux; a longer description is refused
_DESCRIPTION = struct.Struct("<8s36sQQQ")  # magic, boot id of the machine, device, inode, segment bytes; then the path
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def boot_id() -> bytes:
    """What tells this boot of this machine from any other, in 36 characters. Raises TransferError without /proc."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError as error:
        raise TransferError(f"the machine does not say which it is: {error}") from error


def describe(segment: Segment) -> bytes:
    """What a peer of this machine needs to map the segment."""
    status = os.fstat(segment.descriptor)
    return pack_description(boot_id(), status.st_dev, status.st_ino, segment.geometry.segment_bytes, segment.path)


def pack_description(machine: bytes, device: int, inode: int, segment_bytes: int, path: Path) -> bytes:
    """A description: 8 bytes of magic, the 36 of the boot id, three little-endian u64, then the path."""
    return _DESCRIPTION.pack(DESCRIPTION_MAGIC, machine, device, inode, segment_bytes) + os.fsencode(path)


def is_here(description: bytes) -> bool:
    """Whether the peer says that it runs on this machine. Another mount namespace or user may still hide its file."""
    if not _DESCRIPTION.size < len(description) <= _DESCRIPTION.size + PATH_BYTES_MAX:
        raise TransferError(f"a description of a segment in {len(description)} bytes is not valid")
    magic, machine = _DESCRIPTION.unpack_from(description)[:2]
    if magic != DESCRIPTION_MAGIC:
        raise TransferError("this is not a description of a segment of this version")
    return bool(machine == boot_id())


class MappedPeer:
    """The segment of a peer of this machine. Threads may copy from it side by side."""

    def __init__(self, description: bytes, epoch: BootEpoch) -> None:
        """Raises TransferError when there is no such segment of this user and this boot of the peer."""
        if not is_here(description):
            raise TransferError("the peer runs on another machine")
        _, _, device, inode, self._length = _DESCRIPTION.unpack_from(description)
        path = Path(os.fsdecode(description[_DESCRIPTION.size :]))
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise TransferError(f"cannot open the peer's segment {path}: {error}") from error
        self._map: mmap.mmap | None = None
        self._is_closed = False
        try:
            # The peer chose the file: it could be a pipe, a secret of ours, or a file that another user cuts short.
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise TransferError(f"{path} is not a segment of this user")
            if (status.st_dev, status.st_ino) != (device, inode) or status.st_size < self._length:
                raise TransferError(f"{path} is not the peer's segment any more")
            found = epoch_of(self._descriptor)
            if found is None:
                raise TransferError(not_ours(self._descriptor, path).message)
            if found != epoch:
                raise TransferError(f"{path} is a segment of boot {found}, not of boot {epoch} of the peer")
            if in_one_pass():
                self._map = mmap.mmap(self._descriptor, self._length, prot=mmap.PROT_READ)
                self._map.madvise(mmap.MADV_DONTDUMP)
                self._address = np.frombuffer(self._map, np.uint8).ctypes.data
        except (OSError, ValueError) as error:
            os.close(self._descriptor)
            raise TransferError(f"cannot map the peer's segment {path}: {error}") from error
        except BaseException:
            os.close(self._descriptor)
            raise

    def is_named(self) -> bool:
        """Whether the segment still has its name. Without it, it is only kept in memory by those who map it."""
        return os.fstat(self._descriptor).st_nlink > 0

    def read_blocks(
        self, remote: Offsets, target: Segment, local: Offsets, length: int, keys: Sequence[BlockKey]
    ) -> Words:
        """Copy `length` bytes from each offset in the peer's segment to the one at the same index in ours.

        Returns the digests of what arrived, under `keys`. Blocks until all is copied; other threads run meanwhile.
        Raises TransferError for offsets outside of a segment, and when the peer's memory is gone; our slots then hold
        nothing of use.
        """
        self._check(remote, length)
        if not _are_inside(local, length, target.geometry.segment_bytes):
            raise TransferError("a run lies outside of our own segment")
        if self._map is None:
            return self._read_from_file(remote, target, local, length, keys)
        lengths = np.full(len(remote), length, np.int64)
        try:
            return copy_blocks(
                target.address, self._address, local, remote, lengths, np.arange(1, len(remote) + 1), keys
            )
        except OSError as error:
            raise TransferError("the peer's segment was cut short") from error

    def read_headers(self, offsets: Offsets) -> bytes:
        """The slot headers at these offsets, one behind the other. Raises TransferError as `read_blocks` does."""
        self._check(offsets, HEADER_BYTES)
        into = np.zeros(len(offsets) * HEADER_BYTES, np.uint8)
        if self._map is None:
            for number, offset in enumerate(offsets.tolist()):
                self._read_at(offset, into.data[number * HEADER_BYTES : (number + 1) * HEADER_BYTES])
            return into.tobytes()
        places = np.arange(len(offsets)) * HEADER_BYTES
        runs = merge_runs(offsets, places, np.full(len(offsets), HEADER_BYTES, np.int64))
        try:
            copy_runs(into.ctypes.data, self._address, runs.segment, runs.engine, runs.lengths)
        except OSError as error:
            raise TransferError("the peer's segment was cut short") from error
        return into.tobytes()

    def close(self) -> None:
        """Unmap. Nobody may be copying; whoever tries later gets a TransferError. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        os.close(self._descriptor)
        if self._map is not None:
            self._map.close()

    def _check(self, offsets: Offsets, length: int) -> None:
        if self._is_closed:
            raise TransferError("the peer is not mapped any more")
        if not _are_inside(offsets, length, self._length):
            raise TransferError(f"a run lies outside of the peer's {self._length} bytes")

    def _read_from_file(
        self, remote: Offsets, target: Segment, local: Offsets, length: int, keys: Sequence[BlockKey]
    ) -> Words:
        digests = np.zeros(len(keys), np.uint64)
        for number, (there, here) in enumerate(zip(remote.tolist(), local.tolist(), strict=True)):
            payload = target.buffer[here : here + length]
            self._read_at(there, payload)
            digests[number] = digest_payload(payload, keys[number])
        return digests

    def _read_at(self, offset: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            count = os.preadv(self._descriptor, [into[done:]], offset + done)
            if not count:
                raise TransferError("the peer's segment was cut short")
            done += count


def _are_inside(offsets: Offsets, length: int, size: int) -> bool:
    return length > 0 and len(offsets) > 0 and int(offsets.min()) >= 0 and int(offsets.max()) <= size - length
