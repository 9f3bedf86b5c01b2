"""Calls of grpc.aio that take no longer than their time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from kvservice.aio import within

R = TypeVar("R")
SLACK_SECONDS = 0.05  # gRPC's own deadline comes first wherever it holds: it says more


async def call_in_time(
    method: Callable[..., Awaitable[R]], request: Any, timeout: float, metadata: Sequence[tuple[str, str | bytes]] = ()
) -> R:
    """The answer of this method of a stub, within `timeout` seconds.

    gRPC's own deadline does not hold while the request waits in a full socket. A process that hangs reads nothing, and
    the call ends only with its connection. Raises AioRpcError as the call does, with DEADLINE_EXCEEDED for such a call.
    """
    try:
        return await within(timeout + SLACK_SECONDS, method(request, timeout=timeout, metadata=metadata))
    except asyncio.TimeoutError:
        nothing = grpc.aio.Metadata()
        code, text = grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded: what was sent was not read"
        raise grpc.aio.AioRpcError(code, nothing, nothing, text, None) from None
