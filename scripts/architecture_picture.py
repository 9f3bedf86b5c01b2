"""architecture_picture.py: draws docs/img/architecture-light.svg and -dark.svg."""

from __future__ import annotations

from pathlib import Path

from scripts.svg import THEMES, Theme, arrow, box, picture, text

FOLDER = Path(__file__).parent.parent / "docs" / "img"
TITLE = (
    "Two nodes. On each, a vLLM replica uses the cache shard of its node, whose blocks are in shared memory. "
    "Shard B reads blocks from shard A with NIXL. Both announce to the directory and ask it who has what."
)
WIDTH, HEIGHT = 860, 372
NODE_WIDTH, NODE_HEIGHT = 330, 246


def node(theme: Theme, x: float, name: str, says: str) -> list[str]:
    inner = x + 24
    across = NODE_WIDTH - 48
    _, blue, green = theme.accents
    middle = inner + across / 2
    return [
        box(x, 20, NODE_WIDTH, NODE_HEIGHT, "none", theme.line, 10),
        text(x + 16, 42, name, theme.quiet, bold=True),
        box(inner, 56, across, 58, theme.panel, theme.line),
        text(inner + 14, 80, "vLLM replica", theme.text, size=15, bold=True),
        text(inner + 14, 100, says, theme.quiet),
        arrow([(middle, 116), (middle, 156)], green, both=True),
        text(middle + 12, 140, "verified blocks", theme.quiet),
        box(inner, 158, across, 92, theme.panel, blue),
        text(inner + 14, 182, "cache shard", theme.text, size=15, bold=True),
        text(inner + 14, 202, "its pool, in shared memory", theme.quiet),
        *(
            box(inner + 14 + 26 * number, 214, 22, 22, green if number < 7 else "none", green, 3)
            for number in range(10)
        ),
    ]


def drawn(theme: Theme) -> str:
    _, blue, _ = theme.accents
    left, right = 10, WIDTH - NODE_WIDTH - 10
    middle = WIDTH / 2
    shapes = [
        *node(theme, left, "node A", "computed this prompt"),
        *node(theme, right, "node B", "gets the same prompt: a hit"),
        arrow([(left + NODE_WIDTH - 22, 204), (right + 22, 204)], blue),
        text(middle, 190, "NIXL READ", theme.text, anchor="middle", bold=True),
        text(middle, 224, "RDMA or TCP", theme.quiet, anchor="middle"),
        box(middle - 190, 310, 380, 52, theme.panel, theme.line),
        text(middle, 333, "directory: which node has which block", theme.text, size=15, anchor="middle", bold=True),
        text(middle, 352, "soft: wrong or gone, it costs a miss", theme.quiet, anchor="middle"),
        arrow([(left + 165, 252), (left + 165, 336), (middle - 192, 336)], theme.quiet),
        text(left + 157, 292, "announce", theme.quiet, anchor="end"),
        arrow([(right + 165, 252), (right + 165, 336), (middle + 192, 336)], theme.quiet, both=True),
        text(right + 173, 292, "who has it?", theme.quiet),
    ]
    return picture(WIDTH, HEIGHT, TITLE, (blue, theme.accents[2], theme.quiet), shapes)


def drawings() -> dict[str, str]:
    """By name of the file."""
    return {f"architecture-{theme.name}.svg": drawn(theme) for theme in THEMES}


if __name__ == "__main__":
    for file, content in drawings().items():
        (FOLDER / file).write_text(content)
