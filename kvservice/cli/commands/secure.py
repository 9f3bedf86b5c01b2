"""Commands about who may use a service: certificates and tenants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvservice.cli import tenants
from kvservice.cli.tree import command

GROUP = "Secure"


def add(tree: typer.Typer) -> None:
    """Add this module's commands to the tree, in the order of the help."""
    command(
        tree,
        GROUP,
        "kvservice certs /etc/kvservice/tls",
        "kvservice certs ./n0 --ca /etc/kvservice/tls --node n0 --address 10.0.0.7",
        "kvservice certs ./bastion --ca /etc/kvservice/tls --role client",
        "kvservice certs /etc/kvservice/tls --renew",
    )(certs)
    tree.add_typer(tenants.app, name="tenants", rich_help_panel=GROUP)


def certs(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Folder to create; KVSERVICE_TLS_DIR names it.")
    ],
    days: Annotated[int, typer.Option(min=1, max=3650, metavar="N", help="Days that the certificate is valid.")] = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="Make a new certificate with the CA that is in the folder.")
    ] = False,
    role: Annotated[
        Literal["node", "client"],
        typer.Option(help="node: may do everything. client: may only ask, for routers and commands."),
    ] = "node",
    node: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="NODE", help="Restrict the certificate to this node. Repeat for more."),
    ] = None,
    address: Annotated[
        list[str] | None,
        typer.Option("--address", metavar="ADDRESS", help="Restrict it to shards at this address. Repeat for more."),
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Folder of the CA that signs. Default: a new CA is made.")
    ] = None,
) -> None:
    """Make a CA and certificates for TLS between nodes.

    For all nodes, for one node, or for a client that may only ask."""
    from kvservice.cli import certs as run

    owner = run.Owner(role == "client", tuple(node or ()), tuple(address or ()))
    given = owner if owner != run.Owner() or not renew else None
    typer.echo(run.run(directory, days, renew=renew, owner=given, ca=ca))
