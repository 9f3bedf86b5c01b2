"""`kvservice top` beside a real service: on a terminal, in a pipe, and driven by keys."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress

import pytest
from textual.widgets import DataTable

from kvservice.cli.top.app import TopApp
from kvservice.cli.top.run import MemberSource
from kvservice.client.members import find_members
from kvservice.client.shard import ShardClient
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually, eventually_async
from kvservice.units import MiB
from tests.integration.engine import Engine, chain


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(1, 1, pool_bytes=16 * MiB) as running:
        yield running


def variables(cluster: LocalCluster) -> dict[str, str]:
    return {**os.environ, "KVSERVICE_RUNTIME_DIR": str(cluster.root), "TERM": "xterm-256color"}


async def test_the_screen_follows_what_an_engine_does(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSERVICE_RUNTIME_DIR", str(cluster.root))
    members = await asyncio.to_thread(find_members, cluster.service)
    app = TopApp(MemberSource(members), 0.2)
    engine = await Engine.attach(ShardClient(cluster.socket("n0")))
    async with app.run_test(size=(120, 30)) as pilot:
        await eventually_async(lambda: app.seen is not None and len(app.seen.engines) == 1, "the engine on the screen")
        keys = chain(1, 40)
        await engine.store(keys)
        await engine.acquire(keys, request_id="cmpl-top")
        await eventually_async(lambda: any(one.hit_rate for one in app.trends.history()), "a hit rate")
        await pilot.press("5")
        table = app.query_one(DataTable)
        await eventually_async(lambda: table.row_count == 1, "the request in its table")
        assert str(table.get_cell_at((0, 0))) == "cmpl-top"  # type: ignore[arg-type]
    engine.let_go()
    await engine.pool.close()


def test_in_a_pipe_it_prints_lines_and_ends(cluster: LocalCluster) -> None:
    command = [sys.executable, "-m", "kvservice", "top", "--interval", "0.2", "--count", "2"]
    shown = subprocess.run(command, env=variables(cluster), capture_output=True, text=True, timeout=120)
    assert (shown.returncode, shown.stderr) == (0, "")
    head, first, second = shown.stdout.splitlines()
    assert head.split()[:3] == ["time", "node", "state"] and first.split()[2:5] == second.split()[2:5]
    assert "\x1b" not in shown.stdout


@pytest.mark.parametrize("words", [("top", "--plain", "--interval"), ("status", "--watch")], ids=["top", "status"])
def test_a_reader_that_has_seen_enough_ends_it_well(cluster: LocalCluster, words: tuple[str, ...]) -> None:
    """As with `kvservice status --watch | head -1`."""
    command = [sys.executable, "-m", "kvservice", *words, "0.2"]
    with subprocess.Popen(command, env=variables(cluster), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert (process.wait(60), process.stderr.read()) == (0, b"")


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_it_ends_cleanly_and_gives_the_terminal_back(cluster: LocalCluster, key: bytes) -> None:
    ours, its = pty.openpty()
    os.set_blocking(ours, False)
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [sys.executable, "-m", "kvservice", "top", "--interval", "0.2"]
    process = subprocess.Popen(
        command, env=variables(cluster), stdin=its, stdout=its, stderr=its, start_new_session=True
    )
    os.close(its)
    said = bytearray()

    def has(what: bytes) -> bool:
        with suppress(BlockingIOError, OSError):
            said.extend(os.read(ours, 1 << 20))
        return what in said

    try:
        eventually(
            lambda: has(b"Slowest requests") and has(socket.gethostname().encode()),
            "the screen",
            60,
            detail=lambda: bytes(said[-3000:]),
        )
        os.write(ours, key)
        eventually(lambda: has(b"\x1b[?1049l") or process.poll() is not None, "the end of the full screen", 30)
        eventually(lambda: not has(b"never said") and process.poll() is not None, "the end of the process", 30)
        assert process.returncode == 0 and b"Traceback" not in said and b"\x1b[?1049l" in said
    finally:
        process.kill()
        process.wait()
        os.close(ours)
