"""What the commands have in common: groups in the help, examples, options that several commands take.

Only this module knows Typer's classes. Its help is plain text, because Rich would take longer to load than to print.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from kvservice.cli.exits import reports_errors
from kvservice.cli.output import Format

GROUPS = ("Run", "Look", "Operate", "Secure", "Develop")  # in the order of the help
WATCH_SECONDS = "2"  # for --watch without a number: often enough to see changes, no load for a service
SETTINGS = "kvservice.settings"  # where the values of a command's settings lie in its context
HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

Service = Annotated[
    str | None,
    typer.Option(
        "--service",
        metavar="NAME",
        help="Name of the service. Default: KVSERVICE_SERVICE, else the only one of this machine, else 'default'.",
    ),
]
Lookup = Annotated[
    list[str] | None,
    typer.Option(
        "--lookup",
        metavar="ADDRESS",
        help="Ask the service of this lookup partition (host:port or unix:/path), from any machine. Default: "
        "KVSERVICE_LOOKUP, else the service of this machine. KVSERVICE_TLS_DIR names the certificate.",
    ),
]
Output = Annotated[
    Format,
    typer.Option("--output", "-o", help="table or wide for people, json or yaml for programs.", metavar="FORMAT"),
]
Watch = Annotated[
    float | None,
    typer.Option(
        "--watch",
        metavar="[SECONDS]",
        min=0.1,
        help=f"Again every so many seconds ({WATCH_SECONDS} if you give no number), until Ctrl-C.",
    ),
]
Config = Annotated[Path | None, typer.Option(metavar="FILE", help="TOML file with any of the settings.")]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Address of the Ray cluster to join. auto: RAY_ADDRESS, else the cluster of this machine. Default: the "
        "same, but `up` starts a cluster if there is none.",
    ),
]
JsonLogs = Annotated[bool, typer.Option("--json-logs", help="Write logs as one JSON object a line.")]

F = TypeVar("F", bound=Callable[..., object])


class Tree(TyperGroup):
    """A group whose help lists its commands under the headings of GROUPS."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        shown = [(name, each) for name, each in self.commands.items() if not each.hidden]
        limit = formatter.width - 6 - max(len(name) for name, _ in shown)
        for group in (*GROUPS, None):
            rows = [
                (name, each.get_short_help_str(limit))
                for name, each in shown
                if getattr(each, "rich_help_panel", None) == group
            ]
            if rows:
                with formatter.section(group or "Commands"):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(self.epilog, formatter)


class Leaf(TyperCommand):
    """A command with examples at the end of its help. `--watch` takes a number or none. An option for one value is
    refused when it is given twice, because `clear --tenant a --tenant b` would clear one of them in silence."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = with_watch_seconds(args)
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for option in self.params:  # settings may be repeated: a wrapper overrides them so
            takes_one = option.param_type_name == "option" and not (option.is_flag or option.multiple)  # type: ignore[attr-defined]
            if takes_one and given.count(option) > 1 and not ctx.resilient_parsing:
                ctx.fail(f"{option.opts[0]} takes one value, and was given {given.count(option)} times.")
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(self.epilog, formatter)


class LeafWithSettings(Leaf):
    """A command that takes every setting of a service as an option of the setting's name, so that all parts of a
    service can be started with the same options. Its help explains those that it reads, and names the others.

    The options are made when this command needs them, because the definitions of the settings take longer to load than
    all other help. The function finds the values with `given_settings`."""

    _made: tuple[Any, ...] = ()

    @classmethod
    def reads(cls, name: str) -> bool:
        """Whether the command uses the setting of this name."""
        return True

    def get_params(self, ctx: Any) -> list[Any]:
        own = super().get_params(ctx)
        return [*own, *self.settings()]

    def settings(self) -> tuple[Any, ...]:
        if not self._made:
            from kvservice.cli.settings import options

            taken = {param.name for param in self.params}
            self._made = tuple(each for each in options() if each.name not in taken)
            for each in self._made:
                each.hidden = not self.reads(each.name)  # completion does not offer it
        return self._made

    def format_options(self, ctx: Any, formatter: Any) -> None:
        made = self.settings()
        rows: dict[str, list[Any]] = {"Arguments": [], "Options": [], "Settings": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if param.param_type_name == "argument" else "Options"
                rows["Settings" if param in made else kind].append(record)
        for name, found in rows.items():
            if found:
                with formatter.section(name):
                    formatter.write_dl(found)
        others = ", ".join(each.opts[0] for each in made if each.hidden)
        if others:
            with formatter.section("Other settings"):
                write_unbroken(f"These are understood too, and change nothing here: {others}.", formatter)

    def invoke(self, ctx: Any) -> Any:
        ctx.meta[SETTINGS] = {each.name: ctx.params.pop(each.name, None) for each in self.settings()}
        return super().invoke(ctx)


def given_settings(context: typer.Context) -> dict[str, Any]:
    """The settings that the command line of a LeafWithSettings gives, as text; None for the others."""
    found: dict[str, Any] = context.meta[SETTINGS]
    return found


def offer_settings(incomplete: str) -> list[str]:
    """For completion: the settings whose names begin so."""
    from kvservice.config import ServiceConfig

    return [name for name in ServiceConfig.model_fields if name.startswith(incomplete)]


def offer_nodes(incomplete: str) -> list[str]:
    """For completion: the nodes of this machine whose names begin so."""
    from kvservice.discovery import find_shards
    from kvservice.errors import KVServiceError

    try:
        return [record.node_id for record in find_shards(live_only=False) if record.node_id.startswith(incomplete)]
    except KVServiceError:  # completion says nothing
        return []


def new_tree(text: str) -> typer.Typer:
    """A group of commands. Only the outermost one can install completion."""
    return typer.Typer(
        cls=Tree,
        help=text,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=HELP,
    )


def command(
    tree: typer.Typer, group: str | None, *examples: str, name: str | None = None, kind: type[Leaf] = Leaf
) -> Callable[[F], F]:
    """Add a function to a tree under a heading of its help. It may raise KVServiceError. The examples are whole command
    lines; a test parses them."""

    def add(function: F) -> F:
        tree.command(
            name,
            cls=kind,
            epilog="\n".join(examples),
            rich_help_panel=group,
            context_settings=HELP,
        )(reports_errors(function))
        return function

    return add


def with_watch_seconds(arguments: Sequence[str]) -> list[str]:
    """The same arguments with a number after each `--watch` that has none."""
    made: list[str] = []
    for index, word in enumerate(arguments):
        made.append(word)
        if word == "--watch" and not _is_number("".join(arguments[index + 1 : index + 2])):
            made.append(WATCH_SECONDS)
    return made


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def write_unbroken(text: str, formatter: Any) -> None:
    """Write a text that has options in it: a line may end between two of them, and not at the hyphen of one."""
    margin = " " * formatter.current_indent
    lines = textwrap.wrap(
        text, formatter.width, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False
    )
    formatter.write("".join(f"{line}\n" for line in lines))


def write_examples(epilog: str | None, formatter: Any) -> None:
    if epilog:
        with formatter.section("Examples"):
            for line in epilog.splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
