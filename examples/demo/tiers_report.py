"""Table and picture of the demo with tiers below the memory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

SOURCES = ("computed", "disk", "objects")
NAMES = {"computed": "computed", "disk": "the node's disk, after a restart", "objects": "an S3 API, on another node"}
COLOURS = ("#555555", "#4c72b0", "#dd8452")


@dataclass(slots=True)
class Answers:
    """One round of the prompts; lists have a place for each prompt."""

    source: str
    token_ids: list[list[int]] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    loaded_tokens: list[int] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    tier_blocks: dict[str, int] = field(default_factory=dict)  # brought back, by tier
    blocks: int = 0  # whole ones of the prompts

    @property
    def seconds(self) -> float:
        """The middle one of the prompts."""
        return sorted(self.first_token_seconds)[len(self.first_token_seconds) // 2]


def shortfalls(played: list[Answers]) -> list[str]:
    """What the demo was to show and did not."""
    first = played[0]
    found = {"the first round did not compute": bool(sum(first.loaded_tokens))}
    for answers in played[1:]:
        found[f"no block came from {answers.source}"] = not answers.tier_blocks.get(answers.source, 0)
        found[f"the engine loaded nothing that came from {answers.source}"] = not sum(answers.loaded_tokens)
        found[f"tokens after {answers.source} differ"] = answers.token_ids != first.token_ids
    return [words for words, is_missing in found.items() if is_missing]


def show(played: list[Answers], console: Console) -> None:
    table = Table(title="the same prompts, by where their blocks came from", title_justify="left")
    for name in ("source", "first token", "of computing", "prompt tokens", "loaded", "blocks of the tier", "tokens"):
        table.add_column(name, justify="left" if name == "source" else "right")
    first = played[0]
    for answers in played:
        table.add_row(
            NAMES[answers.source],
            f"{answers.seconds:.2f} s",
            f"{100 * answers.seconds / first.seconds:.0f} %",
            f"{sum(answers.prompt_tokens):,}",
            f"{sum(answers.loaded_tokens):,}",
            f"{answers.tier_blocks.get(answers.source, 0):,}",
            "equal" if answers.token_ids == first.token_ids else "differ",
        )
    console.print(table)


def save(played: list[Answers], out: Path) -> list[Path]:
    """The figures as JSON, and the picture."""
    out.mkdir(parents=True, exist_ok=True)
    figures, picture = out / "tiers.json", out / "tiers.png"
    figures.write_text(json.dumps([asdict(answers) for answers in played], indent=2) + "\n")
    draw(played, picture)
    return [figures, picture]


def draw(played: list[Answers], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawing, axes = pyplot.subplots(figsize=(9, 3))
    names, seconds = [NAMES[answers.source] for answers in played], [answers.seconds for answers in played]
    bars = axes.barh(names, seconds, color=COLOURS)
    axes.bar_label(bars, [f"{each:.2f} s" for each in seconds], padding=4)
    axes.invert_yaxis()
    axes.set_xlim(right=1.15 * max(seconds))
    axes.set_xlabel("seconds to the first token, median of the prompts")
    axes.set_title(f"{sum(played[0].prompt_tokens):,} tokens of prompts on this machine, reference engine on CPU")
    drawing.tight_layout()
    drawing.savefig(path, dpi=110)
    pyplot.close(drawing)
