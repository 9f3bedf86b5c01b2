"""Makes the data of the page from an overview of the service: what the page shows, bounded, with rates. Pure.

Texts in it come from engines, tenants and clients. The page shows them as text only; here they are cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

from kvservice.console.rates import Rates
from kvservice.console.source import Json

# Rows of one table. More cannot be watched; the page says how many are left out, and commands show all.
ROWS_MAX = 256
FLOWS_MAX = 64  # of the busiest pairs of nodes: eight nodes that all talk to each other
TEXT_CHARS_MAX = 300  # of one text; a longer one is cut, so that a tick stays small whatever names engines choose

# Name on the page -> counter of a shard.
COUNTERS = {
    "acquires": "acquires",
    "asked": "asked_blocks",
    "local": "hit_local_blocks",
    "remote": "hit_remote_blocks",
    "tier": "hit_tier_blocks",
    "pulled": "fetched_bytes",
    "stored": "stored_bytes",
    "served": "served_bytes",
}
# Fields of a tier that only grow, whose rates the page shows.
TIER_RATES = ("written_bytes", "read_bytes")
HIT_SOURCES = ("local", "remote", "tier")


class View:
    """Remembers the counters of the last seconds, so that each overview becomes a page with rates."""

    def __init__(self) -> None:
        self._rates = Rates()

    def take(self, overview: Json, now: float) -> tuple[Json, Json]:
        """(the page, the point of the charts). `now`: seconds on a clock that never goes back."""
        used: set[Hashable] = set()
        nodes = [self._node(row, now, used) for row in overview["nodes"]]
        tiers = [self._tier(node, tier, now, used) for node in overview["nodes"] for tier in node["tiers"]]
        flows = [self._flow(row, now, used) for row in overview["flows"]]
        evicted = self._evictions(overview["nodes"], now, used)
        self._rates.keep_only(used)
        sums = {name: round(sum(row["rates"][name] for row in nodes), 2) for name in COUNTERS}
        flows.sort(key=lambda row: (-row["rate"], -row["bytes"], row["source"], row["target"]))
        page = {
            "service": _cut(overview["service"]),
            "at": overview["at"],
            "restricted": bool(overview.get("restricted")),
            "pool": overview["pool"],
            "windows": overview["windows"],
            "rates": sums | {"evicted": sum(evicted.values())},
            "hit_rates": _hit_rates(sums),
            "states": Counter(row["state"] for row in nodes),
            "nodes": nodes[:ROWS_MAX],
            "tiers": tiers[:ROWS_MAX],
            "flows": flows[:FLOWS_MAX],
            "evictions": [
                {"cause": cause, "blocks": count, "rate": evicted.get(cause, 0.0)}
                for cause, count in sorted(overview["evictions"].items())
            ],
            "models": [_model(row, overview) for row in overview["models"][:ROWS_MAX]],
            "tenants": [
                {**_cut_all(row), "hit_rate": _hit_rate(overview["hits"], "tenant", row["name"])}
                for row in overview["tenants"][:ROWS_MAX]
            ],
            "slowest": [_cut_all(row) for row in overview["slowest"][:ROWS_MAX]],
            "refused": [_cut_all(row) for row in overview["refused"][:ROWS_MAX]],
            "lookups": [_cut_all(row) for row in overview["lookups"][:ROWS_MAX]],
            "problems": [_cut(text) for text in overview["problems"][:ROWS_MAX]],
            "counts": {
                "tiers": len(tiers),
                **{name: len(overview[name]) for name in ("nodes", "flows", "models", "tenants", "problems")},
            },
        }
        point = {"at": overview["at"], **sums, **_hit_rates(sums), "evicted": evicted}
        return page, point

    def _node(self, row: Json, now: float, used: set[Hashable]) -> Json:
        name = row["node_id"]
        rates = {}
        for short, counter in COUNTERS.items():
            key = (name, row["epoch"], counter)
            if row["state"] != "silent":  # an absent answer is no zero
                self._rates.put(key, row["counters"].get(counter, 0), now)
            used.add(key)
            rates[short] = round(self._rates.per_second(key), 2) if row["state"] != "silent" else 0.0
        shown = ("node_id", "host", "address", "state", "error", "uptime_seconds", "transport", "version", "pool")
        return {
            **{field: _cut(row[field]) for field in shown},
            "windows": row["windows"],
            "rates": rates,
            "hit_rates": _hit_rates(rates),
            "evictions": row["evictions"],
            "pins": row["pins"],
            "pinned_bytes": row["pinned_bytes"],
            "lookup_keys": row["lookup_keys"],
            "mirror": row["mirror"],
        }

    def _tier(self, node: Json, row: Json, now: float, used: set[Hashable]) -> Json:
        rates = {}
        for field in TIER_RATES:
            key = (node["node_id"], node["epoch"], "tier", row["name"], field)
            self._rates.put(key, row[field], now)
            used.add(key)
            rates[field] = round(self._rates.per_second(key), 2)
        shown = {name: value for name, value in row.items() if name != "counters"}
        return {"node_id": _cut(node["node_id"]), **_cut_all(shown), "rates": rates}

    def _flow(self, row: Json, now: float, used: set[Hashable]) -> Json:
        key = ("flow", row["source"], row["target"])
        self._rates.put(key, row["bytes"], now)
        used.add(key)
        rate = round(self._rates.per_second(key), 2)
        return {"source": _cut(row["source"]), "target": _cut(row["target"]), "bytes": row["bytes"], "rate": rate}

    def _evictions(self, nodes: Iterable[Json], now: float, used: set[Hashable]) -> dict[str, float]:
        """Blocks a second, by cause."""
        found: dict[str, float] = {}
        for row in nodes:
            for cause, count in row["evictions"].items():
                key = (row["node_id"], row["epoch"], "evicted", cause)
                self._rates.put(key, count, now)
                used.add(key)
                found[cause] = round(found.get(cause, 0.0) + self._rates.per_second(key), 2)
        return found


def _hit_rates(rates: Json) -> Json:
    """Shares of the blocks that were asked for in the last seconds; None if none were."""
    asked = rates["asked"]
    return {f"{name}_hits": round(min(rates[name] / asked, 1.0), 4) if asked else None for name in HIT_SOURCES}


def _hit_rate(hits: Iterable[Json], by: str, name: str) -> float | None:
    """Of one model or tenant, since the start of the nodes; None if nothing was asked for it."""
    rows = [row for row in hits if row[by] == name]
    asked = sum(row["asked_blocks"] for row in rows)
    found = sum(row[f"hit_{source}_blocks"] for row in rows for source in HIT_SOURCES)
    return round(found / asked, 4) if asked else None


def _model(row: Json, overview: Json) -> Json:
    """A model, how much of it is hit, and how fast its engines compute."""
    speeds = [
        engine["prefill_tokens_per_second"]
        for engine in overview["engines"]
        if (engine["model"], engine["namespace"]) == (row["model"], row["namespace"])
        and engine["prefill_tokens_per_second"]
    ]
    hit_rate = _hit_rate(overview["hits"], "model", row["model"])
    return {**_cut_all(row), "hit_rate": hit_rate, "prefill_tokens_per_second": max(speeds, default=None)}


def _cut_all(row: Json) -> Json:
    return {name: _cut(value) for name, value in row.items()}


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > TEXT_CHARS_MAX:
        return value[: TEXT_CHARS_MAX - 1] + "…"
    return value[:ROWS_MAX] if isinstance(value, list) else value
