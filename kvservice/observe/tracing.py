"""Spans of one request, over all processes that it touches: OpenTelemetry, off unless `start` was called.

Only an engine or a proxy begins a trace. A process that serves them adds its spans to a trace that comes with a call,
and makes none otherwise: heartbeats leave no traces, and one place decides how many requests are traced. The context
goes to the next process as W3C traceparent: in gRPC's metadata, in HTTP's headers, or in a request's transfer
parameters. Inside a process it follows the tasks that a task starts. While tracing is off, every function returns at
once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvservice.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

HEADER = "traceparent"
# Of version 00: two, 32, 16 and two hexadecimal digits, with dashes between. A longer value is ignored.
HEADER_CHARS = 55
# Spans that wait for the collector. When it does not answer, further ones are dropped; this is OpenTelemetry's default.
QUEUE_MAX = 2048
FLUSH_SECONDS = 2.0  # for the last spans of a process: a collector that is away must not keep it from ending
GIVEN_UP_SECONDS = 0.2  # for an attempt to hear that it is given up
FILE = "file:"
Value = str | int | float | bool

_tracer: Tracer | None = None
_running: tuple[TracerProvider, SpanExporter] | None = None
_starting = threading.Lock()


class Span:
    """The span of a block of work. This class itself drops everything: tracing is off, or the request has no trace."""

    def set(self, **attributes: Value) -> None:
        """Add attributes, exported as kvservice.<name>."""

    def end(self, **attributes: Value) -> None:
        """End a span of `begin`, on any thread, with further attributes."""


class _RealSpan(Span):
    def __init__(self, span: Any) -> None:
        self._span = span

    def set(self, **attributes: Value) -> None:
        self._span.set_attributes(_named(attributes))

    def end(self, **attributes: Value) -> None:
        self.set(**attributes)
        self._span.end()


_NO_SPAN = Span()
_OFF: AbstractContextManager[Span] = contextlib.nullcontext(_NO_SPAN)


def start(where: str, name: str, **about: str) -> None:
    """Begin to export the spans of this process. Does nothing for "off", or when it has begun already.

    Args:
        where: off; otlp, for the collector that the variables OTEL_EXPORTER_OTLP_* name; or file:/path, to which each
            span is appended as a line of JSON.
        name: what this process is, such as kvservice-shard. OTEL_SERVICE_NAME wins.
        about: attributes of the process, such as its node.

    Raises ConfigError when OpenTelemetry is not installed or the file cannot be written.
    """
    global _tracer, _running
    with _starting:
        if where == "off" or _tracer is not None:
            return
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                "traces need OpenTelemetry: install kvservice with its extra otel, or set traces to off"
            ) from error
        called = os.environ.get("OTEL_SERVICE_NAME", name)
        resource = Resource.create({"service.name": called, "process.pid": os.getpid(), **_named(about)})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # it would wait for a collector that hangs
        atexit.register(stop)
        exporter = _exporter(where)
        provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=QUEUE_MAX))
        _running, _tracer = (provider, exporter), provider.get_tracer("kvservice")


def stop() -> None:
    """Export what is left, and switch tracing off. Idempotent. Blocks for little more than FLUSH_SECONDS."""
    global _tracer, _running
    with _starting:
        running, _running, _tracer = _running, None, None
    if running is not None:
        provider, exporter = running
        flushing = threading.Thread(target=provider.force_flush, name="kvservice-traces", daemon=True)
        flushing.start()  # it does not keep to a timeout of its own while it tries again
        flushing.join(FLUSH_SECONDS)
        exporter.shutdown()  # ends the attempts under way, but for one that waits for an answer
        flushing.join(GIVEN_UP_SECONDS)
        if not flushing.is_alive():  # else this would wait for the same answer
            provider.shutdown()


def request_span(name: str, parent: str = "", **attributes: Value) -> AbstractContextManager[Span]:
    """A span in the trace of the traceparent `parent`; without one it begins a trace. For engines and proxies."""
    return _OFF if _tracer is None else _current(name, _context_of(parent), attributes)


def served_span(name: str, metadata: Callable[[], Any]) -> AbstractContextManager[Span]:
    """The span of a call that is served, when the gRPC metadata of the call have a traceparent."""
    if _tracer is None:
        return _OFF
    parent = next((value for key, value in metadata() or () if key == HEADER and isinstance(value, str)), "")
    context = _context_of(parent)
    return _OFF if context is None else _current(name, context, {}, serves=True)


def span(name: str, **attributes: Value) -> AbstractContextManager[Span]:
    """A span below the current one; none where there is no current one."""
    return _OFF if _tracer is None or not trace_id() else _current(name, None, attributes)


def begin(name: str, parent: str = "", **attributes: Value) -> Span:
    """A span for work that ends elsewhere: call its `end`. It does not become the current span. It is below the
    traceparent `parent`, without one below the current span, and there is none where there is neither."""
    if _tracer is None:
        return _NO_SPAN
    context = _context_of(parent)
    if context is None and not trace_id():
        return _NO_SPAN
    return _RealSpan(_tracer.start_span(f"kvservice.{name}", context, attributes=_named(attributes)))


def parent_in(*carriers: object) -> str:
    """The traceparent of the first mapping that has one, such as HTTP headers or a request's parameters; "" if none."""
    if _tracer is None:
        return ""
    found = (carrier.get(HEADER) for carrier in carriers if isinstance(carrier, Mapping))
    return next((value for value in found if isinstance(value, str)), "")


def traceparent() -> str:
    """The current span as W3C traceparent; "" where there is none."""
    if _tracer is None:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get(HEADER, "")


def metadata() -> tuple[tuple[str, str], ...]:
    """gRPC metadata that carry the current span to the next process."""
    found = traceparent()
    return ((HEADER, found),) if found else ()


def trace_id() -> str:
    """The current trace as 32 hexadecimal digits; "" where there is none, or where it is not sampled."""
    if _tracer is None:
        return ""
    from opentelemetry.trace import format_trace_id, get_current_span

    context = get_current_span().get_span_context()
    return format_trace_id(context.trace_id) if context.is_valid and context.trace_flags.sampled else ""


@contextlib.contextmanager
def _current(
    name: str, context: Context | None, attributes: Mapping[str, Value], *, serves: bool = False
) -> Iterator[Span]:
    from opentelemetry.trace import SpanKind

    assert _tracer is not None
    kind = SpanKind.SERVER if serves else SpanKind.INTERNAL
    with _tracer.start_as_current_span(f"kvservice.{name}", context, kind, _named(attributes)) as made:
        yield _RealSpan(made)


def _context_of(parent: str) -> Context | None:
    """None for a text that is no traceparent."""
    if len(parent) != HEADER_CHARS:
        return None
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    found = TraceContextTextMapPropagator().extract({HEADER: parent})
    return found if get_current_span(found).get_span_context().is_valid else None


def _exporter(where: str) -> SpanExporter:
    if where == "otlp":
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise ConfigError(
                "traces to a collector need its protocol: install kvservice with its extra otel"
            ) from error
        return OTLPSpanExporter()
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    path = Path(where.removeprefix(FILE))
    try:
        file = open(path, "a", buffering=1, encoding="utf-8", opener=_private)  # noqa: SIM115  Path.open has no opener; it stays open
    except OSError as error:
        raise ConfigError(f"cannot write traces to {path}: {error.strerror}") from error
    return ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # request ids and node names are for the service's user


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f"kvservice.{name}": value for name, value in attributes.items()}
