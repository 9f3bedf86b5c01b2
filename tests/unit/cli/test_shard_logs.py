"""`kvservice logs --follow` of a file that is rotated meanwhile."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvservice.cli import shard_logs
from kvservice.discovery import ShardRecord, write_record
from kvservice.units import BootEpoch, NodeId

RECORD = ShardRecord("s", NodeId("n"), "/none.sock", "unix:/none", 1, BootEpoch(1))


@pytest.mark.parametrize("moved", [True, False])
def test_a_rotated_log_is_followed_where_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], moved: bool
) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntwo\n")
    followed = shard_logs._open(replace(RECORD, log=str(path)), 0, name=False)
    with path.open("a") as log:
        log.write("three\n")
    if moved:
        path.rename(tmp_path / "log.1")
        assert shard_logs._print_new(followed, name=False)
    else:
        assert shard_logs._print_new(followed, name=False)
        path.write_text("")  # as `copytruncate` does
        assert not shard_logs._print_new(followed, name=False)
    path.write_text("four\n")
    for _ in range(3):
        shard_logs._print_new(followed, name=False)
    assert capsys.readouterr().out.splitlines() == ["three", "four"]
    followed.file.close()


def test_ctrl_c_is_how_following_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is no error, as for `top` and `status --watch`."""
    (tmp_path / "log").write_text("one\n")
    monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(tmp_path / "run"))
    write_record(replace(RECORD, log=str(tmp_path / "log")))

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    shard_logs.run("s", None, 1, follow=True)


@pytest.mark.processes
def test_following_ends_with_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `kvservice logs --follow | head -1`, also while nothing more is logged."""
    (tmp_path / "log").write_text("one\n")
    monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(tmp_path / "run"))
    write_record(replace(RECORD, log=str(tmp_path / "log")))
    command = [sys.executable, "-m", "kvservice", "logs", "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        try:
            assert following.stdout.readline() == "one\n"
            following.stdout.close()
            assert following.wait(timeout=30) == 0
        finally:
            following.kill()
