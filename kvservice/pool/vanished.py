"""Waits until engines that vanished can no longer write, so that the core takes back the slots they held.

Runs on the pool's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from kvservice.core import events as ev
from kvservice.errors import KVServiceError
from kvservice.pool.runtime_ports import Claim

log = logging.getLogger("kvservice.pool")

POLL_SECONDS = 0.5  # between two looks whether a vanished engine still writes: a file lock has no event


class VanishedEngines:
    """`spawn` runs a coroutine until the pool closes; `dispatch` gives an event to the core."""

    def __init__(
        self, claim: Claim, spawn: Callable[[Coroutine[Any, Any, None]], None], dispatch: Callable[[ev.Event], None]
    ) -> None:
        self._claim = claim
        self._spawn = spawn
        self._dispatch = dispatch
        self._watched: set[bytes] = set()

    def watch(self, engine_id: bytes) -> None:
        """Report EngineGone once this engine cannot write any more. Returns at once."""
        if engine_id not in self._watched:
            self._watched.add(engine_id)
            self._spawn(self._await_end(engine_id))

    async def _await_end(self, engine_id: bytes) -> None:
        level = logging.WARNING  # of the first complaint
        try:
            while True:  # a file lock has no event
                try:
                    if self._end(engine_id):
                        return
                except KVServiceError as error:  # for example no file locks left: the slots stay quarantined longer
                    log.log(level, "engine_end_unknown", extra={"reason": error.message})
                    level = logging.DEBUG
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self._watched.discard(engine_id)

    def _end(self, engine_id: bytes) -> bool:
        """Take back what this engine may have been writing, unless it still may. Returns whether that was done. It
        happens under one lock: a worker that starts in between waits, and then finds its slots gone."""
        with self._claim(engine_id) as is_free:
            if is_free:
                self._dispatch(ev.EngineGone(engine_id))
        return is_free
