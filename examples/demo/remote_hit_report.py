"""Table and plot of a demo with two engines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.demo.network import Crossing
from kvservice.units import format_bytes

KINDS = {"recompute": "#8c8c8c", "cold": "#c44e52", "engine": "#dd8452", "remote": "#4c72b0", "pool": "#55a868"}
CACHE_OFF = "B, cache off"  # the replica whose answers the others are compared with
SAVING = frozenset({"engine", "remote", "pool"})  # kinds that a speed-up makes sense for


@dataclass(frozen=True, slots=True)
class Row:
    """One measured answer."""

    question: int  # from 1
    replica: str  # what the table calls it
    kind: str  # one of KINDS: where most of the prompt came from
    first_token_seconds: float
    prompt_tokens: int
    computed_tokens: int
    engine_tokens: int
    pool_tokens: int
    remote_tokens: int
    token_ids: tuple[int, ...]
    text: str

    @classmethod
    def of(cls, question: int, replica: str, answer: dict[str, Any], *, with_cache: bool = True) -> Row:
        sources = {name: answer[f"{name}_tokens"] for name in ("engine", "pool", "remote")}
        largest = max(sources, key=lambda name: sources[name])
        kind = largest if sources[largest] > answer["computed_tokens"] else "cold" if with_cache else "recompute"
        return cls(
            question,
            replica,
            kind,
            answer["first_token_seconds"],
            answer["prompt_tokens"],
            answer["computed_tokens"],
            answer["engine_tokens"],
            answer["pool_tokens"],
            answer["remote_tokens"],
            tuple(answer["token_ids"]),
            answer["text"],
        )

    @property
    def sentence(self) -> str:
        return (
            f"Q{self.question} {self.replica}: first token after {self.first_token_seconds:.2f} s, "
            f"{self.computed_tokens:,} tokens computed, {self.engine_tokens + self.pool_tokens:,} hit locally, "
            f"{self.remote_tokens:,} hit remotely"
        )


def show(rows: list[Row], nodes: list[tuple[str, dict[str, Any]]], crossing: Crossing, console: Console) -> None:
    """Print the table, what a remote hit gained, what crossed, and whether the answers are equal."""
    _show_table(rows, crossing.sentence, console)
    _show_gain(rows, console)
    _show_transfers(nodes, console)
    _show_answers(rows, console)


def _show_table(rows: list[Row], crossing: str, console: Console) -> None:
    reference = {row.question: row.first_token_seconds for row in rows if row.kind == "recompute"}
    title = "time to first token, and where the prompt's tokens came from"
    table = Table(title=title, title_justify="left", caption=crossing, caption_justify="left")
    for column in ("question", "replica"):
        table.add_column(column)
    for column in ("first token", "computed", "hit in engine", "hit in local pool", "hit remotely", "speed-up"):
        table.add_column(column, justify="right")
    for row in rows:
        gain = f"{reference[row.question] / row.first_token_seconds:.1f} ×" if row.kind in SAVING else ""
        table.add_row(
            str(row.question),
            row.replica,
            f"{row.first_token_seconds:.2f} s",
            f"{row.computed_tokens:,}",
            f"{row.engine_tokens:,}",
            f"{row.pool_tokens:,}",
            f"{row.remote_tokens:,}",
            gain,
            style="bold" if row.kind == "remote" else None,
        )
    console.print(table)


def _show_gain(rows: list[Row], console: Console) -> None:
    """The main figure of the demo: a prompt that this replica never saw, computed by another replica."""
    reference = {row.question: row.first_token_seconds for row in rows if row.kind == "recompute"}
    for row in rows:
        if row.kind == "remote" and row.question in reference:
            share = row.first_token_seconds / reference[row.question]
            console.print(
                f"{row.replica}'s first token, from blocks that the other replica computed: "
                f"{row.first_token_seconds:.2f} s, {share:.1%} of the {reference[row.question]:.2f} s of recomputing",
                highlight=False,
            )


def _show_transfers(nodes: list[tuple[str, dict[str, Any]]], console: Console) -> None:
    """The counters of the shards."""
    for name, node in nodes:
        counters = node["counters"]
        pulled = counters.get("fetched_bytes", 0)
        moved = f"{format_bytes(pulled)} by {node['transport'].upper()}" if pulled else "no byte"
        console.print(
            f"shard of {name}: stored {counters.get('blocks_sealed', 0) - counters.get('fetched_blocks', 0)} blocks, "
            f"fetched {counters.get('fetched_blocks', 0)} ({moved}), "
            f"gave {counters.get('peer_located_blocks', 0)} to its peer",
            highlight=False,
        )


def different_answers(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Answers of B that differ from its answer without the cache, each with that one."""
    wanted = {row.question: row for row in rows if row.replica == CACHE_OFF}
    return [(row, wanted[row.question]) for row in _answers(rows) if row.token_ids != wanted[row.question].token_ids]


