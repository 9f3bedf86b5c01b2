"""Settings on the command line: `--set NAME=VALUE` of the commands that start a service, and `kvservice settings`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from kvservice.errors import ConfigError


def load(config: Path | None, pairs: Sequence[str] | None, **options: object) -> Any:
    """The ServiceConfig from file, environment, `--set` and a command's own options.

    Raises ConfigError, also if a setting is given twice on the command line.
    """
    from kvservice.config import load_config

    given = {name: value for name, value in options.items() if value is not None}
    for pair in pairs or ():
        name, sign, value = pair.partition("=")
        if not sign:
            raise ConfigError(f"--set {pair!r}: write NAME=VALUE, for example --set eviction=lru", key=name)
        if name in given:
            raise ConfigError(f"{name} is given twice on the command line; give it once", key=name)
        given[name] = value
    return load_config(config, None, **given)


def show(*, as_json: bool) -> None:
    """Print the definitions for people, or as JSON with stable keys."""
    from kvservice.config import ENVIRONMENT_PREFIX, ServiceConfig, allowed, default_of

    rows = [
        {
            "name": name,
            "variable": ENVIRONMENT_PREFIX + name.upper(),
            "values": allowed(field),
            "default": default_of(field),
            "meaning": " ".join((field.description or "").split()),
        }
        for name, field in ServiceConfig.model_fields.items()
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    console = Console()
    for row in rows:
        console.print(f"[bold]{row['name']}[/bold] = {row['default'] or '(empty)'}", highlight=False)
        console.print(
            f"    {row['meaning']}\n    Values: {row['values']}. Variable: {row['variable']}.", highlight=False
        )
