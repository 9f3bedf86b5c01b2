"""Table of the demo with one pool for several kinds of engine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ENGINES = ("vLLM", "SGLang", "reference")


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt at one engine."""

    writer: str  # the engine that computed it first
    engine: str
    prompt_tokens: int
    hit_tokens: int
    first_token_seconds: float
    token_ids: list[int]


def shortfalls(played: list[Asked]) -> list[str]:
    """What the demo was to show and did not."""
    missing: list[str] = []
    found = {(asked.writer, asked.engine): asked for asked in played}
    for writer in ENGINES:
        own = found[writer, writer]
        if own.hit_tokens:
            missing.append(f"{writer} did not compute its prompt")
        for engine in ENGINES:
            other = found[writer, engine]
            if engine != writer and not other.hit_tokens:
                missing.append(f"{engine} hit nothing of what {writer} computed")
            if other.token_ids != own.token_ids:
                missing.append(f"{engine} says other tokens than {writer} for the prompt of {writer}")
    return missing


def show(played: list[Asked], console: Console) -> None:
    table = Table(title="a prompt of each engine, at all of them", title_justify="left")
    for name in ("computed by", "asked at", "prompt tokens", "hit", "first token", "tokens"):
        table.add_column(name, justify="left" if name in ("computed by", "asked at") else "right")
    for asked in played:
        own = next(one for one in played if one.writer == one.engine == asked.writer)
        is_equal = asked.token_ids == own.token_ids
        table.add_row(
            asked.writer,
            asked.engine,
            f"{asked.prompt_tokens:,}",
            f"{asked.hit_tokens:,}",
            f"{asked.first_token_seconds:.2f} s",
            ("equal" if is_equal else "differ") if asked is not own else "",
        )
    console.print(table)


def save(played: list[Asked], out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "two_engines.json"
    path.write_text(json.dumps([asdict(asked) for asked in played], indent=1) + "\n")
    return path
