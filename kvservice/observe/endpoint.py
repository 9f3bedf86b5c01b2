"""The HTTP endpoint of a process: /metrics for Prometheus, /livez and /readyz for probes.

    /metrics  Prometheus' text format, or OpenMetrics for a client that asks for it
    /livez    200; 503 when the event loop does not answer, or when only a restart helps
    /readyz   200 while the process takes new work; 503 with the reason otherwise, so a drain shows at once

It is plain HTTP, in a service with TLS as well: a probe of Kubernetes has no client certificate, and nothing here is
secret from who may read the metrics. Every connection runs on a thread of its own, and there are CONNECTIONS_MAX at
most: beyond it the oldest is cut off, so that whoever opens many keeps no probe out. A request asks the event loop and
waits for it a bounded time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from socketserver import TCPServer
from typing import Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from kvservice.errors import KVServiceError
from kvservice.observe.condition import Condition
from kvservice.observe.figures import ExportedFigure, gauge, metrics
from kvservice.version import __version__

log = logging.getLogger("kvservice.observe")

T = TypeVar("T")
# A request waits this long for the event loop: less than the five seconds after which a probe of the chart gives up,
# and half of Prometheus' ten. Later the loop counts as stuck.
ANSWER_SECONDS = 3.0
IDLE_SECONDS = 10.0  # a connection that sends nothing is closed after this: it would keep its thread
# Threads, one a connection: some probes, several Prometheus and a person at a browser. A thread takes about 100 KiB.
CONNECTIONS_MAX = 32
# After a connection that could not be accepted. Without a free descriptor the next attempt fails as well, at once.
PAUSE_SECONDS = 0.2
ANY_ADDRESS = "::"  # of IPv4, too; where there is no IPv6, of IPv4 alone


def on_loop(loop: asyncio.AbstractEventLoop, ask: Callable[[], T]) -> Callable[[], T | None]:
    """Make a function that calls `ask` on the loop and that any thread may call. It blocks at most ANSWER_SECONDS, and
    returns None if the loop is stuck or has ended, or if `ask` raises a KVServiceError."""

    async def call() -> T:
        return ask()

    def read() -> T | None:
        work = call()
        try:
            answer = asyncio.run_coroutine_threadsafe(work, loop)
        except RuntimeError:  # the loop has ended
            work.close()
            return None
        try:
            return answer.result(ANSWER_SECONDS)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError, KVServiceError):
            answer.cancel()  # a loop that comes back need not answer it any more
            return None

    return read


def serve_endpoint(
    collectors: Sequence[Collector],
    condition: Callable[[], Condition | None],
    port: int,
    address: str = ANY_ADDRESS,
) -> Callable[[], None]:
    """Serve at address:port. Returns a function that ends it and blocks for a moment.

    `condition` is called on threads; None means that the process does not answer. If the port is taken this logs a
    warning and serves nothing; the process goes on.
    """
    registry = CollectorRegistry(auto_describe=False)
    for collector in (*collectors, BuildCollector(), ProcessCollector(registry=None)):
        registry.register(collector)
    try:
        server = _listen(address, port, _Application(make_wsgi_app(registry), condition))
    except OSError as error:
        log.warning(
            "metrics_port_taken: no metrics and no probes are served; choose another --metrics-port",
            extra={"port": port, "error": error.strerror},
        )
        return lambda: None
    thread = threading.Thread(target=server.serve_forever, name="kvservice-metrics", daemon=True)
    thread.start()

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join(5)

    return end


class BuildCollector(Collector):
    """What runs here: kvservice_build_info."""

    def collect(self) -> Iterator[Metric]:
        found = {"version": __version__, "python": platform.python_version()}
        yield InfoMetricFamily("kvservice_build", "versions of kvservice and Python, as labels; the value is 1", found)


_CERTIFICATE: Sequence[ExportedFigure[tuple[float, float]]] = (
    gauge("not_before_seconds", "when the certificate, or its CA, became valid, in seconds since 1970", itemgetter(0)),
    gauge("not_after_seconds", "when the certificate, or its CA, ends, in seconds since 1970", itemgetter(1)),
)


class CertificateCollector(Collector):
    """How long the certificate of this process is valid: kvservice_certificate_*.

    `valid` says from when and until when it is valid, or its CA if that ends first. None without TLS.
    """

    def __init__(self, service: str, valid: Callable[[], tuple[float, float] | None]) -> None:
        self._service = service
        self._valid = valid

    def collect(self) -> Iterator[Metric]:
        found = self._valid()
        if found is not None:
            yield from metrics("kvservice_certificate_", _CERTIFICATE, ("service",), {(self._service,): found})


class _Application:
    """The WSGI application: probes here, everything else by prometheus_client."""

    def __init__(self, metrics: Any, condition: Callable[[], Condition | None]) -> None:
        self._metrics = metrics
        self._condition = condition

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path not in ("/livez", "/readyz"):
            found: Iterable[bytes] = self._metrics(environ, start_response)
            return found
        now = self._condition()
        if now is None:
            fault = f"the process does not answer within {ANSWER_SECONDS:.0f} s"
        else:
            fault = now.dead or (now.unready if path == "/readyz" else "")
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")]
        start_response("503 Service Unavailable" if fault else "200 OK", headers)
        return [f"{fault or 'ok'}\n".encode()]


class _Handler(WSGIRequestHandler):
    timeout = IDLE_SECONDS

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: a request every few seconds is no event."""


class _Server(ThreadingWSGIServer):
    """Serves CONNECTIONS_MAX connections at once, the newest."""

    def __init__(self, *arguments: Any) -> None:
        self._free = threading.Semaphore(CONNECTIONS_MAX)
        self._open: dict[int, socket.socket] = {}  # by descriptor, the oldest first
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def server_bind(self) -> None:
        """Without http.server's lookup of the host's name: it would block the caller for as long as DNS is silent."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            time.sleep(PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self._cut_oldest()
            # Its thread ends at once, unless it is waiting for the event loop.
            if not self._free.acquire(timeout=ANSWER_SECONDS):
                self.shutdown_request(request)
                return
        with self._lock:
            self._open[request.fileno()] = request
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the machine has no thread left
            self._ended(request)
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        self._ended(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone or says nothing in time: no event, and no traceback in the log."""
        log.debug("metrics_connection_failed", exc_info=True)

    def _ended(self, request: Any) -> None:
        with self._lock:
            known = self._open.pop(request.fileno(), None) is not None
        if known:
            self._free.release()

    def _cut_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._open.values()), None)
            if oldest is not None:
                with contextlib.suppress(OSError):  # its client was faster
                    oldest.shutdown(socket.SHUT_RDWR)


def _listen(address: str, port: int, application: _Application) -> ThreadingWSGIServer:
    if address == ANY_ADDRESS and not _has_ipv6():
        address = "0.0.0.0"
    family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]

    class Server(_Server):
        address_family = family

    return make_server(str(place[0]), port, application, Server, handler_class=_Handler)


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((ANY_ADDRESS, 0))
            return True
    except OSError:
        return False
