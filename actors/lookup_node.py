"""LookupNode: hosts one lookup partition. Its port is fixed, so that clients find it at the same address after a
restart.

What a lookup partition is made of is imported where it runs, see actors.cache_shard.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ray


class LookupNode:
    """A lookup partition as a Ray actor; actors.supervisor makes it one. A method blocks only the thread that runs
    it."""

    def __init__(
        self,
        address: str,
        partition: int,
        partition_count: int,
        tls_dir: str = "",
        allow_plaintext: bool = False,
        heartbeat_seconds: float = 1.0,
        traces: str = "off",
        service: str = "default",
        metrics_port: int = 0,
    ) -> None:
        """`metrics_port` 0 means that no metrics are served."""
        from kvservice.actors.hosting import HostedServer
        from kvservice.core.directory.membership import patience
        from kvservice.lookup.server import LookupServer
        from kvservice.observe import tracing
        from kvservice.observe.endpoint import serve_endpoint
        from kvservice.observe.lookup_metrics import LookupCollector

        tracing.start(traces, "kvservice-lookup", service=service)
        self._address = address
        self._partition = partition
        self._server = LookupServer(
            address,
            partition,
            partition_count,
            tls_dir=tls_dir,
            allow_plaintext=allow_plaintext,
            silence=patience(heartbeat_seconds),
        )
        self._hosted = HostedServer(self._server.start)
        self._end_metrics: Callable[[], None] = lambda: None
        if metrics_port:
            collector = LookupCollector(service, self._hosted.reader(self._server.numbers))
            condition = self._hosted.reader(self._server.condition)
            self._end_metrics = serve_endpoint([collector], condition, metrics_port)

    def ready(self) -> dict[str, Any]:
        """Address, node and process of this lookup partition. Raises the KVServiceError that keeps it from starting."""
        self._hosted.ensure_started()
        node = ray.get_runtime_context().get_node_id()
        return {"partition": self._partition, "address": self._address, "ray_node": node, "pid": os.getpid()}

    def stop(self) -> int:
        from kvservice.observe import tracing

        self._end_metrics()
        self._hosted.close(self._server.stop())
        tracing.stop()
        return os.getpid()
