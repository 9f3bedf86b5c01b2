"""FakeTier: a tier in this process's memory, with a thread of its own, that can be slow, hang, be full and fail."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from kvservice.core.events import BroughtBlock, PullResult
from kvservice.core.segment.blockfile import (
    FILE_HEADER_BYTES,
    BlockFileHeader,
    is_file_of,
    pack_file_header,
    unpack_file,
    unpack_file_header,
)
from kvservice.core.tier.tier_block import TierBlock
from kvservice.errors import TierError
from kvservice.tier.base import ProbeCallback, ReadCallback, TierRead, TierWrite, WriteCallback, WriteResult
from kvservice.tier.headers import brought
from kvservice.units import BlockKey

Files = dict[BlockKey, bytes]  # whole block files, header and payload


class FakeTier:
    """`files` outlive it: give the same to the next one, as a restart does. Set the switches at any time."""

    def __init__(self, name: str = "fake", files: Files | None = None) -> None:
        self.name = name
        self.files: Files = {} if files is None else files
        self.delay_seconds = 0.0  # before each piece of work
        self.start_error = ""  # the start fails with it
        self.start_is_transient = False  # that error says that it may work later
        self.is_full = False  # writes are answered with FULL
        self.fails = False  # writes and reads are answered with FAILED
        self.in_use: list[memoryview] = []  # slots that it reads or writes at this moment
        self._may_start = threading.Event()
        self._may_start.set()
        self._may_work = threading.Event()
        self._may_work.set()
        self._urgent: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()  # (work, what drops it)
        self._rest: deque[tuple[Callable[[], None], Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"kvservice-tier-{name}", daemon=True)
        self._counters: Counter[str] = Counter()

    # -- switches ----

    def hang_at_start(self) -> None:
        self._may_start.clear()

    def hang(self) -> None:
        """Work that is under way does not end, and none begins, until `go_on`."""
        self._may_work.clear()

    def go_on(self) -> None:
        self._may_start.set()
        self._may_work.set()

    # -- Tier ----

    def start(self) -> list[TierBlock]:
        self._may_start.wait()
        if self.start_error:
            raise TierError(self.start_error, transient=self.start_is_transient)
        self._thread.start()
        headers = (unpack_file_header(data[:FILE_HEADER_BYTES]) for data in self.files.values())
        return [header.block for header in headers if header is not None]

    def write(self, job: TierWrite, on_done: WriteCallback) -> None:
        failed = (WriteResult.FAILED,) * len(job.items)
        self._add(
            self._rest,
            lambda: on_done(job.job_id, tuple(self._written(*item) for item in job.items)),
            lambda: on_done(job.job_id, failed),
        )

    def read(self, job: TierRead, on_done: ReadCallback) -> None:
        count = len(job.items)

        def work() -> None:
            on_done(job.job_id, tuple(self._read(*item, job.deadline) for item in job.items))

        self._add(
            self._urgent if job.urgent else self._rest,
            work,
            lambda: on_done(job.job_id, (BroughtBlock(PullResult.FAILED),) * count),
        )

    def erase(self, keys: Sequence[BlockKey]) -> None:
        def work() -> None:
            for key in keys:
                self.files.pop(key, None)

        self._add(self._urgent, work, lambda: None)

    def probe(self, keys: Sequence[BlockKey], deadline: float, on_done: ProbeCallback) -> None:
        def work() -> None:
            count = 0
            while count < len(keys) and keys[count] in self.files:
                count += 1
            on_done(count, count < len(keys))

        self._add(self._urgent, work, lambda: on_done(0))

    def counters(self) -> Mapping[str, int]:
        return dict(self._counters)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    # -- the thread ----

    def _add(
        self,
        queue: deque[tuple[Callable[[], None], Callable[[], None]]],
        work: Callable[[], None],
        drop: Callable[[], None],
    ) -> None:
        with self._changed:
            is_closed = self._is_closed
            if not is_closed:
                queue.append((work, drop))
                self._changed.notify()
        if is_closed:
            drop()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._rest or self._is_closed)
                if self._is_closed:
                    break
                work, _ = self._urgent.popleft() if self._urgent else self._rest.popleft()
            work()
        for _, drop in (*self._urgent, *self._rest):
            drop()

    def _use(self, payload: memoryview) -> None:
        """Hold the slot for as long as the switches say."""
        self.in_use.append(payload)
        if self.delay_seconds:
            threading.Event().wait(self.delay_seconds)
        self._may_work.wait()
        self.in_use = [each for each in self.in_use if each is not payload]

    def _written(self, block: TierBlock, payload: memoryview) -> WriteResult:
        self._use(payload)
        self._counters["writes"] += 1
        if self.is_full or self.fails:
            return WriteResult.FULL if self.is_full else WriteResult.FAILED
        self.files[block.key] = pack_file_header(BlockFileHeader(block, len(payload))) + bytes(payload)
        return WriteResult.OK

    def _read(self, block: TierBlock, target: memoryview, deadline: float) -> BroughtBlock:
        if monotonic() > deadline:
            return BroughtBlock(PullResult.FAILED)
        self._use(target)
        self._counters["reads"] += 1
        data = self.files.get(block.key)
        if data is None or self.fails:
            return BroughtBlock(PullResult.FAILED if self.fails else PullResult.STALE)
        found = unpack_file(data)
        if found is None:
            return BroughtBlock(PullResult.CORRUPT)
        header, payload = found
        if not is_file_of(header, block):
            return BroughtBlock(PullResult.STALE)
        target[:] = payload
        return brought(PullResult.OK, header)
