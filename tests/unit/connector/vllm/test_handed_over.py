"""Prompts that one engine computes for another, at random and on vLLM's own scheduler, before a model that shows every
wrong byte: see handed_over.py.

A failure names its settings and its seed. `make test-all` plays more settings and more seeds than the gate.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvservice.core.acquire import acquisitions, handoff
from kvservice.pool import remote
from kvservice.units import MiB
from tests.sim.mutation import Mutant, planted
from tests.unit.connector.vllm.handed_over import HandedOver, PairSettings
from tests.unit.connector.vllm.hash_chain import EngineSettings, Group
from tests.unit.connector.vllm.random_plays import STEPS, check_shows, folder, plain_cells, quick_retries

__all__ = ["folder", "plain_cells", "quick_retries"]  # fixtures

GATE_SEED, SLOW_SEEDS = 1, range(2, 8)
Given = dict[str, Any]  # of EngineSettings


def pair(both: Given = {}, prefill: Given = {}, decode: Given = {}, **rest: Any) -> PairSettings:  # noqa: B006
    """A producer and a consumer, unless they say something else."""
    timeout = {"handoff_timeout_seconds": 60.0 if rest.get("is_calm") else 20.0}

    def engine(role: str, given: Given) -> EngineSettings:
        return EngineSettings(**{"role": role, **both, **given, "options": {**timeout, **given.get("options", {})}})

    shared = both.get("options", {})
    of_prefill, of_decode = ({**it, "options": {**shared, **it.get("options", {})}} for it in (prefill, decode))
    return PairSettings(engine("kv_producer", of_prefill), engine("kv_consumer", of_decode), **rest)


AHEAD: Given = {"runs_ahead": True}
BOTH: Given = {"role": "kv_both"}
FAILING: Given = {"failures": 0.1}
LOST: Given = {"losses": 0.02}
SMALL: Given = {"pool_bytes": 4 * MiB}
WINDOWS: Given = {"groups": (Group("full", layers=2), Group("sliding", 40), Group("sliding", 100, block=32))}
STATES: Given = {"groups": (Group("state"), Group("full", layers=2), Group("state"))}


def with_options(**options: object) -> Given:
    return {"options": options}


GATE = {
    "calm": pair(AHEAD, is_calm=True),
    "calm on one node": pair(BOTH | AHEAD, is_calm=True, one_node=True),
    "calm evicting": pair(BOTH | with_options(offload="evicting"), is_calm=True),
    "failing": pair(BOTH | AHEAD | FAILING),
    "small pool failing": pair(FAILING, **SMALL),
    "lost": pair(BOTH | FAILING, **LOST),
    "bad wire": pair(AHEAD, faults=0.03),
    "layerwise failing": pair(BOTH | FAILING | with_options(layerwise="both")),
    "two ranks failing": pair(BOTH | AHEAD | FAILING, {"ranks": 2, "heads": 2}, {"heads": 2}),
    "windows failing": pair(BOTH | AHEAD | FAILING | WINDOWS),
    "states lost": pair(BOTH | FAILING | STATES, **LOST),
    "two ranks of one head": pair(AHEAD | {"ranks": 2}),
}
SLOW = {
    "plain": pair(),
    "one node": pair(AHEAD, one_node=True),
    "calm both roles": pair(BOTH | AHEAD, is_calm=True),
    "calm lazy": pair(BOTH | with_options(offload="lazy"), is_calm=True),
    "calm tails": pair(BOTH | AHEAD | with_options(tails=True), is_calm=True),
    "calm large slots": pair(AHEAD | with_options(slot_tokens=48), is_calm=True),
    "calm ranks": pair(AHEAD | {"heads": 2}, {}, {"ranks": 2}, is_calm=True),
    "small pool on one node": pair(BOTH | AHEAD, one_node=True, **SMALL),
    "tiny pool failing": pair(BOTH | FAILING, pool_bytes=5 * MiB // 2),
    "lost on one node": pair(BOTH | AHEAD, one_node=True, **LOST),
    "lost layerwise": pair(BOTH | with_options(layerwise="both"), **LOST),
    "lost ranks": pair(BOTH | AHEAD | {"ranks": 2, "heads": 2}, **LOST),
    "bad wire on one node": pair(BOTH | AHEAD, one_node=True, faults=0.03),
    "bad wire failing": pair(BOTH | FAILING, faults=0.03, **SMALL),
    "layerwise saves": pair({}, with_options(layerwise="save"), with_options(layerwise="load")),
    "tails failing": pair(FAILING | with_options(tails=True)),
    "large slots failing": pair(BOTH | FAILING | with_options(slot_tokens=48)),
    "lazy": pair(BOTH | AHEAD | with_options(offload="lazy")),
    "evicting failing": pair(BOTH | FAILING | with_options(offload="evicting")),
    "drafts": pair({}, {}, {"drafts": 3} | AHEAD),
    "stored after a hand-off": pair(BOTH | AHEAD | with_options(store_after_handoff=True)),
    "no prefix caching": pair(FAILING | {"prefix_caching": False}),
    "calm windows": pair(AHEAD | WINDOWS, is_calm=True),
    "windows over a bad wire": pair(BOTH | AHEAD | WINDOWS, faults=0.03),
    "states on one node": pair(BOTH | AHEAD | FAILING | STATES, one_node=True),
    "priorities": pair(AHEAD | {"policy": "priority"}),
    "four ranks failing": pair(BOTH | AHEAD | FAILING | {"ranks": 4, "heads": 2}),
    "two ranks layerwise": pair(BOTH | FAILING | {"ranks": 2, "heads": 2} | with_options(layerwise="both")),
    "two ranks with large slots": pair(BOTH | FAILING | {"ranks": 2, "heads": 2} | with_options(slot_tokens=48)),
}
SETTINGS = GATE | SLOW
# Bugs, each with the rule that it breaks, settings that show it, what they say, and where it is planted.
BUGS = (
    (
        "two ranks of one head",
        "wrong",
        Mutant(
            "ranks with the same heads take turns",
            "kvservice.core.segment.layout",
            "return slot % self.replica_count == self.replica",
            "return slot % self.replica_count == self.replica == 0",
        ),
    ),
    (
        "calm on one node",
        "cut",
        Mutant(
            "a hand-off waits for the copies of others",
            "kvservice.connector.scheduler.stores",
            "            self._belongs_to(store, first.writes)\n",
            "            pass\n",
        ),
    ),
    (
        "calm evicting",
        "cut",
        Mutant(
            "a prompt that is handed off is stored while it is computed",
            "kvservice.connector.scheduler.half",
            "request.offload = self._offload if request.writes is None else Offload.EAGER",
            "request.offload = self._offload",
        ),
    ),
)
SEARCHED = range(1, 11)  # seeds


@pytest.fixture(autouse=True)
def quick(plain_cells: None, quick_retries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers ask again soon."""
    monkeypatch.setattr(acquisitions, "FOLLOW_WAIT_SECONDS", 0.2)


