"""Health of a shard over grpc.health.v1. Being alive and taking work are separate.

    ""      the process serves
    live    the event loop answers; nothing else is checked. For liveness probes
    ready   a pool is open, works, and is not draining. For readiness probes

Runs on the server's event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpc_health.v1 import health, health_pb2

LIVE = "live"
READY = "ready"


class ReadinessServicer(health.aio.HealthServicer):  # type: ignore[misc, name-defined]  # missing in the stubs
    """`is_ready` is called on every check of "ready", so a drain shows at once."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        super().__init__()
        self._is_ready = is_ready

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802  the name is the RPC's
        if request.service != READY:
            return await super().Check(request, context)
        states = health_pb2.HealthCheckResponse
        return states(status=states.SERVING if self._is_ready() else states.NOT_SERVING)
