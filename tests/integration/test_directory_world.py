"""Whatever partitions, nodes and connections went through, all answers are those of a plain model in the end.

KVSERVICE_DIRECTORY_WORLDS sets how many worlds are played.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import ModuleType

import pytest

from kvservice.core.directory import announce
from kvservice.core.directory import mirror as core_mirror
from kvservice.lookup import announce_pump, mirror_reader, mirror_writer, server, watch
from tests.integration.directory_world import World

WORLDS = int(os.environ.get("KVSERVICE_DIRECTORY_WORLDS", "3"))
STEPS = 50


@pytest.fixture(autouse=True)
def small_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred keys go in several pieces, and what takes seconds elsewhere takes tenths."""
    pieces: dict[ModuleType, dict[str, float]] = {
        announce: {"UPDATE_KEYS_MAX": 24, "PENDING_MAX": 100},
        watch: {"SNAPSHOT_KEYS": 16, "SNAPSHOTS_MAX": 2, "QUEUE_BYTES_MAX": 16 << 10},
        server: {"SWEEP_KEYS": 16},
        core_mirror: {"SWEEP_KEYS": 16, "STALE_SECONDS": 0.6},
        mirror_writer: {"PIECE_BYTES": 128, "HEARTBEAT_SECONDS": 0.1, "SILENT_SECONDS": 0.5, "RETRY_SECONDS_MAX": 0.3},
        mirror_reader: {"LOOK_AGAIN_SECONDS": 0.05},
        announce_pump: {"CALL_SECONDS": 0.4, "BACKOFF_SECONDS_MAX": 0.3},
    }
    for module, values in pieces.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("seed", range(WORLDS))
async def test_every_node_finds_what_the_model_holds(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, seed)
    await world.start()
    try:
        for _ in range(2):
            for _ in range(STEPS):
                print(await world.step())  # shown when it fails
            await world.rest()
    finally:
        await world.stop()
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.CRITICAL]
