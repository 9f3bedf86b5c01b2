"""A shard's segment: one named file in shared memory with a control page and slabs (core.segment.geometry).

The shard creates it and locks it exclusively for its whole life; engines attach by path. The file outlives a killed
shard, so that the next boot can adopt its blocks. Control page, 72 bytes, little endian:

    0   8  magic "KVSSEG01"      8  8  slab bytes      16  8  slab count     24  8  boot epoch
    32 24  SHA-256 prefix of the node id                56  4  slot version   60  4  crc32 of bytes 0..59
    64  8  when the shard was last alive, a double of seconds since 1970; 0: not known

The slot version is that of the headers (core.segment.header). A segment with another version is replaced, never
adopted: headers that cannot be read would hide which engine still writes where.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import logging
import math
import mmap
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from kvservice.core.segment.geometry import CONTROL_BYTES, HEADER_BYTES, Geometry
from kvservice.core.segment.header import SLOT_VERSION
from kvservice.errors import KVServiceError, SegmentError, ServiceConflict, another_version
from kvservice.memory import room
from kvservice.memory.map_ahead import MapAhead
from kvservice.memory.slabs import Slabs
from kvservice.private_files import user_name
from kvservice.units import BootEpoch, GiB, SlotIndex, format_bytes

log = logging.getLogger("kvservice.memory")

SEGMENT_MAGIC = b"KVSSEG01"
PIECE_BYTES = GiB  # reserved at once: the kernel needs about a second, and then the log can say how far it is
TELL_SECONDS = 5.0  # between two lines about it: a pool of 64 GiB is reserved in about a minute
# That an engine maps ahead: more than it copies in its first minutes. Many engines share the memory of a large pool.
ENGINE_AHEAD_BYTES = 16 * GiB
_CONTROL = struct.Struct("<8sQQQ24sI")
_CRC = struct.Struct("<I")
_ALIVE = struct.Struct("<d")  # behind the header of the control page: it changes every few seconds
_OF_PROCESS = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
assert _CONTROL.size + _CRC.size == HEADER_BYTES <= CONTROL_BYTES - _ALIVE.size


class Segment(Slabs):
    """A mapping of one segment. Made by `create` (a shard), `nameless` (an embedded pool) or `attach` (engines)."""

    def __init__(self, path: Path, geometry: Geometry, descriptor: int) -> None:
        self.path = path
        self.existed = False  # True when create() found blocks of an earlier boot
        self.used_at = math.inf  # when the boot that left them was last alive, in seconds since 1970
        self._descriptor = descriptor
        try:
            mapping = mmap.mmap(descriptor, geometry.segment_bytes)
        except OSError as error:
            raise SegmentError(
                f"cannot map the {format_bytes(geometry.segment_bytes)} of the segment {path}: {error.strerror}; this "
                f"process may have no more of address space (ulimit -v), or {room.LOWER}",
                path=path,
            ) from error
        mapping.madvise(mmap.MADV_DONTDUMP)  # a core dump would contain prompts, and is stored elsewhere
        super().__init__(geometry, mapping)
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._anchor)
        self.epoch = BootEpoch(0)
        self._closed = False
        self._ahead: MapAhead | None = None

    # -- life ----

    @classmethod
    def create(
        cls,
        path: Path,
        geometry: Geometry,
        node_id: str,
        *,
        epoch_floor: int = 1,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> Segment:
        """Open this node's segment for adoption, or make a new one. The boot epoch grows in either case.

        All memory is reserved now, so that no later access can fail with SIGBUS. Blocks as long as the kernel needs for
        that, and asks now and then whether it `is_given_up`. Raises SegmentError then, when there is too little space
        (and says how to get more) or the file is not a regular file of this user, and ServiceConflict when another
        process owns it.
        """
        descriptor = open_locked(path)
        try:
            previous = _read_control(descriptor)
            known = previous is not None and previous[2] == _node_mark(node_id)
            reusable = known and previous is not None and previous[0] == geometry and _is_whole(descriptor, geometry)
            if not reusable and os.fstat(descriptor).st_size > 0:
                descriptor = replace_locked(descriptor, path)
            try:
                if not reusable:
                    _reserve(descriptor, path.parent, geometry.segment_bytes, is_given_up)
                segment = cls(path, geometry, descriptor)
            except SegmentError:
                if not reusable:
                    path.unlink(missing_ok=True)  # the file is new, and a failed start must leave nothing behind
                raise
        except BaseException:
            os.close(descriptor)
            raise
        segment.existed = reusable
        if reusable:
            segment.used_at = segment.last_alive()
        before = previous[1] if previous is not None and known else 0
        segment.epoch = BootEpoch(max(before + 1, epoch_floor))
        segment.write_control(node_id)
        return segment

    @classmethod
    def nameless(
        cls, directory: Path, geometry: Geometry, node_id: str, *, is_given_up: Callable[[], bool] = lambda: False
    ) -> Segment:
        """New memory without a name, in the file system of `directory`.

        The kernel frees it when no process maps it any more, however the processes end. Others attach by a path that
        leads through this process's descriptor, as the same user and in the same PID namespace. Reserves memory and
        raises as `create` does.
        """
        try:
            descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SegmentError(f"cannot make a file in {directory}: {error.strerror}", path=directory) from error
        try:
            _reserve(descriptor, directory, geometry.segment_bytes, is_given_up)
            segment = cls(Path(f"/proc/{os.getpid()}/fd/{descriptor}"), geometry, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        # Random, so that a process that finds other memory at this path cannot take it for ours.
        segment.epoch = BootEpoch(1 + int.from_bytes(os.urandom(6), "big"))
        segment.write_control(node_id)
        return segment

    @classmethod
    def attach(cls, path: Path, geometry: Geometry) -> Segment:
        """Map an existing segment for reading and writing.

        Raises SegmentError with the numbers when it is not what was promised, and VersionMismatch when its slot headers
        have another version.
        """
        descriptor = open_private(path, os.O_RDWR)
        try:
            found = _read_control(descriptor)
            if found is None:
                raise not_ours(descriptor, path)
            size = os.fstat(descriptor).st_size
            if found[0] != geometry or size < geometry.segment_bytes:
                raise SegmentError(
                    f"{path} holds {found[0].slab_count} slabs of {found[0].slab_bytes} bytes in {size}, expected "
                    f"{geometry.slab_count} of {geometry.slab_bytes} in {geometry.segment_bytes}",
                    size=size,
                    expected=geometry.segment_bytes,
                )
            segment = cls(path, geometry, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        segment.epoch = found[1]
        return segment

    def close(self) -> None:
        """Unmap. Idempotent. Views that callers still hold keep the memory mapped until they are dropped."""
        if self._closed:
            return
        self._closed = True
        if self._ahead is not None:
            self._ahead.stop()
        del self._anchor
        with contextlib.suppress(BufferError):  # a view is still in use: the memory is unmapped when that is dropped
            self.buffer.release()
            self._map.close()
        os.close(self._descriptor)

    def map_ahead(self, bytes_max: int | None = None) -> MapAhead:
        """Map the pages, the first slots first, on a thread that `close` ends. Without it the first touch maps each.

        With `bytes_max` only so many: tables of pages take 2 MiB for each GiB in every process.
        """
        if self._ahead is None:
            size = self.geometry.segment_bytes
            self._ahead = MapAhead(self.buffer, self.address, min(size, bytes_max or size))
        return self._ahead

    @property
    def descriptor(self) -> int:
        return self._descriptor

    def reopen(self) -> int:
        """A new open file description of the same inode, even after the file was removed. The caller closes it."""
        try:
            return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SegmentError(
                f"cannot open the segment {self.path} again: {error.strerror}", path=self.path
            ) from error

    def touch(self, wall: float) -> None:
        """Note in the memory that this boot is alive at this time, in seconds since 1970."""
        self.used_at = wall
        _ALIVE.pack_into(self.buffer, HEADER_BYTES, wall)

    def last_alive(self) -> float:
        """What `touch` noted last. If nothing is noted: when the file was last written, which an engine that outlived
        its shard can do, too."""
        noted: float = _ALIVE.unpack_from(self.buffer, HEADER_BYTES)[0]
        return noted if noted > 0 else os.fstat(self._descriptor).st_mtime

    def is_linked(self) -> bool:
        """Whether the path still names this memory; the file may have been removed or replaced."""
        try:
            named, mapped = self.path.stat(), os.fstat(self._descriptor)
        except OSError:
            return False
        return (named.st_dev, named.st_ino) == (mapped.st_dev, mapped.st_ino)

    def unlink(self) -> None:
        """Remove the file, if it has a name. Mappings of it stay valid. Idempotent."""
        if not self.path.is_relative_to("/proc"):  # the number there may be that of another file by now
            self.path.unlink(missing_ok=True)

    # -- contents ----

    def payload(self, slot: SlotIndex, payload_bytes: int) -> memoryview:
        """The slot's bytes, writable. Valid until `close`; the owner may reuse the slot at any time."""
        start = self.geometry.payload_offset(slot, payload_bytes)
        return self.buffer[start : start + payload_bytes]

    def current_epoch(self) -> BootEpoch:
        """The owner's present boot epoch. An engine whose attachment has another one must not write."""
        found = _parse_control(bytes(self.buffer[:HEADER_BYTES]))
        return BootEpoch(0) if found is None else found[1]

    def retire(self) -> None:
        """Mark the segment as nobody's. Processes that map it unmap it at their next step, and its memory is freed."""
        self.buffer[:HEADER_BYTES] = bytes(HEADER_BYTES)

    def write_control(self, node_id: str) -> None:
        body = _CONTROL.pack(
            SEGMENT_MAGIC,
            self.geometry.slab_bytes,
            self.geometry.slab_count,
            self.epoch,
            _node_mark(node_id),
            SLOT_VERSION,
        )
        self.buffer[:HEADER_BYTES] = body + _CRC.pack(zlib.crc32(body))


