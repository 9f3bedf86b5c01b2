"""One service's storage as a dictionary: memory, disks and objects of two nodes, under restarts, clears and harm."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.property.storage_world import StorageWorld

# KVSERVICE_TEST_STORAGE_WORLDS=200 for a campaign; the first is number KVSERVICE_TEST_STORAGE_SEED.
WORLDS = int(os.environ.get("KVSERVICE_TEST_STORAGE_WORLDS", "3"))
FIRST = int(os.environ.get("KVSERVICE_TEST_STORAGE_SEED", "0"))
STEPS = {"save": 30, "load": 25, "together": 8, "pin": 4, "unpin": 3, "clear": 4, "restart": 6}
STEPS |= {"fill_up": 3, "harm": 4, "quiet": 6}


async def test_storage_gives_what_a_dictionary_would_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + WORLDS):
        (root := tmp_path / str(seed)).mkdir()
        with monkeypatch.context() as patch:
            counts += await play(StorageWorld(seed, root, patch), seed)
    assert counts["tier"] > WORLDS, "hardly a block came from a tier"
    assert counts["kept"] or WORLDS < 6, "no start found what an earlier one had left"


async def play(world: StorageWorld, seed: int) -> Counter[str]:
    step = "start"
    try:
        for node in world.nodes:
            await node.open()
        for number in range(80):
            name = world.random.choices([*STEPS], [*STEPS.values()])[0]
            step = f"step {number}, {name}"
            await getattr(world, name)(world.random.choice(world.nodes))
        step = "end"
        world.is_full = False
        for node in world.nodes:
            await node.quiet()
    except BaseException:
        print(f"world {seed}, {step}: KVSERVICE_TEST_STORAGE_SEED={seed} plays it first")
        raise
    finally:
        for node in world.nodes:
            await node.close()
    return world.counts
