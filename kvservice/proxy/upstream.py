"""HTTP to the servers behind the proxy: one session, what is forwarded, how answers and failures are classified.

Runs on the proxy's event loop. A cancelled call closes its connection, which is how a server learns to stop computing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum

import aiohttp
from multidict import CIMultiDict

from kvservice.proxy.bodies import EventTail
from kvservice.proxy.servers import Server, ServerFault
from kvservice.units import MiB

WHOLE_BYTES_MAX = 64 * MiB  # of an answer that is kept until it is complete

# Between two neighbours only, or rewritten here. Answers must be readable, so no compression is asked for.
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
    REFUSED = "refused"  # the request is at fault
    FAULTY = "faulty"  # the server is at fault
    BUSY = "busy"


class UpstreamFault(Exception):
    """A request to a server came to nothing. Never leaves this package."""

    def __init__(self, fault: ServerFault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class UpstreamAnswer:
    """A complete answer of a server."""

    status: int
    headers: CIMultiDict[str]  # those that a client may see
    body: bytes


def kind_of(status: int) -> AnswerKind:
    """501 is how vLLM says that it does not know what the request wants."""
    if 200 <= status < 300:
        return AnswerKind.GOOD
    if status in (408, 429):
        return AnswerKind.BUSY
    return AnswerKind.REFUSED if 400 <= status < 500 or status == 501 else AnswerKind.FAULTY


def forwarded_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The client's headers for a server: Authorization and all others that are not about the connection."""
    return CIMultiDict(_end_to_end(headers, _NOT_FORWARDED))


def returned_headers(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """A server's headers for the client."""
    return CIMultiDict(_end_to_end(headers, _NOT_RETURNED))


def _end_to_end(headers: Mapping[str, str], left_out: frozenset[str]) -> list[tuple[str, str]]:
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return [(name, value) for name, value in headers.items() if name.lower() not in left_out | named]


def new_session() -> aiohttp.ClientSession:
    """To be made on the event loop. A connection per request: servers close idle ones at moments nobody can know,
    and a request lost to that would look like a dead server."""
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
    """POST the JSON `body`, or GET without one; the answer's head is there, its body is not.

    Also while its body is read, raises UpstreamFault for whatever goes wrong between here and the server. Closes the
    connection in any case.
    """
    sent = CIMultiDict(headers or {})
    sent["Accept-Encoding"] = "identity"
    if body is not None:
        sent["Content-Type"] = "application/json"
    timeout = aiohttp.ClientTimeout(total=total_seconds, sock_connect=connect_seconds)
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
        raise UpstreamFault(ServerFault.UNREACHABLE, f"{type(error).__name__}: {error}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise UpstreamFault(ServerFault.BROKEN, f"{type(error).__name__}: {error}") from error


async def whole(response: aiohttp.ClientResponse) -> UpstreamAnswer:
    """The complete answer, for use inside `asked`."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > WHOLE_BYTES_MAX:
            raise UpstreamFault(ServerFault.ERROR, f"an answer of more than {WHOLE_BYTES_MAX} bytes")
    return UpstreamAnswer(response.status, returned_headers(response.headers), bytes(body))


def is_event_stream(response: aiohttp.ClientResponse) -> bool:
    return response.content_type == "text/event-stream"


async def pieces(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body in the pieces in which it may go to the client, for use inside `asked`; together they are the body.

    Events one or several at a time, as they come. Anything else in one piece, so that a server that dies in the middle
    of it can still be replaced.
    """
    if not is_event_stream(response):
        yield (await whole(response)).body
        return
    tail = EventTail()
    async for chunk in response.content.iter_any():
        if data := tail.feed(chunk):
            yield data
    if data := tail.rest():
        yield data