def segment_path(service: str, node_id: str, directory: Path = Path("/dev/shm")) -> Path:
    return directory / f"kvservice-{service}-{node_id}"


def remove_stale(directory: Path, prefix: str) -> list[Path]:
    """Remove the segments with this name prefix that no process owns any more. Returns their paths."""
    return [path for path in sorted(directory.glob(f"{prefix}*")) if remove_unowned(path)]


def remove_unowned(path: Path) -> bool:
    """Remove this segment unless a process owns it. Returns whether it was removed."""
    return _if_unowned(path, lambda: path.unlink(missing_ok=True)) is True


def is_owned(path: Path) -> bool:
    """Whether a process owns the segment at this path."""
    return _if_unowned(path, lambda: None) is False


def _if_unowned(path: Path, act: Callable[[], None]) -> bool | None:
    """Call `act` under the segment's lock, so that no process can become its owner in between. Returns whether it was
    called; None if there is no segment of this user."""
    try:
        descriptor = open_private(path, os.O_RDWR)
    except SegmentError:
        return None  # not ours to remove
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        act()
        return True
    finally:
        os.close(descriptor)


def is_segment_of(path: Path, node_id: str) -> bool:
    """Whether the file is the segment of the node with this id. Its name does not say: a service's name may have the
    character before the node's id too."""
    try:
        descriptor = open_private(path, os.O_RDONLY)
    except SegmentError:
        return False
    try:
        found = _read_control(descriptor)
    finally:
        os.close(descriptor)
    return found is not None and found[2] == _node_mark(node_id)


