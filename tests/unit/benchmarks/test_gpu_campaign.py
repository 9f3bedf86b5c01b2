"""How the campaign for a GPU machine runs its stages, what it carries there, and its tables."""

from __future__ import annotations

import json
import subprocess
import time
import zipfile
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.gpu import carry
from benchmarks.gpu.__main__ import (
    CUDA,
    LEAST_SECONDS,
    PART_SECONDS,
    PARTS,
    STAND_IN,
    Campaign,
    Planned,
    run_part,
)
from benchmarks.gpu.summary import table
from kvservice.testing.eventually import eventually

FINDS = "from benchmarks.gpu.findings import Stage; s = Stage('it'); s.record('a figure', 3)"


def run(tmp_path: Path, program: str, seconds: float = 60.0) -> tuple[str, int, Campaign]:
    campaign = Campaign(1, tmp_path)
    campaign.run(Planned("it", seconds, ("-c", program)))
    return campaign.ends["it"], campaign.statuses["it"], campaign


def test_parts_end_within_nine_minutes_and_share_no_stage() -> None:
    names = [stage.name for stages in PARTS.values() for stage in stages]
    assert PART_SECONDS < 540 and len(names) == len(set(names)) == 11


@pytest.mark.processes
def test_stage_that_is_fine_says_so(tmp_path: Path) -> None:
    line, status, campaign = run(tmp_path, FINDS)
    assert line.startswith("ok after") and line.endswith("1 findings") and status == 0
    campaign.write()
    document = json.loads((tmp_path / "part1.json").read_text())
    assert document["figures"]["findings"] == {"it": {"a figure": 3}}
    assert document["figures"]["stages"]["it"]["how"] == "ok" and document["figures"]["skipped"] == 0
    assert {"machine", "command", "commit"} <= document.keys()
    page = (tmp_path / "page.md").read_text()
    assert "a figure: 3" in page and "| it | ok after" in page


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("raise SystemExit('the last word')", "the last word"),
        (
            f"{FINDS}; s.attempt('another', lambda: 1 // 0)",
            "1 of 2 findings, the first is 'another': ZeroDivisionError",
        ),
        ("import os; os.abort()", "failed after"),
    ],
)
def test_stage_that_fails_says_why_in_one_line(tmp_path: Path, program: str, why: str) -> None:
    line, status, _ = run(tmp_path, program)
    assert line.startswith("failed") and why in line and "\n" not in line
    assert status == 1


@pytest.mark.processes
def test_stage_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.__main__.LEAST_SECONDS", 0.0)
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    line, status, campaign = run(tmp_path, f"{FINDS}; {child}; s.record('child', p.pid); p.wait()", seconds=5.0)
    assert line.startswith("failed: it was not done after 5 s") and "2 findings until then" in line and status == 1
    pid = campaign.findings()["it"]["child"]
    eventually(lambda: not is_running(pid), "the end of the child")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, or before it is read
        return False


def test_stage_without_time_is_not_begun(tmp_path: Path) -> None:
    campaign = Campaign(1, tmp_path)
    campaign.deadline = time.monotonic() + LEAST_SECONDS / 2
    campaign.run(Planned("it", 60.0, ("-c", "raise SystemExit(1)")))
    assert campaign.ends["it"].startswith("skipped: no time")


@pytest.mark.processes
def test_make_says_which_parts_there_are() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "gpu"], cwd=report.ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0 and "make gpu PART=1" in done.stderr


def test_carried_wheel_records_what_it_leaves_out(tmp_path: Path) -> None:
    """It leaves out what is not used."""
    whole = tmp_path / "nixl_cu13-1-py3-none-any.whl"
    names = ["nixl_cu13/_api.py", "nixl_cu13.libs/ucx/libuct_cuda.so", "nixl_ep_cu13/x.so", "a.libs/libplugin_OBJ.so"]
    with zipfile.ZipFile(whole, "w") as made:
        for name in names:
            made.writestr(name, name)
        made.writestr("nixl_cu13-1.dist-info/RECORD", "".join(f"{name},sha256=x,1\n" for name in names))
    with zipfile.ZipFile(carry.slim(whole, tmp_path / "slim")) as found:
        assert found.namelist() == [*names[:2], "nixl_cu13-1.dist-info/RECORD"]
        record = found.read("nixl_cu13-1.dist-info/RECORD").decode()
    assert record == "".join(f"{name},sha256=x,1\n" for name in names[:2])


@pytest.mark.processes
def test_time_that_a_stage_leaves_is_for_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.__main__.LEAST_SECONDS", 0.0)
    slow = "import time; time.sleep(2.5)"
    stages = [Planned("short", 60.0, ("-c", "pass")), Planned("long", 2.0, ("-c", slow))]
    assert run_part(Campaign(1, tmp_path, CUDA), stages)
    ends = json.loads((tmp_path / "part1.json").read_text())["figures"]["stages"]
    assert {name: end["how"] for name, end in ends.items()} == {"short": "ok", "long": "ok"}


def test_stage_that_needs_a_gpu_is_skipped_on_the_stand_in(tmp_path: Path) -> None:
    campaign = Campaign(1, tmp_path, STAND_IN)
    campaign.run(Planned("it", 60.0, ("-c", "raise SystemExit(1)")))
    assert campaign.ends["it"].startswith("skipped: it needs a GPU") and campaign.skipped == 1


def test_carried_packages_are_locked_for_the_cuda_image() -> None:
    found = carry.locked()
    assert len(found) == len(carry.PACKAGES) and all("==" in one for one in found)


def test_carried_requirement_is_the_one_of_the_cuda_image() -> None:
    assert carry.wanted() in (report.ROOT / "requirements" / "cuda.in").read_text().splitlines()


def test_copy_without_git_has_the_commit_that_was_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "git", lambda *_: None)
    monkeypatch.setattr(report, "COMMIT_NOTE", tmp_path / "commit")
    assert report.commit() == "unknown"
    (tmp_path / "commit").write_text("0123456789ab\n")
    assert report.commit() == "0123456789ab"


def test_table_shows_shares_and_ratios() -> None:
    alone = {"step ms p50": 10.0, "step ms p99": 20.0, "TFLOP/s": 500.0, "steps": 9}
    beside = {"step ms p50": 11.0, "step ms p99": 60.0, "TFLOP/s": 250.0, "steps": 9, "copies GB/s": 40.0}
    found = {
        "copies": {
            "limits": {"load": 50.0, "store": 50.0, "direct": 0.0},
            "load 64 KiB runs, batch": {"GB/s": 45.0, "submit ms": 0.1, "runs": 64},
            "store 64 KiB runs, batch": {"failed": "RuntimeError"},
        },
        "interference": {
            "engine of default priority, alone": alone,
            "engine of default priority, beside load in another process": beside,
        },
    }
    text = table({"copies": "ok after 3 s"}, found)
    assert "copies: ok after 3 s" in text
    assert "45 90% 0.1ms" in text and "failed" in text
    assert "p50 ×1.10  p99 ×3.00  TFLOP/s ×0.50  copies 40.0 GB/s" in text
