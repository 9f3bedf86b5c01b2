"""The memory of a pool whose start is given up."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path

import pytest

from kvservice.core.segment.geometry import plan_geometry
from kvservice.memory import segment as module
from kvservice.pool.opening import open_segment
from kvservice.units import MiB


def test_memory_made_while_the_loop_ends_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the last piece is reserved: the loop ends, and cancels its tasks, before the thread does."""
    reserve, reserved, may_go_on = module._reserve, threading.Event(), threading.Event()

    def slowly(*arguments: object) -> None:
        reserve(*arguments)  # type: ignore[arg-type]
        reserved.set()
        assert may_go_on.wait(10)

    monkeypatch.setattr(module, "_reserve", slowly)
    path = tmp_path / "segment"

    async def give_up() -> None:
        opening = asyncio.ensure_future(open_segment(path, tmp_path, plan_geometry(8 * MiB, None), "n0", 1))
        assert await asyncio.to_thread(reserved.wait, 10)
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await opening
        asyncio.get_running_loop().call_soon(may_go_on.set)

    asyncio.run(give_up())
    assert not path.exists()
