"""Rules of tier.mounts: what a file system is, and what it lets a tier do."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvservice.tier import mounts
from kvservice.tier.mounts import decide_access, file_system_of, mounts_here, parse_mounts


def test_the_deepest_mount_says_the_kind_of_file_system() -> None:
    table = parse_mounts("x / ext4 rw 0 0\nserver:/h /home nfs4 rw 0 0\nt /home/a/my\\040own tmpfs rw 0 0\n\nodd\n")
    for path, kind in (
        ("/etc", "ext4"),
        ("/home/a/.local", "nfs4"),
        ("/home/a/my own/x", "tmpfs"),
        ("/homely", "ext4"),
    ):
        assert file_system_of(Path(path), table) == kind
    assert file_system_of(Path("/a"), ()) == "unknown"


def test_of_two_mounts_at_one_place_the_last_counts() -> None:
    table = parse_mounts("a / overlay rw 0 0\nb /data ext4 rw 0 0\nc /data tmpfs rw 0 0\n")
    assert file_system_of(Path("/data/x"), table) == "tmpfs"


@pytest.mark.parametrize(
    ("kind", "direct", "threads"), [("xfs", True, 4), ("ext4", True, 4), ("nfs4", True, 16), ("overlay", False, 4)]
)
def test_the_table_says_how_files_are_accessed(
    kind: str, direct: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64))
    found = decide_access(Path("/data/x"), parse_mounts(f"a / {kind} rw 0 0"))
    assert (found.kind, found.direct, found.threads) == (kind, direct, threads)
    assert decide_access(Path("/data/x"), parse_mounts(f"a / {kind} rw 0 0"), direct=not direct).direct is not direct


@pytest.mark.parametrize(("cores", "threads"), [(1, 2), (2, 2), (3, 3), (64, 4)])
def test_a_small_machine_uses_fewer_threads(cores: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(cores))
    assert decide_access(Path("/data"), parse_mounts("a / ext4 rw 0 0")).threads == threads


def test_an_unknown_file_system_is_not_accessed_directly() -> None:
    assert not decide_access(Path("/data"), ()).direct


def test_the_mounts_of_this_machine_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_system_of(Path("/proc/self"), mounts_here()) == "proc"
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "none")
    assert mounts_here() == ()