def _answers(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.replica.startswith("B") and row.replica != CACHE_OFF]


def _show_answers(rows: list[Row], console: Console) -> None:
    """Say which answers of B differ from its answers without the cache, or that none does."""
    different = different_answers(rows)
    for row, plain in different:
        console.print(f"[red]different[/]: Q{row.question} {row.replica}: {row.text!r}, without: {plain.text!r}")
    if not different:
        console.print(f"all {len(_answers(rows))} answers of B equal, token for token, what B says with the cache off")


def shortfalls(rows: list[Row]) -> list[str]:
    """What the demo was to show and did not."""
    missing = [
        f"{row.replica} says other tokens to question {row.question} than with the cache off"
        for row, _ in different_answers(rows)
    ]
    if not any(row.kind == "remote" for row in rows):
        missing.append("no prompt was hit remotely")
    if not any(row.kind == "pool" for row in rows):
        missing.append("no prompt was hit in the pool of its own node")
    if any(row.kind != "recompute" for row in rows if row.replica == CACHE_OFF):
        missing.append("with the cache off something was hit")
    return missing


def save(
    rows: list[Row],
    nodes: list[tuple[str, dict[str, Any]]],
    crossing: Crossing,
    folder: Path,
    *,
    name: str = "demo",
    title: str = "one document, two vLLM replicas on two Ray nodes (CPU)",
) -> list[Path]:
    """Write NAME.json and NAME.png into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{name}.json"
    shards = {label: {k: node[k] for k in ("transport", "counters")} for label, node in nodes}
    found = {"rows": [asdict(row) for row in rows], "shards": shards, "crossing": asdict(crossing)}
    data.write_text(json.dumps(found, indent=2))
    picture = folder / f"{name}.png"
    _plot(rows, picture, f"{title}, blocks cross by {crossing.how}")
    return [data, picture]


def _plot(rows: list[Row], path: Path, title: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (times, tokens) = pyplot.subplots(1, 2, figsize=(13, 0.5 * len(rows) + 2), sharey=True)
    labels = [f"Q{row.question}  {row.replica}" for row in rows]
    positions = list(range(len(rows)))
    times.barh(positions, [row.first_token_seconds for row in rows], color=[KINDS[row.kind] for row in rows])
    for position, row in zip(positions, rows, strict=True):
        times.text(row.first_token_seconds, position, f" {row.first_token_seconds:.2f} s", va="center", fontsize=9)
    times.set_yticks(positions, labels)
    times.invert_yaxis()
    times.set_xlabel("time to first token, seconds")
    times.margins(x=0.15)
    left = [0] * len(rows)
    parts = [("computed", "cold", "computed"), ("hit in the engine", "engine", "engine")]
    parts += [("hit in the local pool", "pool", "pool"), ("hit on another node", "remote", "remote")]
    for label, colour, name in parts:
        widths = [getattr(row, f"{name}_tokens") for row in rows]
        tokens.barh(positions, widths, left=left, color=KINDS[colour], label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    tokens.set_xlabel("prompt tokens, by where they came from")
    tokens.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=4, fontsize=8, frameon=False)
    for axes in (times, tokens):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
