"""What memory a process may have: of its machine, or of the control groups that it runs in."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.memory.room import Cgroup, cgroups
from kvservice.units import MiB

STAT = "anon 5\ninactive_file 1048576\nactive_file 2097152\ntotal_inactive_file 4194304\ntotal_active_file 0\n"


def group(folder: Path, limit: str, usage: int, *, version: int) -> None:
    folder.mkdir(parents=True)
    limit_file, usage_file = (
        ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    )
    (folder / limit_file).write_text(f"{limit}\n")
    (folder / usage_file).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(STAT)


def limits(root: Path, membership: str) -> list[Cgroup]:
    file = root.parent / "membership"
    file.write_text(membership)
    return cgroups(root, file)


def test_each_group_above_a_process_limits_it(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group(root / "kubepods/pod1/c1", "max", 0, version=2)
    group(root / "kubepods/pod1/c2", str(8 * MiB), 1 * MiB, version=2)
    group(root / "memory", str(64 * MiB), 65 * MiB, version=1)
    (root / "kubepods" / "memory.max").write_text(str(100 * MiB))  # and the rest of it cannot be read
    assert limits(root, "0::/kubepods/pod1/c1\n") == []
    assert limits(root, "0::/kubepods/pod1/c2\n") == [Cgroup(8 * MiB, (8 - 1 + 3) * MiB, sys.maxsize)]
    of_the_host = "1:name=systemd:/\n4:cpu,memory:/docker/of/the/host\n"
    assert limits(root, of_the_host) == [Cgroup(64 * MiB, 3 * MiB, sys.maxsize)]
    assert limits(root, "nothing of this form\n") == limits(root, "") == cgroups(root, tmp_path / "none") == []


@pytest.mark.parametrize(
    ("version", "files", "swap"),
    [
        (2, {"memory.swap.max": "0", "memory.swap.current": "0"}, 0),
        (2, {"memory.swap.max": str(5 * MiB), "memory.swap.current": str(2 * MiB)}, 3 * MiB),
        (2, {"memory.swap.max": "max", "memory.swap.current": "0"}, sys.maxsize),
        (1, {"memory.memsw.limit_in_bytes": str(8 * MiB), "memory.memsw.usage_in_bytes": str(1 * MiB)}, 0),
        (1, {"memory.memsw.limit_in_bytes": str(16 * MiB), "memory.memsw.usage_in_bytes": str(4 * MiB)}, 5 * MiB),
    ],
)
def test_a_group_has_no_more_swap_than_it_may(tmp_path: Path, version: int, files: dict[str, str], swap: int) -> None:
    """The machine may have swap that its containers must not use."""
    root = tmp_path / "cgroup"
    group(root / "memory", str(8 * MiB), 1 * MiB, version=version)
    for name, text in files.items():
        (root / "memory" / name).write_text(f"{text}\n")
    assert [each.swap_bytes for each in limits(root, "0::/memory\n" if version == 2 else "4:memory:/\n")] == [swap]


@pytest.fixture
def limited() -> Iterator[Path]:
    """A real group with a limit of 192 MiB."""
    root = Path("/sys/fs/cgroup")
    version_2 = (root / "cgroup.controllers").exists()
    folder = (root if version_2 else root / "memory") / f"kvservice-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(str(192 * MiB))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    yield folder
    folder.rmdir()


def test_a_pool_larger_than_its_container_is_refused(limited: Path, tmp_path: Path) -> None:
    """The kernel ended the shard, which had asked whether the machine has room."""
    create = (
        "import os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n"
        "from kvservice.core.segment.geometry import plan_geometry\n"
        "from kvservice.memory.segment import Segment\n"
        "Segment.create(pathlib.Path(sys.argv[2]), plan_geometry(int(sys.argv[3])), 'node')\n"
    )
    path = Path("/dev/shm") / f"kvservice-test-{os.getpid()}"
    try:
        command = [sys.executable, "-c", create, limited / "cgroup.procs", path]
        for size, code in ((64 * MiB, 0), (400 * MiB, 1)):
            ended = subprocess.run([*command, str(size)], capture_output=True, text=True, timeout=60)
            assert ended.returncode == code, ended.stderr
            path.unlink(missing_ok=True)
    finally:
        path.unlink(missing_ok=True)
    assert "memory is short" in ended.stderr and "this machine or container has only 1" in ended.stderr
