"""Runs a copy worker as a process of its own, for `kvservice copy-worker`. SIGTERM and Ctrl-C stop it cleanly.

It ends with status 3 when a copy hangs, and with 4 when this process cannot use its GPU any more, so that whoever
supervises it starts it anew."""

from __future__ import annotations

import os
import signal
import threading

from kvservice.copying.worker.devices import device_named
from kvservice.copying.worker.server import CopyWorker, CopyWorkerConfig
from kvservice.observe.logs import say

STATUS_WEDGED = 3
STATUS_DEVICE_LOST = 4
POLL_SECONDS = 0.2


def run(config: CopyWorkerConfig, wanted: str) -> int:
    """Serve copies on the device `wanted` (cpu, or a GPU's UUID or index) until a signal. Blocks; call it on the main
    thread. Returns the status that the process is to end with, or ends it itself. Raises KVServiceError when it cannot
    start."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    server = CopyWorker(config, device_named(wanted))
    record = server.start()
    say(f"worker for {record.device} listens at {record.socket}")
    while not stopped.wait(POLL_SECONDS):
        if server.wedged.is_set():
            os._exit(STATUS_WEDGED)  # a thread that hangs cannot be joined
        if server.device_lost.is_set():
            os._exit(STATUS_DEVICE_LOST)  # engines that wait for a last word take the end of the process for it
    stopping = threading.Thread(target=server.stop, daemon=True)
    stopping.start()
    stopping.join(config.wedge_seconds)
    if stopping.is_alive():
        os._exit(STATUS_WEDGED)
    return 0
