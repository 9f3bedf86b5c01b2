"""`python -m kvservice.copying`: a copy worker as a plain process, without Ray. SIGTERM and Ctrl-C stop it cleanly.

It ends with status 3 when a copy hangs, and with 4 when this process cannot use its GPU any more, so that whoever
supervises it starts it anew."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from kvservice.copying.device import HOST
from kvservice.copying.worker.devices import device_named
from kvservice.copying.worker.server import CopyWorker, CopyWorkerConfig
from kvservice.errors import KVServiceError
from kvservice.units import NodeId

STATUS_WEDGED = 3
STATUS_DEVICE_LOST = 4
POLL_SECONDS = 0.2


def parse(arguments: list[str] | None = None) -> tuple[CopyWorkerConfig, str]:
    parser = argparse.ArgumentParser(prog="python -m kvservice.copying", description=__doc__)
    parser.add_argument("--service", default="default", help="name shared by all parts of one installation")
    parser.add_argument("--node", required=True, help="name of this node: that of its shard")
    parser.add_argument("--device", default=HOST, help="cpu, or a GPU: its UUID, or its index here")
    parser.add_argument("--runtime-root", type=Path, default=None)
    parser.add_argument("--wedge-seconds", type=float, default=10.0, help="a copy that takes longer hangs")
    given = parser.parse_args(arguments)
    config = CopyWorkerConfig(given.service, NodeId(given.node), given.runtime_root, given.wedge_seconds)
    return config, given.device


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    config, wanted = parse()
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        server = CopyWorker(config, device_named(wanted))
        record = server.start()
    except KVServiceError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    print(f"worker for {record.device} listens at {record.socket}", flush=True)
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


if __name__ == "__main__":
    sys.exit(main())
