"""`python -m examples.demo`: demos on one machine, from the root of a clone. Most run vLLM.

`make demo` and `make demo-NAME` run them: pd, serve, engine, sglang, tiers, two-engines. Exit codes are those of
`kvservice`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvservice.cli.exits import fail
from kvservice.errors import KVServiceError

app = typer.Typer(
    help="The cache between engines on two nodes of this machine, measured and plotted.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Model = Annotated[str | None, typer.Option(help="Model folder or hub id. Default: a small prepared model.")]
Out = Annotated[Path, typer.Option(help="Folder for the table and the plot.")]
OUT = Path("demo-output")


@app.command()
def remote_hit(
    model: Model = None,
    out: Out = OUT,
    questions: Annotated[int, typer.Option(min=1, max=5, help="Number of questions about the document.")] = 3,
) -> None:
    """Let a vLLM replica hit a prefix that a replica on another node computed; measured and plotted."""
    from examples.demo.remote_hit import run

    try:
        run(model, out, questions)
    except KVServiceError as error:
        raise fail(error) from error


@app.command()
def pd(
    model: Model = None,
    out: Out = OUT,
    prompts: Annotated[int, typer.Option(min=1, max=5, help="Number of prompts that are handed off.")] = 2,
) -> None:
    """Let one vLLM engine prefill and another on another node decode; measured and plotted."""
    from examples.demo.pd import run

    try:
        run(model, out, prompts)
    except KVServiceError as error:
        raise fail(error) from error


@app.command()
def serve(
    model: Model = None,
    out: Out = OUT,
    users: Annotated[int, typer.Option(min=2, max=64, help="Number of conversations.")] = 10,
    turns: Annotated[int, typer.Option(min=2, max=8, help="Number of turns of each conversation.")] = 6,
) -> None:
    """Conversations through Ray Serve: without the cache, with it, and routed to where it is; measured and plotted."""
    from examples.demo.conversation import Shape
    from examples.demo.serve import run

    try:
        run(model, out, Shape(users, turns))
    except KVServiceError as error:
        raise fail(error) from error


@app.command()
def engine(model: Model = None, out: Out = OUT) -> None:
    """Two reference engines: prompts that cross, requests that swap, blocks that are copied on write; plotted."""
    from examples.demo.engine import run

    try:
        run(model, out)
    except KVServiceError as error:
        raise fail(error) from error


@app.command()
def sglang(
    model: Model = None,
    out: Out = OUT,
    questions: Annotated[int, typer.Option(min=1, max=5, help="Number of questions about the document.")] = 2,
) -> None:
    """Let an SGLang engine hit a prefix that one on another node computed; measured and plotted."""
    from examples.demo.sglang import run

    try:
        run(model, out, questions)
    except KVServiceError as error:
        raise fail(error) from error


@app.command()
def tiers(model: Model = None, out: Out = OUT) -> None:
    """Prompts that come back from a node's disk after a restart, and from an S3 API on another node; plotted."""
    from examples.demo.tiers import run

    try:
        run(model, out)
    except KVServiceError as error:
        raise fail(error) from error


@app.command()
def two_engines(model: Model = None, out: Out = OUT) -> None:
    """One pool for vLLM, SGLang and the reference engine: each hits what the others computed."""
    from examples.demo.two_engines import run

    try:
        run(model, out)
    except KVServiceError as error:
        raise fail(error) from error


if __name__ == "__main__":
    app(prog_name="python -m examples.demo")
