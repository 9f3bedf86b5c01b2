"""The pool's memory as one program maps it, for one attachment: checked writes, and windows for reading."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvservice.api.layout import Array, Layout
from kvservice.core.messages import Attachment
from kvservice.core.segment.header_checks import is_as_promised, is_reserved
from kvservice.core.segment.refs import BlockRef
from kvservice.memory.liveness import hold
from kvservice.memory.segment import Segment
from kvservice.memory.window import ReadWindow
from kvservice.units import BlockKey, SlotIndex


class MappedPool:
    """Any thread may call. The lock of this process on the memory ends when the mapping is closed and nobody writes, so
    that the shard gives no slot away that is being written."""

    def __init__(self, attachment: Attachment, engine_id: bytes, layout: Layout) -> None:
        """Blocks for a fifth of a second at most. Raises SegmentError, or Unavailable (try again)."""
        self.attachment = attachment
        self._layout = layout
        self._segment = Segment.attach(Path(attachment.segment_path), attachment.geometry)
        try:
            self._held = hold(self._segment, engine_id, attachment.epoch)
        except BaseException:
            self._segment.close()
            raise
        self._lock = threading.Lock()
        self._writers = 0
        self._closed = False

    @property
    def is_written(self) -> bool:
        """Whether a thread writes into it now."""
        return self._writers > 0

    def write(self, refs: Sequence[BlockRef], blocks: Sequence[Array]) -> int:
        """Write `blocks[i]` into the reserved slot `refs[i]`. Returns how many were written: it stops at the first slot
        that is not this program's any more. Blocks until the bytes are copied."""
        with self._lock:
            if self._closed:
                return 0
            self._writers += 1
        try:
            size, kind, shape = self._layout.block_bytes, self._layout.numpy_type, self._layout.shape
            for count, (ref, block) in enumerate(zip(refs, blocks, strict=True)):
                is_ours = self._segment.current_epoch() == self.attachment.epoch
                header = self._segment.header_bytes(ref.slot)
                if not is_ours or not is_reserved(header, self.attachment.epoch, ref, size):
                    return count
                target = np.frombuffer(self._segment.payload(ref.slot, size), kind).reshape(shape)
                np.copyto(target, block, casting="no")
            return len(refs)
        finally:
            with self._lock:
                self._writers -= 1
                self._let_go()

    def promised(self, refs: Sequence[BlockRef], keys: Sequence[BlockKey]) -> list[bytes]:
        """The headers of the leading slots that hold what was promised."""
        headers: list[bytes] = []
        with self._lock:
            if self._closed:
                return headers
            for ref, key in zip(refs, keys, strict=True):
                header = self._segment.header_bytes(ref.slot)
                if not is_as_promised(header, self.attachment.epoch, ref, key, self._layout.block_bytes):
                    break
                headers.append(header)
        return headers

    def open_window(self, slots: Sequence[SlotIndex]) -> tuple[ReadWindow, HeaderWatch] | None:
        """The payloads of these slots, and their headers. None when the mapping is closed. Raises SegmentError."""
        with self._lock:  # a closed segment's descriptor may name another file
            if self._closed:
                return None
            return ReadWindow(self._segment, slots, self._layout.block_bytes), HeaderWatch(self._segment, slots)

    def close(self) -> None:
        """Unmap, at once or when the last write has ended. Windows stay."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._let_go()

    def drop_lock(self) -> None:
        """In a forked child: the lock is the parent's."""
        self._held.release()

    def _let_go(self) -> None:
        if self._closed and not self._writers:
            self._segment.close()
            self._held.release()


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