def open_private(path: Path, flags: int) -> int:
    """Open a regular file of this user. Anybody may make files beside it: one that is a pipe must not be waited for.

    Raises SegmentError.
    """
    of_process = _OF_PROCESS.fullmatch(str(path)) is not None  # the kernel's link to an open file, not a user's link
    try:
        flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if of_process else os.O_NOFOLLOW)
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if isinstance(error, PermissionError) and os.path.lexists(path):
            _check_owner(path, path.lstat())
        advice = (
            "; the workers of an engine with a pool of its own need its user and PID namespace" if of_process else ""
        )
        raise SegmentError(f"cannot open the segment {path}: {error.strerror}{advice}", path=path) from error
    except ValueError as error:  # a zero byte, or characters that a file name cannot have
        raise SegmentError(f"{str(path)!a} is not a valid path of a segment", path=ascii(str(path))) from error
    status = os.fstat(descriptor)
    try:
        _check_owner(path, status)
    except SegmentError:
        os.close(descriptor)
        raise
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise SegmentError(f"{path} is no file, as a segment is: remove it", path=path)
    return descriptor


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise SegmentError(
            f"the segment {path} belongs to {user_name(status.st_uid)}: choose another service name, or ask them to "
            "end their service and remove it",
            path=path,
        )


def open_locked(path: Path) -> int:
    """Open and lock the file at this path; again, if it was removed between opening and locking."""
    while True:
        descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            _lock(descriptor, path)
            if os.fstat(descriptor).st_nlink > 0:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def replace_locked(descriptor: int, path: Path) -> int:
    """Put an empty, locked file in place of the one that we own.

    Engines of an earlier boot may still map the old file. Truncating it would kill them with SIGBUS, and reusing it
    would let them write into blocks that are not theirs.
    """
    path.unlink(missing_ok=True)
    fresh = open_locked(path)
    os.close(descriptor)
    return fresh


