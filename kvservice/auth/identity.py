"""Who calls: what a connection's certificate says, what its role may do, and in whose name it may speak.

A certificate with the DNS name `kvservice` is a node's and may do everything; one with `client.kvservice` is a
client's, of routers and commands, and may only ask. URI names `kvservice://node/NAME` and `kvservice://address/HOST`
bind a node's certificate to that node and those addresses. Unix sockets and plaintext have no certificate: their caller
may do everything.

Where many nodes share one certificate, or have none, a node is told apart by a secret of its own. It never travels:
each receiver is sent a proof made for it alone, with which nobody can speak to another. Pure functions of what gRPC
knows.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvservice.errors import Forbidden

NODE_NAME, CLIENT_NAME = "kvservice", "client.kvservice"
NODE_URI, ADDRESS_URI = "kvservice://node/", "kvservice://address/"
PROOF_KEY = "kvservice-proof-bin"
PROOF_BYTES = 32

_PACKAGE = "kvservice.wire.v1"
# Everything else, and whatever is added, is for nodes.
CLIENT_MAY = frozenset(
    {f"{_PACKAGE}.LookupService.{name}" for name in ("Resolve", "Watch", "FindNode", "LookupStats", "LostBlocks")}
    | {f"{_PACKAGE}.AdminService.{name}" for name in ("Stats", "Accounting", "Explain", "BlockHistory", "EngineStats")}
)

Proofs = Callable[[str], tuple[tuple[str, bytes], ...]]  # call metadata for a receiver


class Connection(Protocol):
    """What of grpc.aio.ServicerContext is needed here."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]: ...

    def invocation_metadata(self) -> Any: ...

    def peer(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Caller:
    """What a connection's certificate says. `checked` is False where there is none."""

    checked: bool = False
    is_node: bool = True
    is_client: bool = False
    nodes: frozenset[str] = frozenset()  # the only ones it may speak for; empty = any
    hosts: frozenset[str] = frozenset()  # likewise, of addresses it may give

    def check_may(self, rpc: str) -> None:
        """Raises Forbidden when its role does not allow this RPC, given by its full name."""
        if self.is_node or (self.is_client and rpc in CLIENT_MAY):
            return
        name = rpc.rpartition(".")[2]
        if self.is_client:
            raise Forbidden(f"{name} is for nodes, and this is a client's certificate ({CLIENT_NAME})", rpc=name)
        raise Forbidden(
            f"the certificate has neither the name DNS:{NODE_NAME} nor DNS:{CLIENT_NAME}: it may do nothing here",
            rpc=name,
        )

    def check_speaks_for(self, node: str, address: str | None = None) -> None:
        """Raises Forbidden when its certificate is another node's, or does not have the host of this address."""
        if self.nodes and node not in self.nodes:
            raise Forbidden(f"this certificate is of node {', '.join(sorted(self.nodes))}, not of {node[:64]!r}")
        if self.checked and address is not None and address.startswith("unix:"):
            # Whoever called it would send nothing through TLS.
            raise Forbidden(f"with certificates a shard is reached by host:port, not at {address[:64]!r}")
        host = None if address is None else address.rpartition(":")[0].strip("[]")
        if self.hosts and host is not None and host not in self.hosts:
            raise Forbidden(f"this certificate is for address {', '.join(sorted(self.hosts))}, not for {host[:64]!r}")


ANYBODY = Caller()


def caller_of(connection: Connection) -> Caller:
    """Who is at the other end."""
    known = connection.auth_context()
    if b"ssl" not in tuple(known.get("transport_security_type", ())):
        return ANYBODY
    names = {text.decode(errors="replace") for text in known.get("peer_dns", ())}
    uris = [text.decode(errors="replace") for text in known.get("peer_uri", ())]
    return Caller(
        True,
        NODE_NAME in names,
        CLIENT_NAME in names,
        frozenset(uri.removeprefix(NODE_URI) for uri in uris if _binds(uri)),
        frozenset(uri.removeprefix(ADDRESS_URI) for uri in uris if uri.startswith(ADDRESS_URI)),
    )


def _binds(uri: str) -> bool:
    """To a node; also what only looks like a name of ours, and then to a node that nobody has: one that was meant to be
    bound must not be free for a mistake in its name."""
    return uri.lower().startswith("kvservice:") and not uri.startswith(ADDRESS_URI)


def proofs_of(secret: bytes) -> Proofs:
    """The metadata by which a node with this secret is known to a receiver; none without a secret."""

    def proof(audience: str) -> tuple[tuple[str, bytes], ...]:
        if not secret:
            return ()
        return ((PROOF_KEY, hmac.digest(secret, audience.encode(), hashlib.sha256)),)

    return proof


def proof_in(connection: Connection) -> bytes:
    """The caller's, as it can be kept: not what was sent, so that it is of no use to a reader of our memory. Empty when
    it sent none, or nothing that is one."""
    for name, value in connection.invocation_metadata() or ():
        if name == PROOF_KEY and isinstance(value, bytes) and len(value) == PROOF_BYTES:
            return hashlib.sha256(value).digest()
    return b""


def lookup_audience(partition: int) -> str:
    return f"lookup/{partition}"


def shard_audience(node: str) -> str:
    return f"shard/{node}"
