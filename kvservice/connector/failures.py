"""Keeps failures of the cache from the engine: each is counted and logged once per kind, and the engine is answered as
if the cache had nothing. Any thread may call."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from kvservice.errors import KVServiceError

log = logging.getLogger("kvservice.connector")

T = TypeVar("T")


class Failures:
    def __init__(self, counters: Counter[str], counter: str = "failed_{entry}") -> None:
        """`counter` is the name that is counted in `counters`, where {entry} stands for the entry that failed."""
        self._counters = counters
        self._counter = counter
        self._logged: set[tuple[str, str]] = set()

    def note(self, entry: str, error: Exception) -> None:
        self._counters[self._counter.format(entry=entry)] += 1
        kind = (entry, type(error).__name__)
        if kind not in self._logged:
            self._logged.add(kind)
            # The error itself, since one that a future kept is noted outside of any `except`.
            trace = None if isinstance(error, KVServiceError) else error
            log.error("%s failed, going on without the cache for it: %s: %s", *kind, error, exc_info=trace)

    @contextlib.contextmanager
    def guard(self, entry: str) -> Iterator[None]:
        """Guard a block. The code after the block runs in any case."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  the engine's loop must go on whatever happens here
            self.note(entry, error)


class Guarded(Protocol):
    @property
    def failures(self) -> Failures: ...


def guarded(neutral: Callable[..., object]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Guard a method: when it fails, the answer is what `neutral` makes of its arguments."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(function)
        def call(self: Guarded, *args: Any, **kwargs: Any) -> T:
            try:
                return function(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001  the engine's loop must go on whatever happens here
                self.failures.note(function.__name__, error)
                return neutral(*args, **kwargs)  # type: ignore[return-value]

        return call

    return decorate
