"""`kvservice status`: asks the lookup partitions for the nodes, and every shard for its numbers. Needs no Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvservice.cli.output import Format, show
from kvservice.units import format_bytes, printable

CALL_SECONDS = 3.0  # For one RPC. A part that takes longer is shown as a problem.
ASKED_AT_ONCE = 16  # RPCs at once, so that a large service is asked in seconds.
STATES = ("free", "writing", "sealed", "leased", "quarantined")
COLOURS = {"free": "green", "writing": "yellow", "sealed": "blue", "leased": "magenta", "quarantined": "red"}
BAR_CHARS = 24  # Of a bar that shows a node's slots; one character is about 4 %.
FALLBACK = "mirror_fallback_"


def run(service: str | None, lookup: Sequence[str] | None, form: Format, watch: float | None = None) -> dict[str, Any]:
    """Print the state of a service, with `watch` again and again. Returns what `collect` found last. Blocks for RPCs.
    Raises NoService."""
    return show(lambda: collect(service, lookup), lambda state, _: draw(state), form, watch)


def collect(service: str | None, lookup: Sequence[str] | None = None) -> dict[str, Any]:
    """Everything that `draw` shows, with stable keys. Blocks for RPCs. Raises NoService."""
    from kvservice.cli.members import find_members

    members = find_members(service, lookup)
    return read_state(members.service, members.lookups, {**members.shards, **members.gone}, members.tls)


def read_state(service: str, lookup_addresses: Sequence[str], known: Mapping[str, str], tls: Any) -> dict[str, Any]:
    """The answers of these lookup partitions, and of every shard that they or `known` (node -> peer address) name.
    `tls` is TlsFiles or None. Blocks for RPCs."""
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        lookups = list(pool.map(partial(_lookup_stats, tls), lookup_addresses))
        peers = dict(known)
        for lookup in lookups:
            peers.update({node["node_id"]: node["peer_address"] for node in lookup["nodes"] if node["alive"]})
        names = sorted(peers)
        nodes = list(pool.map(partial(_node_stats, tls), names, [peers[name] for name in names]))
    problems = [f"lookup partition {row['address']}: {row['error']}" for row in lookups if row["error"]]
    problems += [f"node {row['node_id']} at {row['peer_address']}: {row['error']}" for row in nodes if row["error"]]
    totals = {
        name: sum(row["counters"].get(name, 0) for row in nodes)
        for name in ("asked_blocks", "hit_local_blocks", "hit_remote_blocks", "fetched_bytes")
    }
    asked = totals["asked_blocks"]
    rates = {
        "local": totals["hit_local_blocks"] / asked if asked else None,
        "remote": totals["hit_remote_blocks"] / asked if asked else None,
    }
    return {
        "service": service,
        "nodes": nodes,
        "lookup_partitions": lookups,
        "totals": totals,
        "hit_rates": rates,
        "problems": problems,
    }


def draw(state: dict[str, Any]) -> RenderableType:
    nodes = Table(title=f"service '{plain(state['service'])}'", title_justify="left")
    for column in ("node, where peers reach it", "pool", "slots by state", "hit blocks", "pulled from peers", "up"):
        nodes.add_column(column, overflow="fold")
    for row in state["nodes"]:
        nodes.add_row(*_node_cells(row))
    lookups = Table(title="lookup partitions", title_justify="left")
    for column in ("address", "partition", "keys", "nodes alive"):
        lookups.add_column(column)
    for row in state["lookup_partitions"]:
        alive = sum(node["alive"] for node in row["nodes"])
        part = f"{row['partition']} of {row['partition_count']}"
        lookups.add_row(plain(row["address"]), part, f"{row['key_count']:,}", plain(row["error"]) or str(alive))
    legend = "  ".join(f"[{COLOURS[name]}]■[/] {name}" for name in STATES)
    lines = [Text.from_markup(line) for line in (legend, *_lines(state))]
    return Group(nodes, lines[0], lookups, *lines[1:])


def _lines(state: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    rates = state["hit_rates"]
    if rates["local"] is not None:
        asked = state["totals"]["asked_blocks"]
        lines.append(f"hit rate of {asked:,} asked blocks: {rates['local']:.1%} local, {rates['remote']:.1%} remote")
    for row in state["nodes"]:
        if "mirror_keys" in row["counters"]:
            lines.append(mirror_line(row["node_id"], row["counters"]))
        lines += [f"attached at {plain(row['node_id'])}: {plain(model)}" for model in row["models"]]
        for tenant in row["tenants"]:
            quota = f" of {format_bytes(tenant['quota_bytes'])}" if tenant["quota_bytes"] else ""
            held = f"{format_bytes(tenant['used_bytes'])}{quota}"
            lines.append(f"tenant {plain(tenant['name'])} at {plain(row['node_id'])}: {held}")
    return [*lines, *(f"[red]problem:[/] {plain(problem)}" for problem in state["problems"])]


def plain(text: str) -> str:
    """Text from others, unchanged, but neither Rich nor the terminal acts on it."""
    return escape(printable(text))


def mirror_line(node_id: str, counters: Mapping[str, int]) -> str:
    """One line about a node's mirror of the directory."""
    fallbacks = {name[len(FALLBACK) :]: count for name, count in sorted(counters.items()) if name.startswith(FALLBACK)}
    reasons = f" ({', '.join(f'{name} {count:,}' for name, count in fallbacks.items())})" if fallbacks else ""
    return (
        f"mirror of the directory at {plain(node_id)}: {counters['mirror_keys']:,} keys in "
        f"{format_bytes(counters['mirror_bytes'])}, {counters['mirror_live_partitions']} lookup partitions live, "
        f"{counters['mirror_age_ms'] / 1e3:.1f} s old; answered {counters.get('mirror_answers', 0):,}, left to the "
        f"lookup partitions {sum(fallbacks.values()):,}{reasons}"
    )


