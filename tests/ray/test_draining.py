"""How long a shard may take to leave a node that Ray takes away."""

from __future__ import annotations

import pytest

from kvservice.actors import draining
from kvservice.actors.draining import MARGIN_SECONDS, NO_DEADLINE_SECONDS, SECONDS_MAX, SECONDS_MIN, seconds_left

pytestmark = pytest.mark.ray

NOW = 1_700_000_000.0


def test_a_shard_ends_before_its_node() -> None:
    assert seconds_left(int((NOW + 40) * 1000), NOW) == pytest.approx(40 - MARGIN_SECONDS)
    assert seconds_left(0, NOW) == NO_DEADLINE_SECONDS
    assert seconds_left(int((NOW - 5) * 1000), NOW) == SECONDS_MIN
    assert seconds_left(2**63 - 1, NOW) == SECONDS_MAX


def test_a_ray_that_names_no_draining_nodes_drains_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import state

    def missing() -> dict[str, int]:
        raise AttributeError("get_draining_nodes")

    monkeypatch.setattr(state.state, "get_draining_nodes", missing)
    assert draining.draining_nodes() == {}
