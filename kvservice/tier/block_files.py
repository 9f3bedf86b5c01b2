"""One folder of block files: write, read and remove one block, and find those that are there.

    FOLDER/ab/abcd….safetensors     a block (core.segment.blockfile) under its key, in one of 256 folders
    FOLDER/new/…                    a block while it is written; then it is renamed, so no file is ever half a block
    FOLDER/index, FOLDER/lock       tier.index, and the lock of the process that owns the folder

All of it belongs to one user and nobody else can read it. Everything goes through a descriptor of the folder, so that
whoever renames a folder above it changes nothing. Nothing is synced: after a loss of power files may be torn, which
their headers and digests show. Any thread may call; every method blocks for the file system.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from kvservice.codec.base import EXTRA_BYTES_MAX
from kvservice.codec.coder import Coder
from kvservice.core.block.engine_names import NAMES_SUFFIX
from kvservice.core.events import BroughtBlock, PullResult
from kvservice.core.segment.blockfile import (
    FILE_HEADER_BYTES,
    BlockFileHeader,
    pack_file_header,
)
from kvservice.core.segment.digest import digest_payload
from kvservice.core.segment.geometry import PAGE_BYTES
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import TierError
from kvservice.observe.failpoints import failpoint
from kvservice.private_files import user_name
from kvservice.tier.base import WriteResult
from kvservice.tier.file_io import FileIO, aligned_memory
from kvservice.tier.headers import brought, header_of
from kvservice.tier.index import INDEX_NAME
from kvservice.units import BlockKey

ENDING = ".safetensors"
LOCK_NAME, DRAFTS = "lock", "new"
FOLDERS = tuple(f"{number:02x}" for number in range(256))  # by the first byte of the key: some thousand files in each
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_PASSING = (*_NO_ROOM, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # may work later
_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def name_of(key: BlockKey) -> str:
    """Of a block's file, in the tier's folder."""
    text = key.hex()
    return f"{text[:2]}/{text}{ENDING}"


class TierFolder:
    """The folder of a disk tier, owned by this process from `__init__` to `close`."""

    def __init__(self, path: Path, *, make: bool = True) -> None:
        """Lock it. `make`: make it where it is missing, and remove what a process that was killed was writing.

        Raises TierError, and says what to do.
        """
        self.path = path
        self.descriptor = _open_folder(path, make=make)
        self._lock = -1
        self._making = threading.Lock()
        try:
            self._lock = _lock(self.descriptor, path, make=make)
            if make:
                self._make_folders()
            for name in self.names(DRAFTS) if make else ():
                os.unlink(f"{DRAFTS}/{name}", dir_fd=self.descriptor)
        except OSError as error:
            self.close()
            raise cannot_use(path, error) from error
        except BaseException:
            self.close()
            raise

    def make_again(self) -> None:
        """Make what somebody removed: folders, the lock, or the whole folder at its path. All keep their descriptors.

        Raises OSError, or TierError when another process owns the folder by now.
        """
        with self._making:
            if not os.fstat(self.descriptor).st_nlink:
                self._move_to(_open_folder(self.path, make=True))
            elif not os.fstat(self._lock).st_nlink:
                _put_in_place(_lock(self.descriptor, self.path, make=True), self._lock)
            self._make_folders()

    def _move_to(self, folder: int) -> None:
        """Go on in this folder once it is ours: others' threads use `descriptor` as soon as it means the new one."""
        try:
            lock = _lock(folder, self.path, make=True)
        except BaseException:
            os.close(folder)
            raise
        _put_in_place(lock, self._lock)
        _put_in_place(folder, self.descriptor)

    def _make_folders(self) -> None:
        for name in (*FOLDERS, DRAFTS):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.descriptor)

    def close(self) -> None:
        """Others may own the folder from now on."""
        os.close(self.descriptor)
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked child has it too, and may run on for long
            os.close(self._lock)

    def names(self, folder: str) -> list[str]:
        """The names in one of the folders below; none where it is missing."""
        try:
            descriptor = os.open(folder, _READ | os.O_DIRECTORY, dir_fd=self.descriptor)
        except FileNotFoundError:
            return []
        try:
            return os.listdir(descriptor)  # noqa: PTH208  a descriptor is no path
        finally:
            os.close(descriptor)

    def listed(self) -> Iterator[BlockKey]:
        """The keys of all block files, by their names."""
        for folder in FOLDERS:
            for name in self.names(folder):
                if _NAME.fullmatch(name) and name.startswith(folder):
                    yield BlockKey(bytes.fromhex(name.removesuffix(ENDING)))

    def first_bytes(self, key: BlockKey, count: int = FILE_HEADER_BYTES) -> tuple[bytes, int]:
        """The first bytes of a block's file, as many as it has, and its size. Raises OSError."""
        descriptor = os.open(name_of(key), _READ, dir_fd=self.descriptor)
        try:
            return os.pread(descriptor, count, 0), os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)

    def changed_at(self, name: str) -> float:
        """When the file of this name was last written, in seconds since 1970; 0.0: there is none. Raises OSError."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            return 0.0

    def has(self, key: BlockKey) -> bool:
        """Whether there is a file of this name, whatever is in it."""
        return os.access(name_of(key), os.F_OK, dir_fd=self.descriptor, follow_symlinks=False)

    def remove(self, key: BlockKey) -> bool:
        """Whether there was a file to remove. Raises OSError."""
        try:
            os.unlink(name_of(key), dir_fd=self.descriptor)
        except FileNotFoundError:
            return False
        return True


_WHAT_TO_DO = "set disk_path to a folder of this user on a disk with room, or to nothing to go without this tier"


def cannot_use(path: Path, error: OSError) -> TierError:
    """The error for people. Its attribute `transient` says whether the same may work later."""
    return TierError(
        f"the disk tier cannot use {path}: {error.strerror}: {_WHAT_TO_DO}",
        path=path,
        transient=error.errno in _PASSING,
    )


def _open_folder(path: Path, *, make: bool) -> int:
    try:
        if make:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise cannot_use(path, error) from error
    owner = os.fstat(descriptor).st_uid
    try:
        if owner != os.geteuid():
            raise TierError(f"{path} belongs to {user_name(owner)}: {_WHAT_TO_DO}", path=path)
        if make:
            os.fchmod(descriptor, 0o700)
    except OSError as error:
        os.close(descriptor)
        raise cannot_use(path, error) from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(folder: int, path: Path, *, make: bool) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if make else 0)
    try:
        descriptor = os.open(LOCK_NAME, flags, 0o600, dir_fd=folder)
    except FileNotFoundError as error:
        raise TierError(f"{path} has no blocks of a disk tier: name disk_path/SERVICE/NODE", path=path) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except BlockingIOError as error:
        owner = os.pread(descriptor, 20, 0).decode(errors="replace")
        os.close(descriptor)
        whose = f"another process ({owner if owner.isdigit() else 'unknown'})"
        raise TierError(
            f"{'another pool of this process' if owner == str(os.getpid()) else whose} uses the blocks in {path}: stop "
            "it, or give each node a disk_path of its own",
            path=path,
            transient=True,  # it may be the process before this one, which still ends
        ) from error
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _put_in_place(fresh: int, old: int) -> None:
    """Let the number `old` mean what `fresh` does: threads that use it go on with the new one."""
    try:
        os.dup2(fresh, old, inheritable=False)
    finally:
        os.close(fresh)


def remove_blocks(path: Path) -> int:
    """Remove all that a disk tier left in this folder, whose blocks they were, and the folder if nothing else is in
    it. Returns how many blocks there were; 0 where there is no such folder. Blocks. Raises TierError when a process
    uses it."""
    if not (path / LOCK_NAME).exists():
        return 0
    folder = TierFolder(path)
    try:
        count = sum(folder.remove(key) for key in list(folder.listed()))
        for name in (LOCK_NAME, INDEX_NAME):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder.descriptor)
        for name in (*FOLDERS, DRAFTS):
            with contextlib.suppress(OSError):  # files of others are in it
                os.rmdir(name, dir_fd=folder.descriptor)
    except OSError as error:
        raise TierError(f"the blocks in {path} cannot be removed: {error.strerror}", path=path) from error
    finally:
        folder.close()
    with contextlib.suppress(OSError):
        path.with_name(path.name + NAMES_SUFFIX).unlink(missing_ok=True)
        path.rmdir()
    return count


class BlockFiles:
    """Writes and reads the files of a folder, for one thread: it has memory for headers, and a FileIO."""

    def __init__(self, folder: TierFolder, io: FileIO, coder: Coder, *, direct: bool) -> None:
        self._folder = folder
        self._io = io
        self._coder = coder
        self._flags = os.O_DIRECT if direct else 0
        self._scratch = aligned_memory(2 * PAGE_BYTES)
        self._header, self._tail = self._scratch[:PAGE_BYTES], self._scratch[PAGE_BYTES:]
        self.problem = ""  # why the last write or read failed, for people

    def close(self) -> None:
        self._io.close()

    def write(self, block: TierBlock, payload: memoryview) -> tuple[WriteResult, BlockFileHeader | None]:
        """The result, and the header of what was written. An older file of the block is replaced, and folders that
        somebody removed are made again."""
        encoded = self._coder.encode(block, payload)
        if encoded is None:
            self.problem = "its codec failed"
            return WriteResult.FAILED, None
        parts = self._parts(encoded.header, memoryview(encoded.data).cast("B"), is_aligned=encoded.data is payload)
        draft = f"{DRAFTS}/{block.key.hex()}.{threading.get_native_id()}"
        try:
            try:
                self._write(draft, parts, encoded.header, name_of(block.key))
            except FileNotFoundError:
                self._folder.make_again()
                self._write(draft, parts, encoded.header, name_of(block.key))
        except (OSError, TierError) as error:
            with contextlib.suppress(OSError):
                os.unlink(draft, dir_fd=self._folder.descriptor)
            if isinstance(error, TierError):
                self.problem = error.message
                return WriteResult.FAILED, None
            self.problem = error.strerror or str(error)
            return (WriteResult.FULL if error.errno in _NO_ROOM else WriteResult.FAILED), None
        return WriteResult.OK, encoded.header

    def _write(self, draft: str, parts: list[memoryview], header: BlockFileHeader, name: str) -> None:
        """Write the draft and give it its name. Raises OSError."""
        place = self._folder.descriptor
        descriptor = os.open(draft, _WRITE | self._flags, 0o600, dir_fd=place)
        try:
            failpoint("tier.write")
            self._io.write(descriptor, parts)
            if sum(map(len, parts)) != header.file_bytes:
                os.ftruncate(descriptor, header.file_bytes)
        finally:
            os.close(descriptor)
        failpoint("tier.rename")
        os.rename(draft, name, src_dir_fd=place, dst_dir_fd=place)

    def _parts(self, header: BlockFileHeader, data: memoryview, *, is_aligned: bool) -> list[memoryview]:
        """The file's bytes in pieces that direct access takes; the last may be longer than the file is."""
        packed = pack_file_header(header)
        if not is_aligned:  # a codec's result lies anywhere
            room = aligned_memory(FILE_HEADER_BYTES + len(data))
            room[:FILE_HEADER_BYTES] = packed
            room[FILE_HEADER_BYTES : FILE_HEADER_BYTES + len(data)] = data
            return [room]
        self._header[:] = packed
        pages = len(data) - len(data) % PAGE_BYTES
        parts = [self._header, data[:pages]] if pages else [self._header]
        if pages < len(data):
            self._tail[: len(data) - pages] = data[pages:]
            parts.append(self._tail)
        return parts

    def read(self, block: TierBlock, target: memoryview) -> BroughtBlock:
        """Read the block into `target`. Returns the result, and what its header says when it is OK.

        A file that is not this block's, or is damaged, is removed: it will never be right again.
        """
        place = self._folder.descriptor
        try:
            descriptor = os.open(name_of(block.key), _READ | self._flags, dir_fd=place)
        except FileNotFoundError:
            return BroughtBlock(PullResult.STALE)
        except OSError as error:
            if error.errno != errno.ELOOP:  # a link is not of ours
                self.problem = error.strerror or str(error)
                return BroughtBlock(PullResult.FAILED)
            found = BroughtBlock(PullResult.STALE)
        else:
            try:
                found = self._read(descriptor, block, target)
            except OSError as error:
                self.problem = error.strerror or str(error)
                return BroughtBlock(PullResult.FAILED)
            finally:
                os.close(descriptor)
        if found.result in (PullResult.STALE, PullResult.CORRUPT):
            with contextlib.suppress(OSError):
                self._folder.remove(block.key)
        return found

    def _read(self, descriptor: int, block: TierBlock, target: memoryview) -> BroughtBlock:
        size = os.fstat(descriptor).st_size
        if size == FILE_HEADER_BYTES + len(target):
            pages = len(target) - len(target) % PAGE_BYTES
            parts = [self._header, *([target[:pages]] if pages else []), *([self._tail] if pages < len(target) else [])]
            failpoint("tier.read")
            if self._fill(descriptor, parts) != size:
                return BroughtBlock(PullResult.FAILED)  # it is as long as it should be, and yet not all of it came
            header = header_of(self._header, size, block)
            if isinstance(header, PullResult):
                return BroughtBlock(header)
            if not header.codec:
                target[pages:] = self._tail[: len(target) - pages]
                if digest_payload(target, block.key) != header.block.digest:
                    return BroughtBlock(PullResult.CORRUPT)
                return brought(PullResult.OK, header)
        return self._read_encoded(descriptor, size, block, target)

    def _fill(self, descriptor: int, parts: list[memoryview]) -> int:
        """How many bytes came. Codecs that pay only for slow disks are told how fast it was."""
        started = time.monotonic()
        count = self._io.read(descriptor, parts)
        self._coder.tier_read(count, time.monotonic() - started)
        return count

    def _read_encoded(self, descriptor: int, size: int, block: TierBlock, target: memoryview) -> BroughtBlock:
        """A file of any size up to what a codec may make of the block."""
        if not FILE_HEADER_BYTES < size <= FILE_HEADER_BYTES + len(target) + EXTRA_BYTES_MAX:
            return BroughtBlock(PullResult.STALE)
        room = aligned_memory(size)
        if self._fill(descriptor, [room]) != size:
            return BroughtBlock(PullResult.FAILED)
        header = header_of(room[:FILE_HEADER_BYTES], size, block)
        if isinstance(header, PullResult):
            return BroughtBlock(header)
        return brought(self._coder.decode(header, room[FILE_HEADER_BYTES:size], target), header)
