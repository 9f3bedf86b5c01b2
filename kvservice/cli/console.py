"""`kvservice console`: makes the settings and the source of the console, and runs it in the foreground."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

BLOCKS_LISTED = 200  # in one answer: more rows than anybody reads; `kvservice blocks` lists more
# A node that falls silent is shown so long after its last answer. The directory forgets it much earlier, and a page
# without it would look as if all were well.
REMEMBERED_SECONDS = 300.0


class ServiceSource:
    """A service, through its lookup partitions and shards. Made and used on one event loop."""

    def __init__(self, service: str | None, lookup: Sequence[str] | None) -> None:
        """Blocks for RPCs. Raises NoService and ConfigError as find_members does."""
        from kvservice.auth.token import Token
        from kvservice.client.channels import Channels
        from kvservice.client.members import find_members

        self._asked_for = (service, lookup)
        self._members = find_members(service, lookup)
        self._channels = Channels(self._members.tls, token=Token.of_command())
        self._answered: dict[str, tuple[str, float]] = {}  # by node: its address, and when it answered last
        self._is_well = True

    @property
    def name(self) -> str:
        return self._members.service

    async def overview(self) -> dict[str, Any]:
        from kvservice.client.overview import DRAINING, SILENT, as_json, gather_overview

        if not self._is_well:  # all of it may have ended, and begun again elsewhere
            self._members = await self._find()
        known = {**self._members.gone, **{node: address for node, (address, _) in self._answered.items()}}
        overview = await gather_overview(self._channels, self._members.service, self._members.lookups, known)
        now = time.monotonic()
        for node in overview.nodes:
            if node.state == DRAINING:
                self._answered.pop(node.node_id, None)  # when it is silent next, it has left
            elif node.state != SILENT:
                self._answered[node.node_id] = (node.address, now)
        self._answered = {node: row for node, row in self._answered.items() if row[1] > now - REMEMBERED_SECONDS}
        self._is_well = any(node.state != SILENT for node in overview.nodes)
        return as_json(overview)

    async def blocks(self, wanted: Mapping[str, str]) -> dict[str, Any]:
        from dataclasses import asdict

        from kvservice.cli.blocks import BLOCK_STATES
        from kvservice.client.block_list import BlockFilter, list_blocks

        node, state = wanted.get("node", ""), wanted.get("state", "")
        addresses = {name: address for name, (address, _) in self._answered.items() if node in ("", name)}
        chosen = BlockFilter((state,) if state else BLOCK_STATES, wanted.get("model", ""))
        return asdict(await list_blocks(self._channels, addresses, chosen, BLOCKS_LISTED))

    async def explain(self, request_id: str) -> dict[str, Any]:
        from kvservice.aio import in_thread
        from kvservice.cli import explain

        service, lookup = self._asked_for
        return await in_thread(lambda: explain.explain(service, request_id, lookup))

    async def close(self) -> None:
        await self._channels.close()

    async def _find(self) -> Any:
        from kvservice.aio import in_thread
        from kvservice.client.members import find_members

        return await in_thread(lambda: find_members(*self._asked_for))


def run(
    service: str | None,
    lookup: Sequence[str] | None,
    *,
    host: str,
    port: int,
    names: Sequence[str],
    certificate: Path | None,
    key: Path | None,
    token_file: Path | None,
    interval: float,
) -> None:
    """Serve the console until a signal; blocks. Raises KVServiceError."""
    from kvservice.auth.tls import CERTIFICATE_NAME, KEY_NAME, is_loopback
    from kvservice.config import tls_of_environment
    from kvservice.console.server import serve
    from kvservice.console.settings import ConsoleSettings, token_of

    tls_dir, allow_plaintext = tls_of_environment()
    if certificate is None and key is None and tls_dir and not is_loopback(host):
        certificate, key = Path(tls_dir, CERTIFICATE_NAME), Path(tls_dir, KEY_NAME)
    settings = ConsoleSettings(
        token_of(token_file),
        host=host,
        port=port,
        names=frozenset(name.lower() for name in (*names, socket.gethostname())),
        certificate=certificate,
        key=key,
        allow_plaintext=allow_plaintext,
        interval_seconds=interval,
        printed_token=token_file is None,
    )

    async def main() -> None:
        source = ServiceSource(service, lookup)

        def say(url: str) -> None:
            typer.echo(f"console of service {source.name!r}: {url}")
            with_token = "the URL has the token" if token_file is None else f"it asks for the token in {token_file}"
            typer.echo(f"it only reads; {with_token}; Ctrl-C ends it")

        await serve(settings, source, say)

    asyncio.run(main())
