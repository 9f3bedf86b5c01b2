"""Which chunks are asked for, and when again."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from kvservice.connector.offloading.lookups import Lookups, Presence


class Blocks:
    """A pool that answers at once."""

    def __init__(self) -> None:
        self.there: set[bytes] = set()
        self.asked: list[bytes] = []
        self.released: list[Any] = []

    def hold(self, names: Sequence[bytes], seconds: float) -> Future[list[Any]]:
        self.asked += names
        answer: Future[list[Any]] = Future()
        answer.set_result([name if name in self.there else None for name in names])
        return answer

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
