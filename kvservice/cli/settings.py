"""Settings on the command line: an option for each of them, and `kvservice config show`."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvservice.cli.output import Format, show
from kvservice.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class Effective:
    """One setting as a command that starts here and now would have it."""

    name: str
    value: Any
    origin: str  # default, or who gave it
    values: str  # which ones are allowed, in words
    default: str
    variable: str
    meaning: str


_LISTS = ("lookup",)  # an empty list on the command line is an option that was not given
_SENTENCE = re.compile(r"(?<=\.) ")
_WITHOUT = re.compile(r"0\b|Empty:|Without (?:it|them)\b")  # how a sentence begins that says what 0 or no value does


def options() -> list[Any]:
    """An option of the command line for each setting, of the same name. They take text, which `load` checks."""
    from kvservice.config import ServiceConfig

    def every() -> None: ...

    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(name, field))
        for name, field in ServiceConfig.model_fields.items()
    ]
    every.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False)
    app.command()(every)
    made: list[Any] = typer.main.get_command(app).params
    return [each for each in made if each.name in ServiceConfig.model_fields]


def _option(name: str, field: Any) -> Any:
    from kvservice.config import allowed, default_of

    words = summary(field)
    default = default_of(field)
    flag = f"--{name.replace('_', '-')}"
    if field.annotation is bool:
        words = f"{words} Default: {'yes' if field.default else 'no'}."
        return Annotated[bool | None, typer.Option(f"{flag}/--no-{flag[2:]}", help=words)]
    text = f"{words} Values: {allowed(field)}." + (f" Default: {default}." if default else "")
    if _is_list(field.annotation):
        return Annotated[list[str] | None, typer.Option(flag, help=f"{text} Repeat for more.", metavar="ADDRESS")]
    return Annotated[str | None, typer.Option(flag, help=text, metavar=metavar(name, field))]


def summary(field: Any) -> str:
    """The first sentence of the meaning, and those that say what 0 or no value does, where the default does not."""
    from kvservice.config import shown

    first, *others = _SENTENCE.split(" ".join((field.description or "").split()))
    said = [] if shown(field).default else [each for each in others if _WITHOUT.match(each)]
    return " ".join([first, *said])


def metavar(name: str, field: Any) -> str:
    """The kind of value in one word."""
    from kvservice.config import allowed

    words = allowed(field)
    for beginning, kind in (
        ("a size", "SIZE"),
        ("a whole number", "N"),
        ("0, or a port", "PORT"),
        ("a number", "SECONDS"),
        ("an absolute path", "PATH"),
        ("a URL", "URL"),
    ):
        if words.startswith(beginning):
            return kind
    return "NAME"


def _is_list(kind: Any) -> bool:
    """Whether this is the type of a list."""
    return getattr(kind, "__origin__", None) is tuple


def load(config: Path | None, given: dict[str, Any]) -> Any:
    """The ServiceConfig from file, environment and the options of a command. Raises ConfigError."""
    from kvservice.config import load_config

    return load_config(config, None, **_overrides(given))


def _overrides(given: dict[str, Any]) -> dict[str, Any]:
    """What is given, with lists as text with commas."""
    texts = {name: ",".join(each) if isinstance(each, list | tuple) else each for name, each in given.items()}
    return {name: each for name, each in texts.items() if each not in (None, "") or name not in _LISTS}


def show_config(config: Path | None, given: dict[str, Any], names: list[str], form: Format) -> None:
    """Print every setting, or these. Raises ConfigError if one is unknown or wrong."""
    show(lambda: effective(config, given, names), _draw, form, data=_rows)


def effective(config: Path | None, given: dict[str, Any], names: list[str]) -> list[Effective]:
    from kvservice.config import ENVIRONMENT_PREFIX, ServiceConfig, allowed, default_of, gather_given

    fields = ServiceConfig.model_fields
    for name in names:
        if name not in fields:
            raise ConfigError(ServiceConfig.unknown(name), key=name)
    loaded = load(config, given)
    origins = gather_given(config, None, **_overrides(given))
    return [
        Effective(
            name,
            loaded.model_dump(mode="json")[name],
            origins[name].origin if name in origins else "default",
            allowed(field),
            default_of(field),
            ENVIRONMENT_PREFIX + name.upper(),
            " ".join((field.description or "").split()),
        )
        for name, field in fields.items()
        if not names or name in names
    ]


def written(setting: Effective) -> str:
    """The value as one would write it into a file."""
    from kvservice.units import format_bytes

    if setting.values.startswith("a size") and setting.value:
        return format_bytes(setting.value)
    if isinstance(setting.value, bool):
        return "1" if setting.value else "0"
    if isinstance(setting.value, list):
        return ",".join(setting.value)
    return f"{setting.value:g}" if isinstance(setting.value, float) else str(setting.value)


def _rows(found: list[Effective]) -> list[dict[str, Any]]:
    return [{name: getattr(each, name) for name in Effective.__slots__} for each in found]


def _draw(found: list[Effective], wide: bool) -> RenderableType:
    """A line for each setting; if wide, its definition as well."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if wide:
        texts: list[Text] = []
        for each in found:
            texts += [
                Text.assemble((each.name, "bold"), f" = {written(each) or '(empty)'}, from {each.origin}"),
                Text(f"    {each.meaning}\n    Values: {each.values}. Variable: {each.variable}."),
            ]
        return Group(*texts)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold", no_wrap=column == "setting")
    for each in found:
        style = "" if each.origin == "default" else "bold"
        value = ("no", "yes")[each.value] if isinstance(each.value, bool) else written(each)  # as the help has it
        cells = (each.name, value or each.default or "(empty)", each.origin)
        table.add_row(*(Text(cell) for cell in cells), style=style)
    return table
