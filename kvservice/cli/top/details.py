"""What `kvservice top` shows of one row: a node, a model, an engine, a tenant, a request or a tier. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvservice.cli.drawing import bound, percent, plain, span, table, used_of
from kvservice.cli.status import draw_eviction, draw_hits, draw_tiers, node_names
from kvservice.cli.top.tables import STATE_STYLES, TIER_STYLES, bar, model_key
from kvservice.cli.top.trends import Trends
from kvservice.units import counted, format_bytes, printable

if TYPE_CHECKING:
    from kvservice.client.overview import EngineOverview, NodeOverview, Overview, SlowestRequest

STATE_BAR_CHARS = 40  # of a memory state; a character is 2.5 %
GONE = "It is not there any more."


def detail_of(seen: Overview, trends: Trends, view: str, key: str) -> tuple[Text, RenderableType]:
    """(title, body) for the row with this key of a view."""
    match view:
        case "nodes":
            return _node(seen, key)
        case "models":
            return _model(seen, key)
        case "engines":
            return _engine(seen, key)
        case "tenants":
            return _tenant(seen, key)
        case "tiers":
            return _tier(seen, key)
    return _request(seen, key)


def _title(kind: str, name: str, more: str = "") -> Text:
    return Text.assemble((f"{kind} ", "bold"), (printable(name), "bold cyan"), f"  {more}" if more else "")


def _fields(*pairs: tuple[str, str]) -> Table:
    made = Table(box=None, show_header=False, padding=(0, 3, 0, 0), pad_edge=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        made.add_row(name, plain(value) or "-")
    return made


def _part(title: str, body: RenderableType) -> list[RenderableType]:
    return [Text(), Text(title, style="bold"), body]


def _node(seen: Overview, key: str) -> tuple[Text, RenderableType]:
    node = next((one for one in seen.nodes if one.node_id == key), None)
    if node is None:
        return _title("Node", key), Text(GONE)
    title = _title("Node", node.label)
    title.append(f"  {node.state}", STATE_STYLES[node.state])
    if node.error:
        return title, Text(printable(node.error))
    parts: list[RenderableType] = [
        _fields(
            ("up for", span(node.uptime_seconds)),
            ("address", node.address),
            ("transport", node.transport),
            ("version", node.version),
            ("blocks in the directory", f"{node.lookup_keys:,}"),
            ("pinned", f"{counted(node.pins, 'prompt')}, {format_bytes(node.pinned_bytes)}"),
        )
    ]
    parts += _part("Memory", _memory(node))
    if node.tiers:
        parts += _part("Tiers below the memory", draw_tiers(replace(seen, nodes=(node,)), node_names(seen)))
    parts += _part("Hits", draw_hits(replace(seen, windows=node.windows, evictions=node.evictions)))
    parts += _part("Engines", _engine_table(seen, [one for one in seen.engines if one.node_id == key]))
    if node.eviction is not None:
        parts += _part("Eviction", draw_eviction(replace(seen, nodes=(node,)), node_names(seen)))
    flows = [flow for flow in seen.flows if key in (flow.source, flow.target)]
    if flows:
        names = node_names(seen)
        made = table("read from", "by", "*bytes", fold=("by",))
        for flow in sorted(flows, key=lambda flow: -flow.bytes):
            source, target = names.get(flow.source, flow.source), names.get(flow.target, flow.target)
            made.add_row(plain(source), plain(target), format_bytes(flow.bytes))
        parts += _part("Flows since the start", made)
    slow = [one for one in seen.slowest if one.node_id == key]
    parts += _part("Slowest requests", _requests(slow)) if slow else []
    return title, Group(*parts)


def _memory(node: NodeOverview) -> Table:
    made = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for justify in ("left", "left", "right", "right", "right"):
        made.add_column(justify=justify, no_wrap=True)
    for usage in node.pool.states:
        made.add_row(
            usage.state,
            Text(bar(usage.percent, STATE_BAR_CHARS), style="cyan"),
            format_bytes(usage.bytes),
            f"{usage.percent:.0f} %",
            counted(usage.slots, "slot"),
        )
    return made


def _engine_table(seen: Overview, engines: Sequence[EngineOverview]) -> RenderableType:
    if not engines:
        return Text("none")
    names = node_names(seen)
    made = table("engine", "node", "model", "tenant", "*attached for", fold=("model", "tenant"))
    for one in engines:
        node = plain(names.get(one.node_id, one.node_id))
        made.add_row(one.engine_id, node, plain(one.model), plain(one.tenant) or "-", span(one.attached_seconds))
    return made


def _requests(slow: Sequence[SlowestRequest]) -> Table:
    made = table("request", "*took", "*blocks asked", "*hit", "*ago")
    for one in slow:
        hit = one.local_blocks + one.fetched_blocks
        took = f"{one.took_seconds * 1000:,.1f} ms"
        made.add_row(plain(one.request_id), took, str(one.asked_blocks), str(hit), span(one.age_seconds))
    return made


def _model(seen: Overview, key: str) -> tuple[Text, RenderableType]:
    for model in seen.models:
        if model_key(model.namespace, model.model, model.fingerprint) == key:
            break
    else:
        return _title("Model", key), Text(GONE)
    engines = [
        one
        for one in seen.engines
        if (one.namespace, one.model, one.fingerprint) == (model.namespace, model.model, model.fingerprint)
    ]
    hits = [one for one in seen.hits if one.model == model.model]
    parts: list[RenderableType] = [
        _fields(("namespace", model.namespace), ("fingerprint", model.fingerprint), ("engines", str(model.engines)))
    ]
    made = table("tenant", "*blocks asked", "*local", "*from other nodes", "*from tiers", "*hit rate")
    for one in hits:
        made.add_row(
            plain(one.tenant) or "-",
            f"{one.asked_blocks:,}",
            f"{one.hit_local_blocks:,}",
            f"{one.hit_remote_blocks:,}",
            f"{one.hit_tier_blocks:,}",
            percent(one.hit_rate),
        )
    parts += _part("Hits since the start", made) if hits else []
    parts += _part("Engines", _engine_table(seen, engines))
    slow = [one for one in seen.slowest if one.model == model.model]
    parts += _part("Slowest requests", _requests(slow)) if slow else []
    return _title("Model", model.model), Group(*parts)


def _engine(seen: Overview, key: str) -> tuple[Text, RenderableType]:
    engine = next((one for one in seen.engines if f"{one.node_id} {one.engine_id}" == key), None)
    if engine is None:
        return _title("Engine", key), Text(GONE)
    speed = engine.prefill_tokens_per_second
    body = _fields(
        ("node", node_names(seen).get(engine.node_id, engine.node_id)),
        ("model", engine.model),
        ("namespace", engine.namespace),
        ("tenant", engine.tenant),
        ("fingerprint", engine.fingerprint),
        ("block", counted(engine.block_tokens, "token")),
        ("process", str(engine.pid) if engine.pid else "in another pid namespace"),
        ("attached for", span(engine.attached_seconds)),
        ("prefill", "not measured yet" if speed is None else f"{speed:,.0f} tokens/s"),
    )
    return _title("Engine", engine.engine_id), body


def _tenant(seen: Overview, key: str) -> tuple[Text, RenderableType]:
    names = node_names(seen)
    rows = [(node, one) for node in seen.nodes for one in node.tenants if one.name == key]
    made = table("node", "*used", "*quota", "*filling")
    for node, one in rows:
        sizes = (format_bytes(one.used_bytes), bound(one.quota_bytes))
        made.add_row(plain(names[node.node_id]), *sizes, str(one.in_flight))
    parts: list[RenderableType] = [made] if rows else [Text(GONE)]
    events = next((one.counters for one in seen.tenants if one.name == key), {})
    if events:
        parts += _part(
            "Events", _fields(*((name.replace("_", " "), f"{count:,}") for name, count in sorted(events.items())))
        )
    parts += _part("Engines", _engine_table(seen, [one for one in seen.engines if one.tenant == key]))
    return _title("Tenant", key), Group(*parts)


def _request(seen: Overview, key: str) -> tuple[Text, RenderableType]:
    slow = next((one for one in seen.slowest if f"{one.node_id} {one.request_id}" == key), None)
    if slow is None:
        return _title("Request", key), Text(GONE)
    body = _fields(
        ("node", node_names(seen).get(slow.node_id, slow.node_id)),
        ("model", slow.model),
        ("tenant", slow.tenant),
        ("waited for its answer", f"{slow.took_seconds * 1000:,.1f} ms, {span(slow.age_seconds)} ago"),
        ("blocks asked", f"{slow.asked_blocks:,}"),
        ("of them local", f"{slow.local_blocks:,}"),
        ("read from other nodes", f"{slow.fetched_blocks:,}"),
        ("the promise ended by", "" if slow.miss == "none" else slow.miss.replace("_", " ")),
    )
    more = Text(f"\nWhy each block was hit or missed: kvservice explain {printable(slow.request_id)}", style="dim")
    return _title("Request", slow.request_id), Group(body, more)


def _tier(seen: Overview, key: str) -> tuple[Text, RenderableType]:
    found = ((node, tier) for node in seen.nodes for tier in node.tiers if f"{node.node_id} {tier.name}" == key)
    node, tier = next(found, (None, None))
    if node is None or tier is None:
        return _title("Tier", key), Text(GONE)
    title = _title("Tier", tier.name, f"of {printable(node.label)}")
    title.append(f"  {printable(tier.state)}", TIER_STYLES.get(tier.state, "yellow"))
    why = "why it does not take every block" if tier.state == "open" else "why it is not used"
    parts: list[RenderableType] = [
        _fields(
            *([(why, tier.detail)] if tier.detail else []),
            ("shared by all nodes", "yes: blocks are those that this node knows of" if tier.shared else "no"),
            ("blocks", f"{tier.blocks:,}"),
            ("used", used_of(tier)),
            ("waiting to be written", counted(tier.waiting_blocks, "block")),
            ("hits of all blocks asked", percent(tier.hit_share)),
        )
    ]
    counters = sorted(tier.counters.items())
    parts += _part("Since the start", _fields(*((name.replace("_", " "), f"{count:,}") for name, count in counters)))
    return title, Group(*parts)
