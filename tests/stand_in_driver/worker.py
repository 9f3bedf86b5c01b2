"""`kvservice copy-worker` with the stand-in's kernel in place of Triton's, and with one planted mistake or none.

The tests of the stand-in must notice each of these mistakes: otherwise the stand-in is too kind, or the tests are.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

from kvservice.cli.main import app
from kvservice.copying import device
from kvservice.copying.cuda import copies as cuda_copies
from kvservice.copying.cuda import device as cuda_device
from kvservice.copying.cuda import driver as cuda_driver
from kvservice.copying.cuda import pinning
from kvservice.copying.cuda.driver import ORDER_ANY
from kvservice.copying.message import NO_EVENT
from kvservice.copying.worker import lanes, loans
from tests.gpu.slots import SLOT
from tests.stand_in_driver import engine


def stores_in_any_order() -> None:
    """A store's source may come from the gather kernel on the same stream: it is read too early."""
    cuda_copies.ORDER_STREAM = ORDER_ANY  # type: ignore[misc]


def copies_are_not_awaited() -> None:
    cuda_copies.OnStream.wait = lambda self: None  # type: ignore[method-assign]


def staging_is_reused_early() -> None:
    """The next round of a store fills the buffer before this one has left it, which only stream order prevents."""
    start, across = cuda_copies.CudaCopies.start, cuda_copies.CudaCopies._start_across
    others: dict[int, Any] = {}

    def on_another_stream(self: Any, direction: Any, way: Any, address: Any, runs: Any) -> None:
        engine.call("cuStreamSynchronize", ctypes.c_void_p(way.stream))  # this round is gathered
        other = others.setdefault(id(way), cuda_copies._Way(way.driver))
        engine.call("stand_in_set", b"DELAY_US", ctypes.c_long(20_000))  # the next round is gathered meanwhile
        across(self, direction, other, address, runs)
        engine.call("stand_in_set", b"DELAY_US", ctypes.c_long(200))

    def and_await_both(self: Any, direction: Any, runs: Any) -> Any:
        started = start(self, direction, runs)
        for other in others.values():
            engine.call("cuStreamSynchronize", ctypes.c_void_p(other.stream))
        return started

    cuda_copies.CudaCopies._start_across = on_another_stream  # type: ignore[method-assign]
    cuda_copies.CudaCopies.start = and_await_both  # type: ignore[method-assign]


def engine_is_not_awaited() -> None:
    """Copies begin while the kernels that write the block still run."""
    submit = lanes.CopyLane.submit
    lanes.CopyLane.submit = lambda self, target, job, ready=None: submit(self, target, job)  # type: ignore[method-assign, misc, assignment]


def offset_is_forgotten() -> None:
    """The KV cache begins where its allocation begins."""
    made = cuda_device.CudaKV.__init__

    def without_offset(self: Any, driver: Any, base: int, offset: int, events: list[int]) -> None:
        made(self, driver, base, 0, events)

    cuda_device.CudaKV.__init__ = without_offset  # type: ignore[method-assign]


def lender_is_not_awaited() -> None:
    """A lent block is read while the lender still computes it."""
    lend = loans.Loans.lend

    def without_event(self: Any, lender: Any, lending_id: int, blocks: Any, event: int, on_taken: Any) -> None:
        lend(self, lender, lending_id, blocks, NO_EVENT, on_taken)

    loans.Loans.lend = without_event  # type: ignore[method-assign, assignment]


def final_errors_are_forgotten() -> None:
    """The worker stays, and fails every copy."""
    cuda_driver.FATAL = frozenset()  # type: ignore[misc]


def unpinning_is_awaited() -> None:
    """An engine that leaves hears of the end of its copies only afterwards."""
    give = device.Segments.give

    def and_wait(self: device.Segments, segment: Any) -> None:
        give(self, segment)
        for thread in threading.enumerate():
            if thread.name == "kvservice-copy-unmap":
                thread.join()

    device.Segments.give = and_wait  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[], None]] = {
    plant.__name__: plant
    for plant in (
        stores_in_any_order,
        copies_are_not_awaited,
        staging_is_reused_early,
        engine_is_not_awaited,
        offset_is_forgotten,
        lender_is_not_awaited,
        final_errors_are_forgotten,
        unpinning_is_awaited,
    )
}


def pinned_is_said() -> None:
    """On standard output, so that a test knows which way its copies go."""
    work = pinning.Pinning._work

    def and_say(self: pinning.Pinning) -> None:
        work(self)
        print("pinned", flush=True)

    pinning.Pinning._work = and_say  # type: ignore[method-assign]


if __name__ == "__main__":
    pinned_is_said()
    cuda_copies.STAGING_BYTES = 2 * SLOT.payload_bytes  # small jobs go through it in rounds, too
    cuda_device.gather_launcher = lambda driver: engine.gather  # type: ignore[assignment]
    if plant := os.environ.get("STAND_IN_PLANT"):
        PLANTS[plant]()
    app()
