"""Hosts one lookup partition behind gRPC, with the standard health and reflection services.

The Ray actor, `kvservice lookup` and the tests all run this class, on one event loop. It owns the directory and its
periodic work: silent nodes expire, and their keys are swept. Nothing is kept over a restart; the cache shards announce
themselves again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvservice.aio import end_tasks
from kvservice.auth.tls import TlsFiles, is_bound, listen, open_tls, remove_socket
from kvservice.core.directory.directory import Directory
from kvservice.core.directory.membership import FORGET_SECONDS, HIDE_SECONDS
from kvservice.errors import ConfigError
from kvservice.lookup.service import LookupServicer
from kvservice.lookup.watch import SUBSCRIBERS_MAX, WatchHub
from kvservice.observe.condition import Condition
from kvservice.observe.lookup_metrics import LookupNumbers
from kvservice.wire.serving import MESSAGE_BYTES_MAX, server_options, service_handler, stop_server
from kvservice.wire.v1 import lookup_pb2

log = logging.getLogger("kvservice.lookup")

STOP_GRACE_SECONDS = 1.0  # calls under way may finish within this; lookups take milliseconds. Then they are cancelled.
EXPIRE_SECONDS = 0.25  # how late watchers may hear of a change by time alone
LOOK_SECONDS = 1.0  # a socket that was removed is made again within this time
SWEEP_KEYS = 4_096  # keys swept without a turn of the loop: about 1 ms
SWEEP_PAUSE_SECONDS = 0.005  # after each sweep, because lookups come first
# Calls and streams at once. A shard has one announcement, one watch stream and a few lookups open. Further calls are
# refused with RESOURCE_EXHAUSTED before they are read.
CONCURRENT_CALLS_MAX = 4_096
assert SUBSCRIBERS_MAX < CONCURRENT_CALLS_MAX, "watchers must leave room for lookups"


class LookupServer:
    """Call `start` and `stop` on one event loop. `epoch` must differ between two starts; a wall clock in ns does.

    `silence` is that after which a node is hidden, and forgotten: see membership.patience. `tls_dir` and
    `allow_plaintext` are those of ServiceConfig.
    """

    def __init__(
        self,
        bind_address: str,
        partition: int = 0,
        partition_count: int = 1,
        epoch: int | None = None,
        *,
        silence: tuple[float, float] = (HIDE_SECONDS, FORGET_SECONDS),
        clock: Callable[[], float] = time.monotonic,
        tls_dir: str = "",
        allow_plaintext: bool = False,
    ) -> None:
        if not 0 <= partition < partition_count:
            raise ConfigError(f"partition {partition} of {partition_count}: it must be 0 to {partition_count - 1}")
        self._bind_address = bind_address
        self._tls_dir = tls_dir
        self._allow_plaintext = allow_plaintext
        self._partition = partition
        self.epoch = epoch if epoch is not None else time.time_ns()
        self._clock = clock
        self._directory = Directory(*silence)
        self._hub = WatchHub(self._directory, clock)
        self._servicer = LookupServicer(self._directory, self._hub, partition, partition_count, self.epoch, clock)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        self._tls: TlsFiles | None = None
        self._servers: list[grpc.aio.Server] = []  # more than one after the directory of its socket was removed
        self._address = ""
        self._maintenance: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Returns the address to call. Raises ConfigError when it cannot be bound or the TLS files cannot be used."""
        self._tls = open_tls(self._tls_dir)
        self._address = await self._serve(self._bind_address)
        self._maintenance = asyncio.get_running_loop().create_task(self._maintain())
        log.info("lookup_started", extra={"address": self._address})
        return self._address

    async def _serve(self, wanted: str) -> str:
        server = grpc.aio.server(
            options=server_options(MESSAGE_BYTES_MAX), maximum_concurrent_rpcs=CONCURRENT_CALLS_MAX
        )
        service = lookup_pb2.DESCRIPTOR.services_by_name["LookupService"]
        server.add_generic_rpc_handlers((service_handler(service, self._servicer),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (service.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        address = listen(server, wanted, self._tls, allow_plaintext=self._allow_plaintext)
        await server.start()
        self._servers.append(server)
        for name in ("", "live", "ready", service.full_name):  # the names that a shard's health service has as well
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return address

    async def stop(self, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """Idempotent."""
        if self._maintenance is not None:  # ends first, or it would make the removed socket again
            await end_tasks([self._maintenance])
            self._maintenance = None
        servers, self._servers = self._servers, []
        if not servers:
            return
        await self._health.enter_graceful_shutdown()
        self._hub.close()
        await asyncio.gather(*[stop_server(server, grace_seconds) for server in servers])
        remove_socket(self._address)

    def numbers(self) -> LookupNumbers:
        """The numbers for its metrics. Call it on the server's loop."""
        nodes = self._directory.nodes(self._clock())
        alive = sum(node.visible for node in nodes)
        gauges = {
            "boot_epoch": self.epoch,
            "keys": len(self._directory),
            "nodes_alive": alive,
            "nodes_silent": len(nodes) - alive,
        }
        return LookupNumbers(self._partition, gauges, self._servicer.counters())

    def certificate_valid(self) -> tuple[float, float] | None:
        """As TlsFiles.valid; None without TLS. May be called from any thread."""
        return None if self._tls is None else self._tls.valid()

    def condition(self) -> Condition:
        """For its probes. Call it on the server's loop."""
        return Condition(unready="" if self._servers else "it does not serve")

    async def _maintain(self) -> None:
        look_at = self._clock()
        complained = ""
        while True:
            try:
                if self._clock() >= look_at:
                    look_at = self._clock() + LOOK_SECONDS
                    if not is_bound(self._address):  # its directory was removed; connections that are open stay open
                        await self._serve(self._address)
                        complained = ""
                        log.warning("runtime_files_remade", extra={"address": self._address})
                self._directory.expire(self._clock())
                self._hub.publish()
                looked_at = self._directory.sweep(SWEEP_KEYS)
            except Exception as error:  # task boundary: expiry must go on, and the reason must be seen
                if str(error) != complained:  # some causes last for hours, such as a directory that cannot be made
                    complained = str(error)
                    log.exception("maintenance_failed")
                looked_at = 0
            await asyncio.sleep(SWEEP_PAUSE_SECONDS if looked_at else EXPIRE_SECONDS)
