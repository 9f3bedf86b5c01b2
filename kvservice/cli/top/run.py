"""Starts `kvservice top`: on the full screen, or with --plain line by line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvservice.cli.output import drop_output

if TYPE_CHECKING:
    from kvservice.client.members import Members
    from kvservice.client.overview import Overview, OverviewReader


def run(service: str | None, lookup: Sequence[str] | None, seconds: float, *, plain: bool, count: int | None) -> None:
    """Show the service until `q` or Ctrl-C, or `count` rounds of lines. Blocks. Raises NoService, and
    ModuleNotFoundError without textual."""
    from kvservice.client.members import find_members

    if plain or not (sys.stdout.isatty() and sys.stdin.isatty()):  # a full screen in a pipe would be noise
        _run_plain(find_members(service, lookup), seconds, count)
        return
    from kvservice.cli.top.app import TopApp

    TopApp(MemberSource(find_members(service, lookup)), seconds).run()


class MemberSource:
    """Reads the overview of one service again and again. Make it anywhere; call it on one event loop."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._reader: OverviewReader | None = None

    async def read(self) -> Overview:
        from kvservice.auth.token import Token
        from kvservice.client.overview import OverviewReader

        if self._reader is None:
            self._reader = OverviewReader(self._members.tls, Token.of_command())
        return await self._reader.read(self._members.service, self._members.lookups, self._members.known)

    async def close(self) -> None:
        if self._reader is not None:
            await self._reader.close()


def _run_plain(members: Members, seconds: float, count: int | None) -> None:
    from kvservice.cli.top.plain import follow

    async def work() -> None:
        source = MemberSource(members)
        try:
            await follow(source.read, lambda line: print(line, flush=True), seconds, count)
        finally:
            await source.close()

    try:
        asyncio.run(work())
    except KeyboardInterrupt:
        return
    except BrokenPipeError:
        drop_output()
