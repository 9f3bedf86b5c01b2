"""The disk of a node as a tier: one file a block, read and written by a few threads straight from and into slots.

How files are accessed is chosen by the file system (tier.mounts) or by the setting `disk_io`, and proven at the start
by one write, read and compare. What cannot be proven is not used: NIXL's engines and direct access fall back to what is
next, which is logged and counted; a folder that does not keep bytes at all is refused.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from kvservice.codec.coder import Coder
from kvservice.core.events import BroughtBlock, PullResult
from kvservice.core.tier.tier_block import TierBlock
from kvservice.core.tier.tiers import FULL_SECONDS
from kvservice.errors import TierError, TransferError
from kvservice.observe.failpoints import failpoint
from kvservice.tier.answers import Written, read_answers, write_answers
from kvservice.tier.base import ProbeCallback, ReadCallback, TierRead, TierWrite, WriteCallback, WriteResult
from kvservice.tier.block_files import BlockFiles, TierFolder, cannot_use
from kvservice.tier.disk_io import DiskIO, choose_way
from kvservice.tier.found_blocks import find_blocks
from kvservice.tier.index import IndexLog, pack_erased, pack_row
from kvservice.tier.worker import TierWorker, Urgency
from kvservice.units import BlockKey

log = logging.getLogger("kvservice.tier")

# Without a failed write until the log says that writes succeed again: on a full disk they fail and succeed in turn.
SUCCEED_SECONDS = 60.0
ERASES_AGAIN = 16  # files that could not be removed, tried again with each erase: some may never go
WRITES_WAITING_MAX = 1024  # blocks; the core bounds the bytes in flight, so this is reached only when it errs


class DiskTier:
    """Satisfies tier.base.Tier."""

    name = "disk"

    def __init__(
        self, folder: Path, coder: Coder | None = None, io: DiskIO = DiskIO.AUTO, threads: int | None = None
    ) -> None:
        """`threads`: by default as many as the file system can use. Nothing is touched before `start`."""
        self._path = folder
        self._coder = coder or Coder()
        self._wanted = io
        self._threads_wanted = threads
        self._counters: Counter[str] = Counter()
        self._books = threading.Lock()  # of the counters, which the pool's loop reads: held for moments only
        self._removed = threading.Condition(self._books)
        self._to_erase: dict[BlockKey, None] = {}  # whose files are to be removed, and are not yet; in their order
        self._removing: set[BlockKey] = set()  # whose files are being removed
        self._log_lock = threading.Lock()  # of the index, which may take a second to be written anew
        self._of_thread = threading.local()
        self._opened: list[BlockFiles] = []  # one for each thread that had work
        self._problem = ""  # with the last write
        self._fails_until = 0.0  # when the log may say that writes succeed again; 0.0: it has not said that they fail
        self._full = ("", 0.0)  # why there was no room, and until when the pool holds no more than it did then
        self._is_closed = False

    # -- life ----

    def start(self) -> list[TierBlock]:
        self._folder = TierFolder(self._path)
        try:
            self._way = choose_way(self._folder, self._wanted)
            found = find_blocks(self._folder)
        except OSError as error:
            self._folder.close()
            raise cannot_use(self._path, error) from error
        except BaseException:
            self._folder.close()
            raise
        self._index = IndexLog(self._folder.descriptor, found.blocks)
        self._count(io_refused=len(self._way.refused), found_scanned=found.scanned, found_removed=found.removed)
        self._worker = TierWorker(self.name, self._threads_wanted or self._way.access.threads, WRITES_WAITING_MAX)
        log.info("disk_tier_open", extra={"path": str(self._path), "blocks": len(found.blocks), **self.describe()})
        return found.blocks

    def describe(self) -> dict[str, object]:
        """How files are accessed, for logs and people. After `start`."""
        access = self._way.access
        return {"file_system": access.kind, "direct": access.direct, "disk_io": self._way.name.value}

    def close(self) -> None:
        if self._is_closed or not self._worker.close():
            return  # or a thread hangs in the file system, and still uses the folder's descriptors
        self._is_closed = True
        with self._log_lock:
            self._index.close()
        for files in self._opened:
            files.close()
        self._folder.close()

    # -- work ----

    def write(self, job: TierWrite, on_done: WriteCallback) -> None:
        answers = write_answers(job, on_done)
        for place, (block, payload) in enumerate(job.items):
            work = partial(self._write_one, block, payload, partial(answers.put, place))
            if not self._worker.submit(Urgency.WRITE, work, partial(answers.drop, place)):
                self._count(writes_dropped=1)
                answers.drop(place)

    def read(self, job: TierRead, on_done: ReadCallback) -> None:
        answers = read_answers(job, on_done)
        urgency = Urgency.URGENT_READ if job.urgent else Urgency.READ
        for place, (block, target) in enumerate(job.items):
            work = partial(self._read_one, block, target, job.deadline, partial(answers.put, place))
            if not self._worker.submit(urgency, work, partial(answers.drop, place)):
                answers.drop(place)

    def erase(self, keys: Sequence[BlockKey]) -> None:
        with self._books:
            self._to_erase.update(dict.fromkeys(keys))
        self._worker.submit(Urgency.ERASE, partial(self._erase, len(keys)), lambda: None)

    def probe(self, keys: Sequence[BlockKey], deadline: float, on_done: ProbeCallback) -> None:
        def look() -> None:
            found, is_end = 0, False
            for key in keys:
                if time.monotonic() > deadline:
                    break
                if not self._folder.has(key):
                    is_end = True
                    break
                found += 1
            on_done(found, is_end)

        if not self._worker.submit(Urgency.READ, look, lambda: on_done(0)):
            on_done(0)

    def counters(self) -> Mapping[str, int]:
        with self._books:
            return {**self._counters, "index_failed": self._index.failed, **self._coder.counters()}

    def write_trouble(self) -> str:
        """Why the last write failed, or why the disk holds less than it may. Satisfies tier.base.TellsWriteTrouble."""
        with self._books:
            reason, until = self._full
            problem = self._problem or (reason if time.monotonic() < until else "")
        return f"{self._path}: {problem}" if problem else ""

    # -- on the tier's threads ----

    def _write_one(self, block: TierBlock, payload: memoryview, answer: Callable[[Written], None]) -> None:
        with self._removed:  # or the new file would be removed instead of the old one
            self._removed.wait_for(lambda: block.key not in self._removing)
            was_to_go = block.key in self._to_erase
            self._to_erase.pop(block.key, None)
            erased = self._counters["erased"]
        result, header = self._files().write(block, payload)
        if result is WriteResult.FULL and self._made_room(erased):
            result, header = self._files().write(block, payload)
        with self._books:
            if header is None:
                self._counters[f"writes_{result.value}"] += 1
                if was_to_go:
                    self._to_erase[block.key] = None
                if result is WriteResult.FULL:
                    self._full = (self._files().problem, time.monotonic() + FULL_SECONDS)
            else:
                failpoint("tier.index")
                self._counters["stored_bytes"] += header.file_bytes
        self._tell("" if header is not None else self._files().problem)
        if header is not None:
            self._note([pack_row(header.listed)], 1)
        answer(Written(result, header.stored_bytes if header is not None else 0))

    def _tell(self, problem: str) -> None:
        """Note the problem with a write, or none. Log when writes begin to fail, why, and when they succeed again."""
        now = time.monotonic()
        with self._books:
            self._problem, failing = problem, self._fails_until > 0.0
            is_over = failing and not problem and now >= self._fails_until
            if problem or is_over:
                self._fails_until = now + SUCCEED_SECONDS if problem else 0.0
        if problem and not failing:
            log.warning("disk_writes_fail", extra={"path": str(self._path), "reason": problem})
        elif is_over:
            log.info("disk_writes_succeed", extra={"path": str(self._path)})

    def _made_room(self, erased: int) -> bool:
        """Whether blocks were erased since that many were. Waits for those that are being erased."""
        with self._removed:
            self._removed.wait_for(lambda: not self._removing)
            return self._counters["erased"] > erased

    def _read_one(
        self, block: TierBlock, target: memoryview, deadline: float, answer: Callable[[BroughtBlock], None]
    ) -> None:
        if time.monotonic() > deadline:
            self._count(reads_late=1)
            answer(BroughtBlock(PullResult.FAILED))
            return
        found = self._files().read(block, target)
        with self._books:
            if found.result is not PullResult.OK:
                self._counters[f"reads_{found.result.value}"] += 1
        if found.result in (PullResult.STALE, PullResult.CORRUPT):
            self._note([pack_erased(block.key)], -1)
        answer(found)

    def _erase(self, count: int) -> None:
        """Remove so many files, the first that were to go first, and some that could not be removed before."""
        with self._books:
            going = list(islice(self._to_erase, count + ERASES_AGAIN))
            for key in going:
                del self._to_erase[key]
            self._removing.update(going)
        removed, failed = list[BlockKey](), list[BlockKey]()
        try:
            for key in going:
                try:
                    removed += [key] if self._folder.remove(key) else []
                except OSError:
                    failed.append(key)
            if removed:
                failpoint("tier.erase")
                self._note([pack_erased(key) for key in removed], -len(removed))
        finally:  # a write may wait for it
            with self._removed:
                self._counters.update(erased=len(removed), erases_failed=len(failed))
                self._to_erase.update(dict.fromkeys(failed))
                self._removing.difference_update(going)
                self._removed.notify_all()

    def _note(self, rows: list[bytes], live: int) -> None:
        """Append rows to the index. `live` is how many more blocks there are than before."""
        with self._log_lock:
            self._index.append(rows, live)

    def _files(self) -> BlockFiles:
        """Those of the calling thread."""
        found: BlockFiles | None = getattr(self._of_thread, "files", None)
        if found is None:
            way = self._way
            try:
                io = way.make()
            except TransferError as error:  # it was loaded at the start: no thread may do without
                raise TierError(error.message) from error
            found = self._of_thread.files = BlockFiles(self._folder, io, self._coder, direct=way.access.direct)
            self._opened.append(found)
        return found

    def _count(self, **by: int) -> None:
        with self._books:
            self._counters.update(by)
