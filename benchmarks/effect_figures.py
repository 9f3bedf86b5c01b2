"""Tables of what the cache finds, for `benchmarks.figures`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NAMES = {"default": "default", "lru": "LRU", "s3-fifo": "S3-FIFO", "belady": "Belady's optimum"}
Rates = Mapping[tuple[str, int], float]  # by label and capacity


def one_pool(document: dict[str, Any]) -> str:
    """Hit rates of each policy on the real trace, by capacity, and what part of the optimum they are."""
    trace = document["figures"]["trace"]
    rates, capacities = _rates(trace), _capacities(trace)
    policies = list(dict.fromkeys(run["policy"] for run in trace["runs"]))
    lines = [
        f"Measured at commit {document['commit'][:7]} (`replay.json`); the same on any machine. The second half of the "
        f"trace counts;\n{trace['hit_rate_max']:.1%} of all its blocks have been seen before.\n",
        _row("", [f"{capacity:,}" for capacity in capacities]),
        "|---" * (len(capacities) + 1) + "|",
    ]
    for policy in policies:
        found = [f"{rates[policy, capacity]:.3f}" for capacity in capacities]
        lines.append(_row(NAMES[policy], [f"**{rate}**" for rate in found] if policy == "default" else found))
    for policy in ("default", "lru"):
        parts = [f"{rates[policy, capacity] / rates['belady', capacity]:.0%}" for capacity in capacities]
        lines.append(_row(f"{NAMES[policy]}, of the optimum", parts))
    return "\n".join(lines)


def made_up(document: dict[str, Any]) -> str:
    """The same on made-up traces, at a small and a large capacity."""
    lines = [_row("", ["capacity", "default", "LRU", "optimum", "default, of it"]), "|---" * 6 + "|"]
    for name, trace in document["figures"]["made_up"].items():
        rates, capacities = _rates(trace), _capacities(trace)
        for capacity in (capacities[0], capacities[3]):
            default, lru, belady = (rates[policy, capacity] for policy in ("default", "lru", "belady"))
            cells = [f"{capacity:,}", f"{default:.3f}", f"{lru:.3f}", f"{belady:.3f}", f"{default / belady:.0%}"]
            lines.append(_row(name if capacity == capacities[0] else "", cells))
    return "\n".join(lines)


def nodes(document: dict[str, Any]) -> str:
    """Hit rates on several nodes that have the room of one together."""
    figures = document["figures"]
    alone = figures["trace"]
    capacities = _capacities(alone)
    lines = [_row("", [f"{capacity:,}" for capacity in capacities]), "|---" * (len(capacities) + 1) + "|"]
    for count, by_policy in figures["nodes"].items():
        default, lru = by_policy["default"], by_policy["lru"]
        for what, said in (
            ("local only, round-robin", "each alone, round robin"),
            ("pooled, round-robin", "one pool, round robin"),
            ("pooled, kv-aware", "one pool, router by holdings"),
        ):
            rates = _rates(default)
            cells = _cells(rates, f"{count} nodes, {what}", capacities)
            bold = what.endswith("kv-aware")
            lines.append(_row(f"{count} nodes, {said}", [f"**{one}**" if bold and one else one for one in cells]))
        lines.append(_row("the same with LRU", _cells(_rates(lru), f"{count} nodes, pooled, kv-aware", capacities)))
    lines.append(_row("one node with all the room", _cells(_rates(alone), "default", capacities)))
    return "\n".join(lines)


BEFORE = "mooncake_conversation.jsonl"  # how results of then name the trace
POOLED = "8 nodes, pooled, kv-aware"


def trace_before(document: dict[str, Any], before: dict[str, Any]) -> str:
    """The default beside `reuse`, the default before, on one node."""
    now, then = _rates(document["figures"]["trace"]), _rates(before["figures"][BEFORE])
    return (
        f"Less what `reuse`, the default before, found (commit {before['commit'][:7]}, `replay_reuse.json`):\n"
        f"{_gained(now, 'default', then, 'reuse')}."
    )


def nodes_before(document: dict[str, Any], before: dict[str, Any]) -> str:
    """The default on eight nodes with one pool, beside `reuse` and LRU."""
    eight = document["figures"]["nodes"]["8"]
    ours, lru, then = _rates(eight["default"]), _rates(eight["lru"]), _rates(before["figures"][BEFORE])
    return (
        "On 8 nodes with one pool and the router by holdings, less what others find in the same room:\n\n"
        f"- LRU: {_gained(ours, POOLED, lru, POOLED)}\n"
        f"- `reuse`, the default before (commit {before['commit'][:7]}, `replay_reuse.json`): "
        f"{_gained(ours, POOLED, then, POOLED)}"
    )


def _gained(ours: Rates, label: str, others: Rates, other_label: str) -> str:
    """The points of hit rate that ours finds more than the other, in words."""
    sizes = sorted(capacity for name, capacity in ours if name == label and (other_label, capacity) in others)
    gained = [round(100 * (ours[label, size] - others[other_label, size]), 1) for size in sizes]
    return (
        f"{', '.join(f'{one:+.1f}' if one else '0.0' for one in gained)} points, from the smallest capacity to the "
        f"largest: more at {sum(one > 0 for one in gained)} of {len(sizes)}, less at {sum(one < 0 for one in gained)}"
    )


def policy(document: dict[str, Any]) -> str:
    """Points against the better of LRU and S3-FIFO on random traffic, of each size of the cache."""
    figures = document["figures"]
    lines = [
        f"Measured at commit {document['commit'][:7]} (`policy.json`), {figures['seeds']} seeds.\n",
        _row("part of all blocks", ["mean", "below −0.3", "below −1", "worst", "best", "hit rate", "LRU", "S3-FIFO"]),
        "|---" * 9 + "|",
    ]
    for row in [*figures["by_size"], {"share": None, **figures["result"]}]:
        said = "all" if row["share"] is None else f"{row['share']:.0%}"
        shares = [f"{row[name]:.0%}" for name in ("below_share", "below_one_share")]
        points = [f"{row[name]:+.1f}" for name in ("worst", "best")]
        rates = [f"{100 * row[f'hit_rate_{name}']:.1f} %" for name in ("default", "lru", "s3-fifo")]
        lines.append(_row(said, [f"{row['mean']:+.2f}", *shares, *points, *rates]))
    return "\n".join(lines)


def _rates(study: Mapping[str, Any]) -> Rates:
    return {(run["label"], run["capacity"]): run["hit_rate"] for run in study["runs"]}


def _capacities(study: Mapping[str, Any]) -> list[int]:
    return sorted({run["capacity"] for run in study["runs"]})


def _cells(rates: Rates, label: str, capacities: Sequence[int]) -> list[str]:
    return [f"{rates[label, capacity]:.3f}" if (label, capacity) in rates else "" for capacity in capacities]


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"
