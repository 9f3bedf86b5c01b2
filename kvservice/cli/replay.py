"""`kvservice replay`: what the service would have found of a trace's prompts, as a table, as JSON or as a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvservice.cli.output import Format, write
from kvservice.cli.progress import Progress
from kvservice.errors import ConfigError, InvalidRequest
from kvservice.units import MiB, format_bytes, parse_bytes


def replay(
    path: Path,
    *,
    nodes: int,
    capacities: list[int],
    policies: list[str],
    disks: list[int],
    disk_writes: list[str],
    objects_writes: list[str],
    token_bytes: str,
    limit: int | None,
    warm_up: float,
    processes: int,
    plot: Path | None,
    form: Format,
) -> None:
    """Play everything and print it; blocks meanwhile. Raises ConfigError if the file is no trace or cannot be read, or
    if an option is wrong."""
    from kvservice.replay.cluster import Below, Machine
    from kvservice.replay.study import DEFAULT_POLICIES, OPTIMUM, Plan, default_capacities, play_all, report
    from kvservice.replay.trace import read_trace

    machine = Machine(token_bytes=_token_bytes(token_bytes))
    _check_moments(disk_writes, "--disk-write")
    _check_moments(objects_writes, "--objects-write")
    if plot is not None:
        check_plot(plot)
    with Progress("replay") as progress:
        size = path.stat().st_size if path.is_file() else 0
        try:
            trace = read_trace(path, limit, lambda done: progress.update("reading the trace", done, size))
        except InvalidRequest as error:
            raise ConfigError(error.message) from error
        chosen = tuple(policies) or DEFAULT_POLICIES
        plan = Plan(
            capacities or default_capacities(trace),
            chosen,
            nodes,
            next((policy for policy in chosen if policy != OPTIMUM), DEFAULT_POLICIES[0]),
            int(len(trace.requests) * warm_up),
            machine,
            [
                *(Below(disk, write) for disk in disks for write in disk_writes),
                *(Below(objects=trace.unique_count, objects_write=write) for write in objects_writes),
            ],
        )
        try:
            runs = len(plan.runs())
        except InvalidRequest as error:
            raise ConfigError(f"--policy: {error.message}") from error
        found = play_all(
            trace, plan, processes, lambda done: progress.update(f"{int(done)} of {runs} runs have ended", done, runs)
        )
    figures = report(trace, plan, found)
    if plot is not None:
        draw_plot(figures, plot)
    write(figures, lambda all_, _: draw(all_), form)


def draw(figures: dict[str, Any]) -> RenderableType:
    """`figures`: study.report's."""
    summary = Text(
        f"{figures['trace']}: {figures['requests']:,} requests in {figures['seconds'] / 60:.0f} min, "
        f"{figures['blocks']:,} blocks asked for, {figures['unique_blocks']:,} different ones; "
        f"with room for all of them {figures['hit_rate_max']:.1%} are hits"
    )
    title = "Share of prompt blocks that are hits, by capacity in blocks"
    hits = Table(title=title, title_justify="left", title_style="")
    hits.add_column("")
    plain = [run for run in figures["runs"] if not run["disk"] and not run["objects"]]
    capacities = sorted({run["capacity"] for run in plain})
    rates = {(run["label"], run["capacity"]): run["hit_rate"] for run in plain}
    for capacity in capacities:
        hits.add_column(f"{capacity:,}", justify="right")
    for label in dict.fromkeys(run["label"] for run in plain):
        cells = [rates.get((label, capacity)) for capacity in capacities]
        hits.add_row(label, *("" if rate is None else f"{rate:.1%}" for rate in cells))
    table = Table(title="Fetch or recompute, against an oracle", title_justify="left", title_style="")
    for name in ("link", "decisions that differ", "time lost", "if always fetched", "if never fetched"):
        table.add_column(name, justify="right")
    for row in figures["fetch_or_recompute"]:
        shares = [row[name] for name in ("differ_share", "lost_share", "always_lost_share", "never_lost_share")]
        table.add_row(f"{row['link_bytes_per_second'] / 1e9:g} GB/s", *(f"{share:.1%}" for share in shares))
    return Group(summary, hits, *draw_below(figures), table)


def draw_below(figures: dict[str, Any]) -> list[Table]:
    """What tiers below the memory found, and what was written for it; none without such runs."""
    runs = [run for run in figures["runs"] if run["disk"] or run["objects"]]
    if not runs:
        return []
    block = figures["block_bytes"]
    title = f"Tiers below the memory, with {format_bytes(block)} for each block of 512 tokens"
    table = Table(title=title, title_justify="left", title_style="")
    for name in ("nodes", "memory", "tier", "writes", "hits", "of own tier", "written a day", "of its size"):
        table.add_column(name, justify="right")
    for run in runs:
        name = "disk" if run["disk"] else "objects"
        table.add_row(
            str(run["nodes"]),
            format_bytes(run["capacity"] * block),
            format_bytes(run["disk"] * block) if run["disk"] else "objects",
            run[f"{name}_write"],
            *(f"{run[rate]:.1%}" for rate in ("hit_rate", f"{name}_rate")),
            format_bytes(int(run[f"{name}_written_bytes_a_day"])),
            f"{run['drive_writes_a_day']:.1f}×" if run["disk"] else "",
        )
    return [table]


def _token_bytes(text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--token-bytes: {error}") from error
    if not 0 < size <= MiB * 64:
        raise ConfigError(f"--token-bytes {text}: give a size such as 128KiB, up to 64 MiB")
    return size


def _check_moments(given: list[str], option: str) -> None:
    from kvservice.replay.tiers import WRITES

    for moment in given:
        if moment not in WRITES:
            raise ConfigError(f"{option} {moment}: give {', '.join(WRITES[:-1])} or {WRITES[-1]}")


def check_plot(path: Path) -> None:
    """Check the plot's path before minutes of computing. Raises ConfigError."""
    try:
        import matplotlib  # noqa: F401  it is wanted later
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; pip install matplotlib, or leave --plot out") from error
    if path.suffix not in (".png", ".svg", ".pdf") or not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: give a .png, .svg or .pdf file in an existing directory")
    there = path.exists()
    try:
        path.open("ab").close()
        if not there:
            path.unlink()  # a run that is broken off leaves no empty picture
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}; name another file") from error


def draw_plot(figures: dict[str, Any], path: Path) -> None:
    """Draw hit rates over capacity, policies on the left and nodes on the right. `figures` are those of
    study.report."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = figures["runs"]
    colours: dict[str, str] = {}  # a line that is in both pictures has one colour
    drawing, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for axes, several in ((left, False), (right, True)):
        lines: dict[str, list[tuple[int, float]]] = {}
        for run in runs:
            if (run["nodes"] > 1) == several or (several and run["policy"] == "belady"):
                lines.setdefault(run["label"], []).append((run["capacity"], run["hit_rate"]))
        for label, points in lines.items():
            colour = colours.setdefault(label, f"C{len(colours)}")
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label, color=colour)
        axes.set_xscale("log")
        axes.set_xlabel("capacity of all nodes, blocks of 512 tokens")
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
        if lines:
            axes.legend(fontsize=8)
    left.set_ylabel("share of prompt blocks that are hits")
    left.set_title(f"{figures['trace']}: policies, one pool")
    right.set_title("the same capacity on several nodes")
    drawing.tight_layout()
    drawing.savefig(path, dpi=110)
    pyplot.close(drawing)
