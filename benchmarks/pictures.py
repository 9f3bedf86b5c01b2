"""Draws the pictures of results in docs/img, for `make figures`: first-token-*.svg, blend-*.svg, disk-worth-*.svg and
policy-*.svg.

Measures nothing. Without a result there is no picture. The picture of a result of a tree with uncommitted changes says
so.
"""

from __future__ import annotations

import json
import math
from typing import Any

from benchmarks.report import RESULTS, ROOT
from scripts.svg import THEMES, Theme, box, picture, text

FOLDER = ROOT / "docs" / "img"
WAYS = (("computed", "computed"), ("other node", "hit on another node"), ("this node", "hit on this node"))
TITLE = "Time to the first token by prompt length: computed, from another node, from this node"
WIDTH, LEFT, RIGHT = 860, 118, 176  # pixels; the labels of the bars need what is right of them
TOP, BAR, GAP, BETWEEN = 74, 15, 4, 17  # pixels: above the first group, of a bar, between bars, between groups
NOT_CLEAN = " with uncommitted changes: to be measured again"
LEAST_SECONDS = 0.02  # where the logarithmic axis begins


def bars(theme: Theme, tokens: str, seconds: dict[str, float], y: float, most: float) -> list[str]:
    """One prompt length: a bar for each way, with its seconds and how much sooner it is."""
    span = math.log10(most / LEAST_SECONDS)
    shapes = [text(LEFT - 14, y + 1.5 * BAR + GAP + 5, f"{int(tokens):,} tokens", theme.text, anchor="end", bold=True)]
    for number, ((way, _), colour) in enumerate(zip(WAYS, theme.accents, strict=True)):
        found = seconds[way]
        top = y + number * (BAR + GAP)
        width = (WIDTH - LEFT - RIGHT) * math.log10(found / LEAST_SECONDS) / span
        label = f"{found:.1f} s" if found >= 1 else f"{found:.2f} s"
        if number:
            label += f"  ·  {seconds['computed'] / found:.0f}× sooner"
        shapes += [
            box(LEFT, top, width, BAR, colour, radius=3),
            text(LEFT + width + 8, top + BAR - 3, label, theme.text if number else theme.quiet),
        ]
    return shapes


def drawn(document: dict[str, Any], theme: Theme, *, clean: bool) -> str:
    found = document["figures"]["seconds_by_prompt_tokens"]
    most = max(seconds["computed"] for seconds in found.values())
    group = 3 * BAR + 2 * GAP + BETWEEN
    height = TOP + group * len(found) + 26
    shapes = [text(0, 22, "Time to the first token, seconds (logarithmic)", theme.text, size=17, bold=True)]
    x = 0.0
    for (_, name), colour in zip(WAYS, theme.accents, strict=True):
        shapes += [box(x, 40, 14, 14, colour, radius=3), text(x + 21, 52, name, theme.text)]
        x += 40 + 6.4 * len(name)
    for number, (tokens, seconds) in enumerate(found.items()):
        shapes += bars(theme, tokens, seconds, TOP + group * number, most)
    where = f"vLLM on CPU, SmolLM2-135M, {document['machine']['cpu_count']} cores, two nodes of one machine, medians"
    where += f"; commit {document['commit'][:7]}" + ("" if clean else NOT_CLEAN)
    shapes.append(text(0, height - 8, where, theme.quiet, size=12))
    return picture(WIDTH, height, TITLE, (), shapes)


BLEND_TITLE = "Cached documents in another order: distance from full prefill, and time, by the share computed again"
BLEND_COLUMN = 300  # pixels of the longest bar of a column, its label not counted


def blend(document: dict[str, Any], theme: Theme, *, clean: bool) -> str:
    """A row for each ratio: on the left how far the answer is from full prefill, on the right how long it took."""
    found = document["figures"]["by_ratio"]
    height, left, right = TOP + 40 * len(found) + 26, 70, 70 + BLEND_COLUMN + 130
    most = max(row["kl_mean"] for row in found.values())
    longest = max(1.0, *(row["of_full_prefill"] for row in found.values()))
    shapes = [
        text(0, 22, "Cached documents in another order, by the share computed again", theme.text, size=17, bold=True),
        text(left, 56, "KL from full prefill, nats", theme.quiet),
        text(right, 56, "time, of a full prefill", theme.quiet),
    ]
    for number, (ratio, row) in enumerate(found.items()):
        y, kl, took = TOP + 40 * number, row["kl_mean"], row["of_full_prefill"]
        far, late = BLEND_COLUMN * kl / most, BLEND_COLUMN * took / longest
        shapes += [
            text(left - 14, y + 17, f"{100 * float(ratio):g} %", theme.text, anchor="end", bold=True),
            box(left, y, max(far, 1), 24, theme.accents[1], radius=3),
            text(left + far + 8, y + 17, f"{kl:.3f}" if kl else "0", theme.text),
            box(right, y, late, 24, theme.accents[0], radius=3),
            text(right + late + 8, y + 17, f"{100 * took:.0f} %", theme.text),
        ]
    where = f"{document['figures']['model']}, {document['figures']['prompt_tokens']:,} tokens, "
    where += f"{document['machine']['cpu_count']} cores; commit {document['commit'][:7]}"
    shapes.append(text(0, height - 8, where + ("" if clean else NOT_CLEAN), theme.quiet, size=12))
    return picture(WIDTH, height, BLEND_TITLE, (), shapes)


