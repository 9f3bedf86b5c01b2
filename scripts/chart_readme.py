"""chart_readme.py CHART [--check]: write the chart's README.md from Chart.yaml and the comments of values.yaml.

The comment of a value stands above it and begins with "# -- "; the lines of comment that follow belong to it. Each
value needs a comment, unless it only groups others. A missing one is an error.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

_KEY = re.compile(r"( *)([A-Za-z][\w-]*):(.*)")
_BEGIN = "# -- "

HEAD = """# The `{name}` chart

<!-- Made from values.yaml by scripts/chart_readme.py: `make chart-readme`. Do not edit. -->

{description}. Version {version}, for Kubernetes {kubeVersion}.

```console
helm install cache ./helm/kvservice --namespace inference
helm test cache --namespace inference --logs
```

How to choose values, size memory, upgrade and drain: [docs/kubernetes.md](../../docs/kubernetes.md). Whole files of
values to begin with: [ci/](ci/), which are what the tests render.

| value | default | |
|---|---|---|
"""


def comments(text: str) -> dict[tuple[str, ...], str]:
    """The comment of each value, by the value's path."""
    found: dict[tuple[str, ...], str] = {}
    path: list[tuple[int, str]] = []
    words: list[str] = []
    collecting = False
    for line in text.splitlines():
        bare = line.strip()
        if bare.startswith(_BEGIN):
            words, collecting = [bare.removeprefix(_BEGIN)], True
        elif bare.startswith("#"):
            words += [bare.removeprefix("#").strip()] if collecting else []
        elif match := _KEY.fullmatch(line):
            indent, key = len(match.group(1)), match.group(2)
            path = [(depth, name) for depth, name in path if depth < indent] + [(indent, key)]
            if collecting:
                found[tuple(name for _, name in path)] = " ".join(words)
            collecting = False
        else:
            collecting = False
    return found


def rows(values: Any, described: dict[tuple[str, ...], str], path: tuple[str, ...] = ()) -> list[tuple[str, str, str]]:
    """(dotted name, default as JSON, comment) of each value, in order. Raises SystemExit when a comment is missing."""
    found: list[tuple[str, str, str]] = []
    for key, value in values.items():
        here = (*path, key)
        if here in described:
            found.append((".".join(here), json.dumps(value, ensure_ascii=False), described[here]))
        elif isinstance(value, dict) and value:
            found += rows(value, described, here)
        else:
            raise SystemExit(f"values.yaml: {'.'.join(here)} has no comment")
    return found


def readme(chart: Path) -> str:
    text = (chart / "values.yaml").read_text()
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    table = rows(yaml.safe_load(text), comments(text))
    lines = [f"| `{name}` | `{default}` | {comment} |" for name, default, comment in table]
    return HEAD.format(**about) + "\n".join(line.replace("||", "\\|\\|") for line in lines) + "\n"


def main(arguments: list[str]) -> int:
    chart = Path(arguments[0])
    made, target = readme(chart), chart / "README.md"
    if "--check" not in arguments:
        target.write_text(made)
        return 0
    if not target.exists() or target.read_text() != made:
        print(f"{target} is not what values.yaml says: make chart-readme", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
