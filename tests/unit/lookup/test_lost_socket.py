"""A lookup partition whose socket was removed, with its directory, and cannot be made again for a while."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from kvservice.lookup import server as lookup_server
from kvservice.lookup.server import LookupServer
from kvservice.testing.eventually import eventually_async


async def test_a_socket_that_cannot_be_made_again_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lookup_server, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(lookup_server, "EXPIRE_SECONDS", 0.01)
    folder = tmp_path / "run"
    server = LookupServer(f"unix:{folder}/lookup-0.sock")
    await server.start()
    try:
        shutil.rmtree(folder)
        folder.touch()
        await eventually_async(lambda: "maintenance_failed" in caplog.text, "the reason")
        await asyncio.sleep(0.3)  # some further looks
        assert [record.getMessage() for record in caplog.records].count("maintenance_failed") == 1
        folder.unlink()
        await eventually_async((folder / "lookup-0.sock").is_socket, "the socket")
    finally:
        await server.stop()
