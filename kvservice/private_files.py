"""Files, directories and sockets that only this user can change, and the checks before others' files are trusted.

Whoever can rename one component of a path can replace the file at its end. So every component of a directory must
belong to this user or to root, and nobody else may be able to write it. Every function blocks for a few system calls,
on the calling thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import socket
import stat
import struct
from pathlib import Path
from typing import Protocol

from kvservice.errors import ConfigError

LINKS_MAX = 40  # the kernel's own limit for one path (MAXSYMLINKS). A path with more is refused, as in a loop of links.
SOCKET_PATH_BYTES_MAX = 107  # sun_path has 108 bytes, the last of which is zero. A longer path is refused.
ROOT_UID = 0  # root owns /, /run and /home, and can change any file anyway, so its directories are trusted
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
WHAT_TO_DO = "set KVSERVICE_RUNTIME_DIR to a directory of your own, below directories that only you and root can change"


def write_private(path: Path, data: bytes, mode: int = 0o600, owner: tuple[int, int] | None = None) -> None:
    """Replace a file atomically, so that no reader sees half of it and nobody without permission ever sees it.

    `owner`: its user and group, by default this process's. A symbolic link at `path` is replaced, not followed. Blocks
    until the bytes are on disk. Raises OSError.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if owner is not None:
                os.fchown(descriptor, *owner)
            os.fchmod(descriptor, mode)  # exact, whatever the umask is
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)  # for example when the disk is full
        raise
    _sync_names(path.parent)


def _sync_names(directory: Path) -> None:
    """Without this a file that was replaced may be the old one again after a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that sync no directories
            raise
    finally:
        os.close(descriptor)


def user_name(uid: int) -> str:
    """A user for messages, like 'uid 65534 (nobody)'."""
    try:
        return f"uid {uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return f"uid {uid}"


def make_directory(path: Path) -> None:
    """Make the directory at an absolute path, with missing parents, readable by its owner only.

    Raises ConfigError when another user could have put a directory there: see `check_directory`.
    """
    try:
        made = _walk(path, make=True)
        if made.lstat().st_uid != os.geteuid():
            raise ConfigError(f"{path} belongs to {user_name(made.lstat().st_uid)}: {WHAT_TO_DO}", key="runtime_dir")
        made.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"cannot make {path}: {error.strerror}: {WHAT_TO_DO}", key="runtime_dir") from error


def check_directory(path: Path) -> None:
    """Check that nobody but this user and root can rename, replace or write this directory.

    A directory that does not exist passes, because nothing is read from it. Raises ConfigError with the name of the
    user who could change it.
    """
    try:
        _walk(path, make=False)
    except (FileNotFoundError, PermissionError):  # a directory we may not look at is one we cannot read from
        return
    except OSError as error:
        raise ConfigError(f"cannot look at {path}: {error.strerror}: {WHAT_TO_DO}", key="runtime_dir") from error


def open_own(path: Path) -> int:
    """Open a file for reading, and check that only this user can have written it. Returns the descriptor.

    Raises ConfigError with the name of the owner, or OSError when the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise ConfigError(f"{path} was made by {user_name(status.st_uid)}: {WHAT_TO_DO}", key="runtime_dir")
        if status.st_mode & OTHERS_WRITE:
            raise ConfigError(f"others can write {path}: remove it, and start the service again", key="runtime_dir")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_socket_path(path: str) -> None:
    """Raises ConfigError for a path that is too long for a Unix socket."""
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"{path} has {length} bytes, and a Unix socket's path has at most {SOCKET_PATH_BYTES_MAX}: set "
            "KVSERVICE_RUNTIME_DIR to a short path, or use a shorter service or node name",
            key="runtime_dir",
        )


def is_listening(path: str) -> bool:
    """Whether a process listens on this Unix socket. Blocks for a second at most.

    Raises ConfigError with the name of the user when the process is another user's.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
            uid = peer_uid(probe)
        except (OSError, ValueError):  # ValueError: the text is not a path
            return False
    if uid != os.geteuid():
        raise ConfigError(f"a process of {user_name(uid)} listens at {path}: {WHAT_TO_DO}", key="runtime_dir")
    return True


class AnySocket(Protocol):
    """A socket, or what asyncio gives of one."""

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes: ...


def peer_credentials(connection: AnySocket) -> tuple[int, int]:
    """(process id, user) at the other end of a Unix socket, as the kernel knows them. On a socket we connected: of who
    called listen(). The id is 0 for a process in another pid namespace."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def peer_uid(connection: AnySocket) -> int:
    """The user of the process at the other end of a Unix socket."""
    return peer_credentials(connection)[1]


def _walk(path: Path, *, make: bool) -> Path:
    """Follow a path component by component, through symbolic links, and check each one. Returns the final path.

    Raises ConfigError for a component that fails the check, and OSError for one that does not exist.
    """
    if not path.is_absolute():
        raise ConfigError(f"{path} is not an absolute path: {WHAT_TO_DO}", key="runtime_dir")
    at, links = Path("/"), 0
    _check(at, at.lstat())
    pending = list(reversed(path.parts[1:]))
    while pending:
        name = pending.pop()
        if name == "..":
            at = at.parent
            continue
        step = at / name
        if make:
            with contextlib.suppress(FileExistsError):
                step.mkdir(0o700)
        status = step.lstat()
        if not stat.S_ISLNK(status.st_mode):
            _check(step, status)
            at = step
            continue
        links += 1
        if links > LINKS_MAX or status.st_uid not in (ROOT_UID, os.geteuid()):
            raise ConfigError(f"{step} is a link made by {user_name(status.st_uid)}: {WHAT_TO_DO}", key="runtime_dir")
        target = step.readlink()
        at = Path("/") if target.is_absolute() else at
        pending += reversed([part for part in target.parts if part != "/"])
    return at


def _check(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{path} is not a directory: {WHAT_TO_DO}", key="runtime_dir")
    if status.st_uid not in (ROOT_UID, os.geteuid()):
        raise ConfigError(
            f"{path} belongs to {user_name(status.st_uid)}, who could take the service's place there: {WHAT_TO_DO}",
            key="runtime_dir",
        )
    # In a sticky directory other users can create entries, but cannot rename or remove ours.
    if status.st_mode & OTHERS_WRITE and not status.st_mode & stat.S_ISVTX and not _only_ours_to_write(path, status):
        raise ConfigError(
            f"other users can write {path}, and so replace what is in it: {WHAT_TO_DO}", key="runtime_dir"
        )


def _only_ours_to_write(path: Path, status: os.stat_result) -> bool:
    """Whether the group that may write has no member but this user, as a umask of 002 leaves directories."""
    if status.st_mode & stat.S_IWOTH or status.st_gid != os.getegid():
        return False
    with contextlib.suppress(OSError):  # no access list, or a file system without any
        os.getxattr(path, "system.posix_acl_access", follow_symlinks=False)
        return False  # with an access list the group's bits also stand for the users that it names
    import grp

    try:
        group, user = grp.getgrgid(status.st_gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
