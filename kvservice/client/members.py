"""Finds the parts of a service: on this machine, or from anywhere by a lookup partition's address. Needs no Ray."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from kvservice.errors import ConfigError, NoService

CALL_SECONDS = 3.0  # For one RPC. A lookup partition that takes longer counts as silent.
ASKED_AT_ONCE = 16  # RPCs at once, so that many lookup partitions are asked in seconds.


@dataclass(frozen=True, slots=True)
class Members:
    """The members of a service. Addresses are gRPC targets. A shard of this machine is reached by its socket."""

    service: str  # as people call it: its name, or where it was asked
    shards: dict[str, str]  # by node
    local: tuple[str, ...]  # nodes whose shards run on this machine
    gone: dict[str, str]  # by node, where its peers reached it: registered on this machine, but nobody listens
    lookups: tuple[str, ...]  # of all lookup partitions, in their order
    silent: tuple[str, ...]  # lookup partitions that did not answer
    tls: Any  # TlsFiles; None if the service has no TLS
    hints: dict[str, str] = field(default_factory=dict)  # by address: why a call failed, and what to do
    hidden: dict[str, str] = field(default_factory=dict)  # by node: silent for the directory, which still knows it

    @property
    def known(self) -> dict[str, str]:
        """Every shard that should answer, by node. An overview asks those that the directory names besides."""
        return {**self.shards, **self.gone}

    @property
    def unheard(self) -> dict[str, str]:
        """Every shard that is not among `shards`, by node: it has ended, hangs, or is cut off from the directory."""
        return {node: at for node, at in {**self.hidden, **self.gone}.items() if node not in self.shards}

    def channel(self, address: str) -> grpc.Channel:
        """A channel to one of these addresses. The caller closes it."""
        from kvservice.auth.tls import open_blocking_channel

        return open_blocking_channel(address, self.tls)


def find_members(service: str | None, lookup: Sequence[str] | None = None) -> Members:
    """The members of a service. Blocks for RPCs.

    Args:
        service: its name on this machine; None if there is only one.
        lookup: addresses of its lookup partitions, one is enough; then nothing of this machine is looked at. Default:
            the setting `lookup`.

    Raises:
        NoService: this machine knows no such service, or no lookup partition that was named answers.
        ConfigError: there are several services, its TLS files cannot be used, or both arguments are given.
    """
    from kvservice.config import load_config

    if service is not None and lookup:
        raise ConfigError("give --service or --lookup, not both: a lookup partition belongs to one service")
    named = load_config(service=service, lookup=",".join(lookup) if lookup else None).lookup
    return _members_from_afar(named) if named else _members_here(chosen_service(service))


def _members_here(service: str) -> Members:
    from kvservice.discovery import find_shards
    from kvservice.private_files import is_listening

    records = find_shards(service, live_only=False)
    if not records:
        raise NoService(unknown_service(service))
    live = [record for record in records if is_listening(record.socket)]
    newest = max(live or records, key=lambda record: record.epoch)
    tls = tls_beside(newest)
    found = _ask_lookups(service, newest.lookup_addresses, tls)
    shards = found.shards | {record.node_id: record.rpc_address for record in live}
    gone: dict[str, str] = {record.node_id: record.peer_address for record in records if record not in live}
    local = tuple(record.node_id for record in live)
    hidden = {node: at for node, at in found.hidden.items() if node not in shards and node not in gone}
    return replace(found, shards=shards, local=local, gone=gone, hidden=hidden)


def _members_from_afar(lookup: tuple[str, ...]) -> Members:
    tls = tls_beside()
    found = _ask_lookups(f"at {lookup[0]}", lookup, tls)
    if len(found.silent) == len(lookup):
        advice = "; ".join(sorted(set(found.hints.values())))
        if not advice and tls is None:
            advice = "if the service has TLS, name the folder of your certificate with KVSERVICE_TLS_DIR"
        raise NoService(f"no lookup partition answers at {', '.join(lookup)}{'; ' if advice else ''}{advice}")
    return found


def _ask_lookups(service: str, addresses: tuple[str, ...], tls: Any) -> Members:
    """The members as these lookup partitions know them: none is local, and none is gone."""
    from kvservice.auth.tls import open_blocking_channel
    from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc

    shards: dict[str, str] = {}
    hidden: dict[str, str] = {}
    silent: list[str] = []
    hints: dict[str, str] = {}

    def ask(address: str) -> Sequence[Any]:
        try:
            with open_blocking_channel(address, tls) as channel:
                stub = lookup_pb2_grpc.LookupServiceStub(channel)
                nodes: Sequence[Any] = stub.LookupStats(lookup_pb2.LookupStatsRequest(), timeout=CALL_SECONDS).nodes
                return nodes
        except grpc.RpcError as error:
            silent.append(address)
            note_hint(hints, address, error)
            return ()

    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        for row in itertools.chain.from_iterable(pool.map(ask, addresses)):
            (shards if row.alive else hidden)[row.node.node_id] = row.node.peer_address
    hidden = {node: hidden[node] for node in hidden.keys() - shards.keys()}
    return Members(service, shards, (), {}, addresses, tuple(silent), tls, hints, hidden)


def services_here(*, live_only: bool = False) -> list[str]:
    """The names of the services that are registered on this machine."""
    from kvservice.discovery import find_shards

    return sorted({record.service for record in find_shards(live_only=live_only)})


def chosen_service(given: str | None) -> str:
    """The service that a command asks: the one named by option or KVSERVICE_SERVICE, else the only one of this machine,
    or the only one that runs. Raises ConfigError if there are several."""
    from kvservice.config import load_config

    name = load_config(service=given).service
    found = services_here()
    if given is not None or "KVSERVICE_SERVICE" in os.environ or name in found or not found:
        return name
    running = found if len(found) == 1 else services_here(live_only=True)
    if len(running) != 1:
        dead = "" if running else "; `kvservice down --service NAME` removes what is left of one that has ended"
        names = " or ".join(found)
        raise ConfigError(f"several services are registered on this machine; choose --service {names}{dead}")
    return running[0]


def unknown_service(name: str, *, or_elsewhere: bool = True) -> str:
    """What to tell a user if this machine knows no service of this name. `or_elsewhere`: the command has --lookup."""
    from kvservice.discovery import HOW_TO_START

    found = services_here()
    if not found:
        elsewhere = ", or name a lookup partition of another machine with --lookup HOST:PORT" if or_elsewhere else ""
        return f"no service is registered on this machine; start one with {HOW_TO_START}{elsewhere}"
    return f"no service {name!r} is registered on this machine; there is {', '.join(found)}; name it with --service"


def tls_beside(record: Any = None) -> Any:
    """TlsFiles of KVSERVICE_TLS_DIR, else those of the shard with this record. None if there is no TLS. Raises
    ConfigError."""
    from kvservice.auth.tls import open_tls
    from kvservice.config import tls_of_environment

    found, _ = tls_of_environment()
    return open_tls(found or (record.tls_dir if record is not None else ""))


def note_hint(hints: dict[str, str], address: str, error: Any) -> None:
    """Note what to do about a failed call, if its text says."""
    from kvservice.wire.status import connect_hint

    hint = connect_hint(str(error.details()) if isinstance(error, grpc.Call) else str(error))
    if hint:
        hints[address] = hint
