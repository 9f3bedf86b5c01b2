"""What names an engine's hashes and its pools: wrong, another engine's blocks or an earlier pool's slots are taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kvservice.connector.vllm import compat
from kvservice.connector.worker.remote_copier import RemoteCopier
from tests.unit.connector.line import attachment, pool_info


@pytest.mark.parametrize("given", ["7", None])
def test_the_hash_seed_is_the_one_the_engine_was_started_with(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "get_none_hash_seed", lambda: "vLLM's own")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    config = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256_cbor"))
    assert compat.hash_fields(config)["hash_seed"] == (given or "vLLM's own")


class Followed:
    """The link and the fallback of a copier, as far as adopting a pool concerns them."""

    def __init__(self) -> None:
        self.sources: list[Any] = []

    def follow(self, directory: Path, source: Any) -> None:
        self.sources.append(source)

    def adopt(self, memory: torch.Tensor, pool: Any) -> None:
        pass


def test_every_pool_that_is_adopted_has_a_number_of_its_own() -> None:
    """A worker tells the copies for one pool from those for the pool after it by that number."""
    followed = Followed()
    copier = RemoteCopier(cast("Any", followed), cast("Any", followed))
    for number in (1, 2, 3):
        copier.adopt(torch.empty(0), replace(pool_info(attachment(number)), node_directory="/node"))
    assert len({source.pool_id for source in followed.sources}) == len(followed.sources) == 3
