"""`kvservice tenants`: edits the file of tenants who may use a service. Shards read it again when it changes.

The file is replaced as a whole. Only its owner can read it, and its group if that could; both stay, because shards may
run as another user than the one who edits. Tokens are printed once and never kept.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvservice.cli.exits import ExitCode
from kvservice.cli.output import Format, show, write
from kvservice.cli.tree import Lookup, Output, Service, Watch, command, new_tree
from kvservice.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

app = new_tree("Edit who may use a service: tokens, quotas, public prompts.")
FILE = "--file /etc/kvservice/tenants.json"  # in examples
File = Annotated[
    Path, typer.Option("--file", metavar="FILE", envvar="KVSERVICE_TENANTS_FILE", help="The tenants file.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The tenant.")]
Quota = Annotated[
    str | None,
    typer.Option(
        "--quota", metavar="QUOTA", help="Most that it may hold of each node's pool: 25% or 8GiB; '' = no limit."
    ),
]
DiskQuota = Annotated[
    str | None,
    typer.Option(metavar="QUOTA", help="Most that it may hold of each node's disk: 25% or 80GiB; '' = no limit."),
]
InFlight = Annotated[
    int | None,
    typer.Option(
        "--in-flight", metavar="N", min=0, help="Most slots that it may reserve and fetch at once; 0 = no limit."
    ),
]
PublicRight = Annotated[str | None, typer.Option(metavar="RIGHT", help="Right to public blocks: no, read, or publish.")]
Admin = Annotated[
    bool | None,
    typer.Option("--admin/--no-admin", help="May see requests, blocks and pins of all tenants, and clear blocks."),
]
TokenTo = Annotated[
    Path | None, typer.Option("--token-to", metavar="FILE", help="Write the token to this file, not to the terminal.")
]


@command(app, None, f"kvservice tenants add alice --quota 25% --token-to alice.token {FILE}")
def add(
    name: Name,
    file: File,
    quota: Quota = None,
    disk_quota: DiskQuota = None,
    in_flight: InFlight = None,
    public: PublicRight = None,
    admin: Admin = None,
    token_to: TokenTo = None,
) -> None:
    """Add a tenant and print its token.

    It makes the file if there is none."""
    from kvservice.auth.tenants import Tenant, Tenants, check_name, hash_token, new_secret, new_token

    token = new_token()

    def change(tenants: Any) -> None:
        if name in tenants.by_name:
            raise ConfigError(f"there is a tenant {name} already; `kvservice tenants rotate` gives it another token")
        fresh = Tenant(check_name(name), (hash_token(token),), new_secret())
        tenants.by_name[name] = _with(fresh, quota, disk_quota, in_flight, public, admin)

    _edit(file, change, Tenants([], new_secret()))
    _show_token(name, token, token_to)


@command(app, None, f"kvservice tenants list {FILE}", f"kvservice tenants list {FILE} -o json", name="list")
def list_all(file: File, output: Output = Format.TABLE) -> None:
    """List names and limits; nothing secret."""
    from kvservice.auth.tenants import read_tenants

    rows = [
        {
            "name": t.name,
            "tokens": len(t.tokens),
            "quota": t.quota,
            "disk_quota": t.disk_quota,
            "in_flight": t.in_flight,
            "public": t.public.value,
            "admin": t.admin,
        }
        for t in read_tenants(file).by_name.values()
    ]
    write(rows, lambda found, _: _draw_limits(found), output)


def _draw_limits(rows: list[dict[str, Any]]) -> RenderableType:
    from kvservice.cli.drawing import plain, table

    made = table("tenant", "*tokens", "*quota", "*disk quota", "*in flight", "public", "admin")
    for row in rows:
        limits = (row["quota"] or "-", row["disk_quota"] or "-", str(row["in_flight"] or "-"), row["public"])
        made.add_row(plain(row["name"]), str(row["tokens"]), *limits, "yes" if row["admin"] else "no")
    return made


@command(
    app,
    None,
    "kvservice tenants usage",
    "kvservice tenants usage --lookup 10.0.0.5:7400 --watch",
)
def usage(service: Service = None, lookup: Lookup = None, output: Output = Format.TABLE, watch: Watch = None) -> None:
    """Show what each tenant holds at each node.

    It asks the shards of a running service. Only the first 64 tenants of the file are named at each node; the others
    are one row."""
    from kvservice.cli import tenant_usage

    problems: list[str] = show(lambda: tenant_usage.collect(service, lookup), tenant_usage.draw, output, watch).problems
    if problems:
        raise typer.Exit(ExitCode.PROBLEM)


@command(app, None, f"kvservice tenants set alice --quota 8GiB --public read {FILE}", name="set")
def set_limits(
    name: Name,
    file: File,
    quota: Quota = None,
    disk_quota: DiskQuota = None,
    in_flight: InFlight = None,
    public: PublicRight = None,
    admin: Admin = None,
) -> None:
    """Change what a tenant may hold or do.

    What you do not give stays as it is."""
    if all(value is None for value in (quota, disk_quota, in_flight, public, admin)):
        raise ConfigError("say what to change: --quota, --disk-quota, --in-flight, --public or --admin")

    def change(tenants: Any) -> None:
        tenants.by_name[name] = _with(_known(tenants, name), quota, disk_quota, in_flight, public, admin)

    _edit(file, change)
    typer.echo(f"{name} is changed; shards apply it within seconds")


@command(app, None, f"kvservice tenants rotate alice {FILE}", f"kvservice tenants rotate alice --retire {FILE}")
def rotate(
    name: Name,
    file: File,
    retire: Annotated[bool, typer.Option("--retire", help="Make no token; end all tokens except the newest.")] = False,
    token_to: TokenTo = None,
) -> None:
    """Give a tenant one more token; its blocks stay.

    Once all its engines use the new one, end the others with --retire."""
    from dataclasses import replace

    from kvservice.auth.tenants import TOKENS_MAX, hash_token, new_token

    token = new_token()

    def change(tenants: Any) -> None:
        tenant = _known(tenants, name)
        tokens = tenant.tokens[-1:] if retire else (*tenant.tokens, hash_token(token))
        if len(tokens) > TOKENS_MAX:
            raise ConfigError(f"{name} has {TOKENS_MAX} tokens; end the old ones with --retire first")
        tenants.by_name[name] = replace(tenant, tokens=tokens)

    _edit(file, change)
    if retire:
        typer.echo(f"{name} has one token left; engines with another token are detached within seconds")
    else:
        _show_token(name, token, token_to)


@command(app, None, f"kvservice tenants remove alice {FILE}")
def remove(name: Name, file: File) -> None:
    """Remove a tenant.

    Its engines are detached within seconds, and nobody can ask for its blocks any more."""

    def change(tenants: Any) -> None:
        _known(tenants, name)
        del tenants.by_name[name]

    _edit(file, change)
    typer.echo(f"{name} is removed; shards apply it within seconds")


def _with(
    tenant: Any,
    quota: str | None,
    disk_quota: str | None,
    in_flight: int | None,
    public: str | None,
    admin: bool | None,
) -> Any:
    from dataclasses import replace

    from kvservice.auth.tenants import Public

    if public is not None and public not in [one.value for one in Public]:
        raise ConfigError(f"public is {public!r}; choose no, read or publish")
    return replace(
        tenant,
        quota=tenant.quota if quota is None else quota,
        disk_quota=tenant.disk_quota if disk_quota is None else disk_quota,
        in_flight=tenant.in_flight if in_flight is None else in_flight,
        public=tenant.public if public is None else Public(public),
        admin=tenant.admin if admin is None else admin,
    )


def _known(tenants: Any, name: str) -> Any:
    if name not in tenants.by_name:
        raise ConfigError(f"there is no tenant {name!r}; `kvservice tenants list` shows them")
    return tenants.by_name[name]


def _edit(path: Path, change: Callable[[Any], None], fresh: Any = None) -> None:
    """Read, change, check and replace the file, under a lock. `fresh` is its content if there is no file."""
    from kvservice.auth.tenants import dump_tenants, parse_tenants, read_tenants
    from kvservice.private_files import write_private

    path = path.absolute()
    try:
        with _alone(path.parent):
            tenants = read_tenants(path) if fresh is None or path.exists() else fresh
            change(tenants)
            text = dump_tenants(tenants)
            parse_tenants(json.loads(text))
            if path.exists():
                had = path.stat()
                write_private(path, text.encode(), had.st_mode & 0o660, (had.st_uid, had.st_gid))
            else:
                write_private(path, text.encode())
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Hold the lock, so that two of these commands do not undo each other's changes."""
    import fcntl
    import os

    opened = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _show_token(name: str, token: str, token_to: Path | None) -> None:
    from kvservice.private_files import write_private

    what = (
        f"the token of {name}, shown only now; put it into a file and name that to its engines as KVSERVICE_TOKEN_FILE"
    )
    if token_to is None:
        typer.echo(what, err=True)
        typer.echo(token)
        return
    try:
        write_private(token_to, f"{token}\n".encode())
    except OSError as error:
        typer.echo(f"error: cannot write {token_to}: {error.strerror}. The token is shown instead.", err=True)
        typer.echo(token)
        raise typer.Exit(ExitCode.PROBLEM) from error
    typer.echo(f"the token of {name} is in {token_to}; start its engines with KVSERVICE_TOKEN_FILE={token_to}")
