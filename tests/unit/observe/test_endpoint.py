"""The HTTP endpoint of a process: metrics in both formats, and what probes are told."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPMessage

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvservice import __version__
from kvservice.errors import Unavailable
from kvservice.observe import endpoint
from kvservice.observe.condition import Condition
from kvservice.observe.endpoint import on_loop, serve_endpoint

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


@contextlib.contextmanager
def served(condition: Callable[[], Condition | None] = Condition, host: str = "127.0.0.1") -> Iterator[str]:
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    end = serve_endpoint([], condition, port, host)
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        end()
    with socket.socket(kind) as probe:
        assert probe.connect_ex((host, port)) != 0


def got(url: str, **headers: str) -> tuple[int, str, HTTPMessage]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as reply:
            return reply.status, reply.read().decode(), reply.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_metrics_say_what_runs_and_how_much_it_takes() -> None:
    with served() as url:
        status, text, _ = got(f"{url}/metrics")
    assert status == 200
    assert f'version="{__version__}"' in text and "kvservice_build_info{" in text
    assert "process_resident_memory_bytes " in text and "process_open_fds " in text


def test_openmetrics_is_served_to_a_client_that_asks() -> None:
    with served() as url:
        _, text, headers = got(f"{url}/metrics", Accept=OPENMETRICS)
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert {"kvservice_build", "process_cpu_seconds"} <= {each.name for each in text_string_to_metric_families(text)}


@pytest.mark.parametrize(
    ("condition", "live", "ready", "said"),
    [
        (Condition(), 200, 200, "ok\n"),
        (Condition(unready="draining"), 200, 503, "draining\n"),
        (Condition(dead="fenced: a slot is free twice"), 503, 503, "fenced: a slot is free twice\n"),
        (None, 503, 503, "the process does not answer within 3 s\n"),
    ],
)
def test_probes_are_told(condition: Condition | None, live: int, ready: int, said: str) -> None:
    with served(lambda: condition) as url:
        assert got(f"{url}/livez")[0] == live
        assert got(f"{url}/readyz")[:2] == (ready, said)


def test_the_endpoint_serves_on_ipv6() -> None:
    with served(host="::1") as url:
        assert got(f"{url}/livez")[:2] == (200, "ok\n")


def test_without_an_address_it_serves_both_protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_ipv6 in (True, False):
        monkeypatch.setattr(endpoint, "_has_ipv6", lambda has_ipv6=has_ipv6: has_ipv6)
        with served(host=endpoint.ANY_ADDRESS) as url:
            port = url.rpartition(":")[2]
            assert got(f"http://127.0.0.1:{port}/livez")[0] == 200
            if has_ipv6:
                assert got(f"http://[::1]:{port}/livez")[0] == 200


def test_the_endpoint_asks_no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serving begins on an event loop, which a silent name server would block for ten seconds."""
    monkeypatch.setattr(socket, "getfqdn", lambda *_: pytest.fail("a name was looked up"))
    monkeypatch.setattr(socket, "gethostbyaddr", lambda *_: pytest.fail("a name was looked up"))
    with served(host="127.0.0.2") as url:
        assert got(f"{url}/livez")[0] == 200


def test_without_descriptors_the_endpoint_waits_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, attempts = socket.socket.accept, list[float]()

    def counted(listener: socket.socket) -> tuple[socket.socket, object]:
        attempts.append(time.monotonic())
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", counted)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with served() as url, socket.socket() as client:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))  # those that are open stay open
            client.connect(("127.0.0.1", int(url.rpartition(":")[2])))
            time.sleep(1.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert 1 <= len(attempts) <= 1.0 / endpoint.PAUSE_SECONDS + 2
        assert got(f"{url}/livez")[0] == 200


def test_a_taken_port_costs_the_endpoint_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        serve_endpoint([], Condition, taken.getsockname()[1])()
        assert taken.fileno() >= 0
    assert "no metrics and no probes are served; choose another --metrics-port" in caplog.text


def test_a_question_is_answered_on_the_loop(loop: asyncio.AbstractEventLoop) -> None:
    asked_by = on_loop(loop, threading.get_ident)()
    assert asked_by is not None and asked_by != threading.get_ident()


def test_a_process_that_does_not_run_answers_nothing(loop: asyncio.AbstractEventLoop) -> None:
    def ask() -> int:
        raise Unavailable("it stops")

    assert on_loop(loop, ask)() is None


def test_a_stuck_loop_fails_liveness_in_bounded_time(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "ANSWER_SECONDS", 0.2)
    with served(on_loop(loop, Condition)) as url:
        assert got(f"{url}/livez")[0] == 200
        release = threading.Event()
        loop.call_soon_threadsafe(release.wait)
        started = time.monotonic()
        assert got(f"{url}/livez")[0] == got(f"{url}/readyz")[0] == 503
        assert time.monotonic() - started < 5
        release.set()
        assert got(f"{url}/livez")[0] == 200


def test_a_loop_that_has_ended_answers_nothing() -> None:
    ended = asyncio.new_event_loop()
    ended.close()
    assert on_loop(ended, Condition)() is None


def test_connections_are_bounded_and_a_probe_still_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "CONNECTIONS_MAX", 4)
    before = threading.active_count()
    with served() as url, contextlib.ExitStack() as silent:
        place = url.removeprefix("http://").split(":")
        for _ in range(20):
            silent.enter_context(socket.create_connection((place[0], int(place[1]))))
        assert got(f"{url}/livez")[:2] == (200, "ok\n")
        assert threading.active_count() - before <= 4 + 2, "one thread listens, and one may be ending"
