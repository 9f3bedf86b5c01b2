"""The findings of the campaign as text: how each stage ended, what was found, and tables. One page has both parts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Rows = Mapping[str, Any]
SIZES = ("4", "16", "64", "256", "1024", "2048")  # KiB of a run
RUNS = " KiB runs, "
PRIORITIES = ("engine of default priority", "engine of high priority")


def page(folder: Path) -> str:
    """Markdown, from the results of all parts in the folder."""
    lines = ["# What `make gpu` found", ""]
    for path in sorted(folder.glob("part*.json")):
        document = json.loads(path.read_text())
        figures, machine = document["figures"], document["machine"]
        ends = {name: stage["line"] for name, stage in figures["stages"].items()}
        driver = (
            "on a GPU"
            if figures["driver"] == "cuda"
            else "on the driver that stands in for CUDA's: its speeds mean nothing"
        )
        lines += [
            f"## Part {figures['part']}, {driver}",
            "",
            f"`{document['command']}`, commit {document['commit']}, {document['date']}, {machine['cpu']}, "
            f"{machine['cpu_count']} cores. {len(ends)} stages, {figures['skipped']} skipped.",
            "",
            "| stage | how it ended |",
            "|---|---|",
            *(f"| {name} | {how.replace('|', '/')} |" for name, how in ends.items()),
            "",
            "```text",
            *table({}, figures["findings"]).strip("\n").splitlines(),
            "```",
            "",
        ]
    return "\n".join(lines)


def table(ends: Mapping[str, str], found: Mapping[str, Rows]) -> str:
    lines = [f"{stage}: {how}" for stage, how in ends.items()]
    for stage, rows in found.items():
        if stage == "copies" and "limits" in rows:
            lines += copies(rows)
        elif stage == "interference":
            lines += interference(rows)
        else:
            lines += ["", stage, *(f"  {name}: {json.dumps(value)[:400]}" for name, value in rows.items())]
    return "\n".join(lines) + "\n"


def copies(rows: Rows) -> list[str]:
    lines = ["", "copies: GB/s, share of one large copy, ms that the calling thread takes to submit"]
    for direction in ("load", "store", "direct"):
        limit = rows["limits"].get(direction) or 0
        lines += [
            f"  {direction}: one large copy {limit} GB/s",
            " " * 42 + "".join(f"{size + ' KiB':>22}" for size in SIZES),
        ]
        ways = [name.split(RUNS)[1] for name in rows if name.startswith(f"{direction} ") and RUNS in name]
        for way in dict.fromkeys(ways):
            cells = [_cell(rows.get(f"{direction} {size}{RUNS}{way}"), limit) for size in SIZES]
            lines.append(f"    {way:<38}" + "".join(f"{cell:>22}" for cell in cells))
    lines += [f"  {name}: {json.dumps(row)}" for name, row in rows.items() if RUNS not in name and name != "limits"]
    return lines


def _cell(figure: Any, limit: float) -> str:
    if not isinstance(figure, Mapping) or "GB/s" not in figure:
        return "-" if figure is None else "failed"
    share = f" {figure['GB/s'] / limit:.0%}" if limit else ""
    return f"{figure['GB/s']:g}{share} {figure['submit ms']:g}ms"


def interference(rows: Rows) -> list[str]:
    lines = ["", "interference: what copies cost an engine, as a ratio to it alone"]
    for kind in PRIORITIES:
        alone = rows.get(f"{kind}, alone")
        if not isinstance(alone, Mapping) or "steps" not in alone:
            continue
        step = f"step p50 {alone['step ms p50']} ms, p99 {alone['step ms p99']} ms, {alone['TFLOP/s']} TFLOP/s"
        lines.append(f"  {kind}, alone: {step}")
        for name, row in rows.items():
            if not name.startswith(f"{kind}, ") or name.endswith(", alone"):
                continue
            what = f"    {name.removeprefix(f'{kind}, '):<44}"
            if "steps" not in row:
                lines.append(f"{what} {json.dumps(row)}")
                continue
            p50, p99, speed = ratios(row, alone)
            said = f"p50 ×{p50:.2f}  p99 ×{p99:.2f}  TFLOP/s ×{speed:.2f}"
            lines.append(f"{what} {said}  copies {row.get('copies GB/s', '-')} GB/s")
    return lines


def ratios(row: Rows, alone: Rows) -> tuple[float, float, float]:
    """Of an engine beside copies to the engine alone: median step, p99 of steps, speed of a large product."""
    p50, p99, speed = (row[key] / alone[key] for key in ("step ms p50", "step ms p99", "TFLOP/s"))
    return p50, p99, speed
