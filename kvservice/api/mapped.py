"""The pool's memory as one program maps it, for one attachment: checked writes, and windows for reading."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from kvservice.api.layout import Array, Layout
from kvservice.core.messages import Attachment
from kvservice.core.segment.digest import copy_and_digest, digest_payload
from kvservice.core.segment.header import has_digest
from kvservice.core.segment.header_checks import is_as_promised, is_reserved
from kvservice.core.segment.refs import BlockRef
from kvservice.memory.liveness import hold
from kvservice.memory.segment import ENGINE_AHEAD_BYTES, Segment
from kvservice.memory.window import ReadWindow
from kvservice.units import BlockKey, SlotIndex

Copy: TypeAlias = Callable[[Array], None]  # copies into or out of the array that a slot is, and keeps no view of it


class MappedPool:
    """Any thread may call. The lock of this process on the memory ends when the mapping is closed and nobody copies, so
    that the shard gives no slot away that is being written."""

    def __init__(
        self, attachment: Attachment, engine_id: bytes, layout: Layout, suspect: Callable[[Sequence[BlockRef]], None]
    ) -> None:
        """`suspect` is told of slots that do not hold what was promised; see Session.suspect. Blocks for a fifth of a
        second at most. Raises SegmentError, or Unavailable (try again)."""
        self.attachment = attachment
        self.suspect = suspect
        self._layout = layout
        self._segment = Segment.attach(Path(attachment.segment_path), attachment.geometry)
        try:
            self._held = hold(self._segment, engine_id, attachment.epoch)
        except BaseException:
            self._segment.close()
            raise
        self._segment.map_ahead(ENGINE_AHEAD_BYTES)
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False

    @property
    def is_used(self) -> bool:
        """Whether a thread writes into it or copies from it now."""
        return self._users > 0

    def write(self, refs: Sequence[BlockRef], blocks: Sequence[Array | Copy]) -> int:
        """Write `blocks[i]` into the reserved slot `refs[i]`. Returns how many were written: it stops at the first slot
        that is not this program's any more. Blocks until the bytes are copied."""
        with self._lock:
            if self._closed:
                return 0
            self._users += 1
        try:
            size, kind, shape = self._layout.block_bytes, self._layout.numpy_type, self._layout.shape
            for count, (ref, block) in enumerate(zip(refs, blocks, strict=True)):
                is_ours = self._segment.current_epoch() == self.attachment.epoch
                header = self._segment.header_bytes(ref.slot)
                if not is_ours or not is_reserved(header, self.attachment.epoch, ref, size):
                    return count
                target = np.frombuffer(self._segment.payload(ref.slot, size), kind).reshape(shape)
                if callable(block):
                    block(target)
                else:
                    np.copyto(target, block, casting="no")
            return len(refs)
        finally:
            self._used()

    def promised(self, refs: Sequence[BlockRef], keys: Sequence[BlockKey]) -> list[bytes]:
        """The headers of the leading slots that hold what was promised."""
        headers: list[bytes] = []
        with self._lock:
            if self._closed:
                return headers
            for ref, key in zip(refs, keys, strict=True):
                header = self._segment.header_bytes(ref.slot)
                if not is_as_promised(header, self.attachment.epoch, ref, key, self._layout.block_bytes):
                    self.suspect([ref])
                    break
                headers.append(header)
        return headers

    def read(self, ref: BlockRef, key: BlockKey, target: Array | Copy, *, check_digest: bool) -> bool:
        """Copy a promised block into `target`. False, and `target` holds nothing of use, if the slot is not or was not
        all the time what was promised. Blocks until the bytes are copied."""
        with self._lock:
            if self._closed:
                return False
            self._users += 1
        try:
            is_sound = self._read(ref, key, target, check_digest)
        finally:
            self._used()
        if not is_sound:
            self.suspect([ref])
        return is_sound

    def _read(self, ref: BlockRef, key: BlockKey, target: Array | Copy, check_digest: bool) -> bool:
        size = self._layout.block_bytes
        header = self._segment.header_bytes(ref.slot)
        if not is_as_promised(header, self.attachment.epoch, ref, key, size):
            return False
        payload = self._segment.payload(ref.slot, size)
        source = np.frombuffer(payload, self._layout.numpy_type).reshape(self._layout.shape)
        digest: int | None = None
        if callable(target):
            target(source)
        elif check_digest and _is_like(target, source):
            digest = copy_and_digest(target.data.cast("B"), payload, key)
        else:
            np.copyto(target, source, casting="no")
        if check_digest and digest is None:
            digest = digest_payload(payload, key)
        is_sound = digest is None or has_digest(header, digest)
        return is_sound and self._segment.header_bytes(ref.slot) == header

    def open_window(self, slots: Sequence[SlotIndex]) -> tuple[ReadWindow, HeaderWatch] | None:
        """The payloads of these slots, and their headers. None when the mapping is closed. Raises SegmentError."""
        with self._lock:  # a closed segment's descriptor may name another file
            if self._closed:
                return None
            return ReadWindow(self._segment, slots, self._layout.block_bytes), HeaderWatch(self._segment, slots)

    def close(self) -> None:
        """Unmap, at once or when the last copy has ended. Windows stay."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._let_go()

    def drop_lock(self) -> None:
        """In a forked child: the lock is the parent's."""
        self._held.release()

    def _used(self) -> None:
        with self._lock:
            self._users -= 1
            self._let_go()

    def _let_go(self) -> None:
        if self._closed and not self._users:
            self._segment.close()
            self._held.release()


def _is_like(target: Array, source: Array) -> bool:
    """Whether a copy is one run of bytes."""
    same = (target.dtype, target.shape) == (source.dtype, source.shape)
    return same and target.flags.c_contiguous and target.flags.writeable


class HeaderWatch:
    """Reads headers of a segment, also after it was closed elsewhere."""

    def __init__(self, segment: Segment, slots: Sequence[SlotIndex]) -> None:
        self._segment = segment
        self._slots = tuple(slots)
        self._kept = segment.buffer[:1]  # a view keeps the memory mapped: see Segment.close

    def first_changed(self, before: Sequence[bytes]) -> int | None:
        """The number of the first slot whose header is not as before; None when all are. `before` may end earlier."""
        for number, (slot, header) in enumerate(zip(self._slots, before, strict=False)):
            if self._segment.header_bytes(slot) != header:
                return number
        return None
