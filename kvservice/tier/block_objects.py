"""Blocks of one namespace as objects of one store: asked for by name, with time limits, and with a memory of what is
there. Runs on one event loop, but for `open`, which blocks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvservice.aio import within
from kvservice.breaker import FAILURES_TO_OPEN, Breaker
from kvservice.core.block.marks import MARK_SECONDS, Mark
from kvservice.core.bounded_table import BoundedTable
from kvservice.core.events import PullResult
from kvservice.core.segment.blockfile import FILE_HEADER_BYTES
from kvservice.errors import TierError
from kvservice.tier.mark_objects import MarkObjects
from kvservice.tier.object_store import open_store, store_errors, why_unusable
from kvservice.units import BlockKey

log = logging.getLogger("kvservice.tier")

FIRST_BYTE_SECONDS = 5.0  # until a read is answered at all, retries included; longer counts as a failure of the store
BODY_SECONDS = 30.0  # for the rest; a client that keeps its promise has given up before
LOOK_SECONDS = 2.0  # for one look; longer counts as a failure of the store
LOOKS_AT_ONCE_MAX = 64  # of all probes
PROOF_SECONDS = 30.0  # for the requests of a proof
KNOWN_MAX = 131_072  # keys, about 20 MB
THERE_SECONDS = 600.0  # an object that was seen is believed to be there so long, though life-cycle rules may remove it
PREFIXES_MAX = 16_384  # about 2 MB
PREFIX_SECONDS = 60.0  # what a probe found is believed so long; a read that finds a hole ends it sooner
ABSENT_SECONDS = 5.0  # an object that was not there is not asked for again so long, though another node may write it
# An object of a longer time ago counts as absent: the mark of a clear that covered it may be forgotten. A day before
# that, because nodes hear of a clear some time after it, and clocks of stores differ.
OBJECT_SECONDS = MARK_SECONDS - 86_400.0


@dataclass(slots=True)
class _Direction:
    """Reading, or writing and erasing: a full store that is left alone with writes still gives what it has."""

    breaker: Breaker = field(default_factory=Breaker)
    trouble: str = ""  # why it is left alone; empty while it works


class BlockObjects:
    """The store of `url`; names of blocks begin with `folder`. Nothing raises but `open`, `prove` and what is about
    marks."""

    def __init__(self, url: str, folder: str, marks_folder: str) -> None:
        self.counters: Counter[str] = Counter()
        self._url = url
        self._folder = folder
        self._marks_folder = marks_folder
        self._library: Any = None  # obstore, an extra that is imported when a store is opened
        self._mark_objects: MarkObjects | None = None
        self._known_marks: set[Mark] = set()
        self._clears = 0  # that were heard of: what was asked before one says nothing of what is stored since
        self._store: Any = None
        self._failures: tuple[type[Exception], ...] = ()
        self._reading, self._writing = _Direction(), _Direction()
        self._looking = asyncio.Semaphore(LOOKS_AT_ONCE_MAX)
        self._prefixes: BoundedTable[BlockKey, float] = BoundedTable(PREFIXES_MAX)  # last block of one, until when
        self._believed: BoundedTable[BlockKey, tuple[bool, float]] = BoundedTable(KNOWN_MAX)  # is it there, until when

    def open(self) -> None:
        """Asks nobody yet. Raises TierError when the URL or the environment make no store."""
        self._store = open_store(self._url)
        import obstore

        self._library, self._failures = obstore, store_errors()

    async def prove(self) -> None:
        """One write, read, compare and delete. Raises TierError when that fails."""
        try:
            is_kept = await within(PROOF_SECONDS, self._write_and_read())
        except self._failures as error:
            raise why_unusable(self._url, error) from error
        if not is_kept:
            raise TierError(f"the object store {self._url} gave back other bytes than were written", url=self._url)

    async def load_marks(self) -> tuple[Mark, ...]:
        """The marks of clears in the store. Raises TierError when they cannot all be read."""
        try:
            found = await self._marks().load()
        except self._failures as error:
            raise why_unusable(self._url, error) from error
        self._answered(self._reading, self._writing)  # asked every minute: one that came back is known without a read
        self._heard_of(found)
        self._known_marks.intersection_update(found)
        return found

    async def keep_marks(self, marks: Sequence[Mark]) -> None:
        """Raises TierError when they cannot be written."""
        self._heard_of(marks)
        try:
            await self._marks().keep(marks)
        except self._failures as error:
            raise why_unusable(self._url, error) from error

    def _heard_of(self, marks: Sequence[Mark]) -> None:
        """After a new clear an object that is there may be of before it: the next write of its block replaces it."""
        if not self._known_marks.issuperset(marks):
            self._known_marks.update(marks)
            self._clears += 1
            self._believed.clear()
            self._prefixes.clear()

    def _marks(self) -> MarkObjects:
        if self._mark_objects is None:
            self._mark_objects = MarkObjects(self._library, self._store, self._marks_folder)
        return self._mark_objects

    async def _write_and_read(self) -> bool:
        name, content = f"{self._folder}/proof-{os.urandom(8).hex()}", os.urandom(FILE_HEADER_BYTES)
        await self._library.put_async(self._store, name, content, use_multipart=False)
        try:
            found = bytes(await (await self._library.get_async(self._store, name)).bytes_async())
        except self._failures:
            with contextlib.suppress(*self._failures):
                await self._library.delete_async(self._store, name)
            raise
        await self._library.delete_async(self._store, name)
        return found == content

    @property
    def trouble(self) -> str:
        """Why the store is left alone; empty while it answers."""
        return self._reading.trouble

    @property
    def write_trouble(self) -> str:
        """Why nothing is written to it; empty while writes succeed."""
        return self._writing.trouble

    def is_left_alone(self, now: float) -> bool:
        """Whether it is asked for no block."""
        return not self._reading.breaker.allows(now)

    def may_read(self, now: float) -> bool:
        """Whether to ask the store for anything. One that failed a few times is left alone, and then tried once."""
        return self._reading.breaker.admits(now, FIRST_BYTE_SECONDS)

    def may_write(self, now: float) -> bool:
        """The same for writing and erasing; a store that gives nothing is not asked to take anything either."""
        writing = self._writing.breaker
        return writing.allows(now) and self.may_read(now) and writing.admits(now, FIRST_BYTE_SECONDS)

    async def get(self, key: BlockKey, bytes_max: int) -> tuple[memoryview, float] | PullResult:
        """The bytes of the object, and when the store says that it was written, in seconds since 1970. STALE when it is
        not there, is too old, has no header, or has more than `bytes_max` bytes."""
        data: memoryview | None = None
        clears = self._clears
        try:
            answer = await within(FIRST_BYTE_SECONDS, self._library.get_async(self._store, self._name(key)))
            if _counts(answer.meta) and FILE_HEADER_BYTES < answer.meta["size"] <= bytes_max:
                data = memoryview(await within(BODY_SECONDS, answer.bytes_async()))
        except FileNotFoundError:
            pass
        except self._failures as error:
            self._failed(self._reading, "read", error)
            return PullResult.FAILED
        self._answered(self._reading)
        self._believe(key, data is not None and clears == self._clears)
        return PullResult.STALE if data is None else (data, answer.meta["last_modified"].timestamp())

    async def put(self, key: BlockKey, content: Sequence[bytes | bytearray | memoryview]) -> bool:
        """Given up by the client only, never here: once this has returned, nothing reads the content any more."""
        try:
            await self._library.put_async(self._store, self._name(key), content, use_multipart=False)
        except self._failures as error:
            self._failed(self._writing, "write", error)
            return False
        self._answered(self._reading, self._writing)
        self._believe(key, True)
        return True

    async def delete(self, keys: Sequence[BlockKey]) -> bool:
        """Remove objects, if they are there."""
        names = [self._name(key) for key in keys]
        try:
            try:
                await self._library.delete_async(self._store, names)
            except FileNotFoundError:  # some stores stop at the first that is not there
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        await self._library.delete_async(self._store, name)
        except self._failures as error:
            self._failed(self._writing, "erase", error)
            return False
        self._answered(self._reading, self._writing)
        for key in keys:
            self._believe(key, False)
        return True

    async def look(self, key: BlockKey) -> bool | None:
        """Whether the object is there; None when the store does not say."""
        async with self._looking:
            self.counters["looks"] += 1
            clears = self._clears
            try:
                is_there = _counts(await within(LOOK_SECONDS, self._library.head_async(self._store, self._name(key))))
            except FileNotFoundError:
                is_there = False
            except self._failures as error:
                self._failed(self._reading, "probe", error)
                return None
        self._answered(self._reading)
        self._believe(key, is_there and clears == self._clears)
        return is_there

    # -- what is believed ----

    def believed(self, key: BlockKey, now: float) -> bool | None:
        """Whether the object is there, by what was seen not long ago; None when it is not known."""
        is_there, until = self._believed.get(key) or (False, 0.0)
        return is_there if now < until else None

    def believed_of(self, chain: Sequence[BlockKey], now: float) -> tuple[int, int]:
        """(so many leading blocks are there, from this index on nothing is), by what was seen not long ago."""
        seen = [self.believed(key, now) for key in chain]
        low = next((index for index, is_there in enumerate(seen) if not is_there), len(chain))
        high = seen.index(False) if False in seen else len(chain)
        ends = [index + 1 for index, key in enumerate(chain[:high]) if (self._prefixes.get(key) or 0.0) > now]
        return max([low, *ends]), high

    def believe_prefix(self, last: BlockKey) -> None:
        """A probe found that the chain is there up to this block. It did not look at all of them, so this says nothing
        about single objects."""
        self._prefixes.put(last, time.monotonic() + PREFIX_SECONDS)

    def believe_absent(self, key: BlockKey) -> None:
        """What is there is not the block: the next write replaces it."""
        self._believe(key, False)

    def _believe(self, key: BlockKey, is_there: bool) -> None:
        self._believed.put(key, (is_there, time.monotonic() + (THERE_SECONDS if is_there else ABSENT_SECONDS)))

    def _name(self, key: BlockKey) -> str:
        text = key.hex()
        return f"{self._folder}/{text[:2]}/{text}.safetensors"

    # -- whether it answers ----

    def _answered(self, *directions: _Direction) -> None:
        if any(direction.breaker.failures >= FAILURES_TO_OPEN for direction in directions):
            log.info("object_store_answers_again", extra={"url": self._url})
        for direction in directions:
            direction.breaker.succeeded()
            direction.trouble = ""

    def _failed(self, direction: _Direction, what: str, error: Exception) -> None:
        direction.breaker.failed(time.monotonic())
        self.counters["store_failed"] += 1
        if direction.breaker.failures == FAILURES_TO_OPEN:
            direction.trouble = str(why_unusable(self._url, error))
            self.counters["store_left_alone"] += 1
            log.warning("object_store_left_alone", extra={"after": what, "error": direction.trouble})


def _counts(meta: Any) -> bool:
    """Whether an object with obstore's description `meta` is recent enough."""
    return bool(meta["last_modified"].timestamp() > time.time() - OBJECT_SECONDS)
