"""What the console asks of a service. The command line makes one. Everything runs on the console's event loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

Json = dict[str, Any]  # what json.dumps takes


class Source(Protocol):
    async def overview(self) -> Json:
        """The whole service now, as `kvservice status -o json` has it. A part that does not answer is in it with its
        error. Raises KVServiceError when there is no service."""
        ...

    async def blocks(self, wanted: Mapping[str, str]) -> Json:
        """Some of the blocks that fit these filters, as `kvservice blocks -o json` has them. Raises KVServiceError."""
        ...

    async def explain(self, request_id: str) -> Json:
        """Why a request hit what it hit, as `kvservice explain -o json` has it. Raises KVServiceError."""
        ...

    async def close(self) -> None: ...
