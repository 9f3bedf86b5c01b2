"""Questions that their request takes back."""

from __future__ import annotations

import threading

from kvservice.core.messages import AcquireRequest
from kvservice.testing.eventually import eventually
from tests.unit.session.test_session import KEYS, Bench, bench

__all__ = ["bench"]  # the fixture


def test_a_question_taken_back_before_it_is_asked_is_never_asked(bench: Bench) -> None:
    bench.start()
    assert bench.loop is not None
    waits = threading.Event()
    bench.loop.call_soon_threadsafe(waits.wait, 10)  # both reach the session in one turn of its loop
    bench.session.acquire("r", AcquireRequest(KEYS, 0, 60.0))
    bench.session.abandon("r")
    waits.set()
    eventually(lambda: bench.session.counters["acquire_cancelled"] == 1, "the cancelled acquire")
    assert bench.pool.counters["acquire"] == 0
