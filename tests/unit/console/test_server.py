"""The console's HTTP: who gets data, what every answer carries, and that it only reads."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from kvservice.console.access import HEADERS
from kvservice.console.feed import LISTENERS_MAX
from kvservice.console.server import STATIC, Console
from kvservice.console.settings import ConsoleSettings, token_of
from kvservice.errors import ConfigError
from kvservice.testing.eventually import eventually_async
from tests.unit.console.pages import Pages

TOKEN = "t" * 32
BEARER = {"Authorization": f"Bearer {TOKEN}"}
DATA = ("/api/events", "/api/blocks", "/api/explain?request=r")


@asynccontextmanager
async def serving(source: Pages | None = None) -> AsyncIterator[tuple[Console, aiohttp.ClientSession]]:
    console = Console(ConsoleSettings(TOKEN, port=0, interval_seconds=0.02), source or Pages())
    await console.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{console.port}") as session:
            yield console, session
    finally:
        await console.stop()


async def test_data_needs_the_token() -> None:
    source = Pages()
    async with serving(source) as (_, session):
        for path in DATA:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Cookie": f"token={TOKEN}"}):
                async with session.get(path, headers=headers) as response:
                    assert response.status == 401
                    assert "kvservice console" in (await response.json())["error"]
            async with session.get(f"{path}{'&' if '?' in path else '?'}token={TOKEN}") as response:
                assert response.status == 401, "a token in a request line would be in logs"
    assert source.asked["explain"] == source.asked["blocks"] == 0


async def test_every_answer_has_the_headers() -> None:
    async with serving() as (_, session):
        for path in ("/", "/app.js", "/nowhere", "/api/explain?request=r", "/api/explain", "/api/events"):
            async with session.get(path, headers=BEARER) as response:
                assert {name: response.headers.get(name) for name in HEADERS} == HEADERS, path
        async with session.get("/", headers={"Host": "evil.example"}) as response:
            assert response.headers["Content-Security-Policy"] == HEADERS["Content-Security-Policy"]


async def test_a_name_of_others_gets_nothing() -> None:
    async with serving() as (_, session):
        for path in ("/", *DATA):
            async with session.get(path, headers=BEARER | {"Host": "evil.example"}) as response:
                assert response.status == 421


async def test_nothing_can_be_changed() -> None:
    async with serving() as (_, session):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            for path in ("/", *DATA):
                async with session.request(method, path, headers=BEARER) as response:
                    assert response.status == 405


async def test_events_tell_of_each_reading() -> None:
    async with serving() as (_, session), session.get("/api/events", headers=BEARER) as response:
        assert response.content_type == "text/event-stream"
        names, pages = [], []
        async for line in response.content:
            if line.startswith(b"event: "):
                names.append(line.decode().strip().removeprefix("event: "))
            if line.startswith(b"data: "):
                pages.append(json.loads(line.removeprefix(b"data: ")))
            if len(pages) == 5:
                break
    assert names[0] == "all" and "tick" in names
    seen = [told["page"]["at"] for told in pages if told["page"]]
    assert seen == sorted(set(seen))


async def test_a_page_too_many_is_told_so() -> None:
    async with serving() as (console, session):
        open_pages = [await session.get("/api/events", headers=BEARER) for _ in range(LISTENERS_MAX)]
        async with session.get("/api/events", headers=BEARER) as response:
            assert response.status == 503
            assert "close one" in (await response.json())["error"]
        for one in open_pages:
            one.close()
        await eventually_async(lambda: console.feed.listeners == 0, "the pages to be gone")


async def test_an_answer_and_its_refusals() -> None:
    async with serving() as (_, session):
        async with session.get("/api/explain?request=%20r1%20", headers=BEARER) as response:
            assert (await response.json())["request_id"] == "r1"
        async with session.get("/api/blocks?node=n0&state=", headers=BEARER) as response:
            assert (await response.json())["wanted"] == {"node": "n0"}
        for path in ("/api/explain", f"/api/explain?request={'x' * 600}"):
            async with session.get(path, headers=BEARER) as response:
                assert response.status == 400


@pytest.mark.parametrize("path", ["/../access.py", "/%2e%2e/access.py", "/vendor/", "/static/app.js", "//etc/passwd"])
async def test_only_files_of_the_page_are_served(path: str) -> None:
    async with serving() as (console, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", console.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        status = await reader.readline()
        writer.close()
    assert b" 404 " in status


async def test_stop_ends_open_pages_at_once() -> None:
    async with serving() as (console, session):
        response = await session.get("/api/events", headers=BEARER)
        await response.content.readline()
        async with asyncio.timeout(5):
            await console.stop()
            with contextlib.suppress(aiohttp.ClientPayloadError):  # cut in the middle of the stream
                await response.content.read()


async def test_a_port_that_is_taken_is_said() -> None:
    async with serving() as (console, _):
        another = Console(ConsoleSettings(TOKEN, port=console.port), Pages())
        with pytest.raises(ConfigError, match="choose another --port"):
            await another.start()
        await another.stop()


def test_other_machines_are_served_with_tls_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--certificate"):
        ConsoleSettings(TOKEN, host="0.0.0.0")
    with pytest.raises(ConfigError, match="both"):
        ConsoleSettings(TOKEN, certificate=tmp_path / "a.crt")
    assert ConsoleSettings(TOKEN, host="0.0.0.0", allow_plaintext=True).scheme == "http"
    assert ConsoleSettings(TOKEN, host="0.0.0.0", certificate=tmp_path, key=tmp_path).scheme == "https"


def test_the_token_of_a_file_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "token"
    with pytest.raises(ConfigError, match="cannot read"):
        token_of(file)
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="24 to 512"):
        token_of(file)
    file.write_text(f"{TOKEN}\n")
    assert token_of(file) == TOKEN
    assert token_of(None) != token_of(None)


def test_the_page_has_no_script_or_style_of_its_own() -> None:
    """The policy would refuse it, and a browser would show a page without it."""
    page = (STATIC / "index.html").read_text()
    for inline in ("<style", "style=", "onclick=", "onload=", "javascript:", "http://", "https://"):
        assert inline not in page, inline
    for part in page.split("<script")[1:]:
        assert part.split(">", 1)[1].startswith("</script>")


VENDORED = {  # of uplot-1.6.32.tgz on npm; see docs/decisions/libraries.md
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


def test_files_of_others_are_as_they_were_released() -> None:
    vendor = STATIC / "vendor"
    found = {name: hashlib.sha256((vendor / name).read_bytes()).hexdigest() for name in VENDORED}
    assert found == VENDORED
    assert {path.name for path in vendor.iterdir()} == {*VENDORED, "uPlot.LICENSE.txt"}


def test_texts_never_become_markup() -> None:
    for path in STATIC.glob("*.js"):
        text = path.read_text()
        for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert sink not in text, f"{path.name} uses {sink}"
