"""The command `kvservice`. Commands import what they need when they run, so that --help is instant.

`kvservice.cli.commands` has the commands in the groups of the help, each as its options and a call. `tree` is what they
share, `output` how they print, `exits` how they end.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvservice.cli.commands import develop, hold, look, operate, run, secure
from kvservice.cli.tree import HELP, Tree
from kvservice.version import __version__


def version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvservice {__version__}")
        raise typer.Exit


def start(
    wanted: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """A cluster-wide KV cache for LLM inference, on Ray or without it."""


app = typer.Typer(
    cls=Tree,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP,
    epilog="kvservice demo\nkvservice up --no-ray\nkvservice status --watch\nkvservice explain REQUEST_ID",
)
app.callback()(start)
for group in (run, look, operate, hold, secure, develop):
    group.add(app)


if __name__ == "__main__":
    app()
