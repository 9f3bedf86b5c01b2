"""The tables of `kvservice top`: what each lists, its columns, and how a cell is sorted. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvservice.cli.drawing import percent, span
from kvservice.cli.status import node_names
from kvservice.cli.top.trends import Trends
from kvservice.units import format_bytes, printable

if TYPE_CHECKING:
    from kvservice.client.overview import Overview

STATE_STYLES = {"ok": "green", "draining": "yellow", "silent": "bold red"}
TIER_STYLES = {"open": "green", "failed": "bold red"}  # the others are yellow
BAR_CHARS = 10  # of used memory: a character is 10 %


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    sort_by: float | str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    key: str  # names the row from one reading to the next
    cells: tuple[Cell, ...]  # one for each column


@dataclass(frozen=True, slots=True)
class TopView:
    title: str
    columns: tuple[Column, ...]
    rows: Callable[[Overview, Trends], Iterator[Row]]
    first_sort: tuple[int, bool] = (0, False)  # the index of the column, and whether the largest comes first


def words(text: str, style: str = "") -> Cell:
    return Cell(printable(text) or "-", text, style)


def count(value: int) -> Cell:
    return Cell(f"{value:,}", value)


def size(value: float) -> Cell:
    return Cell(format_bytes(int(value)) if value else "-", value)


def hits(value: float | None) -> Cell:
    return Cell(percent(value), -1.0 if value is None else value)


def bar(used_percent: float, chars: int = BAR_CHARS) -> str:
    """Used memory in characters that differ without colours too."""
    full = min(chars, round(chars * used_percent / 100))
    return "█" * full + "░" * (chars - full)


def node_rows(seen: Overview, trends: Trends) -> Iterator[Row]:
    names = node_names(seen)
    for node in seen.nodes:
        now = trends.of(node.node_id)
        since_start = node.windows[0].hit_rate if node.windows else None
        reserved = next(usage.bytes for usage in node.pool.states if usage.state == "reserved")
        used = f"{bar(node.pool.used_percent)} {node.pool.used_percent:3.0f} %" if node.pool.total_bytes else "-"
        yield Row(
            node.node_id,
            (
                words(names[node.node_id]),
                words(node.state, STATE_STYLES[node.state]),
                Cell(used, node.pool.used_percent, "cyan"),
                hits(since_start),
                hits(now.hit_rate),
                size(now.hit_bytes),
                size(now.stored_bytes),
                size(now.fetched_bytes),
                Cell(f"{now.evicted_blocks:,.0f}" if now.evicted_blocks else "-", now.evicted_blocks),
                Cell(format_bytes(reserved) if node.pool.total_bytes else "-", reserved),
            ),
        )


def model_rows(seen: Overview, trends: Trends) -> Iterator[Row]:
    names = node_names(seen)
    asked = {one.model: one for one in reversed(seen.hits)}
    for model in seen.models:
        found = asked.get(model.model)
        yield Row(
            model_key(model.namespace, model.model, model.fingerprint),
            (
                words(model.model),
                words(model.namespace),
                words(model.fingerprint),
                Cell(str(model.engines), model.engines),
                hits(found.hit_rate if found else None),
                Cell(f"{found.asked_blocks:,}" if found else "-", found.asked_blocks if found else 0),
                words(", ".join(names.get(node, node) for node in model.nodes)),
            ),
        )


def model_key(namespace: str, model: str, fingerprint: str) -> str:
    return f"{fingerprint} {namespace}/{model}"


def engine_rows(seen: Overview, trends: Trends) -> Iterator[Row]:
    names = node_names(seen)
    for engine in seen.engines:
        speed = engine.prefill_tokens_per_second
        yield Row(
            f"{engine.node_id} {engine.engine_id}",
            (
                words(engine.engine_id),
                words(names.get(engine.node_id, engine.node_id)),
                words(engine.model),
                words(engine.tenant),
                Cell(span(engine.attached_seconds), engine.attached_seconds),
                Cell("-" if speed is None else f"{speed:,.0f} tokens/s", speed or 0),
            ),
        )


def tenant_rows(seen: Overview, trends: Trends) -> Iterator[Row]:
    for tenant in seen.tenants:
        asked = [one for one in seen.hits if one.tenant == tenant.name]
        blocks = sum(one.asked_blocks for one in asked)
        found = sum(one.hit_local_blocks + one.hit_remote_blocks + one.hit_tier_blocks for one in asked)
        refused = tenant.counters.get("quota_refused", 0) + tenant.counters.get("in_flight_refused", 0)
        quota = tenant.quota_bytes
        yield Row(
            tenant.name,
            (
                words(tenant.name),
                Cell(format_bytes(tenant.used_bytes), tenant.used_bytes),
                size(quota),
                Cell(f"{100 * tenant.used_bytes / quota:.0f} %" if quota else "-", tenant.used_bytes / (quota or 1)),
                hits(found / blocks if blocks else None),
                Cell(str(tenant.in_flight), tenant.in_flight),
                count(refused),
            ),
        )


def request_rows(seen: Overview, trends: Trends) -> Iterator[Row]:
    names = node_names(seen)
    for slow in seen.slowest:
        hit = slow.local_blocks + slow.fetched_blocks
        yield Row(
            f"{slow.node_id} {slow.request_id}",
            (
                words(slow.request_id),
                words(names.get(slow.node_id, slow.node_id)),
                words(slow.model),
                Cell(f"{slow.took_seconds * 1000:,.1f} ms", slow.took_seconds),
                count(slow.asked_blocks),
                count(hit),
                words("" if slow.miss == "none" else slow.miss.replace("_", " ")),
                Cell(span(slow.age_seconds), slow.age_seconds),
            ),
        )


def tier_rows(seen: Overview, trends: Trends) -> Iterator[Row]:
    names = node_names(seen)
    for node in seen.nodes:
        for tier in node.tiers:
            yield Row(
                f"{node.node_id} {tier.name}",
                (
                    words(names[node.node_id]),
                    words(tier.name),
                    words(tier.state, TIER_STYLES.get(tier.state, "yellow")),
                    count(tier.blocks),
                    Cell(format_bytes(tier.used_bytes), tier.used_bytes),
                    size(tier.budget_bytes),
                    count(tier.waiting_blocks),
                    Cell(format_bytes(tier.written_bytes), tier.written_bytes),
                    Cell(format_bytes(tier.read_bytes), tier.read_bytes),
                    hits(tier.hit_share),
                    count(tier.busy),
                    count(tier.dropped_blocks),
                    count(tier.failed_blocks),
                ),
            )


def _columns(titles: str) -> tuple[Column, ...]:
    """The columns with these titles. A star marks one of numbers."""
    return tuple(Column(title.removeprefix("*"), title.startswith("*")) for title in titles.split(", "))


VIEWS: dict[str, TopView] = {
    "nodes": TopView(
        "Nodes",
        _columns("node, state, *memory used, *hits, *hits now, *loaded/s, *stored/s, *read/s, *evicted/s, *reserved"),
        node_rows,
    ),
    "models": TopView(
        "Models", _columns("model, namespace, fingerprint, *engines, *hits, *blocks asked, nodes"), model_rows
    ),
    "engines": TopView(
        "Engines", _columns("engine, node, model, tenant, *attached for, *prefill"), engine_rows, (1, False)
    ),
    "tenants": TopView(
        "Tenants", _columns("tenant, *used, *quota, *of quota, *hits, *filling, *refused"), tenant_rows, (1, True)
    ),
    "requests": TopView(
        "Slowest requests",
        _columns("request, node, model, *took, *blocks asked, *hit, ended by, *ago"),
        request_rows,
        (3, True),
    ),
    "tiers": TopView(
        "Tiers",
        _columns(
            "node, tier, state, *blocks, *used, *of, *waiting, *written, *read back, *hits, *busy, *dropped, *failed"
        ),
        tier_rows,
    ),
}
