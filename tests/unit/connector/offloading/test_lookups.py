"""Which chunks are asked for, and when again."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from kvservice.connector.offloading.lookups import Lookups, Presence


class Blocks:
    """A pool that answers at once, or, while it is slow, when the test says so."""

    def __init__(self) -> None:
        self.there: set[bytes] = set()
        self.is_slow = False
        self.waiting: list[tuple[Future[list[Any]], list[Any]]] = []
        self.asked: list[bytes] = []
        self.released: list[Any] = []

    def hold(self, names: Sequence[bytes], seconds: float) -> Future[list[Any]]:
        self.asked += names
        answer: Future[list[Any]] = Future()
        self.waiting.append((answer, [name if name in self.there else None for name in names]))
        if not self.is_slow:
            self.answer()
        return answer

    def answer(self) -> None:
        for answer, promises in self.waiting:
            answer.set_result(promises)
        self.waiting = []

    def release(self, promises: Sequence[Any]) -> None:
        self.released += promises


def test_what_was_missing_is_asked_again_for_a_new_request() -> None:
    """The first request may run for long, and store the chunk itself."""
    blocks = Blocks()
    lookups = Lookups(blocks, 1.0)  # type: ignore[arg-type]

    def ask(request_id: str) -> Presence:
        lookups.ask(b"chunk", request_id)
        lookups.send()
        lookups.receive()
        return lookups.ask(b"chunk", request_id)

    assert ask("first") is Presence.MISSING and ask("first") is Presence.MISSING
    assert blocks.asked == [b"chunk"], "it is not asked again for the same request"
    blocks.there.add(b"chunk")
    assert ask("second") is Presence.HERE
    lookups.end("first")
    lookups.end("second")
    assert blocks.released == [b"chunk"]


@pytest.mark.parametrize("is_slow", [True, False])
def test_a_promise_is_given_back_when_a_newer_one_counts(is_slow: bool) -> None:
    """A chunk is asked for again while its load is under way. The load fails, and a third request asks once more."""
    blocks = Blocks()
    blocks.there.add(b"chunk")
    lookups = Lookups(blocks, 1.0)  # type: ignore[arg-type]
    lookups.ask(b"chunk", "first")
    lookups.send()
    lookups.receive()
    assert list(lookups.take([b"chunk"])) == [b"chunk"]
    blocks.is_slow = is_slow
    lookups.ask(b"chunk", "second")
    lookups.send()
    lookups.receive()
    lookups.failed([b"chunk"])
    assert lookups.ask(b"chunk", "second") is Presence.MISSING
    lookups.ask(b"chunk", "third")
    lookups.send()
    blocks.answer()
    lookups.receive()
    for request_id in ("first", "second", "third"):
        lookups.end(request_id)
    assert blocks.released == [b"chunk"] * 2, "of two promises one is kept for ever"
