"""What a shard logs when it cannot ask for what was cleared while it was away."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvservice.observe.logs import fields_of
from kvservice.shard.missed_marks import marks_of_others
from kvservice.units import NodeId


async def test_a_lookup_that_is_down_is_logged_in_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert await marks_of_others(NodeId("a"), [f"unix:{tmp_path}/l.sock"], None) == ()
    (record,) = [each for each in caplog.records if each.getMessage() == "marks_not_asked"]
    reason = str(fields_of(record)["reason"])
    assert reason.startswith("the lookup partition: ") and "AioRpcError" not in reason and "\n" not in reason
