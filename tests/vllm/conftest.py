"""An engine that more than one module asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.replica import Replica


@pytest.fixture(scope="session")
def without_cache(shallow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """An engine without our connector: what it says is what everybody with `shallow_model` has to say. Not yet `ready`,
    so that it loads beside those of the module that asks first."""
    log = tmp_path_factory.mktemp("without-cache") / "replica.log"
    replica = Replica(shallow_model, None, log, max_model_len=2048, max_num_batched_tokens=256)
    try:
        yield replica
    finally:
        replica.close()
