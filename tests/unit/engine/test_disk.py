"""The reference engine with a disk below its memory: what one engine stored, the next one reads after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvservice.engine.loop import ReferenceEngine
from kvservice.engine.model import PagedModel
from kvservice.engine.options import EngineOptions
from kvservice.engine.sampling import Sampling
from kvservice.testing.eventually import eventually
from kvservice.units import MiB
from tests.unit.engine.tiny_models import generated, make, prompt

BLOCK, COUNT = 4, 8
PROMPT = prompt(41, seed=5)
SETTINGS: dict[str, Any] = {
    "mode": "embedded",
    "memory": "8MiB",
    "weights_version": "random",
    "verify_load": "full",
    "block_tokens": BLOCK,
    "device_blocks": 64,
    "disk_bytes": 64 * MiB,
    "disk_write": "reused",
}


@pytest.mark.parametrize("slot", [BLOCK, 4 * BLOCK])
def test_a_restarted_engine_hits_what_its_disk_kept(tmp_path: Path, slot: int) -> None:
    """A file a slot, of one block or of several."""
    model = make("grouped heads")
    wanted = generated(model, PROMPT, COUNT)[0]
    options = EngineOptions(**SETTINGS, disk_path=str(tmp_path), slot_tokens=slot)

    def loaded() -> int:
        """Tokens that the engine did not compute. The tokens that it says are right."""
        engine.forget()
        (output,) = engine.generate([PROMPT], Sampling(max_tokens=COUNT))
        assert output.token_ids == [wanted]
        return output.loaded_tokens

    whole = len(PROMPT) // slot * slot
    with ReferenceEngine(PagedModel(model, block_tokens=BLOCK), options) as engine:
        assert loaded() == 0

        def is_written() -> bool:
            """The disk is opened beside the pool; what is used from then on is written."""
            return loaded() > 0 and len(list(tmp_path.rglob("*.safetensors"))) >= len(PROMPT) // slot

        eventually(is_written, "a file of each slot of the prompt", 30.0)
    with ReferenceEngine(PagedModel(model, block_tokens=BLOCK), options) as engine:
        eventually(lambda: loaded() == whole, "the prompt from the disk", 30.0)
        assert not engine.all_counters()["loads_failed"]
