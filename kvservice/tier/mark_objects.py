"""Marks of clears as objects beside the blocks of a store. A node that was away learns of a clear by them, also if no
node that knows it is up. Runs on one event loop.

    NAMESPACE/marks/<time>-<crc>.marks     one for each clear, in the form of core.block.marks

The time is that of the latest mark in it, in seconds since 1970 with 17 digits and 6 after the point, so that names are
in the order of time. Objects are never changed: nodes that write the same marks write the same object.
"""

from __future__ import annotations

import logging
import re
import time
import zlib
from collections.abc import Sequence
from typing import Any

from kvservice.aio import ask_each, within
from kvservice.core.block.marks import MARK_SECONDS, MARKS_MAX, Mark, MarkKind, pack_marks, unpack_marks

log = logging.getLogger("kvservice.tier")

READS_AT_ONCE_MAX = 32  # at 50 ms each, a thousand objects are read in two seconds
OBJECT_BYTES_MAX = 4 << 20  # far more than all marks and their keys take; a longer object is damaged
REQUEST_SECONDS = 10.0  # for one request; longer counts as a failure of the store
_NAME = re.compile(r"([0-9]{10}\.[0-9]{6})-[0-9a-f]{8}\.marks")


class MarkObjects:
    """The marks in `folder` of an obstore store. Its errors pass through."""

    def __init__(self, library: Any, store: Any, folder: str) -> None:
        self._library = library
        self._store = store
        self._folder = folder
        self._read_before: dict[str, tuple[Mark, ...]] = {}  # objects never change, so each is read once

    async def load(self) -> tuple[Mark, ...]:
        """All marks that still count. In doubt everything was cleared: until the time of an object that is damaged, and
        until that of the latest that is one too many. Removes objects whose time is over."""
        listed = await within(REQUEST_SECONDS, self._library.list_with_delimiter_async(self._store, f"{self._folder}/"))
        names = sorted(name for row in listed["objects"] if _NAME.fullmatch(name := row["path"].rpartition("/")[2]))
        ended = [name for name in names if _time_of(name) + MARK_SECONDS < time.time()]
        if ended:
            await self._remove(ended)
        kept = names[len(ended) :]
        many, some = kept[:-MARKS_MAX], kept[-MARKS_MAX:]
        found = [Mark(MarkKind.EVERYTHING, _time_of(many[-1]))] if many else []
        new = [name for name in some if not self._read_before.get(name)]
        read = dict(zip(new, await ask_each(self._read, new, READS_AT_ONCE_MAX), strict=True))
        self._read_before = {name: self._read_before.get(name) or read[name] for name in some}
        for marks in self._read_before.values():
            found += marks
        return tuple(found)

    async def keep(self, marks: Sequence[Mark]) -> None:
        """Write one object with these marks."""
        data = pack_marks(marks)
        name = f"{max(mark.at for mark in marks):017.6f}-{zlib.crc32(data):08x}.marks"
        path = f"{self._folder}/{name}"
        await within(REQUEST_SECONDS, self._library.put_async(self._store, path, data, use_multipart=False))

    async def _read(self, name: str) -> tuple[Mark, ...]:
        try:
            marks = await self._fetch(name)
            if marks is None:  # or a bit that changed on its way would clear everything
                marks = await self._fetch(name)
        except FileNotFoundError:  # its time is over by the clock of another node
            return ()
        if marks is None:
            log.error("marks_damaged", extra={"object": name})
            return (Mark(MarkKind.EVERYTHING, _time_of(name)),)
        return marks

    async def _fetch(self, name: str) -> tuple[Mark, ...] | None:
        """None: it is damaged."""
        answer = await within(REQUEST_SECONDS, self._library.get_async(self._store, f"{self._folder}/{name}"))
        if answer.meta["size"] > OBJECT_BYTES_MAX:
            return None
        return unpack_marks(bytes(await within(REQUEST_SECONDS, answer.bytes_async())))

    async def _remove(self, names: Sequence[str]) -> None:
        try:
            paths = [f"{self._folder}/{name}" for name in names]
            await within(REQUEST_SECONDS, self._library.delete_async(self._store, paths))
        except Exception as error:  # noqa: BLE001  another node may have removed them; they harm nobody
            log.info("marks_not_removed", extra={"error": str(error)[:200]})


def _time_of(name: str) -> float:
    return float(name.partition("-")[0])