def _is_whole(descriptor: int, geometry: Geometry) -> bool:
    """Whether the file has the right size and no holes, which would need memory later."""
    status = os.fstat(descriptor)
    return status.st_size == geometry.segment_bytes <= status.st_blocks * 512


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ServiceConflict(
            f"another process owns the segment {path}{_owner_hint(path)}: stop it, or choose another service name",
            path=path,
        ) from error


def _owner_hint(path: Path) -> str:
    """' (process 123)' if /proc/locks says so; for the error text only."""
    try:
        inode = str(path.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[5].endswith(":" + inode):
                return f" (process {words[4]})"
    except OSError:
        pass
    return ""


def _reserve(descriptor: int, directory: Path, size: int, is_given_up: Callable[[], bool]) -> None:
    """Reserve the memory with posix_fallocate. On tmpfs it takes the pages now; a later failure would be SIGBUS. Says
    in the log how far it is."""
    status = os.fstatvfs(descriptor)
    free = status.f_bavail * status.f_frsize
    problem: OSError | None = None
    if free >= size:
        try:
            told = time.monotonic()
            for start in range(0, size, PIECE_BYTES):
                if is_given_up():
                    raise SegmentError(f"given up with {format_bytes(start)} of {format_bytes(size)} reserved")
                piece, left = min(PIECE_BYTES, size - start), room.free_memory()
                if left < piece:  # the kernel would end processes for it, and this one first
                    raise SegmentError(
                        f"memory is short: {format_bytes(size)} needed, and after {format_bytes(start)} this machine "
                        f"or container has only {format_bytes(left)} left; end what takes its memory, or {room.LOWER}",
                        needed_bytes=size,
                        free_bytes=left,
                    )
                os.posix_fallocate(descriptor, start, piece)
                if time.monotonic() - told >= TELL_SECONDS:
                    told = time.monotonic()
                    done = format_bytes(min(start + PIECE_BYTES, size))
                    log.info("reserving_memory", extra={"reserved": done, "wanted": format_bytes(size)})
            return
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise SegmentError(f"cannot reserve {format_bytes(size)} in {directory}: {error.strerror}") from error
            problem = error
    raise SegmentError(
        f"{directory} is too small: {format_bytes(size)} needed, {format_bytes(free)} free; "
        + room.how_to_make_room(directory, size, status.f_blocks * status.f_frsize, free),
        needed_bytes=size,
        free_bytes=free,
    ) from problem


def _read_control(descriptor: int) -> tuple[Geometry, BootEpoch, bytes] | None:
    return _parse_control(os.pread(descriptor, HEADER_BYTES, 0))


def epoch_of(descriptor: int) -> BootEpoch | None:
    """The boot epoch that an open file shows as a segment; None if it is none. Reads the file, not a mapping of it."""
    found = _read_control(descriptor)
    return None if found is None else found[1]


def not_ours(descriptor: int, path: Path) -> KVServiceError:
    """The reason why a file whose control page cannot be read is not mapped."""
    data = os.pread(descriptor, HEADER_BYTES, 0)
    if len(data) == HEADER_BYTES and data.startswith(SEGMENT_MAGIC):
        version = _CONTROL.unpack_from(data)[-1]
        is_whole_page = _CRC.unpack_from(data, _CONTROL.size)[0] == zlib.crc32(data[: _CONTROL.size])
        if is_whole_page and version != SLOT_VERSION:
            return another_version(f"the segment {path}", version, SLOT_VERSION)
    return SegmentError(f"{path} is not a kvservice segment")


def _parse_control(data: bytes) -> tuple[Geometry, BootEpoch, bytes] | None:
    if len(data) < HEADER_BYTES or _CRC.unpack_from(data, _CONTROL.size)[0] != zlib.crc32(data[: _CONTROL.size]):
        return None
    magic, slab_bytes, slab_count, epoch, mark, version = _CONTROL.unpack_from(data)
    if magic != SEGMENT_MAGIC or version != SLOT_VERSION or slab_bytes == 0 or slab_count == 0:
        return None
    return Geometry(slab_bytes=slab_bytes, slab_count=slab_count), BootEpoch(epoch), mark


def _node_mark(node_id: str) -> bytes:
    return hashlib.sha256(node_id.encode()).digest()[:24]
