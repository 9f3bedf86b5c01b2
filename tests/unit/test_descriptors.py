"""What a process says when it has no descriptor left for a connection."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from pathlib import Path

import pytest

from kvservice.descriptors import cannot_listen, say_when_short
from kvservice.testing.eventually import eventually_async

log = logging.getLogger("kvservice.shard")


async def test_connections_that_cannot_be_accepted_are_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    say_when_short(log)
    accepted = asyncio.Event()

    class Accepting(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted.set()
            transport.close()

    server = await asyncio.get_running_loop().create_unix_server(Accepting, tmp_path / "s", backlog=64)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX) as client:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))  # those that are open stay open
            client.connect(str(tmp_path / "s"))
            await eventually_async(lambda: caplog.records, "a line about it")
            await asyncio.sleep(0.1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        (line,) = caplog.records
        assert "LimitNOFILE" in line.getMessage() and line.exc_info is None
        await asyncio.wait_for(accepted.wait(), 10)
    server.close()


async def test_other_errors_of_the_loop_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    say_when_short(log)
    asyncio.get_running_loop().call_exception_handler({"message": "something else"})
    assert [record.name for record in caplog.records] == ["asyncio"]


@pytest.mark.parametrize(
    ("host", "taken", "said"),
    [
        ("127.0.0.1", True, "Address already in use; choose another --port"),
        ("192.0.2.77", False, "Cannot assign requested address; choose another --host"),
        ("no-such-name.invalid", False, "choose another --host"),
        ("a" * 64 + ".example", False, "no name of a machine; choose another --host"),
    ],
)
async def test_whoever_cannot_listen_is_told_what_to_change(host: str, taken: bool, said: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1] if taken else 0
        with pytest.raises((OSError, UnicodeError)) as failed:
            await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
    assert isinstance(failed.value, OSError | UnicodeError)
    words = cannot_listen(f"{host}:{port}", failed.value)
    assert said in words and "Unknown error" not in words and words.count(host) == 1
