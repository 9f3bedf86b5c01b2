"""`kvservice sim`: which schedules it plays, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvservice.cli import simulate
from kvservice.testing.eventually import eventually
from kvservice.testing.sim import campaign
from kvservice.testing.sim.campaign import CampaignTally
from kvservice.testing.sim.schedule import make_schedule
from tests.interruptible import interruptible


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


@pytest.mark.processes
def test_ctrl_c_ends_every_process_of_a_campaign_in_silence() -> None:
    """A terminal sends it to all of them."""
    words = interruptible([sys.executable, "-m", "kvservice", "sim", "--count", "100000"])
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

        def computing() -> int:
            """Workers beyond their imports, which take a second of a processor."""
            fields = [Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split() for child in pids()]
            return sum(int(each[11]) > 2 * os.sysconf("SC_CLK_TCK") for each in fields)

        def pids() -> list[str]:
            return children.read_text().split()

        eventually(lambda: 1 < computing() == len(pids()) - 1, "all workers, beside what tracks their resources")
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr is not None and "Traceback" not in process.stderr.read()

    def gone() -> bool:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        return False

    eventually(gone, "the processes to end")


def test_one_lookup_partition_is_not_told_as_many(capsys: pytest.CaptureFixture[str]) -> None:
    seed = next(seed for seed in range(100) if make_schedule(seed).lookups == 1)
    assert simulate.tell(seed, whole=True)
    assert ", 1 lookup partition, " in capsys.readouterr().out
