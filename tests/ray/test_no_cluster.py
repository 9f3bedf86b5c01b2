"""Commands that look for a Ray cluster say soon that there is none. No cluster is started here."""

from __future__ import annotations

import time

import pytest
from ray._private import services

from kvservice.actors import deploy
from kvservice.errors import Unavailable

pytestmark = pytest.mark.ray
SOON = 10.0  # seconds; Ray itself goes on trying for more than a minute


def test_a_cluster_out_of_reach_does_not_hold_up_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray finds the clusters of this machine by their processes. One of another container cannot be reached."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: frozenset({"127.0.0.1:1"}))
    begun = time.monotonic()
    with pytest.raises(Unavailable, match="nothing listens there"):
        deploy.connect(None)
    assert time.monotonic() - begun < SOON
