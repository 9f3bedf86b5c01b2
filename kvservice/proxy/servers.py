"""The servers behind the proxy: which are healthy, how many requests each has, which node a prefill server is on.

Pure bookkeeping without clock or I/O; `now` is passed in, in seconds of a monotonic clock. All calls come from the
proxy's event loop. A server is chosen only while it is healthy and below its limit of requests in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

# Answers with a server error in a row, after which a server is sick. Fewer may be the fault of the requests.
ERRORS_MAX = 3
# Health checks without an answer in a row, after which a server is sick. A single one may only mean that its API
# process is busy.
SLOW_CHECKS_MAX = 2


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class ServerFault(Enum):
    """Why a request to a server failed."""

    UNREACHABLE = "unreachable"  # no connection: the server never got the request
    BROKEN = "broken"  # the connection broke, or the server's health check failed meanwhile
    ERROR = "error"  # the answer says that the server is at fault
    TIMEOUT = "timeout"
    BUSY = "busy"  # the server refuses more work, or this proxy has nothing left for a connection to it

    @property
    def blames_request(self) -> bool:
        """Whether this request may have caused the failure: the server had it and may have worked on it."""
        return self in (ServerFault.BROKEN, ServerFault.ERROR, ServerFault.TIMEOUT)


@dataclass(slots=True)
class Server:
    """One server in one role. Mutable: the pool keeps its record here."""

    role: Role
    url: str  # base address without a trailing slash
    healthy: bool = False
    reason: str = "not checked yet"  # why the server is not healthy; "" if it is
    in_flight: int = 0
    errors: int = 0  # answers with a server error since the last good answer
    slow_checks: int = 0
    next_check_at: float = 0.0
    checking: bool = False
    failed_meanwhile: bool = False  # a request failed since the check under way began, which may know nothing of it
    node: str | None = None  # prefill only: the node whose shard gets the blocks that it computes, if known
    plain: bool = False  # prefill only: its last answer named no node, so it cannot hand anything off


class ServerPool:
    """All servers of one proxy. `now` is in seconds. Nothing here blocks, or raises on what servers do."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], *, in_flight_max: int, check_seconds: float
    ) -> None:
        self._servers = {
            Role.PREFILL: [Server(Role.PREFILL, url) for url in prefill],
            Role.DECODE: [Server(Role.DECODE, url) for url in decode],
        }
        # where the search starts next, so that equally loaded servers take turns
        self._turn = {Role.PREFILL: 0, Role.DECODE: 0}
        self._in_flight_max = in_flight_max
        self._check_seconds = check_seconds

    def __iter__(self) -> Iterator[Server]:
        for servers in self._servers.values():
            yield from servers

    def healthy(self, role: Role) -> bool:
        """Whether any server of this role is healthy."""
        return any(server.healthy for server in self._servers[role])

    def choose(self, role: Role, *, exclude: Collection[str] = (), prefer: Server | None = None) -> Server | None:
        """The usable server with the fewest requests in flight; equals take turns. None if there is none.

        `exclude` has URLs. `prefer` wins if it is usable at all.
        """
        servers = self._servers[role]
        start = self._turn[role]
        order = [*servers[start:], *servers[:start]]
        usable = [server for server in order if self._usable(server) and server.url not in exclude]
        if not usable:
            return None
        if prefer is not None and any(server is prefer for server in usable):
            return prefer
        return min(usable, key=lambda server: server.in_flight)

    def _usable(self, server: Server) -> bool:
        return server.healthy and not server.plain and server.in_flight < self._in_flight_max

    def acquire(self, server: Server) -> None:
        """Count a request that is being sent to the server. Every acquire is followed by one release."""
        server.in_flight += 1
        servers = self._servers[server.role]
        self._turn[server.role] = (next(i for i, each in enumerate(servers) if each is server) + 1) % len(servers)

    def release(self, server: Server) -> None:
        if server.in_flight <= 0:
            raise AssertionError(f"{server.url} has no request in flight to release")
        server.in_flight -= 1

    def answered(self, server: Server) -> None:
        """Note a good answer of the server, or one that blames the request."""
        server.errors = 0

    def learnt(self, server: Server, node: str | None) -> None:
        """Note the node that a prefill answer named; None if it named none."""
        server.node = node
        server.plain = node is None

    def failed(self, server: Server, fault: ServerFault, now: float) -> None:
        """Note a request to the server that failed. Its health is checked at once, unless it was only busy.

        A server that cannot be reached is sick. A server that failed under a request is checked first, because the
        request may be to blame; only several failures in a row make it sick without a check.
        """
        if fault is ServerFault.BUSY:
            return
        server.errors += 1
        server.node = None
        server.failed_meanwhile = True
        if not server.checking:
            server.next_check_at = now
        if fault is ServerFault.UNREACHABLE or server.errors >= ERRORS_MAX:
            self._sicken(server, f"a request failed: {fault.value}")

    def due(self, now: float) -> list[Server]:
        """The servers whose health is to be checked now. Each is returned once, until its check is reported."""
        found = [server for server in self if not server.checking and server.next_check_at <= now]
        for server in found:
            server.checking, server.failed_meanwhile = True, False
        return found

    def seconds_to_next_check(self, now: float) -> float:
        """Seconds until a check is due. At most one interval, also if all servers are being checked."""
        times = [server.next_check_at for server in self if not server.checking]
        return max(0.0, min([now + self._check_seconds, *times]) - now)

    def check_passed(self, server: Server, now: float) -> None:
        """Note a passed check. If a request failed meanwhile, it counts for nothing, and the next check is due now."""
        self._checked(server, now)
        if server.failed_meanwhile:
            server.next_check_at = now
            return
        server.slow_checks = 0
        server.errors = 0
        server.healthy, server.reason = True, ""

    def check_failed(self, server: Server, reason: str, now: float, *, slow: bool) -> None:
        """Note a failed check. `slow` means no answer in time, which one busy moment explains; any other failure counts
        at once."""
        self._checked(server, now)
        server.slow_checks = server.slow_checks + 1 if slow else 0
        if not slow or server.slow_checks >= SLOW_CHECKS_MAX or not server.healthy:
            self._sicken(server, reason)

    def check_impossible(self, server: Server, reason: str, now: float) -> None:
        """Note a check that this proxy could not make. It says nothing about the server."""
        self._checked(server, now)
        if not server.healthy:
            server.reason = reason

    def _checked(self, server: Server, now: float) -> None:
        server.checking = False
        server.next_check_at = now + self._check_seconds

    def _sicken(self, server: Server, reason: str) -> None:
        server.healthy, server.reason = False, reason
        server.node, server.plain = None, False  # the server that comes back at this address may be on another node
