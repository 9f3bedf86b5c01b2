"""The identity of a LoRA adapter: a digest of its bytes, because two replicas may have different weights at one path.

vLLM names an adapter's blocks with its name and path. The digest of its content is mixed into their keys here, so that
an adapter that was trained again has blocks of its own. A thread reads the files. Requests run without the cache until
it is done, and also if the files changed while the engine may still have the old ones loaded.

vLLM does not say when it loads an adapter, and that may be long before the first request. Files that have not changed
since before the engine could load anything are those that it has loaded. Others are trusted only if the operator says
that files at one path never change. Each request is named by a look that began after it came: an engine asked to load
an adapter again may have loaded other bytes just before. While it runs, its blocks are stored after looks that began
once their step was planned.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvservice.connector.weights import downloaded
from kvservice.core.bounded_table import BoundedTable

log = logging.getLogger("kvservice.connector")

# For looks at the files: one takes a tenth of a millisecond unless their disk is slow or away.
LOOK_WAIT_SECONDS = 0.2
LOOK_WAIT_SHARE = 0.1  # Of the time: with a slow disk the engine goes on, and most requests have no name.
LOOK_KEPT_SECONDS = 0.1  # Of that wait, for requests: each is named once, and blocks may be stored in a later step.
RETRY_SECONDS = 5.0  # Until files that could not be read are read again; the engine may still be downloading them.
WEIGHTS = frozenset({".safetensors", ".bin", ".pt"})
CONFIG_NAME = "adapter_config.json"
PIECE_BYTES = 1 << 20  # Bytes read at once: few calls, and little memory
# Beyond it the adapters used longest ago are forgotten; each is read again when it is used. No engine loads so many.
ADAPTERS_MAX = 10_000
NO_PATH = "\0"  # of a number that had two: equal to no path, because either may be loaded
# By how much the clock of a file system may be behind this machine's. A file changed within it counts as changed.
CLOCK_SECONDS = 2.0

Stamp = tuple[tuple[str, int, int, int], ...]  # of each file: name, bytes, mtime and ctime in ns


@dataclass(slots=True)
class _Adapter:
    work: Future[tuple[Stamp, bytes] | None] | None
    stamp: Stamp = ()
    identity: bytes | None = None
    read_at: float = 0.0
    changed: bool = False
    is_in_doubt: bool = False  # it may have been loaded before its files became what they are now


class Adapters:
    """The identities of adapters. One thread calls `of`, which waits for a look at most, and not for each one that is
    slow. `locate` finds the folder of a path or of a hub's name."""

    def __init__(
        self,
        locate: Callable[[str], Path | None],
        clock: Callable[[], float] = time.monotonic,
        *,
        files_stay: bool,
    ) -> None:
        """Make it before any adapter is loaded. `files_stay` is the operator's statement that the files of a path never
        change."""
        self._locate = locate
        self._clock = clock
        self._since_ns = None if files_stay else int((time.time() - CLOCK_SECONDS) * 1e9)
        # vLLM's number of an adapter -> its path when it was first asked for
        self._paths: BoundedTable[int, str] = BoundedTable(ADAPTERS_MAX)
        self._adapters: BoundedTable[str, _Adapter] = BoundedTable(ADAPTERS_MAX)  # by path
        # Their threads start with the first adapter. Looks do not wait behind the reading of another one.
        self._reader = ThreadPoolExecutor(1, "kvservice-adapters")
        self._looker = ThreadPoolExecutor(1, "kvservice-looks")
        self._patience = LOOK_WAIT_SECONDS  # how long looks may be waited for now
        self._waited_at = time.monotonic()
        self._look_seconds = 0.0  # how long the last look took
        self._lost: list[bytes] = []
        self.counters: Counter[str] = Counter()

    def of(self, path: str, number: int = 0) -> bytes | None:
        """The adapter's identity, 32 bytes. None as long as it is not known; the reason is counted. `number` is vLLM's
        own: vLLM finds a loaded adapter by it, whatever path a later request gives."""
        if reason := self.look(path, number):
            self.counters[reason] += 1
            return None
        adapter = self._adapters.get(path)
        return None if adapter is None else adapter.identity

    def loaded(self, number: int, path: str) -> None:
        """A worker has loaded an adapter. Requests that run with its number are computed with it, whatever path they
        gave."""
        self._lose_other(number, path)

    def take_lost(self) -> list[bytes]:
        """The identities of adapters of which the engine may have loaded other bytes since the last call."""
        found, self._lost = self._lost, []
        return found

    def look(self, path: str, number: int = 0, *, may_be_later: bool = False) -> str:
        """Look at its files again. Returns the counter of the reason why the adapter has no name now, else nothing.
        With `may_be_later` that takes no time that new requests need."""
        now = self._clock()
        if number:
            if self._paths.get(number) is None:
                self._paths.put(number, path)
            if self._lose_other(number, path):
                return "adapter_ambiguous"
        if may_be_later and self._earn() < LOOK_KEPT_SECONDS + self._look_seconds:
            return "adapter_unknown"
        adapter = self._adapters.get(path)
        if adapter is None:
            adapter = self._adapters.put(path, _Adapter(self._reader.submit(self._read, path, None)))
        self._take(path, adapter, now)
        self._begin(path, adapter, now, LOOK_KEPT_SECONDS if may_be_later else 0.0)
        if adapter.changed:
            return "adapter_changed"
        if adapter.is_in_doubt:
            return "adapter_in_doubt"
        return "adapter_unknown" if adapter.identity is None or adapter.work is not None else ""

    def _lose_other(self, number: int, path: str) -> bool:
        """Whether a number that is known has had another path than this one. The adapter of that path is lost then."""
        known = self._paths.get(number)
        if known in (None, path):
            return False
        self._lose(self._adapters.get(known))
        self._paths.put(number, NO_PATH)
        return True

    def close(self) -> None:
        for threads in (self._reader, self._looker):
            threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, path: str, adapter: _Adapter, now: float, kept_seconds: float) -> None:
        """Look again at files that are known, or read those that could not be read."""
        if adapter.work is not None or adapter.changed or adapter.is_in_doubt:
            return
        if adapter.identity is not None:
            adapter.work = self._looker.submit(self._look, path, adapter.stamp)
            self._wait(adapter.work, kept_seconds)
            self._take(path, adapter, now)
        elif now >= adapter.read_at:
            adapter.work = self._reader.submit(self._read, path, None)

    def _wait(self, look: Future[Any], kept_seconds: float) -> None:
        wait((look,), max(self._earn() - kept_seconds, 0.0))
        began, self._waited_at = self._waited_at, time.monotonic()
        self._patience = max(self._patience - (self._waited_at - began), 0.0)

    def _earn(self) -> float:
        """How long looks may be waited for now."""
        began, self._waited_at = self._waited_at, time.monotonic()
        earned = (self._waited_at - began) * LOOK_WAIT_SHARE
        self._patience = min(self._patience + earned, LOOK_WAIT_SECONDS)
        return self._patience

    def _lose(self, adapter: _Adapter | None) -> None:
        if adapter is not None and adapter.identity is not None:
            self._lost.append(adapter.identity)

    def _take(self, path: str, adapter: _Adapter, now: float) -> None:
        if adapter.work is None or not adapter.work.done():
            return
        found, adapter.work = adapter.work.result(), None
        if found is None:
            adapter.changed = adapter.identity is not None
            adapter.read_at = now + RETRY_SECONDS
        elif adapter.identity is None and not found[1]:
            adapter.is_in_doubt = True
            log.warning(
                "adapter %s may have changed since the engine loaded it, so its requests run without the cache until "
                'the engine is restarted. If files at one path never change, say so: "adapter_files": "immutable"',
                path,
            )
        elif adapter.identity is None:
            adapter.stamp, adapter.identity = found
        elif found[0] != adapter.stamp:
            adapter.changed = found[1] != adapter.identity
            adapter.stamp = found[0]
        if adapter.changed:
            self._lose(adapter)
            log.error(
                "the files of adapter %s changed while it is in use, so its requests run without the cache until the "
                "engine is restarted; give new weights a path of their own",
                path,
            )

    def _look(self, path: str, known: Stamp) -> tuple[Stamp, bytes] | None:
        """Runs on another thread. Notes how long a look takes."""
        began = time.monotonic()
        found = self._read(path, known)
        self._look_seconds = time.monotonic() - began
        return found

    def _read(self, path: str, known: Stamp | None) -> tuple[Stamp, bytes] | None:
        """Runs on another thread. Reads the bytes only if nothing is known yet, or if ctimes alone tell of a change.
        Returns an empty identity if it is in doubt, and for files whose bytes were not read."""
        try:
            folder = self._locate(path)
            stamp = None if folder is None else stamp_of(folder)
            if folder is None or not stamp:
                return None
            if known is not None:
                # Programs that copy files set mtimes, and a new owner or link changes the ctime of the same bytes.
                if stamp == known or _written(stamp) != _written(known):
                    return stamp, b""
            elif self._since_ns is not None and changed_ns(path, folder) >= self._since_ns:
                return stamp, b""
            identity = identity_of(folder)
            return (stamp, identity) if stamp_of(folder) == stamp else None
        except OSError as error:
            log.warning("adapter %s cannot be read: %s", path, error)
            return None


