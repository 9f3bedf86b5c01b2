"""Whose fault it is that a server does not answer, and what becomes of the requests that wait at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.integration.proxy_lab import Lab


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    made = Lab()
    yield made
    await made.end()


async def test_requests_leave_a_server_that_a_request_found_dead(lab: Lab) -> None:
    """The request finds it before its next health check does, which then fails at a server that is sick already."""
    hanging, other = await lab.server(hold=True), await lab.server(hold=True)
    proxy = await lab.proxy([], [hanging, other], check_seconds=60)
    asking = [asyncio.create_task(proxy.post({"prompt": "x"})) for _ in range(2)]
    await hanging.until(lambda: len(hanging.seen) == 1)
    await other.until(lambda: len(other.seen) == 1)
    await hanging.stop_listening()
    asking.append(asyncio.create_task(proxy.post({"prompt": "x"})))  # it is the turn of the first server
    await other.until(lambda: len(other.seen) == 3)
    await hanging.until(lambda: hanging.seen[0].cancelled)
    other.release()
    assert [status for status, _ in await asyncio.gather(*asking)] == [200, 200, 200]
