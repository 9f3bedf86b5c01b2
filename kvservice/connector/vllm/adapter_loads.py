"""Which adapters vLLM's workers load. No hook of vLLM tells a connector, so the method that loads them is wrapped.

Written for vLLM 0.32 and 0.33. One instance per worker-role connector; used on the worker's thread.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

log = logging.getLogger("kvservice.connector")

METHOD = "_load_adapter"  # of vLLM's class; it reads the files of one adapter
_watching: weakref.WeakSet[AdapterLoads] = weakref.WeakSet()


class AdapterLoads:
    def __init__(self) -> None:
        """Note what is loaded from here on."""
        self._loaded: dict[int, str] = {}  # by vLLM's number
        _watching.add(self)
        _wrap()

    def note(self, number: int, path: str) -> None:
        self._loaded[number] = path

    def take(self) -> dict[int, str]:
        """vLLM's number of each adapter that was loaded since the last call, and the path it was last loaded from. Call
        it in each step: what was loaded before that computed nothing."""
        found, self._loaded = self._loaded, {}
        return found


@functools.cache
def _wrap() -> None:
    """Once in a process."""
    try:
        from vllm.lora.worker_manager import WorkerLoRAManager

        load = getattr(WorkerLoRAManager, METHOD)
    except (ImportError, AttributeError) as error:
        log.warning("a load of an adapter in place is seen with the first request for it only: %s", error)
        return

    @functools.wraps(load)
    def noted(manager: Any, lora_request: Any, *args: Any, **kwargs: Any) -> Any:
        for each in tuple(_watching):  # before it is read: a load that fails midway is taken for one
            each.note(lora_request.lora_int_id, lora_request.lora_path)
        return load(manager, lora_request, *args, **kwargs)

    setattr(WorkerLoRAManager, METHOD, noted)
