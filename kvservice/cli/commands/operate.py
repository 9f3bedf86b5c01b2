"""Commands for those who keep a service running."""

from __future__ import annotations

from typing import Annotated

import typer

from kvservice.cli import tier
from kvservice.cli.exits import ExitCode, say_wrong
from kvservice.cli.output import Format
from kvservice.cli.tree import (
    Config,
    LeafWithSettings,
    Lookup,
    Output,
    Service,
    command,
    given_settings,
    new_tree,
    offer_nodes,
    offer_settings,
)

GROUP = "Operate"


def add(tree: typer.Typer) -> None:
    """Add this module's commands to the tree, in the order of the help."""
    command(
        tree,
        GROUP,
        "kvservice drain --node n0",
        "kvservice drain --local --timeout 120",
        "kvservice drain --node n0 --lookup 10.0.0.5:7400 -o json",
    )(drain)
    command(
        tree,
        GROUP,
        "kvservice check --lookup 10.0.0.5:7400 --lookup 10.0.0.6:7400 --nodes 8 --wait 60",
        "kvservice check --metrics shards.kvservice.svc:9400 --nodes 8",
    )(check)
    command(tree, GROUP, "kvservice doctor", "kvservice doctor -o json")(doctor)
    config = new_tree("Show settings and where they come from.")
    command(
        config,
        None,
        "kvservice config show",
        "kvservice config show pool_bytes transport -o json",
        "kvservice config show --config kvservice.toml -o wide",
        name="show",
        kind=LeafWithSettings,
    )(show_config)
    tree.add_typer(config, name="config", rich_help_panel=GROUP)
    tree.add_typer(tier.app, name="tier", rich_help_panel=GROUP)


def drain(
    node: Annotated[
        str | None,
        typer.Option(
            "--node",
            metavar="NODE",
            autocompletion=offer_nodes,
            help="Node whose shard leaves; the beginning of its name is enough.",
        ),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="All shards of this machine leave.")] = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds until the shard ends, even if blocks are left.")
    ] = 30.0,
    no_handover: Annotated[bool, typer.Option("--no-handover", help="Leave without handing blocks over.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Cancel a drain that is handing blocks over.")] = False,
    service: Service = None,
    lookup: Lookup = None,
    output: Output = Format.TABLE,
) -> None:
    """Make a shard leave; its hot blocks go to others.

    It hands its hottest blocks to other nodes, tells the directory, and ends. Engines go on. From a machine without a
    shard this needs a certificate for a node, because a client's may only ask."""
    from kvservice.cli import drain as run

    seconds = run.check_timeout(timeout)
    left = run.run(service, lookup, node, local, seconds, not no_handover, undo, output)
    if not left:
        raise typer.Exit(ExitCode.PROBLEM)


def check(
    lookup: Lookup = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT", help="Metrics of shards; every address of the name is asked. Repeat for more."
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=0, metavar="N", help="Number of cache shards that must answer.")] = 1,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Seconds to keep asking until nothing is wrong.")
    ] = 0.0,
    service: Service = None,
) -> None:
    """Ask whether every part of a service is there.

    Name all lookup partitions with --lookup, in their order; else it asks the service of this machine, unless --metrics
    is given. For pipelines and `helm test`: it runs anywhere, can wait, and exits with 1 and the reasons if something
    is missing."""
    from kvservice.cli import check as run

    problems, seen = run.run(lookup, metrics or [], nodes, wait, service)
    for problem in problems:
        say_wrong(f"problem: {problem}")
    typer.echo(seen)
    if problems:
        raise typer.Exit(ExitCode.PROBLEM)


def doctor(output: Output = Format.TABLE) -> None:
    """Check this machine, and say what to do.

    Versions, shared memory, NIXL, hashing, reachability, clocks. It reads settings from variables KVSERVICE_* and from
    no file. Exits with 1 if there is a problem."""
    from kvservice.cli import doctor as run

    if not run.healthy(run.run(output)):
        raise typer.Exit(ExitCode.PROBLEM)


def show_config(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", autocompletion=offer_settings, help="Settings to show. Default: all."),
    ] = None,
    config: Config = None,
    output: Output = Format.TABLE,
) -> None:
    """Show each setting, its value and where it comes from.

    These are the settings that a command would have here and now: the default, then the file, then the environment,
    then the options. With -o wide also what they mean and which values they take."""
    from kvservice.cli import settings as run

    run.show_config(config, given_settings(context), names or [], output)
