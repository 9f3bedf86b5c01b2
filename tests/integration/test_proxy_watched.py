"""What one sees of the proxy from outside: traces that go on to the engines, and counters from the start."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvservice.observe import tracing
from tests.integration.proxy_lab import Lab

LONG = "a long prompt " * 100
THEIRS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def lab() -> AsyncIterator[Lab]:
    made = Lab()
    yield made
    await made.end()


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
