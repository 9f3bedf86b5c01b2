"""Table, plot and conclusion of the Ray Serve demo.

Only what a cache can change is judged. The first turn of a conversation is new to every app, so times are those of the
later turns; each is compared with the same turn of the same user in the other app; and the quantiles that are named are
those that so many requests can carry.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from examples.demo.conversation import Shape, Turn

COLOURS = ("#999999", "#4c72b0", "#55a868")
SLACK = 0.02  # two replicas batch differently from run to run: so much of a difference is none
CHANCE_MAX = 0.05  # that so many pairs would be faster if the cache changed nothing
QUANTILES = (0.5, 0.9)


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

    @property
    def later(self) -> dict[tuple[int, int], Turn]:
        """The requests by user and turn, without the first turns."""
        return {(turn.user, turn.turn): turn for turn in self.turns if turn.turn > 0}

    def first_token_seconds(self, quantile: float) -> float:
        """The figures of the later turns."""
        ordered = sorted(turn.first_token_seconds for turn in self.later.values())
        return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]

    def summary(self) -> dict[str, float | int | str]:
        times = {
            f"first_token_p{quantile * 100:.0f}_seconds": round(self.first_token_seconds(quantile), 4)
            for quantile in QUANTILES
        }
        return {
            "app": self.name,
            "requests": len(self.turns),
            "later_turns": len(self.later),
            "prompt_tokens": sum(turn.prompt_tokens for turn in self.turns),
            "hit_rate": round(self.hit_rate, 4),
            "recomputed_tokens": self.recomputed_tokens,
            **times,
            "seconds": round(self.seconds, 2),
            "blocks_fetched_between_nodes": self.fetched_blocks,
        }


@dataclass(frozen=True, slots=True)
class Pairs:
    """The same later turns in two apps."""

    count: int
    faster: int  # had their first token earlier with the cache
    saved_seconds: float  # median of the differences

    @classmethod
    def of(cls, without: Played, with_cache: Played) -> Pairs:
        others = with_cache.later
        saved = [turn.first_token_seconds - others[key].first_token_seconds for key, turn in without.later.items()]
        return cls(len(saved), sum(one > 0 for one in saved), median(saved))

    @property
    def chance(self) -> float:
        """The probability that as many or more would be faster if each were decided by the toss of a coin."""
        return sum(math.comb(self.count, k) for k in range(self.faster, self.count + 1)) / (1 << self.count)

    def __str__(self) -> str:
        return (
            f"{self.faster} of {self.count} later turns had their first token earlier than without the cache, "
            f"by {self.saved_seconds:.2f} s in the median"
        )


def shortfalls(without: Played, with_cache: Played) -> list[str]:
    """Where an app with the cache is not better than the app without. Empty if it is better everywhere."""
    found = []
    if with_cache.hit_rate <= without.hit_rate * (1 + SLACK):
        found.append(f"hit rate {with_cache.hit_rate:.1%}, without the cache {without.hit_rate:.1%}")
    if with_cache.recomputed_tokens >= without.recomputed_tokens * (1 - SLACK):
        found.append(
            f"{with_cache.recomputed_tokens:,} tokens recomputed, without the cache {without.recomputed_tokens:,}"
        )
    pairs = Pairs.of(without, with_cache)
    if pairs.chance > CHANCE_MAX or pairs.saved_seconds <= 0:
        found.append(str(pairs))
    for quantile in QUANTILES:
        old, new = without.first_token_seconds(quantile), with_cache.first_token_seconds(quantile)
        if new >= old:
            found.append(f"first token p{quantile * 100:.0f} {new:.2f} s, without the cache {old:.2f} s")
    return found


def routing_shortfall(plain: Played, routed: Played) -> list[str]:
    """Routing to where the blocks are must not cost hits. What it gains in time depends on the link between the nodes,
    which are one machine here, so that is shown and not judged."""
    if routed.recomputed_tokens > plain.recomputed_tokens * (1 + SLACK):
        return [f"{routed.recomputed_tokens:,} tokens recomputed, with round-robin {plain.recomputed_tokens:,}"]
    return []


def show(found: list[Played], console: Console) -> None:
    title = "the same conversations through the OpenAI API, two vLLM replicas on two nodes"
    table = Table(title=title, title_justify="left")
    table.add_column("app")
    for column in ("prompt tokens hit", "recomputed", "first token p50*", "p90*", "in all", "fetched"):
        table.add_column(column, justify="right")
    for one in found:
        cells = [one.name, f"{one.hit_rate:.1%}", f"{one.recomputed_tokens:,}"]
        cells += [f"{one.first_token_seconds(quantile):.2f} s" for quantile in QUANTILES]
        table.add_row(*cells, f"{one.seconds:.0f} s", f"{one.fetched_blocks} blocks")
    console.print(table)
    first = found[0]
    tokens = sum(turn.prompt_tokens for turn in first.turns)
    console.print(
        f"{len(first.turns)} requests, {tokens:,} prompt tokens each time.  * of the {len(first.later)} turns after "
        "the first, which is new to every app",
        highlight=False,
    )
    for one in found[1:]:
        console.print(f"{one.name}: {Pairs.of(first, one)}", highlight=False)


def save(found: list[Played], shape: Shape, folder: Path) -> list[Path]:
    """Write demo-serve.json and demo-serve.png into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / "demo-serve.json", folder / "demo-serve.png"
    rows = [
        {**one.summary(), "pairs": asdict(Pairs.of(found[0], one)), "turns": [asdict(turn) for turn in one.turns]}
        for one in found
    ]
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
        for offset, quantile in zip((-0.2, 0.2), QUANTILES, strict=True):
            seconds = one.first_token_seconds(quantile)
            times.bar(number + offset, seconds, 0.38, color=COLOURS[number], alpha=1 if quantile == 0.5 else 0.55)
            label = f"p{quantile * 100:.0f}\n{seconds:.2f}"
            times.text(number + offset, seconds, label, ha="center", va="bottom", fontsize=8)
        ordered = sorted(turn.first_token_seconds for turn in one.later.values())
        shares = [(index + 1) / len(ordered) for index in range(len(ordered))]
        curve.step(ordered, shares, where="post", color=COLOURS[number], label=one.name)
    for axes in (rates, times):
        axes.set_xticks(range(len(found)), names, fontsize=8)
        axes.margins(y=0.18)
    rates.set_title("prompt tokens that were hits, %", fontsize=10)
    times.set_title("time to first token of later turns, s", fontsize=10)
    curve.set_title("share of later turns with a first token by then", fontsize=10)
    curve.set_xlabel("seconds")
    curve.legend(fontsize=8, frameon=False)
    for axes in (rates, times, curve):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
