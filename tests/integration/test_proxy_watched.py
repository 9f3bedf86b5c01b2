"""What one sees of the proxy from outside: traces that go on to the engines, and counters from the start."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

from kvservice.observe import tracing
from kvservice.testing.eventually import eventually_async
from tests.integration.proxy_lab import COMPLETIONS, Lab, Running

LONG = "a long prompt " * 100
THEIRS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_trace_of_the_client_goes_on_to_both_engines(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "spans"
    tracing.start(f"file:{path}", "kvservice-proxy")
    try:
        prefill, decode = await lab.server(node="node-p"), await lab.server()
        proxy = await lab.proxy([prefill], [decode])
        status, _ = await proxy.post({"model": "m", "prompt": LONG}, traceparent=THEIRS)
        await proxy.proxy.stop()  # the client has its answer before the span ends
    finally:
        tracing.stop()
    assert status == 200
    spans = {span["name"]: span for span in map(json.loads, path.read_text().splitlines())}
    assert spans["kvservice.proxy"]["parent_id"] == f"0x{THEIRS[36:52]}"
    for role, server in (("prefill", prefill), ("decode", decode)):
        span = spans[f"kvservice.proxy.{role}"]
        sent = f"{THEIRS[:36]}{span['context']['span_id'].removeprefix('0x')}-01"
        (seen,) = server.seen
        assert seen.headers["traceparent"] == sent and seen.params is not None
        assert seen.params["traceparent"] == sent


async def test_without_traces_the_header_of_the_client_goes_on(lab: Lab) -> None:
    prefill, decode = await lab.server(node="node-p"), await lab.server()
    proxy = await lab.proxy([prefill], [decode])
    await proxy.post({"model": "m", "prompt": LONG}, traceparent="theirs")
    (seen,) = decode.seen
    assert seen.headers["traceparent"] == "theirs" and "traceparent" not in (seen.params or {})


async def test_counters_are_there_from_the_start(lab: Lab) -> None:
    prefill, decode = await lab.server(node="node-p"), await lab.server()
    proxy = await lab.proxy([prefill], [decode])
    _, text = await proxy.get("/metrics")
    for line in (
        'kvservice_proxy_requests_total{path="/v1/completions",status="200"} 0.0',
        f'kvservice_proxy_failures_total{{fault="timeout",role="decode",server="{decode.url}"}} 0.0',
        'kvservice_proxy_first_byte_seconds_count{path="/v1/chat/completions"} 0.0',
    ):
        assert line in text.decode()


def counted(proxy: Running) -> dict[str, float]:
    """The requests for completions by status, those that there were."""
    found = re.findall(
        rf'requests_total\{{path="{COMPLETIONS}",status="(\w+)"\}} (\S+)', proxy.proxy.metrics.text().decode()
    )
    return {status: float(count) for status, count in found if float(count)}


async def test_requests_that_the_proxy_refuses_are_counted_once(lab: Lab) -> None:
    decode = await lab.server()
    proxy = await lab.proxy([], [decode], body_bytes_max=1000, request_seconds=0.5)

    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    assert (await proxy.post({"prompt": "x"}))[0] == 200
    assert (await proxy.post({"kv_transfer_params": {}}))[0] == 400
    assert (await proxy.post({"prompt": "x" * 2000}))[0] == 413
    async with proxy.session.post(proxy.url + COMPLETIONS, data=endless()) as response:
        assert response.status == 408
    assert (await proxy.get(COMPLETIONS))[0] == 405
    assert (await proxy.post({}, "/v1/embeddings"))[0] == 404
    decode.healthy = False
    await eventually_async(lambda: not any(each.healthy for each in proxy.proxy.pool), "the failed health check")
    assert (await proxy.post({"prompt": "x"}))[0] == 503  # by an exchange
    proxy.proxy._stopping = True
    assert (await proxy.post({"prompt": "x"}))[0] == 503
    proxy.proxy._stopping = False
    assert counted(proxy) == {"200": 1, "400": 1, "413": 1, "408": 1, "405": 1, "503": 2}
    assert "embeddings" not in proxy.proxy.metrics.text().decode()


async def test_a_client_that_leaves_within_its_body_is_counted(lab: Lab) -> None:
    proxy = await lab.proxy([], [await lab.server()])
    _, writer = await asyncio.open_connection("127.0.0.1", proxy.proxy.port)
    writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode())
    await asyncio.sleep(0.1)  # the request has begun
    writer.close()
    await eventually_async(lambda: counted(proxy) == {"left": 1}, "the count of the client that left", 20)


async def test_a_body_that_the_end_of_the_proxy_cuts_is_told_so(lab: Lab) -> None:
    """It is the proxy that ends, and not the client that is slow."""
    proxy = await lab.proxy([], [await lab.server()])
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.proxy.port)
    writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{{".encode())
    await asyncio.sleep(0.1)  # the request has begun
    await proxy.proxy.stop()
    answer = await asyncio.wait_for(reader.read(), 10)
    assert answer.startswith(b"HTTP/1.1 503") and b"Retry-After" in answer and b"this proxy is stopping" in answer
    assert counted(proxy) == {"503": 1}
    writer.close()
