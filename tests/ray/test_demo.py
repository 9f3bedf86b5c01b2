"""`make demo` shows what it promises, and however it ends it leaves no process, no segment and no other file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.demo.network import why_not
from kvservice.lookup.mirror_file import MIRROR_SUFFIX
from kvservice.testing.eventually import NotInTime, eventually

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")
MARK = "KVSERVICE_TEST_DEMO"
MOMENT_SECONDS = 150.0
END_SECONDS = 90.0
GONE_SECONDS = 10.0


@dataclass
class Demo:
    """A demo in a session of its own, as a shell starts it. Its processes are told by a variable they inherit."""

    process: subprocess.Popen[bytes]
    mark: str
    runtime: Path
    log: Path

    @property
    def shared(self) -> list[Path]:
        """Segments, and mirrors of the directory."""
        return sorted(SHARED_MEMORY.glob(f"kvservice-demo-{self.process.pid}-*"))

    @property
    def segments(self) -> list[Path]:
        return [path for path in self.shared if not path.name.endswith(MIRROR_SUFFIX)]

    def processes(self, name: str = "") -> dict[int, str]:
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if command and name in command:
                        found[int(entry.name)] = command[:160]
            except OSError:
                continue  # ended meanwhile
        return found

    def wait_for(self, moment: Callable[[], Any], what: str) -> Any:
        def seen() -> Any:
            found = moment()
            assert found or self.process.poll() is None, f"ended before {what}: {self.log.read_text()}"
            return found

        return eventually(seen, what, MOMENT_SECONDS, detail=self.log.read_text)

    def ended(self, seconds: float = END_SECONDS) -> tuple[int, str]:
        """Exit code and output."""
        code = self.process.wait(seconds)
        return code, self.log.read_text()

    def left(self) -> list[str]:
        """What is still there when it had time to go."""

        def found() -> list[str]:
            files = [*self.shared, *(path for path in self.runtime.rglob("*") if not path.is_dir())]
            return [*map(str, files), *self.processes().values()]

        with contextlib.suppress(NotInTime):
            eventually(lambda: not found(), "nothing left behind", GONE_SECONDS)
        return found()


Start = Callable[..., Demo]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Demo] = []
    with tempfile.TemporaryDirectory(prefix="kvd-") as runtime:

        def run(*arguments: str) -> Demo:
            mark, log = uuid.uuid4().hex, tmp_path / "demo.log"
            with log.open("wb") as out:
                process = subprocess.Popen(
                    [sys.executable, "-m", "examples.demo", "remote-hit", "--out", str(tmp_path / "out"), *arguments],
                    cwd=ROOT,
                    env={**os.environ, MARK: mark, "KVSERVICE_RUNTIME_DIR": runtime, "COLUMNS": "200"},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            made.append(Demo(process, mark, Path(runtime), log))
            return made[-1]

        yield run
        for demo in made:
            for pid in [*demo.processes()]:  # only when the test has failed already
                os.kill(pid, signal.SIGKILL)
            demo.process.wait()
            for path in demo.shared:
                path.unlink()


@pytest.mark.usefixtures("model_path")
def test_ctrl_c_while_the_cluster_starts(start: Start) -> None:
    demo = start()
    demo.wait_for(lambda: demo.processes("raylet/raylet"), "raylet")
    os.killpg(demo.process.pid, signal.SIGINT)  # a terminal signals the whole group
    code, output = demo.ended()
    assert (code, demo.left()) == (130, []), output


@pytest.mark.slow
@pytest.mark.usefixtures("model_path")
def test_an_impatient_user_does_not_cut_the_cleaning_up_short(start: Start) -> None:
    demo = start()
    demo.wait_for(lambda: len(demo.segments) == 2, "segments of two shards")
    os.killpg(demo.process.pid, signal.SIGINT)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) * 3:
        time.sleep(0.1)
        if demo.process.poll() is None:
            os.kill(demo.process.pid, number)
    code, output = demo.ended()
    assert (code, demo.left()) == (130, []), output


@pytest.mark.slow
@pytest.mark.usefixtures("model_path")
def test_sigterm_while_replicas_load(start: Start) -> None:
    demo = start()
    demo.wait_for(lambda: demo.processes("ray::DemoReplica"), "replica")
    demo.process.send_signal(signal.SIGTERM)
    code, output = demo.ended()
    assert (code, demo.left()) == (143, []), output


@pytest.mark.slow
@pytest.mark.usefixtures("model_path")
def test_a_killed_replica_is_a_readable_error(start: Start) -> None:
    demo = start()
    replicas = demo.wait_for(lambda: demo.processes("ray::DemoReplica"), "replica")
    os.kill(next(iter(replicas)), signal.SIGKILL)
    code, output = demo.ended()
    assert (code, demo.left()) == (1, []), output
    assert "error: " in output
    assert "Traceback" not in output


def test_a_missing_model_folder_is_said_before_the_start(start: Start, tmp_path: Path) -> None:
    demo = start("--model", str(tmp_path / "nowhere"))
    code, output = demo.ended(30)
    assert (code, demo.left()) == (2, []), output
    assert "nowhere" in output
    assert "Ray" not in output


@pytest.mark.vllm
def test_whole_demo_shows_a_remote_hit_and_equal_answers(start: Start, tmp_path: Path, model_path: Path) -> None:
    """Over a network, where the demo may make one; else it says what it used."""
    demo = start("--questions", "1")
    code, output = demo.ended(280)
    assert (code, demo.left()) == (0, []), output
    shown = json.loads((tmp_path / "out" / "demo.json").read_text())
    rows = {row["kind"]: row for row in shown["rows"]}
    assert set(rows) == {"cold", "remote", "pool", "recompute"}
    assert {tuple(row["token_ids"]) for row in shown["rows"]} == {tuple(rows["cold"]["token_ids"])}
    assert rows["remote"]["remote_tokens"] > 0.95 * rows["remote"]["prompt_tokens"]
    assert rows["remote"]["first_token_seconds"] < 0.3 * rows["recompute"]["first_token_seconds"]
    shard_a, shard_b = shown["shards"].values()
    reason = why_not(str(model_path))
    transport = "nixl" if reason is None else "shm"
    pulled = shard_b["counters"][f"transfer_{transport}_bytes"]
    assert pulled == shard_b["counters"]["fetched_bytes"] > 0
    crossing, said = shown["crossing"], " ".join(output.split())
    assert (crossing["transport"], crossing["reason"]) == (transport, reason or "")
    if reason is None:
        assert crossing["link_bytes"] >= pulled, "the blocks did not cross the link"
        assert "Blocks crossed by NIXL over a network between two namespaces" in said
    else:
        assert crossing["link_bytes"] is None
        assert "Blocks crossed by shared memory" in said and reason in said
    assert shard_a["counters"]["peer_located_blocks"] >= rows["remote"]["remote_tokens"] // 32
    assert (tmp_path / "out" / "demo.png").stat().st_size > 10_000
