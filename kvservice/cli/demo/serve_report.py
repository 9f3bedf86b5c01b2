"""Table, plot and verdict of the Ray Serve demo."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvservice.cli.demo.conversation import Shape, Turn

COLOURS = ("#999999", "#4c72b0", "#55a868")
HIT_SLACK = 0.005  # two replicas batch differently from run to run: half a point of hit rate is no difference


@dataclass(frozen=True, slots=True)
class Played:
    """The workload against one app."""

    name: str
    turns: tuple[Turn, ...]
    seconds: float
    fetched_blocks: int  # between the nodes

    @property
    def hit_rate(self) -> float:
        return sum(turn.cached_tokens for turn in self.turns) / sum(turn.prompt_tokens for turn in self.turns)

    @property
    def recomputed_tokens(self) -> int:
        return sum(turn.recomputed_tokens for turn in self.turns)

    def first_token_seconds(self, quantile: float) -> float:
        ordered = sorted(turn.first_token_seconds for turn in self.turns)
        return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]

    def summary(self) -> dict[str, float | int | str]:
        return {
            "app": self.name,
            "requests": len(self.turns),
            "prompt_tokens": sum(turn.prompt_tokens for turn in self.turns),
            "hit_rate": round(self.hit_rate, 4),
            "recomputed_tokens": self.recomputed_tokens,
            "first_token_p50_seconds": round(self.first_token_seconds(0.5), 4),
            "first_token_p99_seconds": round(self.first_token_seconds(0.99), 4),
            "seconds": round(self.seconds, 2),
            "blocks_fetched_between_nodes": self.fetched_blocks,
        }


def shortfalls(before: Played, after: Played) -> list[str]:
    """In what `after` is not better than `before`; empty when it is in everything."""
    found = []
    if after.hit_rate < before.hit_rate - HIT_SLACK:
        found.append(f"hit rate {after.hit_rate:.1%}, before {before.hit_rate:.1%}")
    if after.recomputed_tokens > before.recomputed_tokens * (1 + HIT_SLACK):
        found.append(f"{after.recomputed_tokens:,} tokens recomputed, before {before.recomputed_tokens:,}")
    for label, quantile in (("p50", 0.5), ("p99", 0.99)):
        old, new = before.first_token_seconds(quantile), after.first_token_seconds(quantile)
        if new >= old:
            found.append(f"time to first token {label} {new:.2f} s, before {old:.2f} s")
    return found


def show(found: list[Played], console: Console) -> None:
    title = "the same conversations through the OpenAI API, two vLLM replicas on two nodes"
    table = Table(title=title, title_justify="left")
    table.add_column("app")
    for column in (
        "requests",
        "prompt tokens",
        "hit rate",
        "recomputed",
        "first token p50",
        "p99",
        "in all",
        "fetched",
    ):
        table.add_column(column, justify="right")
    for one in found:
        cells = [one.name, str(len(one.turns)), f"{sum(turn.prompt_tokens for turn in one.turns):,}"]
        cells += [f"{one.hit_rate:.1%}", f"{one.recomputed_tokens:,}", f"{one.first_token_seconds(0.5):.2f} s"]
        cells += [f"{one.first_token_seconds(0.99):.2f} s", f"{one.seconds:.0f} s", f"{one.fetched_blocks} blocks"]
        table.add_row(*cells)
    console.print(table)


def save(found: list[Played], shape: Shape, folder: Path) -> list[Path]:
    """demo-serve.json and demo-serve.png in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / "demo-serve.json", folder / "demo-serve.png"
    rows = [{**one.summary(), "turns": [asdict(turn) for turn in one.turns]} for one in found]
    data.write_text(json.dumps({"workload": asdict(shape), "apps": rows}, indent=2))
    _plot(found, picture)
    return [data, picture]


def _plot(found: list[Played], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (rates, times, curve) = pyplot.subplots(1, 3, figsize=(14, 4.2))
    names = [one.name.replace(", ", ",\n") for one in found]
    for number, one in enumerate(found):
        rates.bar(number, one.hit_rate * 100, color=COLOURS[number])
        rates.text(number, one.hit_rate * 100, f"{one.hit_rate:.0%}", ha="center", va="bottom", fontsize=9)
        for offset, quantile in ((-0.2, 0.5), (0.2, 0.99)):
            seconds = one.first_token_seconds(quantile)
            times.bar(number + offset, seconds, 0.38, color=COLOURS[number], alpha=1 if quantile == 0.5 else 0.55)
            label = f"p{quantile * 100:.0f}\n{seconds:.2f}"
            times.text(number + offset, seconds, label, ha="center", va="bottom", fontsize=8)
        ordered = sorted(turn.first_token_seconds for turn in one.turns)
        shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
        curve.step(ordered, shares, where="post", color=COLOURS[number], label=one.name)
    for axes in (rates, times):
        axes.set_xticks(range(len(found)), names, fontsize=8)
        axes.margins(y=0.18)
    rates.set_title("prompt tokens that were hits, %", fontsize=10)
    times.set_title("time to first token, s", fontsize=10)
    curve.set_title("share of requests with a first token by then", fontsize=10)
    curve.set_xlabel("seconds")
    curve.legend(fontsize=8, frameon=False)
    for axes in (rates, times, curve):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
