"""Keeps Python's garbage collector from walking through the tables of a process again and again.

A full collection visits every object of the process, and nothing else runs meanwhile: with the books of 100,000 blocks
that is a tenth of a second, for every engine of the node. These tables make no cycles, so it finds nothing in them.

Only for processes that are ours alone. An engine and a user's program have objects of others, so nothing here is called
in them: a program with a pool of its own decides for itself.
"""

from __future__ import annotations

import gc
import threading
import time

# Objects, net, before a young collection; young ones before a collection of the middle generation; those before a full
# one. With Python's 10 instead of 3, a full collection looks at some 80,000 objects, which take up to 10 ms.
THRESHOLDS = (700, 10, 3)
LOOK_SECONDS = 60.0  # between two looks at whether the process idles
IDLE_SHARE = 0.02  # of a core, in that time; a shard without engines takes less
# Between two collections of everything. What they find is little: it was in use when a full collection came.
EVERYTHING_SECONDS = 3600.0


def keep_tables() -> None:
    """Look at what the process has now for the last time, and at everything that comes at most once more.

    What a full collection finds alive is moved out of its way (`gc.freeze`). Reference counting frees it as before. A
    cycle that forms of it later is found when the process idles. Call it once the process is ready, with the blocks of
    an earlier boot adopted. It blocks for a collection of everything.
    """
    gc.set_threshold(*THRESHOLDS)
    if _freeze not in gc.callbacks:
        gc.callbacks.append(_freeze)
        threading.Thread(target=_look_for_ever, name="kvservice-garbage", daemon=True).start()
    gc.collect()  # and `_freeze` behind it
    # Python puts a full collection off until what is new is a quarter of what the last one found. Have it find nothing.
    gc.collect()


def _freeze(phase: str, about: dict[str, int]) -> None:
    if phase == "stop" and about["generation"] == 2:
        gc.freeze()


class IdleLook:
    """Says when everything may be collected: after an idle minute, and once an hour at most."""

    def __init__(self, now: float, cpu_seconds: float) -> None:
        self._collected_at = self._looked_at = now
        self._cpu_seconds = cpu_seconds

    def is_due(self, now: float, cpu_seconds: float) -> bool:
        """`cpu_seconds` is the processor time that the process has taken so far."""
        share = (cpu_seconds - self._cpu_seconds) / max(now - self._looked_at, 1e-3)
        self._looked_at, self._cpu_seconds = now, cpu_seconds
        if share > IDLE_SHARE or now - self._collected_at < EVERYTHING_SECONDS:
            return False
        self._collected_at = now
        return True


def _look_for_ever() -> None:
    look = IdleLook(time.monotonic(), time.process_time())
    while _freeze in gc.callbacks:
        time.sleep(LOOK_SECONDS)
        if look.is_due(time.monotonic(), time.process_time()):
            collect_everything()


def collect_everything() -> None:
    """Free also the cycles that were alive when they were frozen. Everything else stands meanwhile."""
    gc.unfreeze()
    gc.collect()
    gc.collect()  # as in `keep_tables`
