"""A disk that gives errors as its pool starts is used once it answers. Nothing that was cleared comes back."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import kvservice
from kvservice.api.pool import Pool
from kvservice.core.block.engine_names import NAMES_SUFFIX, EngineNames
from kvservice.core.block.marks import Mark, MarkKind, pack_marks, unpack_marks
from kvservice.errors import Unavailable
from kvservice.pool import tier_specs
from kvservice.pool import tiers as pool_tiers
from kvservice.pool.name_files import NameFiles
from kvservice.pool.runtime import PoolRuntime
from kvservice.pool.tiers import TierPhase
from kvservice.testing.eventually import eventually
from tests.integration.embedded import open_embedded

LAYOUT = kvservice.Layout(block_tokens=16, shape=(4, 2, 16, 64))
BLOCKS = np.random.default_rng(0).standard_normal((8, 4, 2, 16, 64)).astype("float32")
TOKENS = range(16 * 8)


def is_open(runtime: PoolRuntime) -> bool:
    return runtime._tiers.states()[0].phase is TierPhase.OPEN


def clear(pool: Pool, model: str) -> None:
    runtime = pool._thread._runtime
    assert runtime is not None
    pool._thread.loop.wait(runtime.clears.clear([Mark(MarkKind.MODEL, time.time(), model)]))


def hide(marks: Path) -> None:
    """To read a folder is an error of the kernel."""
    marks.unlink(missing_ok=True)
    marks.symlink_to(marks.parent)


def appear(marks: Path, model: str) -> None:
    """At once: a pool that looks in between would find no marks."""
    draft = marks.with_name("draft")
    draft.write_bytes(pack_marks([Mark(MarkKind.MODEL, time.time(), model)]))
    draft.replace(marks)


def hit(pool: Pool, model: str) -> int:
    with pool.attach(model, LAYOUT).get(TOKENS) as found:
        assert np.array_equal(found.copy(), BLOCKS[: found.tokens // 16])
        return found.tokens // 16


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With 8 blocks each of the models a, b and c."""
    monkeypatch.setattr(pool_tiers, "REOPEN_SECONDS_MIN", 0.05)
    monkeypatch.setattr(pool_tiers, "REOPEN_SECONDS_MAX", 0.05)
    pool, runtime = open_embedded(tmp_path)
    with pool:
        eventually(lambda: is_open(runtime), "the disk is open")
        for model in "abc":
            assert pool.attach(model, LAYOUT).put(TOKENS, BLOCKS).stored == 8
        eventually(lambda: runtime.stats().counters.get("tier_disk_written_blocks") == 24, "they are on the disk")
    return tmp_path


def test_a_disk_that_answers_late_gives_what_was_not_cleared(disk: Path) -> None:
    """What was cleared is read when it answers; what is cleared until then is not complete, and holds all the same."""
    marks = disk / "embedded.marks"
    hide(marks)
    pool, runtime = open_embedded(disk)
    with pool:
        eventually(lambda: "Is a directory" in runtime._tiers.states()[0].detail, "status says why")
        assert runtime._tiers.states()[0].phase is TierPhase.FAILED
        with pytest.raises(Unavailable, match="not used before it answers"):
            clear(pool, "b")
        assert hit(pool, "c") == 0
        appear(marks, "a")
        eventually(lambda: is_open(runtime), "the disk is used")
        eventually(lambda: runtime.stats().counters.get("tier_disk_found") == 8, "its blocks are found")
        assert [hit(pool, model) for model in "abc"] == [0, 0, 8]
        read = unpack_marks(marks.read_bytes())
        assert read is not None and {mark.name for mark in read} == {"a", "b"}
        clear(pool, "c")
        assert pool.attach("d", LAYOUT).put(TOKENS, BLOCKS).stored == 8
        eventually(lambda: runtime.stats().tiers[0].blocks == 8, "the disk takes blocks")
    pool, runtime = open_embedded(disk)
    with pool:
        eventually(lambda: runtime.stats().counters.get("tier_disk_found") == 8, "the next start finds them")
        assert [hit(pool, model) for model in "abcd"] == [0, 0, 0, 8]


def test_a_late_disk_that_takes_no_marks_is_tried_again(disk: Path) -> None:
    """It may be full for the moment, or hang again."""
    marks, draft = disk / "embedded.marks", disk / f".embedded.marks.{os.getpid()}"
    hide(marks)
    pool, runtime = open_embedded(disk)
    with pool:
        eventually(lambda: "Is a directory" in runtime._tiers.states()[0].detail, "it is late")
        draft.mkdir()
        marks.unlink()
        eventually(lambda: "cannot be kept" in runtime._tiers.states()[0].detail, "status says why")
        draft.rmdir()
        eventually(lambda: is_open(runtime), "the disk is used")


def test_a_late_disk_that_hangs_again_holds_up_no_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network mount may. A reader of a pipe waits in the kernel as long as nobody writes to it."""
    hangs = 20.0
    names = tmp_path / f"embedded{NAMES_SUFFIX}"
    os.mkfifo(names)
    monkeypatch.setattr(tier_specs, "FREE_SECONDS", 0.2)
    pool, runtime = open_embedded(tmp_path)
    eventually(lambda: "did not answer" in runtime._tiers.states()[0].detail, "it is late")

    def is_started() -> bool:
        """It answers until it is."""
        if "disk" not in runtime._tiers._open:
            with contextlib.suppress(OSError):  # nobody reads
                os.close(os.open(names, os.O_WRONLY | os.O_NONBLOCK))
        return "disk" in runtime._tiers._open

    eventually(is_started, "it was started")
    ends = threading.Timer(hangs, lambda: names.open("wb").close())
    ends.daemon = True
    ends.start()
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < hangs / 2
    ends.cancel()

    def is_read() -> bool:
        """So that no later test sees the thread that hangs."""
        with contextlib.suppress(OSError):
            os.close(os.open(names, os.O_WRONLY | os.O_NONBLOCK))
        return not any(thread.name.startswith("kvservice-join") for thread in threading.enumerate())

    eventually(is_read, "the thread ended")


def test_a_clear_amid_a_join_keeps_the_marks_of_the_disk(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wrote what the pool knew by then over what had lain beside the disk, and the pool may end next."""
    marks, keep, seen = disk / "embedded.marks", NameFiles.keep, list[set[str]]()
    hide(marks)
    pool, runtime = open_embedded(disk)

    async def cleared_meanwhile(files: NameFiles, names: EngineNames) -> None:
        await keep(files, names)
        with contextlib.suppress(Unavailable):  # it need not be complete yet
            await runtime.clears.clear([Mark(MarkKind.MODEL, time.time(), "b")])
        seen.append({mark.name for mark in unpack_marks(marks.read_bytes()) or ()})

    monkeypatch.setattr(NameFiles, "keep", cleared_meanwhile)
    with pool:
        eventually(lambda: "Is a directory" in runtime._tiers.states()[0].detail, "it is late")
        appear(marks, "a")
        eventually(lambda: is_open(runtime), "the disk is used")
    assert len(seen) == 1 and "a" in seen[0]
    assert {mark.name for mark in unpack_marks(marks.read_bytes()) or ()} == {"a", "b"}
