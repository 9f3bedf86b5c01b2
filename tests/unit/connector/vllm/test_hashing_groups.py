"""Requests at random before a model of several KV cache groups that shows every wrong byte: see hashing_groups.py.

A failure names its settings and its seed. `make test-all` plays more seeds than the gate.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.mutation import Mutant
from tests.unit.connector.vllm.hash_chain import EngineSettings, Group
from tests.unit.connector.vllm.random_plays import (
    check_bug_shows,
    check_no_byte_is_wrong,
    check_shows,
    folder,
    plain_cells,
    play,
    play_together,
    quick_retries,
)

__all__ = ["folder", "plain_cells", "quick_retries"]  # fixtures

GATE_SEEDS, SLOW_SEEDS = range(1, 3), range(3, 13)
FULL, STATE = Group("full", layers=2), Group("state")
NARROW, WIDE, LARGE = Group("sliding", 40), Group("sliding", 100), Group("sliding", 100, block=32)
SETTINGS = {
    "windows": EngineSettings(groups=(FULL, NARROW, LARGE), runs_ahead=True),
    "windows failing": EngineSettings(groups=(Group("sliding", 33), FULL, Group("sliding", 33), WIDE), failures=0.1),
    "chunks failing": EngineSettings(groups=(FULL, Group("chunk", 64), NARROW), runs_ahead=True, failures=0.1),
    "states": EngineSettings(groups=(STATE, FULL, STATE), runs_ahead=True),
    "states alone failing": EngineSettings(groups=(STATE, Group("state", layers=2)), failures=0.1),
    "states and windows failing": EngineSettings(groups=(FULL, STATE, NARROW), runs_ahead=True, failures=0.1),
    "small pool": EngineSettings({"memory": "6MiB"}, groups=(FULL, STATE, NARROW)),
    "lazy": EngineSettings({"offload": "lazy"}, groups=(FULL, STATE, NARROW)),
    "priorities": EngineSettings(groups=(FULL, STATE, WIDE), policy="priority", runs_ahead=True),
}
BUGS = (
    (
        "windows",
        Mutant(
            "a hit has the whole window before its end",
            "kvservice.core.block.window_groups",
            "return max(0, tokens - self.sliding_tokens + 1)",
            "return max(0, min(tokens - 1, tokens - self.sliding_tokens + 33))",
            seed=1,
        ),
    ),
    (
        "states",
        Mutant(
            "a hit has the state at its end",
            "kvservice.core.block.window_groups",
            "return max(0, tokens - 1)",
            "return tokens",
            seed=1,
        ),
    ),
)


@pytest.mark.parametrize("name", SETTINGS)
def test_no_byte_of_any_group_is_wrong(folder: Path, name: str) -> None:
    check_no_byte_is_wrong(folder, SETTINGS[name], GATE_SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW_SEEDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_no_byte_of_any_group_is_wrong_with_more_seeds(folder: Path, name: str, seed: int) -> None:
    assert play(folder, SETTINGS[name], seed)["requests_checked"]


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("groups", [(), (FULL, STATE, NARROW)], ids=["one group", "groups"])
def test_engines_of_other_weights_share_no_wrong_byte(folder: Path, tmp_path: Path, groups: tuple[Group, ...]) -> None:
    """One that has new weights reads nothing of the other's, at a shard that is lost meanwhile."""
    found = play_together(folder, tmp_path, EngineSettings(groups=groups), 1)
    check_shows(found, "resets")


@pytest.mark.parametrize(("name", "bug"), BUGS, ids=[bug.name for _, bug in BUGS])
def test_a_planted_bug_of_groups_shows(folder: Path, name: str, bug: Mutant) -> None:
    check_bug_shows(folder, SETTINGS[name], bug)
