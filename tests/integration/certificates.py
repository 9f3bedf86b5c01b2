"""Directories of real certificates for tests: good ones, expired ones, of another CA, with another name."""

from __future__ import annotations

from pathlib import Path

from kvservice.cli.certs import Authority, Owner, issue, make_authority
from kvservice.private_files import write_private

AUTHORITY = make_authority("test CA")
STRANGER = make_authority("another CA")


def write(
    directory: Path,
    *,
    issuer: Authority = AUTHORITY,
    trusted: bytes = AUTHORITY.pem,
    days: float = 1,
    name: str = "",
    client: bool = False,
    nodes: tuple[str, ...] = (),
    addresses: tuple[str, ...] = (),
) -> Path:
    """Make or replace the three files. Returns the directory."""
    directory.mkdir(exist_ok=True)
    certificate, key = issue(issuer, days=days, name=name, owner=Owner(client, nodes, addresses))
    write_private(directory / "tls.key", key)
    write_private(directory / "tls.crt", certificate)
    write_private(directory / "ca.crt", trusted)
    return directory
