"""Reaches peers on the same machine without NIXL: maps the peer's segment file and copies. For laptops and for tests.

Copies happen in `poll`, a bounded piece at a time, so that the owner thread stays responsive. One thread owns an
instance. The peer's file is mapped read-only, so this side cannot damage it.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvservice.errors import TransferError
from kvservice.memory.segment import SEGMENT_MAGIC, Segment
from kvservice.transfer.base import Completion, Copy, PeerHandle, TransferId, TransferOutcome

DESCRIPTION_MAGIC = b"KVSSHM01"
PIECE_BYTES = 32 << 20  # copied by one poll: a few milliseconds
PATH_BYTES_MAX = 4096  # PATH_MAX of Linux; a longer description is refused
_DESCRIPTION = struct.Struct("<8sQQ")  # magic, inode, segment bytes; then the path


class SharedMemoryTransport:
    """Satisfies transfer.base.Transport."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._peers: dict[PeerHandle, mmap.mmap] = {}
        self._views: dict[PeerHandle, memoryview] = {}
        self._queue: deque[tuple[TransferId, PeerHandle, deque[Copy]]] = deque()
        self._finished: list[Completion] = []
        self._next_id = 1

    @property
    def name(self) -> str:
        return "shm"

    def describe(self) -> bytes:
        inode = self._segment.path.stat().st_ino
        return _DESCRIPTION.pack(DESCRIPTION_MAGIC, inode, self._segment.geometry.segment_bytes) + os.fsencode(
            self._segment.path
        )

    def connect(self, description: bytes) -> PeerHandle:
        if not _DESCRIPTION.size < len(description) <= _DESCRIPTION.size + PATH_BYTES_MAX:
            raise TransferError(f"a peer description of {len(description)} bytes is not valid")
        magic, inode, length = _DESCRIPTION.unpack_from(description)
        if magic != DESCRIPTION_MAGIC:
            raise TransferError("this is not a shared-memory peer description of this version")
        path = Path(os.fsdecode(description[_DESCRIPTION.size :]))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise TransferError(
                f"cannot map the peer's segment {path}: {error}. The shm transport reaches peers of this machine "
                "only: use transport 'nixl' across machines"
            ) from error
        try:
            status = os.fstat(descriptor)
            if status.st_ino != inode or status.st_size < length:
                raise TransferError(f"{path} is not the peer's segment any more")
            # The peer chose the file: it could be a pipe, a secret of ours, or a file that another user truncates.
            plain = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not plain or os.pread(descriptor, len(SEGMENT_MAGIC), 0) != SEGMENT_MAGIC:
                raise TransferError(f"{path} is not a segment of this user")
            mapped = mmap.mmap(descriptor, length, prot=mmap.PROT_READ)
            mapped.madvise(mmap.MADV_DONTDUMP)
        finally:
            os.close(descriptor)
        handle = PeerHandle(self._next_id)
        self._next_id += 1
        self._peers[handle] = mapped
        self._views[handle] = memoryview(mapped)
        return handle

    def post_read(self, peer: PeerHandle, copies: Sequence[Copy]) -> TransferId:
        view = self._views.get(peer)
        if view is None:
            raise TransferError("the peer is not connected")
        own = self._segment.geometry.segment_bytes
        if not copies or not all(copy.fits(len(view), own) for copy in copies):
            raise TransferError(f"a run lies outside of the peer's {len(view)} or our own {own} bytes")
        transfer = TransferId(self._next_id)
        self._next_id += 1
        self._queue.append((transfer, peer, deque(copies)))
        return transfer

    def poll(self) -> list[Completion]:
        budget = PIECE_BYTES
        while self._queue and budget > 0:
            transfer, peer, copies = self._queue[0]
            view = self._views[peer]
            while copies and budget > 0:
                copy = copies.popleft()
                with (
                    self._segment.buffer[copy.local_offset : copy.local_offset + copy.length] as target,
                    view[copy.remote_offset : copy.remote_offset + copy.length] as source,
                ):
                    # numpy lets other threads run meanwhile; a slice assignment does not.
                    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
                budget -= copy.length
            if not copies:
                self._queue.popleft()
                self._finished.append(Completion(transfer, TransferOutcome.DONE))
        finished, self._finished = self._finished, []
        return finished

    def disconnect(self, peer: PeerHandle) -> None:
        if peer not in self._peers:
            return
        kept: deque[tuple[TransferId, PeerHandle, deque[Copy]]] = deque()
        for entry in self._queue:
            if entry[1] == peer:
                self._finished.append(Completion(entry[0], TransferOutcome.FAILED, "the peer was disconnected"))
            else:
                kept.append(entry)
        self._queue = kept
        self._views.pop(peer).release()
        self._peers.pop(peer).close()

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
