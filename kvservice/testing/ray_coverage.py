"""A plug-in of coverage: Ray ends its workers without Python's exit, so they save what was measured every few seconds.

Only `make coverage` loads it, in every process that is measured.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time

SAVE_SECONDS = 2.0  # what runs in the last seconds of a worker is lost


def coverage_init(registry: object, options: object) -> None:
    """Called by coverage when it starts in a process."""
    if any(argument.endswith("default_worker.py") for argument in sys.orig_argv):
        threading.Thread(target=_save, name="coverage-save", daemon=True).start()


def _save() -> None:
    import coverage

    while True:
        time.sleep(SAVE_SECONDS)
        measured = coverage.Coverage.current()
        if measured is not None:
            with contextlib.suppress(coverage.CoverageException):
                measured.save()
