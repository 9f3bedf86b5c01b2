"""Whose fault it is that a server does not answer, and what becomes of the requests that wait at it."""

from __future__ import annotations

import asyncio
import resource
import time

import pytest

from kvservice.proxy import server as proxy_server
from kvservice.proxy import upstream
from kvservice.proxy.servers import Role, Server, ServerFault
from kvservice.testing.eventually import eventually_async
from tests.integration.proxy_lab import COMPLETIONS, Lab


async def test_requests_leave_a_server_that_a_request_found_dead(lab: Lab) -> None:
    """The request finds it before its next health check does, which then fails at a server that is sick already."""
    hanging, other = await lab.server(hold=True), await lab.server(hold=True)
    proxy = await lab.proxy([], [hanging, other], check_seconds=60)
    asking = [asyncio.create_task(proxy.post({"prompt": "x"})) for _ in range(2)]
    await hanging.until(lambda: len(hanging.seen) == 1)
    await other.until(lambda: len(other.seen) == 1)
    await hanging.stop_listening()
    asking.append(asyncio.create_task(proxy.post({"prompt": "x"})))  # it is the turn of the first server
    await other.until(lambda: len(other.seen) == 3)
    await hanging.until(lambda: hanging.seen[0].cancelled)
    other.release()
    assert [status for status, _ in await asyncio.gather(*asking)] == [200, 200, 200]


async def test_without_descriptors_the_proxy_blames_itself(lab: Lab) -> None:
    decode = await lab.server()
    proxy = await lab.proxy([], [decode], check_seconds=0.05)
    assert (await proxy.post({"prompt": "x"}))[0] == 200  # over the connection that the others use as well
    (server,) = proxy.proxy.pool
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))  # those that are open stay open
    try:
        async with proxy.session.post(proxy.url + COMPLETIONS, json={"prompt": "x"}) as response:
            assert response.status == 503 and response.headers["Retry-After"] == "1"
            assert "no file descriptor" in (await response.json())["error"]["message"]
        assert (await proxy.get("/v1/models"))[0] == 503
        await asyncio.sleep(0.3)  # some checks
        assert server.healthy and server.errors == 0
        server.healthy = False
        await eventually_async(lambda: "Too many open files" in server.reason, "a reason that names the limit")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await eventually_async(lambda: server.healthy, "a healthy decode server")
    assert (await proxy.post({"prompt": "x"}))[0] == 200


async def test_idle_connections_of_clients_are_closed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert proxy_server.IDLE_SECONDS < 120
    monkeypatch.setattr(proxy_server, "IDLE_SECONDS", 0.1)
    proxy = await lab.proxy([], [await lab.server()])
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.proxy.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 10)  # until the connection is closed
    assert answer.startswith(b"HTTP/1.1 200 OK")
    writer.close()


async def test_after_a_check_too_old_to_count_another_follows(lab: Lab) -> None:
    decode = await lab.server(die_after=0)
    proxy = await lab.proxy([], [decode], check_seconds=60)
    (server,) = proxy.proxy.pool
    decode.hold_health = True
    assert (await proxy.post({"prompt": "x"}))[0] == 502
    await eventually_async(lambda: decode.checks_held == 1, "a check under way")
    proxy.proxy.pool.failed(server, ServerFault.UNREACHABLE, asyncio.get_running_loop().time())
    decode.healthy = decode.hold_health = False
    decode.release()
    await eventually_async(lambda: server.reason == "/health answered 503", "the check after it", 20)


async def test_a_silent_name_server_costs_the_time_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(*_: object, **__: object) -> list[object]:
        await asyncio.sleep(60)
        return []

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", silent)
    session = upstream.new_session()
    began = time.monotonic()
    try:
        with pytest.raises(upstream.UpstreamFault, match="no connection within") as failed:
            async with upstream.asked(
                session,
                Server(Role.DECODE, "http://decode.example:8000"),
                COMPLETIONS,
                connect_seconds=0.2,
                total_seconds=None,
                body=b"{}",
            ):
                pass
    finally:
        await session.close()
    assert failed.value.fault is ServerFault.UNREACHABLE and time.monotonic() - began < 5


@pytest.mark.parametrize("status", [429, 408])
async def test_a_decode_server_without_room_is_left_for_another(lab: Lab, status: int) -> None:
    full, other = await lab.server(status=status), await lab.server()
    proxy = await lab.proxy([await lab.server()], [full, other])
    assert (await proxy.post({"prompt": "x" * 600}))[0] == 200
    assert (len(full.seen), len(other.seen)) == (1, 1)
    assert all(server.healthy for server in proxy.proxy.pool)
    other.status = status
    async with proxy.session.post(proxy.url + COMPLETIONS, json={"prompt": "x" * 600}) as response:
        assert (response.status, response.headers["X-Server"]) == (status, "fake")
    await proxy.idle()


async def test_a_prefill_server_without_a_node_is_told_with_its_causes(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    """It may well have the connector: its shard may have died, or it stores nothing as a consumer."""
    await lab.proxy([await lab.server(node=None)], [await lab.server()])
    event = "prefill_server_hands_nothing_off"
    await eventually_async(lambda: any(each.message == event for each in caplog.records), "the line of the log")
    detail = next(vars(each)["detail"] for each in caplog.records if each.message == event)
    assert all(cause in detail for cause in ("no KVServiceConnector", "kv_consumer", "no pool"))
