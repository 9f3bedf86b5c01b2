"""Table and picture of the demo with two reference engines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.demo.network import Crossing

DEVICE, HOST, LIMIT, SWAP_OUT, SWAP_IN, COPY = "#4c72b0", "#dd8452", "#555555", "#c44e52", "#55a868", "#8172b2"


@dataclass(frozen=True, slots=True)
class Played:
    first: dict[str, Any]  # what EngineReplica.ask returned, of the engine that computed the prompts
    second: dict[str, Any]  # of the engine that found them
    wanted: list[list[int]]  # the tokens of transformers

    @property
    def engines(self) -> list[tuple[str, dict[str, Any]]]:
        return [("first node", self.first), ("second node", self.second)]


def shortfalls(played: Played) -> list[str]:
    """What the demo was to show and did not."""
    counters = played.second["counters"]
    found = {
        "no block crossed to the second engine": not counters.get("load_blocks_remote", 0),
        "the second engine loaded no prompt": not sum(played.second["loaded_tokens"]),
        "no request was swapped out": not counters.get("swapped_out", 0),
        "no swapped request came back": not counters.get("swapped_in", 0),
        "no block was copied on write": not counters.get("copied", 0),
    }
    for name, engine in played.engines:
        found[f"the {name} says other tokens than transformers"] = engine["token_ids"] != played.wanted
    return [words for words, is_missing in found.items() if is_missing]


def show(played: Played, crossing: Crossing, console: Console) -> None:
    title = "two reference engines, the same prompts"
    table = Table(title=title, title_justify="left", caption=crossing.sentence, caption_justify="left")
    table.add_column("")
    for name, _ in played.engines:
        table.add_column(name, justify="right")

    def row(label: str, of: Any) -> None:
        table.add_row(label, *[f"{of(engine):,}" for _, engine in played.engines])

    row("blocks on the device", lambda engine: engine["device_count"])
    row("tokens of the prompts", lambda engine: sum(engine["prompt_tokens"]))
    row("of these loaded from the cache", lambda engine: sum(engine["loaded_tokens"]))
    for label, name in (
        ("tokens computed in prompts", "prefill_tokens"),
        ("blocks that came from the other node", "load_blocks_remote"),
        ("requests swapped out", "swapped_out"),
        ("requests swapped in", "swapped_in"),
        ("blocks copied on write", "copied"),
    ):
        row(label, lambda engine, name=name: engine["counters"].get(name, 0))
    table.add_row(
        "tokens equal those of transformers",
        *["yes" if engine["token_ids"] == played.wanted else "no" for _, engine in played.engines],
    )
    console.print(table)


def save(played: Played, crossing: Crossing, folder: Path) -> list[Path]:
    """Write engine.json and engine.png into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / "engine.json", folder / "engine.png"
    data.write_text(json.dumps({**asdict(played), "crossing": asdict(crossing)}, indent=2))
    _plot(played, picture, f"blocks in use, two reference engines (CPU); blocks cross by {crossing.how}")
    return [data, picture]


def _plot(played: Played, path: Path, title: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(11, 7))
    for axis, (name, engine) in zip(axes, played.engines, strict=True):
        steps = engine["steps"]
        seconds = [step["seconds"] for step in steps]
        axis.fill_between(
            seconds, [s["device_blocks"] for s in steps], step="post", color=DEVICE, alpha=0.5, label="on the device"
        )
        axis.step(seconds, [s["host_blocks"] for s in steps], where="post", color=HOST, label="swapped to the host")
        if any(step["swapped_out"] for step in steps):
            axis.axhline(engine["device_count"], color=LIMIT, linestyle=":", label="blocks on the device")
        marks = (("swapped_out", SWAP_OUT, "swap out"), ("swapped_in", SWAP_IN, "swap in"), ("copied", COPY, "copy"))
        for kind, colour, label in marks:
            at = [step["seconds"] for step in steps if step[kind]]
            if at:
                axis.vlines(at, 0, max(s["device_blocks"] for s in steps), colour, linewidth=1, label=label)
        axis.set_title(f"engine on the {name}", fontsize=10)
        axis.set_ylabel("blocks")
        axis.legend(loc="lower right", fontsize=8)
    axes[-1].set_xlabel("seconds since the prompts came")
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
