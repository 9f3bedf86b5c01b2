"""Commands that bring prompts to nodes, and keep them there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvservice.cli.exits import ExitCode
from kvservice.cli.output import Format
from kvservice.cli.tree import Lookup, Output, Service, command, offer_nodes

GROUP = "Operate"
File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help='Prompts, one JSON value a line: a list of token ids, {"prompt": ...} or {"messages": [...]}.',
    ),
]
OnePrompt = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help='One prompt, as a JSON value in one line: a list of token ids, {"prompt": ...} or {"messages": [...]}.',
    ),
]
Model = Annotated[
    str, typer.Option("--model", metavar="MODEL", help="Name of the engines' model, as `kvservice status` shows it.")
]
Namespace = Annotated[
    str | None, typer.Option(metavar="NAME", help="Namespace of the engines, if the model is attached in several.")
]
Tokenizer = Annotated[
    str, typer.Option(metavar="PATH", help="The engines' tokenizer, for prompts that are text: a folder or hub name.")
]
Nodes = Annotated[
    list[str] | None,
    typer.Option(
        "--node",
        metavar="NODE",
        autocompletion=offer_nodes,
        help="Only at this node; the beginning of its name is enough. Repeat for more.",
    ),
]
Timeout = Annotated[
    float, typer.Option(metavar="SECONDS", min=0.1, max=600, help="Seconds that one prompt may take at one node.")
]


def add(tree: typer.Typer) -> None:
    """Add this module's commands to the tree, in the order of the help."""
    command(
        tree,
        GROUP,
        "kvservice warm prompts.jsonl --model Qwen/Qwen3-8B",
        "kvservice warm system.json --model Qwen/Qwen3-8B --tokenizer ./qwen --node n0 --hold 300",
    )(warm)
    command(tree, GROUP, "kvservice pin system-prompt system.json --model Qwen/Qwen3-8B")(pin)
    command(tree, GROUP, "kvservice unpin system-prompt")(unpin)
    command(tree, GROUP, "kvservice pins", "kvservice pins -o json")(pins)
    command(
        tree,
        GROUP,
        "kvservice clear --model Qwen/Qwen3-8B",
        "kvservice clear --tenant acme --wait 600",
        "kvservice clear --prompt prompts.jsonl --model Qwen/Qwen3-8B",
    )(clear)


def warm(
    file: File,
    model: Model,
    namespace: Namespace = None,
    tokenizer: Tokenizer = "",
    node: Nodes = None,
    hold: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=600, help="Seconds for which the blocks are not evicted.")
    ] = 60.0,
    timeout: Timeout = 60.0,
    service: Service = None,
    lookup: Lookup = None,
    output: Output = Format.TABLE,
) -> None:
    """Bring prompts to nodes before they are asked for.

    Each node that has an engine of the model fetches the blocks that other nodes have, and holds them for --hold
    seconds. Nothing is computed. Requests of engines go first. Exits with 1 if a node failed."""
    from kvservice.cli import hold as run

    wanted = run.Wanted(file, model, namespace, tokenizer, tuple(node or ()), hold, timeout)
    if not run.warm(service, lookup, wanted, output):
        raise typer.Exit(ExitCode.PROBLEM)


def pin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What you call the prompt; you unpin it by this name.")],
    file: OnePrompt,
    model: Model,
    namespace: Namespace = None,
    tokenizer: Tokenizer = "",
    node: Nodes = None,
    timeout: Timeout = 60.0,
    service: Service = None,
    lookup: Lookup = None,
    output: Output = Format.TABLE,
) -> None:
    """Hold a prompt by name, so that it is never evicted.

    Each node fetches it as for `warm`, and holds it until `unpin` or the end of the shard, also when engines end. All
    pins together may take a quarter of the pool, and of a tenant's quota; one that does not fit is refused. Needs a
    certificate for a node. Exits with 1 if a node failed, or none has a block of it."""
    from kvservice.cli import hold as run

    wanted = run.Wanted(file, model, namespace, tokenizer, tuple(node or ()), 0.0, timeout, name)
    if not run.warm(service, lookup, wanted, output):
        raise typer.Exit(ExitCode.PROBLEM)


def unpin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name that it was pinned under.")],
    node: Nodes = None,
    service: Service = None,
    lookup: Lookup = None,
    output: Output = Format.TABLE,
) -> None:
    """Let a pinned prompt go.

    Its blocks stay until their room is needed. Exits with 1 if no node has the pin, or one does not answer."""
    from kvservice.cli import hold as run

    if not run.unpin(service, lookup, name, tuple(node or ()), output):
        raise typer.Exit(ExitCode.PROBLEM)


def pins(service: Service = None, lookup: Lookup = None, output: Output = Format.TABLE) -> None:
    """List the prompts that are pinned.

    In a service with tenants you see those of the tenant whose token you have, and all with an administrator's. Exits
    with 1 if a node does not answer."""
    from kvservice.cli import hold as run

    if not run.pins(service, lookup, output):
        raise typer.Exit(ExitCode.PROBLEM)


def clear(
    everything: Annotated[bool, typer.Option("--everything", help="All blocks of the service.")] = False,
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Blocks of engines in this namespace, and in those below it (NAME/...); '' for those without one.",
        ),
    ] = None,
    tenant: Annotated[str, typer.Option("--tenant", metavar="TENANT", help="Blocks of this tenant.")] = "",
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="Blocks of this model.")] = "",
    prompt: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Blocks of the prompts in this file, for the engines of --model."),
    ] = None,
    tokenizer: Tokenizer = "",
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="Seconds to go on while nodes do not answer, or requests still read cleared blocks. 0: one try.",
        ),
    ] = 0.0,
    service: Service = None,
    lookup: Lookup = None,
    output: Output = Format.TABLE,
) -> None:
    """Forget blocks, in every tier on every node.

    Name one of --everything, --namespace, --tenant, --model and --prompt. After a restart a shard does not know whose
    blocks its memory holds: those go with every tenant, model and namespace. Engines keep what is in their own GPU
    cache. Needs a certificate for a node, and an administrator's token if there are tenants. Exits with 1 if a node was
    not reached, or still reads cleared blocks."""
    from kvservice.cli import clear as run

    wanted = run.Scope(everything, namespace, tenant, model, prompt, tokenizer)
    if not run.run(service, lookup, wanted, wait, output):
        raise typer.Exit(ExitCode.PROBLEM)
