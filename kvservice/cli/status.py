"""`kvservice status`: what one sees of a service at one moment. Needs no Ray.

client.overview gathers it; this module shows it to people. It says everything without colours too, since its output is
also read in pipes and files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvservice.cli.drawing import bound, percent, plain, problem_line, span, table
from kvservice.cli.output import Format, show
from kvservice.units import counted, format_bytes, printable

if TYPE_CHECKING:
    from kvservice.client.overview import Overview

WIDTH_MIN = 80  # characters that the tables need
DIFFERENCES_SHOWN = 3  # of a refused engine; the first ones tell what to change, and `wide` shows all
SLOWEST_SHOWN = 5  # requests; `kvservice explain` says more about each
STATE_STYLES = {"ok": "green", "draining": "yellow", "silent": "red"}
WINDOW_NAMES = {"10m": "last 10 min", "1m": "last min"}
CAUSE_NAMES = {
    "pressure": "for other blocks",
    "slab_moved": "for blocks of another size",
    "quota": "for blocks of their tenant, at its quota",
    "cleared": "by `kvservice clear`",
    "aged": "older than max_age_seconds",
    "corrupt": "damaged in memory",
}


def run(service: str | None, lookup: Sequence[str] | None, form: Format, watch: float | None = None) -> Overview:
    """Print the state of a service, with `watch` again and again. Returns what `collect` found last. Blocks for RPCs.
    Raises NoService."""
    return show(lambda: collect(service, lookup), draw, form, watch, width_min=WIDTH_MIN)


def collect(service: str | None, lookup: Sequence[str] | None = None) -> Overview:
    """Everything that `draw` shows. Blocks for RPCs. Raises NoService."""
    from kvservice.client.lookup_overview import misplaced
    from kvservice.client.members import find_members

    members = find_members(service, lookup)
    seen = read_overview(members.service, members.lookups, members.known, members.tls)
    # For the option one partition is enough. What shards or the setting name must be all of them.
    return seen if lookup else replace(seen, problems=(*seen.problems, *misplaced(seen.lookups)))


def read_overview(service: str, lookup_addresses: Sequence[str], known: dict[str, str], tls: Any) -> Overview:
    """The overview of the service with these lookup partitions, and of the shards in `known` (node -> address).
    `tls` is TlsFiles or None. Blocks for RPCs."""
    import asyncio

    from kvservice.auth.token import Token
    from kvservice.client.channels import Channels
    from kvservice.client.overview import gather_overview

    async def read() -> Overview:
        async with Channels(tls, token=Token.of_command()) as channels:
            return await gather_overview(channels, service, lookup_addresses, known)

    return asyncio.run(read())


def draw(seen: Overview, wide: bool) -> RenderableType:
    """The picture of an overview. With `wide` it has what developers want to know as well."""
    names = node_names(seen)
    parts: list[RenderableType] = [*_headline(seen), *_section("Nodes", _nodes(seen))]
    parts += _section("Memory by state", _memory(seen, names, wide))
    if seen.tiers:
        parts += _section("Tiers below the memory", draw_tiers(seen, names))
    if seen.drifts:
        parts += _section("Drift of blocks that are stored with loss", _drifts(seen, names))
    parts += _section("Hits", draw_hits(seen))
    parts += _section("Models", _models(seen, names))
    if seen.refused:
        parts += _section("Refused engines, which serve without the cache", _refused(seen, names, wide))
    if seen.flows:
        parts += _section("Read from other nodes since their start", _flows(seen, names))
    if seen.tenants:
        parts += _section("Tenants", _tenants(seen))
    if seen.slowest:
        parts += _section("Slowest requests of the last minutes", _slowest(seen, names))
    if wide:
        parts += _section("Engines", _engines(seen, names)) if seen.engines else []
        parts += _section("Node details", _details(seen, names))
        parts += _section("Eviction", draw_eviction(seen, names)) if any(node.eviction for node in seen.nodes) else []
        parts += _section("Lookup partitions", _lookups(seen))
        parts += _section("Mirrors of the directory", _mirrors(seen, names))
    if seen.restricted:
        parts += [Text(), Text(RESTRICTED)]
    if seen.problems:
        parts += [Text(), *map(problem_line, seen.problems), Text(ADVICE)]
    return Group(*parts)


ADVICE = "`kvservice doctor`, on the machine that it is about, says what to do."
NOT_DECODED = "Start it with the codec_key_file, tenants_file and codecs that wrote them."
RESTRICTED = "Refused engines and slow requests belong to tenants. To see them, set KVSERVICE_TOKEN_FILE."


def node_names(seen: Overview) -> dict[str, str]:
    """How to call each node: as its machine, unless two have the same name or it is not known."""
    hosts = [node.host for node in seen.nodes]
    return {
        node.node_id: node.host if node.host and hosts.count(node.host) == 1 else node.node_id for node in seen.nodes
    }


def _section(title: str, body: RenderableType) -> list[RenderableType]:
    return [Text(), Text(title, style="bold underline"), Padding(body, (0, 0, 0, 2))]


def _headline(seen: Overview) -> list[Text]:
    states = [node.state for node in seen.nodes]
    unwell = [f"{states.count(state)} {state}" for state in ("draining", "silent") if state in states]
    answering = sum(not lookup.error for lookup in seen.lookups)
    alone = "Lookup partitions: none, so nothing is read from other nodes."
    lookups = f"Lookup partitions: {answering} of {len(seen.lookups)} answering." if seen.lookups else alone
    nodes = counted(len(states), "node") + (f" ({', '.join(unwell)})" if unwell else "")
    pool = seen.pool
    used = f"{format_bytes(pool.used_bytes)} of {format_bytes(pool.total_bytes)} used ({pool.used_percent:.0f} %)"
    return [
        Text.assemble(
            "Service ",
            (printable(seen.service), "bold"),
            f": {nodes}, {counted(len(seen.engines), 'engine')}.",
        ),
        Text(f"Memory: {used}, {format_bytes(pool.free_bytes)} free.{_pinned(seen)}"),
        Text(lookups),
    ]


def _pinned(seen: Overview) -> str:
    pins = sum(node.pins for node in seen.nodes)
    size = format_bytes(sum(node.pinned_bytes for node in seen.nodes))
    return f" {counted(pins, 'pin')} {'hold' if pins > 1 else 'holds'} {size} of it." if pins else ""


def _nodes(seen: Overview) -> Table:
    made = table("node", "state", "up", "*engines", "*pool", "*used", "*", "*hit rate")
    for node in seen.nodes:
        state = f"[{STATE_STYLES[node.state]}]{node.state}[/]"
        if node.state == "silent":
            made.add_row(plain(node.label), state)
            continue
        made.add_row(
            plain(node.label),
            state,
            span(node.uptime_seconds),
            str(sum(engine.node_id == node.node_id for engine in seen.engines)),
            format_bytes(node.pool.total_bytes),
            format_bytes(node.pool.used_bytes),
            f"{node.pool.used_percent:.0f} %",
            percent(node.windows[0].hit_rate if node.windows else None),
        )
    return made


def _memory(seen: Overview, names: Mapping[str, str], wide: bool) -> Table:
    states = [usage.state for usage in seen.pool.states]
    made = table("node", *(f"*{state}" for state in states))
    pools = [(names[node.node_id], node.pool) for node in seen.nodes if node.state != "silent"]
    for name, pool in [*pools, ("all", seen.pool)] if len(pools) > 1 else pools:
        made.add_row(plain(name), *(format_bytes(usage.bytes) for usage in pool.states))
        if wide:
            made.add_row("", *(f"{counted(usage.slots, 'slot')}" for usage in pool.states))
    made.add_row("of the pool", *(f"{usage.percent:.0f} %" for usage in seen.pool.states))
    return made


def draw_hits(seen: Overview) -> RenderableType:
    windows = seen.windows
    if not windows or not windows[0].asked_blocks:
        return Text("No engine has asked for a block yet.")
    names = [WINDOW_NAMES.get(window.name, f"since start ({span(window.seconds)})") for window in windows]
    made = table("", *(f"*{name}" for name in names))
    made.add_row("hit rate", *(percent(window.hit_rate) for window in windows))
    made.add_row("  local", *(percent(window.local_hit_rate) for window in windows))
    made.add_row("  from other nodes", *(percent(window.remote_hit_rate) for window in windows))
    if seen.tiers:
        made.add_row("  from tiers", *(percent(window.tier_hit_rate) for window in windows))
    made.add_row("blocks asked", *(f"{window.asked_blocks:,}" for window in windows))
    made.add_row("loaded by engines", *(format_bytes(window.hit_bytes) for window in windows))
    made.add_row("stored by engines", *(format_bytes(window.stored_bytes) for window in windows))
    made.add_row("read from other nodes", *(format_bytes(window.pulled_bytes) for window in windows))
    made.add_row("blocks evicted", *(f"{window.evicted_blocks:,}" for window in windows))
    causes = [f"{count:,} {CAUSE_NAMES.get(cause, cause)}" for cause, count in seen.evictions.items() if count]
    return Group(made, Text(f"evicted since start: {', '.join(causes)}")) if causes else made


def draw_tiers(seen: Overview, names: Mapping[str, str]) -> RenderableType:
    """A line for each tier of each node, and what a wrong key or a missing codec has cost."""
    from kvservice.client.tier_overview import not_decoded

    numbers = ("*blocks", "*used", "*of", "*waiting", "*written", "*read", "*hits", "*dropped", "*failed")
    made = table("node", "tier", "state", *numbers)
    for node in seen.nodes:
        for tier in node.tiers:
            made.add_row(
                plain(names[node.node_id]),
                plain(tier.name),
                plain(tier.state),
                f"{tier.blocks:,}",
                format_bytes(tier.used_bytes),
                bound(tier.budget_bytes),
                f"{tier.waiting_blocks:,}",
                format_bytes(tier.written_bytes),
                format_bytes(tier.read_bytes),
                percent(tier.hit_share),
                f"{tier.dropped_blocks:,}",
                f"{tier.failed_blocks:,}",
            )
    lost = [(node, tier, text) for node in seen.nodes for tier in node.tiers if (text := not_decoded(tier))]
    lines = [
        Text(f"{tier.name} of {names[node.node_id]}: {text}. {NOT_DECODED}", "yellow") for node, tier, text in lost
    ]
    return Group(made, *lines)


def _drifts(seen: Overview, names: Mapping[str, str]) -> Table:
    made = table("node", "model", "int8", "*blocks", "*checked", "*keys", "*values", "*limit", fold=("model",))
    for drift in seen.drifts:
        made.add_row(
            plain(names.get(drift.node_id, drift.node_id)),
            plain(drift.model),
            "[red]off[/]" if drift.is_off else "on",
            f"{drift.blocks:,}",
            f"{drift.checked:,}",
            f"{drift.keys:.4f}",
            f"{drift.values:.4f}",
            f"{drift.limit:g}",
        )
    return made


def _models(seen: Overview, names: Mapping[str, str]) -> RenderableType:
    if not seen.models:
        return Text("No engine is attached.")
    rates = {hits.model: percent(hits.hit_rate) for hits in reversed(seen.hits)}
    made = table("model", "namespace", "fingerprint", "*engines", "*hit rate", "nodes", fold=("nodes", "namespace"))
    for model in seen.models:
        made.add_row(
            plain(model.model),
            plain(model.namespace) or "-",
            plain(model.fingerprint),
            str(model.engines),
            rates.get(model.model, "-"),
            plain(", ".join(names.get(node, node) for node in model.nodes)),
        )
    return made


def _refused(seen: Overview, names: Mapping[str, str], wide: bool) -> RenderableType:
    parts: list[RenderableType] = []
    for refused in seen.refused:
        node = printable(names.get(refused.node_id, refused.node_id))
        parts.append(Text(f"{printable(refused.model)} at {node}, {span(refused.age_seconds)} ago. What differs:"))
        made = table("field", "attached engine", "refused engine", fold=("attached engine", "refused engine"))
        shown = refused.differences if wide else refused.differences[:DIFFERENCES_SHOWN]
        for one in shown:
            made.add_row(plain(one.field), plain(one.attached), plain(one.refused))
        parts.append(Padding(made, (0, 0, 0, 2)))
        hidden = len(refused.differences) - len(shown) + refused.more_differences
        if hidden:
            parts.append(Text(f"  and {counted(hidden, 'more field')}"))
    return Group(*parts)


def _flows(seen: Overview, names: Mapping[str, str]) -> Table:
    made = table("from", "to", "*bytes", "*speed", fold=("to",))
    for flow in sorted(seen.flows, key=lambda flow: -flow.bytes):
        made.add_row(
            plain(names.get(flow.source, flow.source)),
            plain(names.get(flow.target, flow.target)),
            format_bytes(flow.bytes),
            f"{format_bytes(int(flow.bytes_per_second))}/s" if flow.bytes_per_second else "-",
        )
    return made


def _tenants(seen: Overview) -> Table:
    made = table("tenant", "*used", "*quota", "*slots being filled", "*slots refused")
    for tenant in seen.tenants:
        refused = tenant.counters.get("quota_refused", 0) + tenant.counters.get("in_flight_refused", 0)
        sizes = (format_bytes(tenant.used_bytes), bound(tenant.quota_bytes))
        made.add_row(plain(tenant.name), *sizes, str(tenant.in_flight), str(refused))
    return made


def _slowest(seen: Overview, names: Mapping[str, str]) -> Table:
    made = table("request", "node", "*took", "*blocks asked", "*hit", "*ago", fold=("node",))
    for slow in seen.slowest[:SLOWEST_SHOWN]:
        made.add_row(
            plain(slow.request_id),
            plain(names.get(slow.node_id, slow.node_id)),
            f"{slow.took_seconds * 1000:,.1f} ms",
            f"{slow.asked_blocks:,}",
            f"{slow.local_blocks + slow.fetched_blocks:,}",
            span(slow.age_seconds),
        )
    return made


def _engines(seen: Overview, names: Mapping[str, str]) -> Table:
    made = table("engine", "node", "model", "tenant", "*attached for", "*prefill", fold=("model", "tenant"))
    for engine in seen.engines:
        speed = engine.prefill_tokens_per_second
        made.add_row(
            plain(engine.engine_id),
            plain(names.get(engine.node_id, engine.node_id)),
            plain(engine.model),
            plain(engine.tenant) or "-",
            span(engine.attached_seconds),
            "-" if speed is None else f"{speed:,.0f} tokens/s",
        )
    return made


def _details(seen: Overview, names: Mapping[str, str]) -> Table:
    made = table("node", "address", "transport", "version", "*boot epoch", "*keys in directory", fold=("address",))
    for node in seen.nodes:
        made.add_row(
            plain(names[node.node_id]),
            plain(node.address),
            plain(node.transport),
            plain(node.version),
            str(node.epoch),
            f"{node.lookup_keys:,}",
        )
    return made


def draw_eviction(seen: Overview, names: Mapping[str, str]) -> Table:
    """Which rule chooses who is evicted on each node, and what each rule would find."""
    made = table("node", "rule", "*by worth it finds", "*by S3-FIFO", "*by LRU", "*changes")
    for node in seen.nodes:
        if (found := node.eviction) is not None:
            made.add_row(
                plain(names[node.node_id]),
                plain(found.rule),
                *(percent(found.hit_rates[rule]) for rule in ("worth", "s3-fifo", "lru")),
                f"{found.changes:,}",
            )
    return made


def _lookups(seen: Overview) -> Table:
    made = table("address", "partition", "*keys", "*nodes alive", fold=("partition",))
    for row in seen.lookups:
        part = f"{row.partition} of {row.partition_count}"
        made.add_row(plain(row.address), plain(row.error) or part, f"{row.keys:,}", str(row.nodes_alive))
    return made


def _mirrors(seen: Overview, names: Mapping[str, str]) -> Table:
    numbers = ("*keys", "*memory", "*partitions live", "*age", "*lookups answered", "*left to partitions")
    made = table("node", *numbers, "because", fold=("because",))
    for node in seen.nodes:
        if (mirror := node.mirror) is not None:
            made.add_row(
                plain(names[node.node_id]),
                f"{mirror.keys:,}",
                format_bytes(mirror.bytes),
                str(mirror.live_partitions),
                f"{mirror.age_seconds:.1f}s",
                f"{mirror.answers:,}",
                f"{sum(mirror.fallbacks.values()):,}",
                plain(", ".join(f"{name} {count:,}" for name, count in sorted(mirror.fallbacks.items()))),
            )
    return made
