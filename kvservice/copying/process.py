"""Runs a copy worker as a process of its own, for `kvservice copy-worker`. SIGTERM, Ctrl-C and a closed
terminal stop it cleanly.

It exits with status 5 when a copy hangs, and with 6 when this process can no longer use its GPU. In both cases the
supervisor should start it again.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from queue import Empty, SimpleQueue

from kvservice.copying.worker.devices import device_named
from kvservice.copying.worker.server import CopyWorker, CopyWorkerConfig
from kvservice.garbage import keep_tables
from kvservice.observe.logs import exit_at_once, say
from kvservice.signals import end_signals

STATUS_WEDGED = 5  # tells a supervisor that a copy hung; kvservice.cli.exits has the codes of all commands
STATUS_DEVICE_LOST = 6  # likewise: this process lost its GPU
POLL_SECONDS = 0.2  # between two looks at the worker's state: a stop or a failure is noticed this much later


def run(config: CopyWorkerConfig, wanted: str) -> int:
    """Serve copies on the device `wanted` (cpu, or a GPU's UUID or index) until a signal. Blocks; call it on the main
    thread. Returns the exit status for the process, or ends the process itself. Raises KVServiceError if it cannot
    start."""
    # An Event would not do: a signal that arrives while this thread holds the Event's lock would wait for it for ever.
    signals: SimpleQueue[int] = SimpleQueue()
    for number in end_signals():
        signal.signal(number, lambda number, _: signals.put(number))
    server = CopyWorker(config, device_named(wanted))
    record = server.start()
    keep_tables()
    say(f"worker for {record.device} listens at {record.socket}")
    stopped = None
    while stopped is None:
        with contextlib.suppress(Empty):
            stopped = signals.get(timeout=POLL_SECONDS)
        if server.wedged.is_set():
            exit_at_once(STATUS_WEDGED)  # a thread that hangs cannot be joined
        if server.device_lost.is_set():
            exit_at_once(STATUS_DEVICE_LOST)  # to engines that wait for a last word, its end says the same
    stopping = threading.Thread(target=server.stop, daemon=True)
    stopping.start()
    stopping.join(config.wedge_seconds)
    if stopping.is_alive():
        exit_at_once(STATUS_WEDGED)
    return 0
