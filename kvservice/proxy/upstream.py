"""HTTP to the servers behind the proxy: the session, the forwarded headers, and how answers and failures are
classified.

Runs on the proxy's event loop. A cancelled call closes its connection, which tells the server to stop computing.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum

import aiohttp
from multidict import CIMultiDict

from kvservice.proxy import bodies
from kvservice.proxy.bodies import EventTail
from kvservice.proxy.servers import Server, ServerFault
from kvservice.units import MiB

# The largest answer that is kept in memory until it is complete. A larger one counts as the server's error.
WHOLE_BYTES_MAX = 64 * MiB
CUT_SHORT = "the connection ended before the answer did"
GIVEN_UP = "the server gave the request up"

# No connection for want of a file descriptor, a port or memory: the proxy's machine is at fault, not the server.
_OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS})

# Headers that concern one connection only, or that are rewritten here. Accept-Encoding is left out because the proxy
# must be able to read the answers.
_NOT_FORWARDED = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "host", "content-length", "content-encoding", "content-type", "accept-encoding", "expect"}
)
_NOT_RETURNED = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "te", "trailer", "transfer-encoding", "upgrade"}
    | {"content-length", "date", "server"}
)


class AnswerKind(Enum):
    GOOD = "good"
    REFUSED = "refused"  # the server says that the request is at fault
    FAULTY = "faulty"  # the server is at fault
    BUSY = "busy"


class UpstreamFault(Exception):
    """A request to a server failed. It never leaves this package."""

    def __init__(self, fault: ServerFault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class UpstreamAnswer:
    """The complete answer of a server."""

    status: int
    headers: CIMultiDict[str]  # the headers that the client may see
    body: bytes


def kind_of(status: int) -> AnswerKind:
    """Classify an HTTP status. 501 counts as a refused request: vLLM answers it when it does not support what the
    request asks for."""
    if 200 <= status < 300:
        return AnswerKind.GOOD
    if status in (408, 429):
        return AnswerKind.BUSY
    return AnswerKind.REFUSED if 400 <= status < 500 or status == 501 else AnswerKind.FAULTY


def forwarded_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The client's headers for a server: Authorization and all others that do not concern the connection."""
    return CIMultiDict(_end_to_end(headers, _NOT_FORWARDED))


def returned_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A server's headers for the client, without those that concern the connection."""
    return CIMultiDict(_end_to_end(headers, _NOT_RETURNED))


def _end_to_end(headers: Mapping[str, str], left_out: frozenset[str]) -> list[tuple[str, str]]:
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return [(name, value) for name, value in headers.items() if name.lower() not in left_out | named]


def new_session() -> aiohttp.ClientSession:
    """A session with one connection per request; call it on the event loop. Servers close idle connections at any
    moment, and a request lost to that would look like a dead server."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )


@asynccontextmanager
async def asked(
    session: aiohttp.ClientSession,
    server: Server,
    path: str,
    *,
    connect_seconds: float,
    total_seconds: float | None,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a request: POST with the JSON `body`, or GET without one. Yields when the head of the answer has arrived.

    Raises UpstreamFault for anything that goes wrong between here and the server, also while the body is read. The
    connection is closed in any case.
    """
    sent = CIMultiDict(headers or {})
    sent["Accept-Encoding"] = "identity"
    if body is not None:
        sent["Content-Type"] = "application/json"
    # `connect` is also for the lookup of the name, which takes ten seconds and more with a silent name server
    timeout = aiohttp.ClientTimeout(total=total_seconds, connect=connect_seconds, sock_connect=connect_seconds)
    method = "GET" if body is None else "POST"
    try:
        response = await session.request(
            method, server.url + path, data=body, headers=sent, timeout=timeout, allow_redirects=False
        )
        try:
            yield response
        finally:
            response.close()
    except aiohttp.ConnectionTimeoutError as error:
        raise UpstreamFault(ServerFault.UNREACHABLE, f"no connection within {connect_seconds:g} s") from error
    except asyncio.TimeoutError as error:
        raise UpstreamFault(ServerFault.TIMEOUT, f"no complete answer within {total_seconds} s") from error
    except aiohttp.ClientConnectorError as error:
        fault = ServerFault.BUSY if error.errno in _OWN_FAULTS else ServerFault.UNREACHABLE
        raise UpstreamFault(fault, f"{type(error).__name__}: {error}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise UpstreamFault(ServerFault.BROKEN, f"{type(error).__name__}: {error}") from error


async def whole(response: aiohttp.ClientResponse) -> UpstreamAnswer:
    """Read the complete answer. For use inside `asked`. Raises UpstreamFault if it is larger than WHOLE_BYTES_MAX."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > WHOLE_BYTES_MAX:
            raise UpstreamFault(ServerFault.ERROR, f"the answer is larger than {WHOLE_BYTES_MAX} bytes")
    if bodies.is_given_up(body):
        raise UpstreamFault(ServerFault.ERROR, GIVEN_UP)
    if _ends_with_connection(response) and response.content_type == "application/json" and not bodies.is_json(body):
        raise UpstreamFault(ServerFault.BROKEN, CUT_SHORT)
    return UpstreamAnswer(response.status, returned_headers(response.headers), bytes(body))


def _ends_with_connection(response: aiohttp.ClientResponse) -> bool:
    """Whether only the end of the connection ends the body, as with HTTP/1.0. A server that dies ends it as well."""
    coding = response.headers.get("Transfer-Encoding", "").lower()
    return "Content-Length" not in response.headers and "chunked" not in coding


def is_event_stream(response: aiohttp.ClientResponse) -> bool:
    return response.content_type == "text/event-stream"


async def pieces(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the body in pieces that may go to the client; together they are the body. For use inside `asked`.

    An event stream comes in whole events, as they arrive, up to one that tells of a failure of the server. Any other
    body comes in one piece, so that a server that dies in the middle of it can still be replaced.
    """
    if not is_event_stream(response):
        yield (await whole(response)).body
        return
    tail, data = EventTail(), b""
    async for chunk in response.content.iter_any():
        events = tail.feed(chunk)
        good, failure = _until_failure(events)
        if not data and bodies.is_end(good):
            raise UpstreamFault(ServerFault.ERROR, GIVEN_UP)
        if good:
            data = good
            yield data
        if failure:
            raise UpstreamFault(ServerFault.ERROR, failure)
    rest = tail.rest()
    if not (rest or data).rstrip().endswith(bodies.DONE):
        raise UpstreamFault(ServerFault.BROKEN, CUT_SHORT)
    if rest:
        yield rest


def _until_failure(events: bytes) -> tuple[bytes, str]:
    """The events before the first that tells of a failure of the server, and the failure; all events and "" if none
    does. An error that blames the request is none."""
    good = 0
    for event in bodies.split_events(events):
        if bodies.is_given_up(event):
            return events[:good], GIVEN_UP
        code = bodies.error_code(event)
        if code is not None and kind_of(code) is AnswerKind.FAULTY:
            return events[:good], f"an error in its stream: {event.decode(errors='replace').strip()}"
        good += len(event)
    return events, ""
