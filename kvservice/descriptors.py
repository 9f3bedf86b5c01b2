"""File descriptors of a process that serves: it may open as many as the system allows, and says when it has none left,
or cannot listen.

Only for processes that are ours alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import socket
import time
from typing import Any

SAY_SECONDS = 10.0  # between two lines about connections that cannot be accepted
_ACCEPT_FAILED = "socket.accept() out of system resource"  # asyncio's words


def raise_file_limit() -> None:
    """Let the process have as many open files as it may. 1,024 are a common limit, and every connection takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS refuses its own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def cannot_listen(address: str, error: OSError | UnicodeError, other_port: str = "choose another --port") -> str:
    """Why a server cannot listen at this address, and which option to change."""
    if isinstance(error, UnicodeError):
        return f"cannot listen on {address}: this can be no name of a machine; choose another --host"
    # asyncio's own text repeats the address; the numbers of resolvers are not those of the system
    why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
    advice = other_port if error.errno in (errno.EADDRINUSE, errno.EACCES) else "choose another --host"
    return f"cannot listen on {address}: {why}; {advice}"


def say_when_short(log: logging.Logger) -> None:
    """Log connections that the running loop cannot accept, a line now and then.

    asyncio logs hundreds a second with a traceback each, and each takes time of the loop.
    """
    loop = asyncio.get_running_loop()
    say_at, times = 0.0, 0

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal say_at, times
        if context.get("message") != _ACCEPT_FAILED:
            loop.default_exception_handler(context)
            return
        times += 1
        if time.monotonic() >= say_at:
            say_at = time.monotonic() + SAY_SECONDS
            log.error(
                "connections_not_accepted: no file descriptor is left; raise `ulimit -n`, or LimitNOFILE of systemd",
                extra={"error": str(context.get("exception")), "times": times},
            )
            times = 0

    loop.set_exception_handler(handle)
