"""What `kvservice down` removes of a service without Ray whose process was killed, and what `doctor` says of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvservice.actors import leftovers
from kvservice.cli import doctor
from kvservice.client.members import chosen_service
from kvservice.core.segment.geometry import Geometry
from kvservice.discovery import (
    EPOCH_NAME,
    KEPT_NAME,
    MARKS_NAME,
    SECRET_NAME,
    ShardRecord,
    find_shards,
    node_directory,
    write_record,
)
from kvservice.errors import ConfigError
from kvservice.lookup.mirror_file import MirrorSegment, mirror_path
from kvservice.memory.segment import Segment, segment_path
from kvservice.testing.eventually import eventually
from kvservice.units import BootEpoch, MiB, NodeId

GEOMETRY = Geometry(slab_bytes=MiB, slab_count=1)
NO_PID = 1 << 30  # no process has it
ROW = ShardRecord("s", NodeId("local"), "/nowhere.sock", "127.0.0.1:1", NO_PID, BootEpoch(1), ("127.0.0.1:1",))


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the machine's shared memory; the runtime directory is beside it."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(leftovers, "DEV_SHM", folder)
    monkeypatch.setattr(doctor, "SHARED_MEMORY", folder)
    monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(tmp_path / "run"))
    return folder


def killed(memory: Path, service: str, node: str = "local") -> tuple[Path, Path]:
    """What a shard leaves that was killed: its segment and its directory."""
    path = segment_path(service, node, memory)
    Segment.create(path, GEOMETRY, node).close()
    MirrorSegment.create(mirror_path(path), 8 * MiB).close()
    write_record(replace(ROW, service=service, node_id=NodeId(node)))
    directory = node_directory(service, NodeId(node))
    for name in (EPOCH_NAME, MARKS_NAME, SECRET_NAME):
        (directory / name).write_bytes(b"1")
    return path, directory


def test_a_killed_node_without_ray_leaves_nothing(memory: Path) -> None:
    path, directory = killed(memory, "s")
    removed, owned = leftovers.remove_dead("s", [])
    assert {path, mirror_path(path), directory / "shard.json"} <= set(removed) and not owned
    assert not list(memory.iterdir()) and not directory.parent.exists()


def test_memory_that_is_kept_stays_with_its_marks(memory: Path) -> None:
    path, directory = killed(memory, "s")
    leftovers.remove_dead("s", [], keep_memory=True)
    assert list(memory.iterdir()) == [path]
    assert {each.name for each in directory.iterdir()} == {MARKS_NAME, KEPT_NAME}


def test_memory_without_a_directory_is_found_too(memory: Path) -> None:
    """As a shard leaves it that keeps its blocks for its next start."""
    path = segment_path("s", "n0", memory)
    Segment.create(path, GEOMETRY, "n0").close()
    assert leftovers.remove_dead("s", []) == ([path], [])


def test_memory_in_a_folder_of_its_own_is_found_by_the_record(memory: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path, _ = killed(elsewhere, "s")
    record = replace(ROW, segment_dir=str(elsewhere))
    write_record(record)
    assert find_shards("s", live_only=False) == [record]
    assert f"--segment-dir {elsewhere}" in doctor._start_again(record)
    assert path in leftovers.remove_dead("s", [])[0]
    assert not list(elsewhere.iterdir())


def test_kept_memory_in_a_folder_of_its_own_is_found_later(memory: Path, tmp_path: Path) -> None:
    """Of a shard that was killed, and of one that ended in order: neither leaves a record to the second `down`."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path, directory = killed(elsewhere, "s")
    write_record(replace(ROW, segment_dir=str(elsewhere)))
    leftovers.remove_dead("s", [], keep_memory=True)
    assert path.exists() and not find_shards("s", live_only=False)
    leftovers.remove_dead("s", [], keep_memory=True)
    assert path.exists() and (directory / MARKS_NAME).exists()
    assert path in leftovers.remove_dead("s", [])[0]
    assert not list(elsewhere.iterdir()) and not directory.exists()


