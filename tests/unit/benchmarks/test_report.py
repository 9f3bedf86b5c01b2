"""A result names the command that repeats it, on any machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.report import command_line


@pytest.mark.processes
def test_another_checkout_stands_in_a_command_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "it"], check=True)
    command = [*git, "rev-parse", "--short=12", "HEAD"]
    revision = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setattr("sys.argv", ["books", "--before", str(tmp_path), "--blocks", "5"])
    assert command_line().endswith(f" --before CHECKOUT-OF-{revision} --blocks 5")


def test_a_folder_of_this_machine_stands_in_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tier_stall", "--folder", str(tmp_path), "--rounds", "5", "--kind", "/tmp"])
    assert command_line().endswith(" --folder FOLDER --rounds 5 --kind /tmp")


@pytest.mark.parametrize("out", [["--out", "/tmp/soak.json"], ["--out=/tmp/soak.json"]], ids=len)
def test_a_file_of_this_machine_is_left_out_of_a_command(out: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["soak", *out, "--minutes", "60"])
    assert command_line().endswith(" --minutes 60") and "out" not in command_line()


def test_a_file_below_the_root_of_the_project_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["soak", "--out", "build/soak.json"])
    assert command_line().endswith(" --out build/soak.json")