DISK_TITLE = "Hits of a memory alone, and with a disk of 4 and of 16 memories, by traffic"
DISK_LEFT, DISK_WIDTH = 262, 500  # pixels: of the names, and of a bar of 100 %


def disk_worth(document: dict[str, Any], theme: Theme, *, clean: bool) -> str:
    """A row for each traffic: what memory finds, and what larger disks add to it, before all that is possible."""
    found = document["figures"]["traffic"]
    height = TOP + 44 * len(found) + 26
    shapes = [text(0, 22, "Share of prompt blocks that are hits", theme.text, size=17, bold=True)]
    x = 0.0
    for name, colour in zip(("memory", "+ disk of 4 memories", "+ disk of 16"), theme.accents, strict=True):
        shapes += [box(x, 40, 14, 14, colour, radius=3), text(x + 21, 52, name, theme.text)]
        x += 46 + 6.6 * len(name)
    for number, (name, traffic) in enumerate(found.items()):
        y, left = TOP + 44 * number, float(DISK_LEFT)
        rates = [run["hit_rate"] for run in traffic["runs"][:3]]
        shapes.append(text(DISK_LEFT - 14, y + 17, name, theme.text, anchor="end", bold=True))
        for before, rate, colour in zip((0.0, *rates), rates, theme.accents, strict=False):
            width = DISK_WIDTH * max(rate - before, 0.0)
            shapes.append(box(left, y, max(width, 0.5), 24, colour))
            left += width
        shapes.append(text(left + 8, y + 17, " → ".join(f"{100 * rate:.0f} %" for rate in rates), theme.text))
    where = f"simulated, the memory holds a 32nd of the different blocks; commit {document['commit'][:7]}"
    shapes.append(text(0, height - 8, where + ("" if clean else NOT_CLEAN), theme.quiet, size=12))
    return picture(WIDTH + 20, height, DISK_TITLE, (), shapes)


POLICY_TITLE = "Hit rate of the default policy, in points above the better of LRU and S3-FIFO, by size of the cache"
POLICY_TOP, POLICY_HEIGHT, POLICY_COLUMN = 70, 300, 112  # pixels; a column for each size
POINTS_MIN, POINTS_MAX = -6.0, 12.0  # what is beyond is drawn at the edge


def policy(document: dict[str, Any], theme: Theme, *, clean: bool) -> str:
    """A dot for each trace in a column for each size: grey below LRU or S3-FIFO, green above."""
    figures = document["figures"]
    bottom = POLICY_TOP + POLICY_HEIGHT
    height = bottom + 66

    def at(points: float) -> float:
        inside = min(max(points, POINTS_MIN), POINTS_MAX)
        return POLICY_TOP + POLICY_HEIGHT * (POINTS_MAX - inside) / (POINTS_MAX - POINTS_MIN)

    shapes = [
        text(0, 22, "Points of hit rate above the better of LRU and S3-FIFO", theme.text, size=17, bold=True),
        text(0, 44, "a dot is a trace; a line is the mean; sizes are parts of a trace's different blocks", theme.quiet),
    ]
    for mark in (-6, -3, 0, 3, 6, 9, 12):
        shapes += [
            text(44, at(mark) + 4, f"{mark:+d}" if mark else "0", theme.quiet, anchor="end"),
            box(54, at(mark), WIDTH - 60, 1.5 if mark == 0 else 0.5, theme.text if mark == 0 else theme.line, radius=0),
        ]
    for number, row in enumerate(figures["by_size"]):
        middle = 54 + POLICY_COLUMN * (number + 0.6)
        for order, seed in enumerate(figures["by_seed"]):
            found = seed["points"][number]
            x = middle + 56 * ((order * 0.618) % 1 - 0.5)  # beside each other, always alike
            shapes.append(box(x - 2.5, at(found) - 2.5, 5, 5, theme.accents[2 if found >= 0 else 0], radius=2.5))
        shapes += [
            box(middle - 32, at(row["mean"]) - 1, 64, 2, theme.accents[1], radius=0),
            text(
                middle, POLICY_TOP + POLICY_HEIGHT + 22, f"{row['share']:.0%}", theme.text, anchor="middle", bold=True
            ),
        ]
    where = f"{figures['seeds']} traces of random traffic; commit {document['commit'][:7]}"
    shapes.append(text(0, height - 8, where + ("" if clean else NOT_CLEAN), theme.quiet, size=12))
    return picture(WIDTH, height, POLICY_TITLE, (), shapes)


DRAWN = {
    "first_token": ("first-token", drawn),
    "blend": ("blend", blend),
    "disk_worth": ("disk-worth", disk_worth),
    "policy": ("policy", policy),
}


def drawings() -> dict[str, str]:
    """By name of the file."""
    made = {}
    for result, (name, draw) in DRAWN.items():
        path = RESULTS / f"{result}.json"
        if path.exists():
            document = json.loads(path.read_text())
            clean = not document["commit"].endswith("-dirty")
            made |= {f"{name}-{theme.name}.svg": draw(document, theme, clean=clean) for theme in THEMES}
    return made


if __name__ == "__main__":
    for file, content in drawings().items():
        (FOLDER / file).write_text(content)
