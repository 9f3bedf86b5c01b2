"""When a shard that was silent is asked again."""

from __future__ import annotations

import asyncio

import pytest

from kvservice.api.silence import SILENT_SECONDS, ShardSilence


async def test_a_trial_that_is_refused_at_once_is_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that ends, as at a restart of the shard, is no silence."""
    silence, loop = ShardSilence(), asyncio.get_running_loop()
    now = loop.time()
    silence.ended(now - 5.0, 5.0, answered=False)
    assert silence.spares(5.0)
    with monkeypatch.context() as later:
        later.setattr(loop, "time", lambda: now + 2.0)
        assert not silence.spares(5.0) and silence.spares(5.0), "one call tries"
        silence.ended(now + 2.0 - SILENT_SECONDS / 2, 5.0, answered=False)
        assert not silence.spares(5.0)
