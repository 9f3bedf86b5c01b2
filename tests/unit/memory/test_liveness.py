"""The lock by which the shard knows whether an engine may still write: it lives with the memory that it protects."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvservice.core.segment.geometry import Geometry, plan_geometry
from kvservice.errors import SegmentError, Unavailable
from kvservice.memory import liveness
from kvservice.memory.liveness import claim, has_writers, hold
from kvservice.memory.segment import Segment
from kvservice.testing.eventually import eventually
from kvservice.testing.unique import unique_name
from kvservice.units import BootEpoch, MiB

GEOMETRY = plan_geometry(12 * MiB)
ENGINE, OTHER = b"e" * 16, b"f" * 16

HOLDER = """
import sys
from pathlib import Path
from kvservice.core.segment.geometry import Geometry
from kvservice.memory.liveness import hold
from kvservice.memory.segment import Segment
path, slab_bytes, slab_count, engine = sys.argv[1:]
segment = Segment.attach(Path(path), Geometry(slab_bytes=int(slab_bytes), slab_count=int(slab_count)))
lock = hold(segment, bytes.fromhex(engine), segment.epoch)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path() -> Iterator[Path]:
    found = Path(f"/dev/shm/kvservice-test{unique_name()}-n")
    yield found
    found.unlink(missing_ok=True)


@pytest.fixture
def shard(path: Path) -> Iterator[Segment]:
    segment = Segment.create(path, GEOMETRY, "node")
    yield segment
    segment.close()


def is_free(segment: Segment, engine_id: bytes = ENGINE) -> bool:
    with claim(segment, engine_id) as free:
        return free


def another_process(path: Path, geometry: Geometry = GEOMETRY) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), str(geometry.slab_bytes), str(geometry.slab_count), ENGINE.hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    return child


@pytest.mark.processes
def test_an_engine_is_gone_only_when_each_of_its_holders_let_go(path: Path, shard: Segment) -> None:
    assert is_free(shard)
    mapped = Segment.attach(path, GEOMETRY)
    first, second = hold(mapped, ENGINE, mapped.epoch), hold(mapped, ENGINE, mapped.epoch)
    assert not is_free(shard)
    assert is_free(shard, OTHER), "engines are told apart"
    first.release()
    first.release()
    assert not is_free(shard), "two holders of one process, as a copy worker has for two ranks, share no lock"
    child = another_process(path)
    second.release()
    assert not is_free(shard)
    child.kill()
    child.communicate()
    assert is_free(shard)
    mapped.close()


def test_a_lock_outlives_its_mapping_and_descriptor(path: Path, shard: Segment) -> None:
    mapped = Segment.attach(path, GEOMETRY)
    lock = hold(mapped, ENGINE, mapped.epoch)
    mapped.close()
    Segment.attach(path, GEOMETRY).close()  # record locks of a process would go here
    assert not is_free(shard)
    lock.release()
    assert is_free(shard)


@pytest.mark.processes
def test_the_next_boot_finds_the_locks_of_who_may_write(path: Path) -> None:
    """The segment was kept."""
    first = Segment.create(path, GEOMETRY, "node")
    child = another_process(path)
    first.close()
    second = Segment.create(path, GEOMETRY, "node")
    assert second.existed
    assert not is_free(second)
    child.kill()
    child.communicate()
    assert is_free(second)
    second.close()


def test_nobody_begins_to_write_while_the_shard_takes_slots_back(path: Path, shard: Segment) -> None:
    mapped = Segment.attach(path, GEOMETRY)
    order: list[str] = []

    def begin() -> None:
        lock = hold(mapped, ENGINE, mapped.epoch)
        order.append("held")
        lock.release()

    worker = threading.Thread(target=begin)
    with claim(shard, ENGINE) as free:
        assert free
        worker.start()
        time.sleep(liveness.HOLD_SECONDS / 4)
        order.append("taken back")
    worker.join()
    assert order == ["taken back", "held"]
    mapped.close()


def test_a_holder_waits_a_moment_only_and_may_try_again(
    path: Path, shard: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "HOLD_SECONDS", 0.01)
    mapped = Segment.attach(path, GEOMETRY)
    with claim(shard, ENGINE), pytest.raises(Unavailable, match="try again"):
        hold(mapped, ENGINE, mapped.epoch)
    hold(mapped, ENGINE, mapped.epoch).release()
    assert is_free(shard), "what was refused left nothing behind"
    mapped.close()


@pytest.mark.parametrize("what", ["removed", "replaced", "another boot"])
def test_memory_that_the_shard_does_not_own_any_more_is_not_held(path: Path, shard: Segment, what: str) -> None:
    mapped = Segment.attach(path, GEOMETRY)
    epoch = mapped.epoch
    if what == "another boot":
        epoch = BootEpoch(epoch + 1)
    else:
        path.unlink()
    fresh = Segment.create(path, GEOMETRY, "node") if what == "replaced" else None
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(SegmentError, match="attach again"):
        hold(mapped, ENGINE, epoch)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert is_free(shard)
    mapped.close()
    if fresh is not None:
        fresh.close()


def test_a_file_without_a_name_is_held_like_any_other() -> None:
    """The segment of an embedded pool."""
    shard = Segment.nameless(Path("/dev/shm"), GEOMETRY, "node")
    lock = hold(Segment.attach(shard.path, GEOMETRY), ENGINE, shard.epoch)
    assert not is_free(shard)
    lock.release()
    assert is_free(shard)
    shard.close()


@pytest.mark.processes
def test_a_forked_child_keeps_its_engine_from_being_gone(path: Path, shard: Segment) -> None:
    """It has the mapping, too, and may write as its parent may: killed, the parent is not all of the engine."""
    ready, end = os.pipe(), os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            mapped = Segment.attach(path, GEOMETRY)
            hold(mapped, ENGINE, mapped.epoch)
            if os.fork() == 0:
                os.close(end[1])
                os.write(ready[1], b"1")
                os.read(end[0], 1)
            else:
                time.sleep(60)
        finally:
            os._exit(0)
    os.close(end[0])
    assert os.read(ready[0], 1) == b"1"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert not is_free(shard)
    os.close(end[1])  # it ends, too
    eventually(lambda: is_free(shard), "the end of the forked child to be seen")
    os.close(ready[0])
    os.close(ready[1])


def test_whether_anybody_writes_is_told_for_all_engines_at_once(path: Path, shard: Segment) -> None:
    mapped = Segment.attach(path, GEOMETRY)
    assert not has_writers(shard)
    lock = hold(mapped, os.urandom(16), shard.epoch)
    assert has_writers(shard)
    lock.release()
    assert not has_writers(shard)
    hold(mapped, ENGINE, shard.epoch).release()  # it was asked, not taken
    mapped.close()
