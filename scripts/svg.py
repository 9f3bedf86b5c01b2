"""The few shapes that the drawn pictures of the docs consist of, in two themes. No library: the files stay small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

FONT = "-apple-system, BlinkMacSystemFont, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours that can be read on the pages of GitHub and of the site. The ground is transparent."""

    name: str
    text: str
    quiet: str  # of labels that are second to the text
    line: str
    panel: str  # the ground of a box
    accents: tuple[str, str, str]  # of what is bad, good, best


LIGHT = Theme("light", "#1f2328", "#59636e", "#d1d9e0", "#f6f8fa", ("#8c959f", "#0969da", "#1a7f37"))
DARK = Theme("dark", "#f0f6fc", "#9198a1", "#3d444d", "#151b23", ("#848d97", "#4493f8", "#3fb950"))
THEMES = (LIGHT, DARK)


def text(
    x: float, y: float, words: str, colour: str, *, size: int = 13, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>'
        f"{escape(words)}</text>"
    )


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", radius: float = 6) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" '
        f'stroke="{stroke}"/>'
    )


def arrow(points: Sequence[tuple[float, float]], colour: str, *, both: bool = False) -> str:
    """A line with a head at its end, or at both ends. Lines are drawn with the marker that `picture` defines."""
    way = " ".join(f"{'L' if number else 'M'}{x:g} {y:g}" for number, (x, y) in enumerate(points))
    head = f"url(#head-{colour[1:]})"
    start = f' marker-start="{head}"' if both else ""
    return f'<path d="{way}" fill="none" stroke="{colour}" stroke-width="1.8"{start} marker-end="{head}"/>'


def picture(width: int, height: int, title: str, colours: Sequence[str], shapes: Sequence[str]) -> str:
    """`colours`: those that arrows have."""
    heads = "".join(
        f'<marker id="head-{colour[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
        for colour in colours
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" font-family="{FONT}">\n<title>{escape(title)}</title>\n'
        + (f"<defs>{heads}</defs>\n" if heads else "")
        + "\n".join(shapes)
        + "\n</svg>\n"
    )
