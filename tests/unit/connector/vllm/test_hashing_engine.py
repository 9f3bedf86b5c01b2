"""Requests at random on vLLM's own scheduler, before a model that shows every wrong byte: see hashing_engine.py.

A failure names its settings and its seed, and `-k "layerwise and 7"` plays them again. `make test-all` plays more seeds
than the gate.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.mutation import Mutant
from tests.unit.connector.vllm.hash_chain import EngineSettings
from tests.unit.connector.vllm.random_plays import check_bug_shows, check_no_byte_is_wrong, folder, plain_cells, play

__all__ = ["folder", "plain_cells"]  # fixtures

GATE_SEEDS, SLOW_SEEDS = range(1, 3), range(3, 13)
SETTINGS = {
    "plain": EngineSettings(),
    "ahead": EngineSettings(runs_ahead=True),
    "ahead failing": EngineSettings(runs_ahead=True, failures=0.15),
    "lazy": EngineSettings({"offload": "lazy"}, runs_ahead=True),
    "lazy with a small pool": EngineSettings({"offload": "lazy", "memory": "4MiB"}),
    "small pool failing": EngineSettings({"memory": "4MiB"}, runs_ahead=True, failures=0.1),
    "evicting": EngineSettings({"offload": "evicting"}, runs_ahead=True),
    "evicting failing": EngineSettings({"offload": "evicting"}, failures=0.1),
    "tails": EngineSettings({"tails": True}, runs_ahead=True),
    "tails failing": EngineSettings({"tails": True}, failures=0.1),
    "layerwise": EngineSettings({"layerwise": "both"}),
    "layerwise failing": EngineSettings({"layerwise": "both"}, failures=0.3),
    "layerwise loads failing": EngineSettings({"layerwise": "load"}, failures=0.1),
    "layerwise saves": EngineSettings({"layerwise": "save"}, runs_ahead=True),
    "layerwise with large slots": EngineSettings({"layerwise": "both", "slot_tokens": 48}, failures=0.2),
    "large slots": EngineSettings({"slot_tokens": 48}, runs_ahead=True),
    "large slots failing": EngineSettings({"slot_tokens": 48}, failures=0.1),
    "drafts": EngineSettings(drafts=3),
    "drafts and tails failing": EngineSettings({"tails": True}, drafts=3, failures=0.05),
    "drafts ahead": EngineSettings(drafts=3, runs_ahead=True),
    "draft layer": EngineSettings(drafts=3, draft_layer=True, prefix_caching=False),
    "draft layer failing": EngineSettings(drafts=3, draft_layer=True, prefix_caching=False, failures=0.1),
    "draft layer ahead": EngineSettings(drafts=3, draft_layer=True, prefix_caching=False, runs_ahead=True),
    "draft layer and large slots": EngineSettings(
        {"slot_tokens": 48}, drafts=3, draft_layer=True, prefix_caching=False
    ),
    "draft layer beside vLLM's cache": EngineSettings(drafts=3, draft_layer=True, runs_ahead=True, failures=0.1),
    "no prefix caching": EngineSettings(prefix_caching=False, runs_ahead=True),
    "no prefix caching failing": EngineSettings(prefix_caching=False, failures=0.1),
    "priorities": EngineSettings(policy="priority", runs_ahead=True),
    "prompts only": EngineSettings({"store": "prompts"}, runs_ahead=True),
}
# Bugs, each with the rule that it breaks, settings that show it, and where it is planted.
BUGS = (
    (
        "plain",
        Mutant(
            "a load copies every block that it counts",
            "kvservice.connector.scheduler.loads",
            "LoadPlan(request.request_id, tuple(entries), borrows)",
            "LoadPlan(request.request_id, tuple(entries[:-1] or entries), borrows)",
        ),
    ),
    (
        "plain",
        Mutant(
            "a block is stored under its own name",
            "kvservice.connector.scheduler.store_plan",
            "grouping.stored(part.table, group, position)",
            "grouping.stored(part.table, group, position and position - 1)",
        ),
    ),
    (
        "ahead failing",
        Mutant(
            "a load that failed is computed again",
            "kvservice.connector.worker.half",
            "            self._failed.add(load.request_id)\n",
            "            pass\n",
        ),
    ),
    (
        "layerwise with large slots",
        Mutant(
            "what a load that was not planned would have filled goes nowhere",
            "kvservice.connector.layerwise.scheduler",
            "        super().allocated(request_id, block_ids, external_tokens)\n",
            "        try:\n            super().allocated(request_id, block_ids, external_tokens)\n"
            "        except OSError:\n            self._loads._layered.pop(request_id, None)\n            raise\n",
            seed=7,
        ),
    ),
    (
        "layerwise failing",
        Mutant(
            "nothing is stored of a load that is not confirmed",
            "kvservice.connector.layerwise.scheduler",
            "        if self._loads.is_unconfirmed(request.request_id):\n            return []\n",
            "",
        ),
    ),
    (
        "lazy",
        Mutant(
            "a block that a preempted request lost is not stored",
            "kvservice.connector.scheduler.engine_cache",
            "found = cache.find(hashes[index])",
            "found = cache.find(hashes[index]) or 0",
            seed=7,
        ),
    ),
    (
        "draft layer",
        Mutant(
            "a block with a draft layer is named by the block behind it",
            "kvservice.connector.vllm.walk",
            "HashesBehind(request.block_hashes) if self._ahead else request.block_hashes",
            "request.block_hashes",
        ),
    ),
    (
        "draft layer beside vLLM's cache",
        Mutant(
            "with a draft layer nothing is stored of vLLM's own hit",
            "kvservice.connector.vllm.walk",
            "                    scheduler.keep_out(request_id, begin)\n",
            "                    pass\n",
        ),
    ),
    (
        "draft layer",
        Mutant(
            "nothing is stored of a step without drafts",
            "kvservice.connector.vllm.walk",
            "                scheduler.keep_out(request_id, sys.maxsize)\n",
            "                pass\n",
        ),
    ),
    (
        "plain",
        Mutant(
            "new weights have new names",
            "kvservice.connector.scheduler.half",
            "            self._keyring.begin_term(term)\n",
            "",
        ),
    ),
)


@pytest.mark.parametrize("name", SETTINGS)
def test_no_byte_is_wrong(folder: Path, name: str) -> None:
    check_no_byte_is_wrong(folder, SETTINGS[name], GATE_SEEDS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW_SEEDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_no_byte_is_wrong_with_more_seeds(folder: Path, name: str, seed: int) -> None:
    assert play(folder, SETTINGS[name], seed)["requests_checked"]


@pytest.mark.parametrize(("name", "bug"), BUGS, ids=[bug.name for _, bug in BUGS])
def test_a_planted_bug_shows_as_wrong_bytes(folder: Path, name: str, bug: Mutant) -> None:
    check_bug_shows(folder, SETTINGS[name], bug)
