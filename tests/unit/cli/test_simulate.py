"""`kvservice sim`: which schedules it plays."""

from __future__ import annotations

import pytest

from kvservice.cli import simulate
from kvservice.testing.sim import campaign
from kvservice.testing.sim.campaign import CampaignTally
from kvservice.testing.sim.schedule import make_schedule


@pytest.mark.parametrize("seed", [0, 4, 8])
def test_only_schedules_with_tiers_are_played(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def run(seeds: range, processes: int, on_progress: object) -> CampaignTally:
        asked.extend(seeds)
        return CampaignTally(len(seeds))

    monkeypatch.setattr(campaign, "run_campaign", run)
    assert simulate.campaign(seed, 4, 1, tiers=True)
    with_tiers = [number for number in range(seed, seed + 20) if make_schedule(number).tiers]
    assert asked == with_tiers[:4]
    asked.clear()
    assert simulate.campaign(seed, 4, 1, tiers=False)
    assert asked == list(range(seed, seed + 4))