def _node_cells(row: dict[str, Any]) -> list[str]:
    place = f"{plain(row['node_id'])}\n{plain(row['peer_address'])}"
    if row["error"]:
        return [place, "", f"[red]{plain(row['error'])}[/]", "", "", ""]
    counters = row["counters"]
    pulled = row["pulled_bytes"] or {row["transport"]: 0}
    return [
        place + ("\n(draining)" if row["draining"] else ""),
        format_bytes(row["segment_bytes"]),
        _bar(row["slots"]),
        f"local {counters.get('hit_local_blocks', 0):,}\nremote {counters.get('hit_remote_blocks', 0):,}",
        "\n".join(f"{format_bytes(count)} by {name}" for name, count in pulled.items()),
        f"{row['uptime_seconds']:.0f} s",
    ]


def _bar(slots: dict[str, int]) -> str:
    """A bar of the slot states, and the counts that are not zero."""
    total = sum(slots.values())
    if total == 0:
        return "(no slab in use)"
    bar = ""
    for name in STATES:
        width = round(BAR_CHARS * slots.get(name, 0) / total) or (1 if slots.get(name, 0) else 0)
        bar += f"[{COLOURS[name]}]{'█' * width}[/]" if width else ""
    counts = " ".join(f"{name} {slots[name]:,}" for name in STATES if slots.get(name, 0))
    return f"{bar}\n{counts}"


def _lookup_stats(tls: Any, address: str) -> dict[str, Any]:
    from kvservice.auth.tls import open_blocking_channel
    from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc

    row: dict[str, Any] = {
        "address": address,
        "partition": 0,
        "partition_count": 0,
        "key_count": 0,
        "nodes": [],
        "error": "",
    }
    try:
        with open_blocking_channel(address, tls) as channel:
            stub = lookup_pb2_grpc.LookupServiceStub(channel)
            reply = stub.LookupStats(lookup_pb2.LookupStatsRequest(), timeout=CALL_SECONDS)
    except grpc.RpcError as error:
        row["error"] = _short(error)
        return row
    row.update(partition=reply.partition, partition_count=reply.partition_count, key_count=reply.key_count)
    row["nodes"] = [
        {
            "node_id": node.node.node_id,
            "peer_address": node.node.peer_address,
            "epoch": node.node.epoch,
            "block_count": node.block_count,
            "heartbeat_age_seconds": round(node.heartbeat_age_seconds, 3),
            "alive": node.alive,
        }
        for node in reply.nodes
    ]
    return row


def _node_stats(tls: Any, node_id: str, address: str) -> dict[str, Any]:
    from kvservice.auth.tls import open_blocking_channel
    from kvservice.wire.v1 import shard_pb2, shard_pb2_grpc

    row: dict[str, Any] = {
        "node_id": node_id,
        "peer_address": address,
        "epoch": 0,
        "segment_bytes": 0,
        "slabs": 0,
        "slabs_free": 0,
        "slots": {},
        "counters": {},
        "pulled_bytes": {},
        "draining": False,
        "transport": "",
        "uptime_seconds": 0.0,
        "models": [],
        "tenants": [],
        "error": "",
    }
    try:
        with open_blocking_channel(address, tls) as channel:
            stub = shard_pb2_grpc.AdminServiceStub(channel)
            reply = stub.Stats(shard_pb2.StatsRequest(), timeout=CALL_SECONDS)
    except grpc.RpcError as error:
        row["error"] = _short(error)
        return row
    row.update(
        epoch=reply.node.epoch,
        segment_bytes=reply.segment_bytes,
        slabs=reply.slab_count,
        slabs_free=reply.slab_free_count,
        slots=dict(reply.slots),
        counters=dict(sorted(reply.counters.items())),
        pulled_bytes=pulled_bytes(reply.counters),
        draining=reply.draining,
        transport=reply.transport,
        uptime_seconds=round(reply.uptime_seconds, 1),
        models=sorted({f"{one.namespace or '-'}/{one.model} {one.fingerprint}" for one in reply.engines}),
        tenants=[
            {
                "name": tenant.name,
                "used_bytes": tenant.used_bytes,
                "quota_bytes": tenant.quota_bytes,
                "in_flight": tenant.in_flight,
                "counters": dict(sorted(tenant.counters.items())),
            }
            for tenant in reply.tenants
        ],
    )
    return row


def pulled_bytes(counters: Mapping[str, int]) -> dict[str, int]:
    """Bytes that arrived from other nodes, by transport."""
    from kvservice.observe.metrics import transport_of

    named = {transport_of(name): count for name, count in counters.items()}
    return {name: count for name, count in named.items() if name is not None}


def _short(error: grpc.RpcError) -> str:
    """'unavailable' or 'deadline exceeded': the code says more to an operator than gRPC's text, unless that is about
    TLS."""
    from kvservice.wire.status import connect_hint

    hint = connect_hint(getattr(error, "details", lambda: "")() or "")
    code = getattr(error, "code", None)
    name = "no answer" if code is None else str(code().name).lower().replace("_", " ")
    return f"{name}: {hint}" if hint else name
