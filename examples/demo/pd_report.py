"""Table and timeline of the prefill/decode demo."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from examples.demo.network import Crossing

SEALED, PULLED, MARK = "#c44e52", "#4c72b0", "#555555"


@dataclass(frozen=True, slots=True)
class Sample:
    seconds: float  # since the prompt was sent
    sealed: int  # blocks on the prefill's node
    pulled: int  # of these, on the decode's node and verified


@dataclass(slots=True)
class HandedOff:
    """One prompt. Seconds count from the moment it was sent to both engines."""

    number: int
    prompt_tokens: int
    recomputed_tokens: int  # by the decode engine: the last, partial block
    prefill_seconds: float  # until the prefill engine's own first token
    first_token_seconds: float  # of the decode engine
    pulled_blocks: int
    pulled_before_prefill_end: int
    samples: list[Sample]
    token_ids: tuple[int, ...]
    alone_token_ids: tuple[int, ...] = ()
    alone_first_token_seconds: float = 0.0

    @property
    def handoff_seconds(self) -> float:
        return self.first_token_seconds - self.prefill_seconds

    def sentence(self) -> str:
        early = self.pulled_before_prefill_end
        return (
            f"prompt {self.number}: {self.prompt_tokens:,} tokens, prefill done after {self.prefill_seconds:.2f} s, "
            f"{early} of {self.pulled_blocks} blocks across by then, decode's first token "
            f"{self.handoff_seconds:.2f} s later"
        )


def show(found: list[HandedOff], crossing: Crossing, console: Console) -> None:
    title = "prefill on one node, decode on the other, against one engine alone"
    table = Table(title=title, title_justify="left", caption=crossing.sentence, caption_justify="left")
    for column in ("prompt", "tokens", "prefill done", "decode's first token", "hand-off", "recomputed"):
        table.add_column(column, justify="right")
    blocks = f"blocks by {crossing.way}"
    for column in (blocks, "of these while prefill ran", "one engine alone", "same tokens"):
        table.add_column(column, justify="right")
    for one in found:
        share = one.pulled_before_prefill_end / one.pulled_blocks if one.pulled_blocks else 0.0
        cells = [str(one.number), f"{one.prompt_tokens:,}", f"{one.prefill_seconds:.2f} s"]
        cells += [f"{one.first_token_seconds:.2f} s", f"{one.handoff_seconds:.2f} s", f"{one.recomputed_tokens:,}"]
        cells += [str(one.pulled_blocks), f"{share:.0%}", f"{one.alone_first_token_seconds:.2f} s"]
        table.add_row(*cells, "yes" if one.token_ids == one.alone_token_ids else "[red]no[/]")
    console.print(table)


def save(found: list[HandedOff], folder: Path, crossing: Crossing) -> list[Path]:
    """Write demo-pd.json and demo-pd.png into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / "demo-pd.json", folder / "demo-pd.png"
    data.write_text(json.dumps({"crossing": asdict(crossing), "prompts": [asdict(one) for one in found]}, indent=2))
    _plot(found, picture, crossing.how)
    return [data, picture]


def _plot(found: list[HandedOff], path: Path, how: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(len(found), 1, figsize=(9, 2.6 * len(found) + 0.8), sharex=True, squeeze=False)
    for one, (axes,) in zip(found, rows, strict=True):
        seconds = [sample.seconds for sample in one.samples]
        axes.step(seconds, [s.sealed for s in one.samples], where="post", color=SEALED, label="sealed by the prefill")
        pulled = [sample.pulled for sample in one.samples]
        axes.step(seconds, pulled, where="post", color=PULLED, label=f"pulled to the decode's node ({how})")
        axes.fill_between(seconds, pulled, step="post", color=PULLED, alpha=0.15)
        for at, text, align in (
            (one.prefill_seconds, "prefill done ", "right"),
            (one.first_token_seconds, " decode's first token", "left"),
        ):
            axes.axvline(at, color=MARK, linewidth=1, linestyle="--")
            axes.text(at, 0.04 * one.pulled_blocks, text, ha=align, fontsize=8, color=MARK)
        axes.set_ylabel("blocks")
        axes.set_title(f"prompt {one.number}: {one.prompt_tokens:,} tokens", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    rows[0][0].legend(loc="upper left", fontsize=8, frameon=False)
    rows[-1][0].set_xlabel("seconds since the prompt was sent to both engines")
    figure.suptitle("blocks cross while the prefill computes (two vLLM engines on two Ray nodes, CPU)", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
