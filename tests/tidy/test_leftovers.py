"""The run's own check for things left behind: it fails a session that leaks, and only then."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from kvservice.testing.unique import SESSION_DIGITS, SESSION_VARIABLE, unique_name

ROOT = Path(__file__).resolve().parents[2]
LEAKS = {
    "shared_memory": "open('/dev/shm/{name}', 'w').close()",
    # It speaks first: a process in the middle of its `exec` has no command and no environment yet.
    "process": "import subprocess as s; c = ['sh', '-c', 'echo; sleep 600; :']; "
    "s.Popen(c, stdout=s.PIPE, start_new_session=True).stdout.readline()",
}


def run_session(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    conftest = (ROOT / "tests" / "conftest.py").read_text().replace("GRACE_SECONDS = 10.0", "GRACE_SECONDS = 0.5")
    assert "GRACE_SECONDS = 0.5" in conftest
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_leak.py").write_text(f"def test_leak():\n    {body}\n")
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != SESSION_VARIABLE}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("kind", LEAKS)
def test_a_session_that_leaks_fails_and_says_what(tmp_path: Path, kind: str) -> None:
    segment = Path("/dev/shm") / f"kvservice-leak-{uuid.uuid4().hex}"
    try:
        result = run_session(tmp_path, LEAKS[kind].format(name=segment.name))
    finally:
        segment.unlink(missing_ok=True)
        for pid in leaked_sleepers(tmp_path):
            subprocess.run(["kill", str(pid)], check=False)
    assert result.returncode == 1, result.stdout
    assert {"shared_memory": segment.name, "process": "sleep 600"}[kind] in result.stdout


def leaked_sleepers(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").resolve() == folder.resolve():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_session_that_cleans_up_passes(tmp_path: Path) -> None:
    result = run_session(tmp_path, "import subprocess; assert subprocess.run(['true']).returncode == 0")
    assert result.returncode == 0, result.stdout


def test_what_another_run_made_is_its_own(tmp_path: Path) -> None:
    """As when two run on one machine: a shard that is killed holds its memory no more, until it is started again."""
    rest = unique_name()[SESSION_DIGITS:]
    body = (
        f"import os; own = os.environ['{SESSION_VARIABLE}'][:{SESSION_DIGITS}]; other = f'{{int(own, 16) ^ 1:03x}}'; "
        f"open(f'/dev/shm/kvservice-t{{other}}{rest}-n0', 'w').close()"
    )
    try:
        result = run_session(tmp_path, body)
        assert list(Path("/dev/shm").glob(f"kvservice-t*{rest}-n0"))
    finally:
        for path in Path("/dev/shm").glob(f"kvservice-t*{rest}-n0"):
            path.unlink()
    assert result.returncode == 0, result.stdout