def test_a_service_whose_name_begins_alike_is_left_alone(memory: Path) -> None:
    path, directory = killed(memory, "s-b")
    other, _ = killed(memory, "s", "n1")
    longer, _ = killed(memory, "s", "n10")
    leftovers.remove_dead("s", ["n10"])
    assert path.exists() and directory.exists() and longer.exists() and not other.exists()


def test_memory_that_a_process_owns_is_left_alone(memory: Path) -> None:
    """A shard that starts owns it for a minute before it listens."""
    path, directory = killed(memory, "s")
    with closing(Segment.create(path, GEOMETRY, "local")):
        assert leftovers.remove_dead("s", []) == ([], [path])
    assert path.exists() and (directory / SECRET_NAME).exists()


def test_a_copy_worker_that_runs_keeps_its_files(memory: Path) -> None:
    _, directory = killed(memory, "s")
    (directory / "copy-cpu.json").touch()
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(directory / "copy-cpu.sock"))
        listener.listen()
        leftovers.remove_dead("s", [])
        assert sorted(path.name for path in directory.iterdir()) == ["copy-cpu.json", "copy-cpu.sock"]


def test_doctor_says_what_to_do_about_a_dead_node(memory: Path) -> None:
    killed(memory, "alone")
    killed(memory, "parts", "n0")
    killed(memory, "ray", "0123456789ab")
    advice = {check.name: check.advice for check in doctor.guarded(doctor.service_parts)}
    assert (
        "`kvservice up --no-ray` for it again, or `kvservice down --service alone` to free" in advice["shard of alone"]
    )
    assert "`kvservice shard --node n0` for it again" in advice["shard of parts"]
    assert "--no-ray" in advice["lookup of alone"] and "read its log" in advice["shard of ray"]


def test_services_that_have_ended_do_not_hide_the_others(memory: Path) -> None:
    killed(memory, "one")
    killed(memory, "two")
    with pytest.raises(ConfigError, match="one or two; `kvservice down --service NAME`"):
        chosen_service(None)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(memory / "socket"))
        listener.listen()
        write_record(replace(ROW, service="three", socket=str(memory / "socket")))
        assert chosen_service(None) == "three"


@pytest.fixture
def variables(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a service without Ray, beside somebody's Ray that takes connections and answers nothing: it is not asked."""
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        yield {
            **os.environ,
            "KVSERVICE_RUNTIME_DIR": str(tmp_path),
            "KVSERVICE_SERVICE": f"down-{os.getpid()}",
            "RAY_ADDRESS": f"127.0.0.1:{silent.getsockname()[1]}",
        }


@pytest.fixture
def up(variables: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    service = variables["KVSERVICE_SERVICE"]
    words = [sys.executable, "-m", "kvservice", "up", "--no-ray", "--pool-bytes", "16MiB"]
    process = subprocess.Popen(words, env=variables, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: find_shards(service, tmp_path), "the shard")
        yield process
    finally:
        process.terminate()
        process.wait(30)
        for path in Path("/dev/shm").glob(f"kvservice-{service}-*"):
            path.unlink()


def down(variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "kvservice", "down"]
    return subprocess.run(words, env=variables, capture_output=True, text=True, timeout=60)


@pytest.mark.processes
@pytest.mark.parametrize("lookup_remains", [True, False])
def test_down_frees_the_memory_of_a_killed_service(
    up: subprocess.Popen[bytes], variables: dict[str, str], tmp_path: Path, lookup_remains: bool
) -> None:
    service = variables["KVSERVICE_SERVICE"]
    up.send_signal(signal.SIGKILL)
    up.wait(30)
    if not lookup_remains:
        (tmp_path / service / "lookup-0.sock").unlink()
    shown = down(variables)
    assert shown.returncode == 0 and "is down" in shown.stderr, shown.stderr
    assert not list(Path("/dev/shm").glob(f"kvservice-{service}-*"))
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
def test_down_says_where_a_service_without_ray_ends(up: subprocess.Popen[bytes], variables: dict[str, str]) -> None:
    shown = down(variables)
    assert shown.returncode == 1 and f"kill {up.pid}" in shown.stderr, shown.stderr
