"""A small service for tests of the console's server: two nodes, whose counters grow when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from kvservice.console.source import Json
from kvservice.core.store.slots import SHOWN_STATES
from kvservice.errors import Unavailable

WINDOW = {
    "name": "1m",
    "seconds": 60.0,
    "asked_blocks": 0,
    "hit_rate": None,
    "local_hit_rate": None,
    "remote_hit_rate": None,
}


def pool(total: int = 1 << 20) -> Json:
    states = [{"state": name, "slots": 0, "bytes": 0, "percent": 0.0} for name in SHOWN_STATES]
    return {"total_bytes": total, "used_bytes": 0, "free_bytes": total, "used_percent": 0.0, "states": states}


def node(name: str, counters: Mapping[str, int], *, epoch: int = 1, state: str = "ok", **others: Any) -> Json:
    return {
        "node_id": name,
        "host": "host",
        "address": "10.0.0.1:7401",
        "epoch": epoch,
        "state": state,
        "error": "",
        "uptime_seconds": 1.0,
        "transport": "shm",
        "version": "1",
        "pool": pool(),
        "windows": [WINDOW],
        "evictions": {},
        "counters": dict(counters),
        "lookup_keys": 0,
        "mirror": None,
        "tiers": [],
        "pins": 0,
        "pinned_bytes": 0,
    } | others


def overview(*nodes: Json, at: float = 1000.0, **others: Any) -> Json:
    empty: Json = {
        name: [] for name in ("engines", "models", "refused", "flows", "tenants", "slowest", "lookups", "hits")
    }
    fixed = {"service": "default", "at": at, "restricted": False, "pool": pool(), "windows": [WINDOW]}
    return {**empty, **fixed, "nodes": list(nodes), "evictions": {}, "problems": [], **others}


class Pages:
    """A source. `asked` counts what it was asked; `answers` may be set to hold answers back."""

    def __init__(self) -> None:
        self.asked = {"overview": 0, "blocks": 0, "explain": 0}
        self.acquires = 0
        self.gone = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def overview(self) -> Json:
        self.asked["overview"] += 1
        if self.gone:
            raise Unavailable("no service is registered on this machine")
        self.acquires += 10
        return overview(node("n0", {"acquires": self.acquires}), node("n1", {}), at=1000.0 + self.asked["overview"])

    async def blocks(self, wanted: Mapping[str, str]) -> Json:
        return await self._answer("blocks", {"wanted": dict(wanted)})

    async def explain(self, request_id: str) -> Json:
        return await self._answer("explain", {"request_id": request_id})

    async def close(self) -> None: ...

    async def _answer(self, name: str, answer: Json) -> Json:
        self.asked[name] += 1
        await self.may_answer.wait()
        return answer
