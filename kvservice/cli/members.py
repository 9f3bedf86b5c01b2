"""Finds the nodes of a service and where their shards listen, from any machine of it. Needs no Ray. Blocks for RPCs."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvservice.errors import ConfigError

CALL_SECONDS = 3.0  # For one RPC. A lookup partition that takes longer counts as silent.
ASKED_AT_ONCE = 16  # RPCs at once, so that many lookup partitions are asked in seconds.


@dataclass(frozen=True, slots=True)
class Members:
    """The members of a service. Addresses are gRPC targets. A shard of this machine is reached by its socket."""

    shards: dict[str, str]  # by node
    local: tuple[str, ...]  # nodes whose shards are registered on this machine
    lookups: tuple[str, ...]
    silent: tuple[str, ...]  # lookup partitions that did not answer
    tls: Any  # TlsFiles; None if the service has no TLS
    hints: dict[str, str] = field(default_factory=dict)  # by address: why TLS made a call fail, and what to do

    def channel(self, address: str) -> grpc.Channel:
        """A channel to one of these addresses. The caller closes it."""
        from kvservice.auth.tls import open_blocking_channel

        return open_blocking_channel(address, self.tls)


def services_here() -> list[str]:
    """The names of the services that are registered on this machine."""
    from kvservice.discovery import find_shards

    return sorted({record.service for record in find_shards(live_only=False)})


def chosen_service(given: str | None) -> str:
    """The service that a command asks: the one named by option or KVSERVICE_SERVICE, else the only one of this machine.
    Raises ConfigError if there are several."""
    from kvservice.config import load_config

    name = load_config(service=given).service
    found = services_here()
    if given is not None or "KVSERVICE_SERVICE" in os.environ or name in found or not found:
        return name
    if len(found) > 1:
        raise ConfigError(f"several services are registered on this machine; choose --service {' or '.join(found)}")
    return found[0]


def unknown_service(name: str) -> str:
    """What to tell a user if this machine knows no service of this name."""
    found = services_here()
    if not found:
        return "no service is registered on this machine; start one with `kvservice up`"
    return f"no service {name!r} is registered on this machine; there is {', '.join(found)}; name it with --service"


def tls_beside(record: Any = None) -> Any:
    """TlsFiles of KVSERVICE_TLS_DIR, else those of the shard with this record. None if there is no TLS. Raises
    ConfigError."""
    from kvservice.auth.tls import open_tls
    from kvservice.config import tls_of_environment

    found, _ = tls_of_environment()
    return open_tls(found or (record.tls_dir if record is not None else ""))


def find_members(service: str) -> Members | None:
    """The members of a service. None if this machine knows no such service. Blocks. Raises ConfigError if its TLS files
    cannot be used."""
    from kvservice.auth.tls import open_blocking_channel
    from kvservice.discovery import find_shards
    from kvservice.private_files import is_listening
    from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc

    records = find_shards(service, live_only=False)
    if not records:
        return None
    newest = max(records, key=lambda record: (is_listening(record.socket), record.epoch))
    tls = tls_beside(newest)
    shards: dict[str, str] = {}
    silent: list[str] = []
    hints: dict[str, str] = {}

    def ask(address: str) -> list[tuple[str, str]]:
        try:
            with open_blocking_channel(address, tls) as channel:
                stub = lookup_pb2_grpc.LookupServiceStub(channel)
                reply = stub.LookupStats(lookup_pb2.LookupStatsRequest(), timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            silent.append(address)
            note_hint(hints, address, error)
            return []
        return [(row.node.node_id, row.node.peer_address) for row in reply.nodes if row.alive]

    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        for found in pool.map(ask, newest.lookup_addresses):
            shards.update(found)
    live = [record for record in records if is_listening(record.socket)]
    shards.update({record.node_id: f"unix:{record.socket}" for record in live})
    return Members(shards, tuple(r.node_id for r in live), newest.lookup_addresses, tuple(silent), tls, hints)


def note_hint(hints: dict[str, str], address: str, error: Any) -> None:
    """Note what to do about a failed call, if TLS is the reason."""
    from kvservice.wire.status import connect_hint

    hint = connect_hint(str(error.details()) if isinstance(error, grpc.Call) else str(error))
    if hint:
        hints[address] = hint
