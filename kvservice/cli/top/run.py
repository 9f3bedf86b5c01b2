"""Starts `kvservice top`: on the full screen, or with --plain line by line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvservice.cli.output import drop_output

if TYPE_CHECKING:
    from kvservice.client.channels import Channels
    from kvservice.client.members import Members
    from kvservice.client.overview import Overview


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
        self._channels: Channels | None = None

    async def read(self) -> Overview:
        from kvservice.auth.token import Token
        from kvservice.client.channels import Channels
        from kvservice.client.overview import gather_overview

        if self._channels is None:
            self._channels = Channels(self._members.tls, token=Token.of_command())
        members = self._members
        return await gather_overview(self._channels, members.service, members.lookups, members.known)

    async def close(self) -> None:
        if self._channels is not None:
            await self._channels.close()


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
