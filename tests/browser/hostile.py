"""`python -m tests.browser.hostile`: a console of a real service, whose every name is markup.

A shard refuses some of these names, a shard that somebody wrote himself would not.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kvservice.cli.console import ServiceSource
from kvservice.console.access import new_token
from kvservice.console.server import serve
from kvservice.console.settings import ConsoleSettings

MARKUP = "<img src=x onerror=window.attacked=1>"
NAMES = ("service", "node_id", "host", "address", "version", "transport", "error", "name", "model", "namespace")
MORE = ("fingerprint", "tenant", "request_id", "source", "target", "message", "miss")


class HostileSource(ServiceSource):
    async def overview(self) -> dict[str, Any]:
        found = await super().overview()
        found["tenants"] = [{"name": "x", "used_bytes": 1, "quota_bytes": 2, "in_flight": 0, "counters": {}}]
        found["refused"] = [{"node_id": "x", "model": "x", "message": "x", "differences": [], "age_seconds": 1.0}]
        found["problems"] = [MARKUP]
        found["evictions"] = {MARKUP: 5}
        for node in found["nodes"]:
            node["evictions"] = {MARKUP: 5}
        return hostile(found)


def hostile(value: Any, name: str = "") -> Any:
    """The same data with markup before every name in it."""
    if isinstance(value, dict):
        return {key: hostile(inner, key) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [hostile(inner, name) for inner in value]
    windows = ("start", "10m", "1m")
    return f"{MARKUP}{value}" if name in (*NAMES, *MORE) and value not in windows else value


async def main() -> None:
    source = HostileSource(None, None)
    await serve(ConsoleSettings(new_token(), port=0), source, lambda url: print(url, flush=True))


if __name__ == "__main__":
    asyncio.run(main())
