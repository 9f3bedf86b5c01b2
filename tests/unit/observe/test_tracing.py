"""Spans: who begins a trace, what travels to the next process, and that nothing happens while it is off."""

from __future__ import annotations

import io
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvservice.errors import ConfigError
from kvservice.observe import logs, tracing

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = CALLER[:-2] + "00"


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "spans.jsonl"
    tracing.start(f"file:{path}", "kvservice-test", node="n0")
    yield path
    tracing.stop()


def spans(path: Path) -> dict[str, Any]:
    """By name, after everything is exported."""
    tracing.stop()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {span["name"].removeprefix("kvservice."): span for span in found}


def test_off_is_nothing() -> None:
    tracing.start("off", "kvservice-test")
    with tracing.request_span("acquire", CALLER, asked_blocks=1) as span:
        span.set(hit_blocks=1)
        assert tracing.metadata() == () and tracing.traceparent() == tracing.trace_id() == ""
    assert tracing.span("a") is tracing.served_span("b", lambda: 1 / 0)
    tracing.begin("fetch").end(blocks=1)


def test_an_engine_begins_a_trace_or_continues_its_clients(file: Path) -> None:
    with tracing.request_span("own", request_id="r1"), tracing.span("below"):
        pass
    with tracing.request_span("continued", CALLER):
        pass
    found = spans(file)
    assert found["own"]["parent_id"] is None
    assert found["own"]["attributes"] == {"kvservice.request_id": "r1"}
    assert found["own"]["resource"]["attributes"]["kvservice.node"] == "n0"
    assert found["below"]["context"]["trace_id"] == found["own"]["context"]["trace_id"]
    assert found["continued"]["context"]["trace_id"] == f"0x{CALLER[3:35]}"


def test_a_server_adds_spans_only_to_a_trace_that_it_gets(file: Path) -> None:
    with tracing.served_span("with", lambda: (("other", b"x"), ("traceparent", CALLER))):
        assert tracing.trace_id() == CALLER[3:35]
        assert tracing.metadata()[0][1].startswith(CALLER[:35])
        tracing.begin("fetch").end(verified=2)
    for metadata in (None, (), (("traceparent", "x" * 55),), (("traceparent", CALLER * 1000),)):
        with tracing.served_span("without", lambda metadata=metadata: metadata), tracing.span("below"):
            assert tracing.metadata() == ()
    found = spans(file)
    assert found.keys() == {"with", "fetch"}
    assert found["fetch"]["parent_id"] == found["with"]["context"]["span_id"]
    assert found["fetch"]["attributes"] == {"kvservice.verified": 2}


def test_a_trace_that_is_not_sampled_makes_no_spans(file: Path) -> None:
    with tracing.request_span("acquire", NOT_SAMPLED), tracing.span("below"):
        assert tracing.metadata()[0][1].endswith("-00"), "the next process must know"
    assert spans(file) == {}


def test_the_parent_is_taken_from_the_first_carrier_that_has_one(file: Path) -> None:
    assert tracing.parent_in(None, {"a": 1}, {"traceparent": 7}, {"traceparent": CALLER}) == CALLER
    assert tracing.parent_in({}, [], None) == ""


def test_records_carry_the_request_and_its_trace(file: Path) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonFormatter())
    logger = logging.Logger("kvservice.test")
    logger.addHandler(handler)
    with logs.about("chat-1"), tracing.request_span("acquire", CALLER):
        logger.info("locate_failed", extra={"node": "n0"})
    logger.info("after")
    inside, after = map(json.loads, stream.getvalue().splitlines())
    assert (inside["request_id"], inside["trace_id"], inside["node"]) == ("chat-1", CALLER[3:35], "n0")
    assert not {"request_id", "trace_id"} & after.keys()


def test_spans_are_for_the_user_of_the_service(file: Path) -> None:
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_missing_sdk_is_named_with_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="its extra otel"):
        tracing.start("otlp", "kvservice-test")


def test_a_file_that_cannot_be_written_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        tracing.start(f"file:{tmp_path}/missing/spans", "kvservice-test")
    assert tracing.traceparent() == ""


@pytest.mark.parametrize("hangs", [False, True], ids=["away", "hangs"])
def test_a_collector_without_an_answer_keeps_nothing_for_long(monkeypatch: pytest.MonkeyPatch, hangs: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as collector:
        port = collector.getsockname()[1] if hangs else 9
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setattr(tracing, "FLUSH_SECONDS", 0.2)
        tracing.start("otlp", "kvservice-test")
        with tracing.request_span("acquire"):
            pass
        began = time.monotonic()
        tracing.stop()
        assert time.monotonic() - began < 3.0


def test_otlp_reaches_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    try:
        tracing.start("otlp", "kvservice-test")
        with tracing.request_span("acquire"):
            pass
        tracing.stop()
    finally:
        server.shutdown()
        server.server_close()
    (body,) = bodies
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert resource.scope_spans[0].spans[0].name == "kvservice.acquire"
