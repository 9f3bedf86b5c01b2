"""Questions that a person asks by a click: few at a time, and the same question of many pages is asked once.

Runs on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from kvservice.console.source import Json
from kvservice.errors import Exhausted

AT_ONCE = 2  # questions under way: each asks every shard
WAITING_MAX = 16  # further ones wait, so many at most; then pages are told to try again
KEEP_SECONDS = 2.0  # an answer is given again for so long, also to other pages
KEPT_MAX = 64  # answers, the newest


class Questions:
    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._open: dict[str, asyncio.Future[Json]] = {}
        self._kept: OrderedDict[str, tuple[float, Json]] = OrderedDict()

    async def ask(self, name: str, question: Callable[[], Awaitable[Json]]) -> Json:
        """The answer to the question of this name; raises what `question` raises, and Exhausted when too many wait."""
        kept = self._kept.get(name)
        if kept is not None and kept[0] + KEEP_SECONDS > time.monotonic():
            return kept[1]
        asked = self._open.get(name)
        if asked is None:
            if len(self._open) >= AT_ONCE + WAITING_MAX:
                raise Exhausted("too many questions are being answered: try again in some seconds")
            asked = self._open[name] = asyncio.ensure_future(self._answer(name, question))
            asked.add_done_callback(lambda done: self._close(name, done))
        return await asyncio.shield(asked)  # a page that leaves does not take the answer from the others

    async def _answer(self, name: str, question: Callable[[], Awaitable[Json]]) -> Json:
        async with self._turn:
            answer = await question()
        self._kept[name] = (time.monotonic(), answer)
        while len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)
        return answer

    def _close(self, name: str, done: asyncio.Future[Json]) -> None:
        self._open.pop(name, None)
        if not done.cancelled():
            done.exception()  # also when every page that asked has left

    @property
    def under_way(self) -> list[asyncio.Future[Json]]:
        return list(self._open.values())
