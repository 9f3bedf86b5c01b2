"""Who is calling: what a connection's certificate says, what its role may do, and for which node it may speak.

A certificate with the DNS name `kvservice` belongs to a node and may do everything. One with `client.kvservice` belongs
to a client, such as a router or a command, and may only ask. URI names `kvservice://node/NAME` and
`kvservice://address/HOST` restrict a node's certificate to that node and those addresses. Unix sockets and plaintext
connections have no certificate: their caller may do everything.

When nodes share one certificate or have none, each node is identified by a secret of its own. The secret never travels.
Each receiver gets a proof made for it alone, which it cannot use with another receiver. Pure functions of what gRPC
knows about a connection; they may be called from any thread.
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
PROOF_BYTES = 32  # the length of an HMAC-SHA256. Metadata of another length is not a proof and counts as none.

_PACKAGE = "kvservice.wire.v1"
# Every other RPC, also any that is added later, is for nodes only.
CLIENT_MAY = frozenset(
    {f"{_PACKAGE}.LookupService.{name}" for name in ("Resolve", "Watch", "FindNode", "LookupStats", "LostBlocks")}
    | {
        f"{_PACKAGE}.AdminService.{name}"
        for name in ("Stats", "Accounting", "Explain", "BlockHistory", "ListBlocks", "EngineStats")
    }
    | {f"{_PACKAGE}.OperatorService.{name}" for name in ("Warm", "ListPins")}
)

Proofs = Callable[[str], tuple[tuple[str, bytes], ...]]  # from a receiver's audience to call metadata


class Connection(Protocol):
    """The part of grpc.aio.ServicerContext that is needed here."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]: ...

    def invocation_metadata(self) -> Any: ...

    def peer(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Caller:
    """What a connection's certificate says. `checked` is False for a connection without one."""

    checked: bool = False
    is_node: bool = True
    is_client: bool = False
    nodes: frozenset[str] = frozenset()  # names of the only nodes it may speak for; empty = any
    hosts: frozenset[str] = frozenset()  # the only hosts of addresses it may announce; empty = any

    def check_may(self, rpc: str) -> None:
        """Raises Forbidden when the caller's role does not allow this RPC. `rpc` is its full name."""
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
        """Raises Forbidden when the certificate is another node's, or does not name the host of this address."""
        if self.nodes and node not in self.nodes:
            raise Forbidden(f"this certificate is of node {', '.join(sorted(self.nodes))}, not of {node[:64]!r}")
        if self.checked and address is not None and address.startswith("unix:"):
            # Others would call such an address without TLS.
            raise Forbidden(f"with certificates a shard is reached by host:port, not at {address[:64]!r}")
        host = None if address is None else address.rpartition(":")[0].strip("[]")
        if self.hosts and host is not None and host not in self.hosts:
            raise Forbidden(f"this certificate is for address {', '.join(sorted(self.hosts))}, not for {host[:64]!r}")


ANYBODY = Caller()


def caller_of(connection: Connection) -> Caller:
    """The caller at the other end of a connection, as its certificate describes it."""
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
    """Whether a URI restricts the certificate to a node.

    A URI that only looks like ours restricts it to a node that nobody has. A certificate that was meant for one node
    must not become valid for all because its name has a typing error.
    """
    return uri.lower().startswith("kvservice:") and not uri.startswith(ADDRESS_URI)


def proofs_of(secret: bytes) -> Proofs:
    """The metadata by which a receiver recognises a node with this secret; empty for an empty secret."""

    def proof(audience: str) -> tuple[tuple[str, bytes], ...]:
        if not secret:
            return ()
        return ((PROOF_KEY, hmac.digest(secret, audience.encode(), hashlib.sha256)),)

    return proof


def proof_in(connection: Connection) -> bytes:
    """A digest of the caller's proof; empty when it sent no proof or a malformed one.

    The digest is kept instead of the proof, so that a reader of our memory cannot call others with it.
    """
    for name, value in connection.invocation_metadata() or ():
        if name == PROOF_KEY and isinstance(value, bytes) and len(value) == PROOF_BYTES:
            return hashlib.sha256(value).digest()
    return b""


def lookup_audience(partition: int) -> str:
    return f"lookup/{partition}"


def shard_audience(node: str) -> str:
    return f"shard/{node}"
