"""The tables of the docs about tiers, from the results of disk_worth, tier_disk, tier_objects, tier_stall, codecs."""

from __future__ import annotations

import statistics
from typing import Any

from kvservice.units import format_bytes

Figures = dict[str, Any]
WAYS = {
    "none": "no tier",
    "beside": "no tier; another process keeps the disk busy",
    "disk": "a disk tier, busy",
    "hung": "a tier that hangs",
}


def disk(figures: Figures) -> str:
    lines = [
        "| GB/s, share of plain calls, seconds of CPU per GB | " + " | ".join(_sizes(figures)) + " |",
        "|---|" + "---|" * len(figures["sizes"]),
    ]
    ways = list(next(iter(figures["sizes"].values())))
    for kind in ("write", "read"):
        for number, way in enumerate(ways):
            cells = [_cell(found[way][kind]) for found in figures["sizes"].values()]
            name = "plain `preadv` and `pwritev`" if way == "plain" else way
            lines.append(f"| {f'**{kind}**: ' if number == 0 else ''}{name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _sizes(figures: Figures) -> list[str]:
    return [format_bytes(int(size)) for size in figures["sizes"]]


def _cell(found: Figures) -> str:
    return f"{found['gb_per_second']:.2f}, {found['ratio']:.2f}, {found['cpu_seconds_per_gb']:.2f}"


def objects(figures: Figures) -> str:
    lines = ["| store | way | under way | GB/s | bare obstore | share |", "|---|---|---|---|---|---|"]
    for name, rows in figures["stores"].items():
        for row in rows:
            rates = (row["tier_gb_per_second"], row["bare_gb_per_second"], row["ratio"])
            cells = " | ".join(f"{rate:.2f}" for rate in rates)
            lines.append(f"| {name} | {row['way']} | {row['at_once']} | {cells} |")
    late = ", ".join(f"{row['gb_per_second']:.2f} GB/s with {row['at_once']}" for row in figures["late"])
    return "\n".join([*lines, "", f"With an S3 API that answers 50 ms late: {late} reads under way."])


def disk_worth(figures: Figures) -> str:
    lines = [
        "| traffic | possible | memory alone | disk of 4 memories | of 16 | read for each byte written |",
        "|---|---|---|---|---|---|",
    ]
    traffic = figures["traffic"]
    for name, found in traffic.items():
        alone, *disks = found["runs"][:3]
        shares = [_read_share(run) for run in disks]
        rates = [f"{100 * rate:.1f} %" for rate in (found["hit_rate_max"], *(r["hit_rate"] for r in (alone, *disks)))]
        lines.append(f"| {name} | {' | '.join(rates)} | {', '.join(shares)} |")
    lines += [
        "",
        "With a disk of 4 memories, by when a block is written: hits, and what is read for each byte written.",
        "",
    ]
    lines += ["| traffic | `evicted` | `stored` | `reused` |", "|---|---|---|---|"]
    for name, found in traffic.items():
        by_moment = {run["write"]: run for run in found["runs"] if run["nodes"] == 1 and run["disk_memories"] == 4}
        cells = [f"{100 * run['hit_rate']:.1f} %, {_read_share(run)}" for run in by_moment.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "Of Mooncake's trace, with 128 KiB a token and disks of 4 memories (all nodes together):", ""]
    lines += ["| nodes | tier | written | hits | from the own tier | written in an hour | drive writes a day |"]
    lines += ["|---|---|---|---|---|---|---|"]
    of_nodes = (found["runs"] for found in traffic.values() if any(run["nodes"] > 1 for run in found["runs"]))
    for run in next(of_nodes, []):
        tier = "objects" if run["objects"] else "disk"
        if run["disk_memories"] in (0, 4) and (run["objects"] or run["disk_memories"]):
            hour = run[f"{tier}_written_bytes_a_day"] / 24
            lines.append(
                f"| {run['nodes']} | {tier} | {run['write']} | {100 * run['hit_rate']:.1f} % | "
                f"{100 * run[f'{tier}_rate']:.1f} % | {hour / 1e12:.1f} TB | {_drive_writes(run)} |"
            )
    return "\n".join(lines)


def _read_share(run: Figures) -> str:
    written = run["disk_written_bytes"]
    return f"{run['disk_read_bytes'] / written:.2f}" if written else "–"


def _drive_writes(run: Figures) -> str:
    return f"{run['drive_writes_a_day']:.0f}" if "drive_writes_a_day" in run else "–"


def codecs(figures: Figures) -> str:
    lines = [
        "| numbers | codec | stored | encode, GB/s | decode, GB/s | reading gets faster on tiers below |",
        "|---|---|---|---|---|---|",
    ]
    for kind, found in figures["types"].items():
        for name, each in found["ways"].items():
            pays = f"{each['pays_below']:.2f} GB/s" if each["pays_below"] > 0 else "–"
            cells = f"{each['stored_share']:.2f} | {each['encode']:.2f} | {each['decode']:.2f} | {pays}"
            lines.append(f"| {kind} | {name} | {cells} |")
    return "\n".join(lines)


def stall(figures: Figures) -> str:
    lines = [
        "| p99 in ms, to that of no tier | reserve | seal | acquire | longest step of the loop |",
        "|---|---|---|---|---|",
    ]
    for way, found in figures["p99_us"].items():
        ratios = figures["ratio"].get(way, dict.fromkeys(found, 1.0))
        cells = [f"{found[name] / 1e3:.2f}, {ratios[name]:.2f}" for name in found]
        lines.append(f"| {WAYS[way]} | {' | '.join(cells)} | {max(figures['longest_step_ms'][way]):.0f} ms |")
    return "\n".join(lines)


SPILL_WAYS = {
    "none": "no memory node",
    "beside": "no memory node; a process as nice copies as much",
    "memory node": "a memory node takes what is evicted",
}


def spill(figures: Figures) -> str:
    """Of each call the median and the p99."""
    times = figures["milliseconds"]
    calls = list(times["none"])
    lines = [f"| p50 / p99 in ms | {' | '.join(calls)} |", "|---|" + "---|" * len(calls)]
    for way, said in SPILL_WAYS.items():
        cells = [f"{times[way][call]['p50']:.2f} / {times[way][call]['p99']:.2f}" for call in calls]
        lines.append(f"| {said} | {' | '.join(cells)} |")
    taken, stored = statistics.median(figures["blocks_taken"]), figures["blocks_stored_a_round"]
    return "\n".join([*lines, "", f"It took {taken / stored:.0%} of the blocks that were stored."])
