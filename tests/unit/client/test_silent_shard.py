"""A shard that accepts connections and says nothing, as one that is stopped does."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kvservice.client.shard import ATTACH_SECONDS, ShardClient
from kvservice.core.messages import WarmRequest
from kvservice.errors import Unavailable
from kvservice.testing.builders import make_chain


async def test_a_warm_ends_in_its_own_time(tmp_path: Path) -> None:
    """It has a connection of its own, whose greeting is a part of it."""
    path = tmp_path / "shard.sock"

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(read, str(path)):
        began = time.monotonic()
        with pytest.raises(Unavailable):
            await ShardClient(str(path)).warm(WarmRequest(b"f" * 32, tuple(make_chain(1)), 0.1, 1.0))
        assert time.monotonic() - began < ATTACH_SECONDS / 2
