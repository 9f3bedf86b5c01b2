"""`kvservice tenants usage`: asks every shard what its tenants hold. Needs no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
from rich.console import Group, RenderableType
from rich.text import Text

from kvservice.cli.drawing import bound, plain, table
from kvservice.units import format_bytes, printable

if TYPE_CHECKING:
    from kvservice.client.members import Members


@dataclass(frozen=True, slots=True)
class Held:
    """What one tenant holds at one node."""

    tenant: str
    node: str
    used_bytes: int
    quota_bytes: int  # 0: no quota
    in_flight: int  # slots that it has reserved or fetches now
    disk_used_bytes: int
    disk_quota_bytes: int  # 0: no quota


@dataclass(slots=True)
class Usage:
    held: list[Held] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def collect(service: str | None, lookup: Sequence[str] | None = None) -> Usage:
    """Ask all shards. Blocks for RPCs. Raises NoService, or ConfigError for TLS files that cannot be used."""
    from kvservice.client.members import ASKED_AT_ONCE, find_members

    members = find_members(service, lookup)
    usage = Usage()
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        for node, rows in pool.map(lambda node: (node, _ask(members, node)), sorted(members.shards)):
            if isinstance(rows, str):
                usage.problems.append(f"node {node}: {rows}")
            else:
                usage.held += rows
    usage.problems += [f"node {node}: its shard has ended" for node in sorted(members.gone)]
    usage.problems += [f"lookup partition {address}: no answer" for address in members.silent]
    usage.problems += sorted(set(members.hints.values()))
    usage.held.sort(key=lambda each: (each.tenant, each.node))
    return usage


def _ask(members: Members, node: str) -> list[Held] | str:
    """The rows of this node, or what is wrong."""
    from kvservice.client.members import CALL_SECONDS, note_hint
    from kvservice.wire.v1 import shard_pb2, shard_pb2_grpc

    address = members.shards[node]
    try:
        with members.channel(address) as channel:
            reply = shard_pb2_grpc.AdminServiceStub(channel).Stats(shard_pb2.StatsRequest(), timeout=CALL_SECONDS)
    except grpc.RpcError as error:
        note_hint(members.hints, address, error)
        return str(getattr(error, "details", lambda: "")() or "no answer")
    return [
        Held(
            each.name,
            node,
            each.used_bytes,
            each.quota_bytes,
            each.in_flight,
            each.disk_used_bytes,
            each.disk_quota_bytes,
        )
        for each in reply.tenants
    ]


def draw(usage: Usage, wide: bool) -> RenderableType:
    sizes = ("*used", "*quota", "*of quota", "*on disk", "*disk quota")
    made = table("tenant", "node", *sizes, "*slots being filled")
    for each in usage.held:
        share = f"{100 * each.used_bytes / each.quota_bytes:.0f} %" if each.quota_bytes else ""
        memory = (format_bytes(each.used_bytes), bound(each.quota_bytes), share)
        disk = (format_bytes(each.disk_used_bytes), bound(each.disk_quota_bytes))
        made.add_row(plain(each.tenant), plain(each.node), *memory, *disk, str(each.in_flight))
    lines = [Text(f"problem: {printable(problem)}", style="red") for problem in usage.problems]
    if not usage.held and not lines:
        return Text("this service has no tenants: everybody is one, see docs/tenants.md")
    return Group(*([made] if usage.held else []), *lines)
