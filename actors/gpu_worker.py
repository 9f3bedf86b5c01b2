"""GpuWorker: one a GPU, beside its node's shard; copies blocks between engines' KV memory and the pool's slots.

On a node without a GPU the same actor serves CPU engines. Ray restarts it when its process dies; the supervisor
replaces it when a copy hangs or the GPU is lost to it, which `ready` tells without waiting for any copy.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import ray

from kvservice.copying.worker.devices import device_named
from kvservice.copying.worker.server import CopyWorker, CopyWorkerConfig
from kvservice.errors import KVServiceError
from kvservice.observe.copy_worker_metrics import serve_copy_worker_metrics

log = logging.getLogger("kvservice.actors")


class GpuWorker:
    """Made into a Ray actor by actors.supervisor. No method waits for a copy, but `stop`."""

    def __init__(self, config: CopyWorkerConfig, device: str, metrics_port: int) -> None:
        """`device`: "cpu", or the index of a GPU on this node. `metrics_port` 0 = none."""
        self._config = config
        self._device = device
        self._metrics_port = metrics_port
        self._lock = threading.Lock()
        self._server: CopyWorker | None = None
        self._end_metrics: Callable[[], None] = lambda: None
        try:
            self._ensure_started()
        except KVServiceError as error:
            # An exception in a constructor would make Ray give the actor up; `ready` tries again.
            log.error("start failed: %s", error.message)

    def ready(self) -> dict[str, Any]:
        """Who this worker is, and how it does. Raises the KVServiceError that keeps it from starting."""
        server = self._ensure_started()
        record = server.record
        assert record is not None
        node = ray.get_runtime_context().get_node_id()
        about = {"node_id": record.node_id, "socket": record.socket, "device": record.device, "pid": os.getpid()}
        return {**server.state(), **about, "ray_node": node}

    def stop(self) -> int:
        """Blocks until the batches under way have ended. Returns the process id, which is about to end."""
        self._end_metrics()
        with self._lock:
            if self._server is not None:
                self._server.stop()
        return os.getpid()

    def _ensure_started(self) -> CopyWorker:
        with self._lock:
            if self._server is None:
                server = CopyWorker(self._config, device_named(self._device))
                server.start()
                self._server = server
                if self._metrics_port:
                    labels = (self._config.service, self._config.node_id, self._device)
                    self._end_metrics = serve_copy_worker_metrics(labels, server.state, self._metrics_port)
            return self._server
