"""The results that are there as tables, with a plot of what is measured against a limit: results/README.md.

    python -m benchmarks.summary

Measures nothing: `make bench` and `make bench-peers` end with it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.__main__ import bandwidth_rows, lookup_rows
from benchmarks.report import RESULTS
from kvservice.units import KiB

TABLE, PLOT = "README.md", "summary.png"
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    seen: str
    beside: str = ""  # the limit
    share: float | None = None  # of the limit


def lookup(figures: Figures) -> Iterator[Row]:
    for name, found in figures.items():
        if not isinstance(found, dict) or "mirror" not in found:
            continue
        for keys, latency in found["mirror"]["one_reader"].items():
            seen = f"p50 {latency['p50_us'] / 1e3:.3f} ms, p99 {latency['p99_us'] / 1e3:.3f} ms"
            yield Row(f"lookup of {keys} keys, mirror, {name}", seen)
        yield Row(f"mirror, {name}", f"{found['mirror']['bytes_per_key']} bytes a key")
        per_core = found["resolved_keys_per_cpu_second"]
        yield Row(f"gRPC, {name}", f"{per_core / 1e6:.1f} M keys a processor second")


def local(figures: Figures) -> Iterator[Row]:
    for blocks, ways in figures.items():
        if isinstance(ways, dict):
            for way, found in ways.items():
                seen, limit = f"{found['gb_per_second']:.2f} GB/s", f"memcpy {found['memcpy_gb_per_second']:.2f}"
                yield Row(f"{way}, {blocks}", seen, limit, found["ratio"])


def transfer(figures: Figures) -> Iterator[Row]:
    for link, sizes in figures["by_ucx_transport"].items():
        for size, ways in sizes.items():
            found = ways["pull"]
            seen, limit = f"{found['gb_per_second']:.2f} GB/s", f"raw NIXL {found['limit_gb_per_second']:.2f}"
            what = f"pull, verified, {int(size) // KiB} KiB, {link}"
            yield Row(what, seen, limit, found["ratio"])


def peers(figures: Figures) -> Iterator[Row]:
    for what, who, size, rate in bandwidth_rows(figures):
        yield Row(f"{what}, {size // KiB} KiB: {who}", f"{rate:.2f} GB/s")
    for who, keys, p50, p99 in lookup_rows(figures):
        yield Row(f"lookup of {keys} keys: {who}", f"p50 {p50:.3f} ms, p99 {p99:.3f} ms")


def first_token(figures: Figures) -> Iterator[Row]:
    for tokens, ways in figures["seconds_by_prompt_tokens"].items():
        for way, seconds in ways.items():
            yield Row(f"first token of {tokens}: {way}", f"{seconds:.3f} s")


def handoff(figures: Figures) -> Iterator[Row]:
    for row in figures["rows"]:
        what = f"hand-off of {row['tokens']} tokens, {row['way']}: {row['system']}"
        yield Row(what, f"{1e3 * row['handoff_seconds']:.0f} ms")


def cold_path(figures: Figures) -> Iterator[Row]:
    found = figures["throughput"]["with_to_without_p50"]
    yield Row("throughput with no reuse at all", f"{found:.3f} of that without", share=found)


def startup(figures: Figures) -> Iterator[Row]:
    yield Row("segment ready, per 100 GB", f"{figures['segment_seconds_per_100_gb']:.1f} s")
    yield Row("shard takes up its blocks again, per GiB", f"{figures['adoption_seconds_per_gib']:.2f} s")
    yield Row("engine attaches", f"p50 {figures['attach_p50_ms']:.1f} ms, p99 {figures['attach_p99_ms']:.1f} ms")


def blend(figures: Figures) -> Iterator[Row]:
    for ratio, found in figures["by_ratio"].items():
        what = f"documents in another order, {float(ratio):.0%} of the cached tokens computed again"
        yield Row(what, f"KL {found['kl_mean']:.2g}, {found['of_full_prefill']:.0%} of a full prefill")


def engine(figures: Figures) -> Iterator[Row]:
    for row in figures["serving"]:
        what = f"reference engine, {figures['device_blocks']} blocks on the device, {row['host_blocks']} on the host"
        yield Row(what, f"{row['served']} requests, {row['tokens_per_second']:.0f} tokens/s")
    for name, taken in figures["operation_us"].items():
        yield Row(f"reference engine, {name}", f"{taken:.1f} µs")
    for name, taken in figures["serving"][-1]["phase_ms"].items():
        yield Row(f"reference engine, a step's {name}", f"{taken:.3f} ms")


def reliability(figures: Figures) -> Iterator[Row]:
    for what, found in figures.items():
        if isinstance(found, dict) and "goal" in found:
            yield Row(what, f"{found['figure']:.4g} {found['unit']}")


READERS: dict[str, Callable[[Figures], Iterator[Row]]] = {
    "lookup_latency": lookup,
    "local_bandwidth": local,
    "transfer_bandwidth": transfer,
    "peers": peers,
    "first_token": first_token,
    "pd_handoff": handoff,
    "cold_path": cold_path,
    "startup": startup,
    "reliability": reliability,
    "blend": blend,
    "engine": engine,
}


def write(folder: Path) -> Path:
    """Write the table and its plot into this folder. Raises ValueError naming a file that is no result."""
    text, bars = summary_of(folder)
    draw(bars, folder / PLOT)
    table = folder / TABLE
    table.write_text(text)
    return table


def summary_of(folder: Path) -> tuple[str, list[tuple[str, Row]]]:
    """The table of the results in this folder, and the bars of its plot. Raises ValueError naming a file that is no
    result."""
    text = ["# Results", "", "Written by `python -m benchmarks.summary`; what it means is in docs/performance.md.", ""]
    text += [f"![of the limit]({PLOT})", ""]
    bars: list[tuple[str, Row]] = []
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text())
            rows = list(READERS.get(document["benchmark"], lambda figures: iter(()))(document["figures"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no result of these benchmarks: {type(error).__name__}: {error}") from error
        machine = document["machine"]
        text += [f"## {path.stem}", "", f"`{document['command']}` at {document['commit']}, {document['date'][:10]}, "]
        text[-1] += f"{machine['cpu_count']} x {machine['cpu']}."
        if rows:
            text += ["", "| what | seen | beside | share |", "|---|---|---|---|"]
            text += [_line(row) for row in rows]
        text.append("")
        bars += [(path.stem, row) for row in rows if row.share is not None]
    return "\n".join(text).rstrip() + "\n", bars


def _line(row: Row) -> str:
    share = "" if row.share is None else f"{row.share:.2f}"
    return f"| {row.what} | {row.seen} | {row.beside} | {share} |"


def draw(bars: list[tuple[str, Row]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 0.26 * len(bars) + 1.2))
    axes.barh([f"{row.what} ({stem})" for stem, row in bars], [row.share or 0.0 for _, row in bars])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("of memcpy, of raw NIXL, of the engine without us: in the same run")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(y=0.01)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    print(write(parser.parse_args().folder))


if __name__ == "__main__":
    main()
