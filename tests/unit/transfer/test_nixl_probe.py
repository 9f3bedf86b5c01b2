"""What `doctor` believes of NIXL: that bytes moved, not that a transfer said so."""

from __future__ import annotations

import ctypes
import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvservice.transfer import nixl_probe


class Agent:
    """As NIXL's, as far as the probe calls it. `moves`: whether a transfer that says DONE has moved anything."""

    def __init__(self, moves: bool) -> None:
        self._moves = moves

    def get_plugin_list(self) -> list[str]:
        return ["UCX"]

    def register_memory(self, rows: list[tuple[Any, ...]], kind: str) -> None:
        assert kind == "DRAM" and rows

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return b"remote"

    def get_xfer_descs(self, rows: list[tuple[int, int, int]], kind: str) -> list[tuple[int, int, int]]:
        return rows

    def initialize_xfer(self, operation: str, local: Any, remote: Any, peer: str) -> tuple[Any, Any]:
        assert (operation, peer) == ("READ", "remote")
        return local[0], remote[0]

    def transfer(self, handle: tuple[Any, Any]) -> str:
        (to, size, _), (source, _, _) = handle
        if self._moves:
            ctypes.memmove(to, source, size)
        return "DONE"


@pytest.mark.parametrize("moves", [True, False])
def test_a_transfer_that_moves_nothing_is_not_taken_for_one(
    moves: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api = SimpleNamespace(nixl_agent=lambda name, config: Agent(moves), nixl_agent_config=lambda backends: None)
    monkeypatch.setattr(nixl_probe, "load_nixl", lambda: (api, Exception))
    monkeypatch.setattr(nixl_probe.os, "_exit", lambda code: None)
    nixl_probe.main()
    assert json.loads(capsys.readouterr().out.strip().removeprefix("@"))["moved"] is moves
