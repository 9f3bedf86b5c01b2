"""Commands that show what a service does. They change nothing."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from kvservice.cli.exits import ExitCode
from kvservice.cli.output import Format
from kvservice.cli.tree import Lookup, Output, Service, Watch, command, offer_nodes

GROUP = "Look"


class Order(str, Enum):
    """What `blocks` sorts by."""

    USES = "uses"
    AGE = "age"
    IDLE = "idle"
    SIZE = "size"
    POSITION = "position"


def add(tree: typer.Typer) -> None:
    """Add this module's commands to the tree, in the order of the help."""
    command(
        tree,
        GROUP,
        "kvservice status",
        "kvservice status --watch 5",
        "kvservice status -o json",
        "kvservice status --lookup 10.0.0.5:7400",
    )(status)
    command(
        tree,
        GROUP,
        "kvservice top",
        "kvservice top --lookup 10.0.0.5:7400 --interval 5",
        "kvservice top --plain --count 10",
    )(top)
    command(
        tree,
        GROUP,
        "kvservice blocks",
        "kvservice blocks --model meta-llama/Llama-3.1-8B --sort uses",
        "kvservice blocks --node n0 --state reserved --state writing",
        "kvservice blocks --key 4f2a9c -o wide",
    )(blocks)
    command(
        tree,
        GROUP,
        "kvservice explain cmpl-6f2a9c",
        "kvservice explain cmpl-6f2a9c -o yaml --lookup 10.0.0.5:7400",
    )(explain)
    command(
        tree,
        GROUP,
        "kvservice console",
        "kvservice console --host 0.0.0.0 --certificate web.crt --key web.key --name kv.example.com",
    )(console)
    command(tree, GROUP, "kvservice logs", "kvservice logs --node n0 --lines 20 --follow")(logs)


def status(service: Service = None, lookup: Lookup = None, output: Output = Format.TABLE, watch: Watch = None) -> None:
    """Show nodes, slots, hits and the directory.

    Exits with 1 if a part of the service does not answer, and with 3 if none does."""
    from kvservice.cli import status as run

    state = run.run(service, lookup, output, watch)
    if state.problems:
        raise typer.Exit(ExitCode.PROBLEM if state.is_alive else ExitCode.NO_SERVICE)


def top(
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines, as it also does if the output is no terminal.")
    ] = False,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.2, help="Time between two readings.")] = 2.0,
    count: Annotated[
        int | None, typer.Option(metavar="ROUNDS", min=1, help="End after so many rounds of lines.")
    ] = None,
    service: Service = None,
    lookup: Lookup = None,
) -> None:
    """Watch the service work: hit rates, bytes and memory, live.

    Enter opens a node, model, engine, tenant or request, and Escape goes back. Tab shows the next table, s sorts by the
    next column, r reverses the order, p pauses. q or Ctrl-C ends it. The full screen needs the extra `top`."""
    from kvservice.cli.top import run

    run.run(service, lookup, interval, plain=plain or count is not None, count=count)


def blocks(
    node: Annotated[
        str | None, typer.Option("--node", metavar="NODE", help="Only of this node; the beginning of its id is enough.")
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="sealed, leased, reserved, writing, quarantined or free. Repeat for more. Default: the first two.",
        ),
    ] = None,
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="Only of this model; its whole name.")] = "",
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="TENANT", help="Only of this tenant.")] = None,
    key: Annotated[
        str, typer.Option(metavar="DIGITS", help="Only blocks whose key begins with these hex digits.")
    ] = "",
    sort: Annotated[
        Order | None,
        typer.Option(
            metavar="FIELD", help="uses, age, idle, size or position: the largest first. Default: by node and slot."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="COUNT", min=1, max=10_000, help="Most blocks to show.")] = 50,
    service: Service = None,
    lookup: Lookup = None,
    output: Output = Format.TABLE,
    watch: Watch = None,
) -> None:
    """List blocks: key, model, tenant, place, age and uses.

    It never shows tokens or the bytes of blocks. Shards answer in small pages, so a long list does not slow them. In a
    service with tenants you see the blocks of the tenant whose token you have, and all with an administrator's. Exits
    with 1 if a node does not answer."""
    from kvservice.cli import blocks as run

    selected = run.Selection(node, tuple(state or ()), model, tenant, key, sort and sort.value, limit)
    if run.run(service, lookup, selected, output, watch).problems:
        raise typer.Exit(ExitCode.PROBLEM)


def explain(
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="The id that the API returned, or its beginning.")
    ],
    service: Service = None,
    lookup: Lookup = None,
    output: Output = Format.TABLE,
) -> None:
    """Explain why a request hit what it hit.

    For each block it says where the block came from, or why it was missed. Nodes remember requests for some minutes.
    Exits with 1 if no node remembers this one."""
    from kvservice.cli import explain as run

    known = run.run(service, lookup, request_id, output)
    if not known:
        raise typer.Exit(ExitCode.PROBLEM)


def console(
    service: Service = None,
    lookup: Lookup = None,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on. Others than loopback need a certificate.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port. 0: any free one, printed at start.")
    ] = 7480,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="NAME", help="DNS name by which browsers call the console. Repeat for more."),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Certificate in PEM that browsers trust. Default beyond loopback: tls_dir's."
        ),
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key in PEM, not encrypted.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Ask for the token in this file. Default: a new one at each start, printed."),
    ] = None,
    interval: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.2, max=60, help="Seconds between two readings while somebody watches."),
    ] = 1.0,
) -> None:
    """Show the service in the browser while it works.

    One page with nodes, slots, hits, flows, tenants, blocks and slow requests. It only reads. Open the printed URL; it
    has the token that the page asks for."""
    from kvservice.cli import console as run

    run.run(
        service,
        lookup,
        host=host,
        port=port,
        names=name or (),
        certificate=certificate,
        key=key,
        token_file=token_file,
        interval=interval,
    )


def logs(
    node: Annotated[
        str | None,
        typer.Option(
            "--node",
            metavar="NODE",
            autocompletion=offer_nodes,
            help="Node of this machine; the beginning of its name is enough. Default: all.",
        ),
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, metavar="N", help="Lines to show from the end of each log.")
    ] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, until Ctrl-C.")] = False,
    service: Service = None,
) -> None:
    """Show the logs of this machine's cache shards.

    The log of a shard is a file if Ray started it. Otherwise it is what you chose when you started the shard, and this
    command says which."""
    from kvservice.cli import shard_logs as run

    run.run(service, node, lines, follow=follow)
