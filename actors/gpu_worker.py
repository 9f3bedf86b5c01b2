"""GpuWorker: one per GPU, beside its node's shard. It copies blocks between engines' KV memory and the pool's slots.

On a node without a GPU the same actor serves CPU engines. Ray restarts it when its process dies. The supervisor
replaces it when a copy hangs or the GPU fails; `ready` reports both without waiting for any copy.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray

from kvservice.errors import KVServiceError

if TYPE_CHECKING:
    from kvservice.copying.worker.server import CopyWorker, CopyWorkerConfig

log = logging.getLogger("kvservice.actors")


class GpuWorker:
    """A copy worker as a Ray actor; actors.supervisor makes it one. No method but `stop` waits for a copy."""

    def __init__(self, config: CopyWorkerConfig, device: str, metrics_port: int) -> None:
        """`device` is "cpu" or the index of a GPU on this node. `metrics_port` 0 means that no metrics are served."""
        self._config = config
        self._device = device
        self._metrics_port = metrics_port
        self._lock = threading.Lock()
        self._server: CopyWorker | None = None
        self._end_metrics: Callable[[], None] = lambda: None
        try:
            self._ensure_started()
        except KVServiceError as error:
            # Ray gives an actor up if its constructor raises; `ready` tries to start again.
            log.error("start failed: %s", error.message)

    def ready(self) -> dict[str, Any]:
        """Address and state of this worker. Raises the KVServiceError that keeps it from starting."""
        server = self._ensure_started()
        record = server.record
        assert record is not None
        node = ray.get_runtime_context().get_node_id()
        about = {"node_id": record.node_id, "socket": record.socket, "device": record.device, "pid": os.getpid()}
        return {**server.state(), **about, "ray_node": node}

    def stop(self) -> int:
        """Stop; blocks until the copies under way have ended. Returns the id of this process, which is about to end."""
        self._end_metrics()
        with self._lock:
            if self._server is not None:
                self._server.stop()
        return os.getpid()

    def _ensure_started(self) -> CopyWorker:
        from kvservice.copying.worker.devices import device_named
        from kvservice.copying.worker.server import CopyWorker
        from kvservice.observe.copy_worker_metrics import CopyWorkerCollector
        from kvservice.observe.endpoint import serve_endpoint

        with self._lock:
            if self._server is None:
                server = CopyWorker(self._config, device_named(self._device))
                server.start()
                self._server = server
                if self._metrics_port:
                    labels = (self._config.service, self._config.node_id, self._device)
                    collector = CopyWorkerCollector(labels, server.state)
                    self._end_metrics = serve_endpoint([collector], server.condition, self._metrics_port)
            return self._server