def _files(folder: Path) -> list[Path]:
    weights = sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS)
    config = folder / CONFIG_NAME
    return [config, *weights] if config.is_file() and weights else []


def stamp_of(folder: Path) -> Stamp:
    """The stamp of the folder; empty if it has no adapter. Raises OSError."""
    found = [(path.name, path.stat()) for path in _files(folder)]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found)


def _written(stamp: Stamp) -> list[tuple[str, int, int]]:
    """The stamp without ctimes."""
    return [(name, size, mtime) for name, size, mtime, _ in stamp]


def changed_ns(path: str, folder: Path) -> int:
    """When anything that the path leads to was last changed: links on the way, the folder, its files. No program can
    set these times back. Raises OSError."""
    given = Path(path).expanduser().absolute()
    links = [step for step in (given, *given.parents) if step.is_symlink()]
    files = _files(folder)
    times = [step.lstat().st_ctime_ns for step in (*links, *files, folder)]
    return max(times + [file.stat().st_ctime_ns for file in files] + [folder.stat().st_ctime_ns])


def identity_of(folder: Path) -> bytes:
    """SHA-256 over the configuration and all bytes of the weights. Raises OSError."""
    hasher = hashlib.sha256()
    for path in _files(folder):
        hasher.update(f"{path.name}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                hasher.update(piece)
    return hasher.digest()


def located(path: str) -> Path | None:
    """The folder itself, or the one where the engine has stored its download of this name. Uses no network."""
    folder = Path(path).expanduser()  # as vLLM does
    return folder if folder.is_dir() else downloaded(path)