def play(folder: Path, place: Path, name: str, seed: int) -> Counter[str]:
    """Returns what was counted."""
    with pytest.MonkeyPatch.context() as patch:
        # Nobody waits long for what does not come. In a calm play all comes, on a busy machine after seconds.
        is_calm = SETTINGS[name].is_calm
        patch.setattr(handoff, "CLOSED_SECONDS", 60.0 if is_calm else 0.5)
        for module in (handoff, acquisitions):
            patch.setattr(module, "APPEAR_SECONDS", 30.0 if is_calm else 0.3)
        if is_calm:
            patch.setattr(remote, "FOLLOW_SLACK_SECONDS", 30.0)
        try:
            it = HandedOver(folder, place, SETTINGS[name], seed)
            try:
                for _ in range(STEPS):
                    it.step()
                it.drain()
                return it.counters()
            finally:
                it.close()
        except Exception as error:
            error.add_note(f"settings {name!r}, seed {seed}")
            raise


@pytest.mark.parametrize("name", GATE)
def test_no_byte_is_wrong_behind_a_handoff(folder: Path, tmp_path: Path, name: str) -> None:
    """And no reader waits in vain, and nobody holds anything when all requests have ended."""
    found = play(folder, tmp_path, name, GATE_SEED)
    if not found["loaded_blocks"]:  # on a busy machine a play of lost connections can lose all of them
        again = tmp_path / "again"
        again.mkdir()
        found += play(folder, again, name, GATE_SEED + 1)
    check_shows(found, "handoffs_written", "handoffs_heard")


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW_SEEDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_no_byte_is_wrong_with_more_handoffs(folder: Path, tmp_path: Path, name: str, seed: int) -> None:
    assert play(folder, tmp_path, name, seed)["requests_checked"]


@pytest.mark.parametrize(("name", "says", "bug"), BUGS, ids=[bug.name for *_, bug in BUGS])
def test_a_planted_bug_of_handoffs_shows(folder: Path, tmp_path: Path, name: str, says: str, bug: Mutant) -> None:
    with planted(bug):
        found = next(filter(None, (fault(folder, tmp_path / str(seed), name, seed) for seed in SEARCHED)), "")
    assert says in found, f"{found or 'nothing'} was found"


def fault(folder: Path, place: Path, name: str, seed: int) -> str:
    place.mkdir()
    try:
        play(folder, place, name, seed)
    except AssertionError as error:
        return str(error)
    return ""
