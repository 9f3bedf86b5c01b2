"""`kvservice explain REQUEST_ID`: prints what became of a request, block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvservice.cli.drawing import plain
from kvservice.cli.output import Format, show
from kvservice.units import counted

COLOURS = {"engine": "green", "local": "green", "fetched": "cyan", "missed": "yellow"}


def run(service: str | None, lookup: Sequence[str] | None, request_id: str, form: Format) -> bool:
    """Print the diagnosis; blocks for RPCs. Returns False if the request is unknown, or if several begin with the id.
    Raises NoService."""
    state = show(lambda: explain(service, request_id, lookup), lambda state, _: draw(state), form)
    return bool(state["requests"])


def explain(service: str | None, request_id: str, lookup: Sequence[str] | None = None) -> dict[str, Any]:
    """Everything that `draw` shows, with stable keys. Blocks for RPCs. Raises NoService."""
    from kvservice.client.explanation import ServiceWitnesses
    from kvservice.client.explanation import explain as ask
    from kvservice.client.members import find_members

    members = find_members(service, lookup)
    state = ask(ServiceWitnesses(members), request_id)
    hints = sorted(set(members.hints.values()))
    return {**state, "silent_lookups": list(members.silent), "hints": hints}


def label(node: str, hosts: Mapping[str, str]) -> str:
    """How people are told of a node: its machine before its id, as `kvservice status` has it."""
    host = hosts.get(node, "")
    return node if host in ("", node) else f"{host} ({node})"


def short(node: str, hosts: Mapping[str, str]) -> str:
    """The same in a narrow column: the machine alone where no other node runs on it, else the id. `~disk` is a tier."""
    from kvservice.core.explain.records import TIER_MARK, place_name

    if node.startswith(TIER_MARK):
        return place_name(node)
    host = hosts.get(node, "")
    return host if host and list(hosts.values()).count(host) == 1 else node


def draw(state: dict[str, Any]) -> RenderableType:
    parts: list[RenderableType] = []
    for row in state["requests"]:
        parts += _draw_record(state["request_id"], row, state["hosts"])
    lines: list[str] = []
    if state["candidates"]:
        lines.append(f"several requests begin with {plain(repr(state['asked_for']))}; give more of the id:")
        lines += [f"  {plain(candidate)}" for candidate in state["candidates"]]
    elif not state["requests"] and not state["keep_seconds"]:
        lines.append(f"no node answered, so nothing is known of a request {plain(repr(state['asked_for']))}")
    elif not state["requests"]:
        minutes = state["keep_seconds"] / 60
        lines.append(
            f"no shard remembers a request {plain(repr(state['asked_for']))}. A node keeps records for "
            f"{minutes:.0f} minutes, and at most the latest 4096. A request is recorded when it asks for its prefix. "
            "Give the engine's id: the one that the API returned, or its beginning."
        )
        lines += [
            f"[yellow]an engine of {plain(refused['model'])} was refused at node "
            f"{plain(label(refused['node'], state['hosts']))} {refused['age_seconds']:.0f} s ago, and serves without "
            f"the cache:[/] {plain(refused['message'])}"
            for refused in state["refused_engines"]
        ]
    for node in state["silent_nodes"]:
        lines.append(f"[red]node {plain(node)} did not answer, so what it knows is missing here[/]")
    lines += [f"[red]left out, because it cannot be read: {plain(what)}[/]" for what in state["unreadable"]]
    lines += [f"[red]lookup partition {plain(address)} did not answer[/]" for address in state["silent_lookups"]]
    lines += [f"→ {plain(hint)}" for hint in state["hints"]]
    return Group(*parts, *(Text.from_markup(line) for line in lines))


def _draw_record(request_id: str, row: dict[str, Any], hosts: Mapping[str, str]) -> list[RenderableType]:
    blocks = row["blocks"]
    waited = (
        f" (it waited for a hand-off from node {plain(label(row['handoff_node'], hosts))})"
        if row["handoff_node"]
        else ""
    )
    head = (
        f"{plain(request_id)}\non node {plain(label(row['node'], hosts))}, model {plain(row['model'])}, "
        f"{row['age_seconds']:.1f} s ago"
    )
    if row["answered"]:
        took = f", answered after {row['took_seconds'] * 1000:.1f} ms{waited}"
    elif row["report"] is None:
        took = ", never answered"
    elif row["report"]["asked"]:
        took = ", given up before it was answered"
    elif row["blocks_asked"]:
        took = ", and its engine did not ask"
    else:
        return [Text.from_markup(f"{head}: its prompt is shorter than a block, so there was nothing to ask")]
    table = Table()
    for column in ("blocks", "", "from", "why"):
        table.add_column(column, overflow="fold")
    for one in row["diagnosis"]:
        last = one["start"] + one["count"] - 1
        span = f"{one['start']}" if last == one["start"] else f"{one['start']}-{last}"
        outcome = f"[{COLOURS[one['outcome']]}]{one['outcome']}[/]"
        why = one["text"] if one["miss_cause"] is None else f"{one['miss_cause'].replace('_', ' ')}: {one['text']}"
        table.add_row(f"{span} ({one['count']})", outcome, plain(short(one["node"], hosts)), plain(why))
    end = "" if row["finished"] else "; it goes on, or its engine ended without reporting its end"
    foot = (
        f"{counted(row['blocks_asked'], 'block')} asked: {blocks['engine']:,} in the engine, {blocks['local']:,} local,"
        f" {blocks['fetched']:,} fetched, {blocks['missed']:,} recomputed{end}"
    )
    return [Text.from_markup(head + took), table, Text.from_markup(foot)]
