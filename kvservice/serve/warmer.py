"""Tells a node's shard to bring a prompt before the engine asks: the router has chosen, and knows the prompt's keys.

Runs on the router's event loop, beside its requests: no request waits for it, and what fails is only counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from kvservice.aio import begun, end_tasks
from kvservice.auth.tls import TlsFiles
from kvservice.auth.token import Token
from kvservice.client.operator import OperatorClient
from kvservice.core.messages import WarmRequest
from kvservice.errors import KVServiceError
from kvservice.units import BlockKey

WARMS_AT_ONCE_MAX = 32  # of one router: prompts that wait behind more would be asked for by their engine first
WARM_SECONDS = 5.0  # after that the engine has asked by itself


class Warmer:
    """`hold_seconds` is how long the blocks are held; 0 = nothing is warmed."""

    def __init__(self, hold_seconds: float, tls: TlsFiles | None = None, token: Token | None = None) -> None:
        self._hold_seconds = hold_seconds
        self._client = OperatorClient(tls, token)
        self._tasks: set[asyncio.Task[None]] = set()
        self.counters: Counter[str] = Counter()

    def warm(self, address: str, fingerprint: bytes, keys: Sequence[BlockKey]) -> None:
        """Begin to warm these blocks at the shard of this address. Returns at once."""
        if not self._hold_seconds or not keys:
            return
        if len(self._tasks) >= WARMS_AT_ONCE_MAX:
            self.counters["warms_left_out"] += 1
            return
        request = WarmRequest(fingerprint, tuple(keys), WARM_SECONDS, self._hold_seconds)
        begun(self._warm(address, request), self._tasks)

    async def _warm(self, address: str, request: WarmRequest) -> None:
        try:
            result = await self._client.warm(address, request)
        except KVServiceError as error:
            self.counters[f"warms_failed_{error.reason.lower()}"] += 1
            return
        self.counters["warms"] += 1
        self.counters["warmed_blocks"] += sum(count for _, count in result.fetched)

    async def close(self) -> None:
        await end_tasks(self._tasks)
        await self._client.close()
