"""Tables of the documents from the results of the campaign."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.gpu.summary import RUNS, SIZES, ratios

WAYS = ("batch", "gather kernel and one copy")


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    names = list(head)
    lines = [f"| {' | '.join(names)} |", f"|---|{'---:|' * (len(names) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def copies(figures: dict[str, Any]) -> str:
    """GB/s of runs that lie apart, by their size."""
    found = figures["findings"]["copies"]

    def speed(direction: str, size: str, way: str) -> str:
        return f"{found[f'{direction} {size}{RUNS}{way}']['GB/s']:.3g}"

    head = ["runs of", *(f"{direction}, {way}" for direction in ("load", "store") for way in ("batch", "kernel"))]
    rows = [
        [
            f"{size} KiB",
            *(speed(direction, size, way) for direction in ("load", "store") for way in WAYS),
            speed("direct", size, "batch"),
            speed("direct", size, "gather kernel"),
        ]
        for size in SIZES
    ]
    alone = {
        "one large copy to the GPU": "one copy, host to device",
        "one from it": "one copy, device to host",
        "both at once": "both directions at once, sum",
        "to the memory of another process": "one copy, host to another process's device memory",
        "from memory that is not pinned": "one copy, pageable host to device",
        "to such memory": "one copy, device to pageable host",
    }
    said = ", ".join(f"{words} {found[name]['GB/s']:.3g}" for words, name in alone.items())
    return f"{_table([*head, 'within the GPU, batch', 'kernel'], rows)}\n\nBeside that, in GB/s: {said}."


def interference(figures: dict[str, Any]) -> str:
    """An engine's steps beside copies, as ratios to the engine alone."""
    found = figures["findings"]["interference"]
    rows = []
    for name, row in found.items():
        kind, what = name.split(", ", 1)
        if what == "alone":
            continue
        alone = found[f"{kind}, alone"]
        said = (f"{ratio:.2f}" for ratio in ratios(row, alone))
        rows.append([f"{kind.removeprefix('engine of ')}, {what}", *said, row.get("copies GB/s", "–")])
    return _table(["engine's priority, and what ran", "step, p50", "step, p99", "TFLOP/s", "copies, GB/s"], rows)


def first_token(figures: dict[str, Any]) -> str:
    found = figures["findings"]["first_token"]
    rows = [
        [
            name.removeprefix("prompt of "),
            *(row[key] for key in ("computed ms", "loaded ms", "load alone ms", "times faster", "load GB/s")),
        ]
        for name, row in found.items()
        if name.startswith("prompt of ")
    ]
    return _table(["prompt", "computed, ms", "loaded, ms", "the load alone, ms", "times faster", "load, GB/s"], rows)
