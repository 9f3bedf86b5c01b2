"""The `vllm serve` lines of docs/howto/tiers.md with a real engine: what its memory evicted is hit after a restart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvservice.testing.s3_server import S3Server
from tests.tidy.test_commands import CONFIG, joined
from tests.vllm.replica import Replica
from tests.vllm.test_output_equality import ENGINE, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "tiers.md"
MEMORY = "24MiB"
MEMORY_BLOCKS = 80  # that it has room for, at most
NAMES = ("Ada", "Bo", "Cy", "Di", "Eve", "Flo", "Gus", "Hal", "Ida", "Jo")
ANSWERED = 3  # prompts that are asked for again: the first ones, which memory gave up long ago


def options_of(setting: str) -> dict[str, Any]:
    """Those of the page's line with this setting."""
    lines = [json.loads(found)["kv_connector_extra_config"] for found in CONFIG.findall(joined(PAGE.read_text()))]
    found: dict[str, Any] = next(line for line in lines if setting in line)
    return found


@pytest.fixture(params=["disk", "objects"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """The line's options, with a small memory and a place of this test; and variables for the object store."""
    if request.param == "disk":
        yield {**options_of("disk_path"), "disk_path": str(tmp_path / "blocks"), "disk_bytes": "1GiB"}, {}
        return
    with S3Server() as s3:
        yield {**options_of("objects_url"), "objects_url": s3.url}, s3.environment()


def test_what_memory_evicted_is_hit_after_a_restart(
    tier: tuple[dict[str, Any], dict[str, str]], without_cache: Replica, shallow_model: Path, tmp_path: Path
) -> None:
    """The memory of the second start is empty, so all that it hits was in the tier."""
    options, variables = tier
    texts = [prompt(name, 20) for name in NAMES]
    wanted = without_cache.ready().tokens(texts[:ANSWERED], 8)

    def engine() -> Replica:
        given = {**options, "memory": MEMORY}
        return Replica(shallow_model, given, tmp_path / "log", variables=variables, **ENGINE).ready()

    with closing(engine()) as before:
        for text in texts:
            before.ask(text, 1)
        assert before.counters()["copied_blocks"] > 2 * MEMORY_BLOCKS
    with closing(engine()) as after:
        outputs = [after.ask_warm(text, 8, 320) for text in texts[:ANSWERED]]
        counters = after.counters()
    assert [output["token_ids"] for output in outputs] == wanted
    assert counters["load_verified_blocks"] and not counters["loads_failed"]
