"""Hosts one node's pool: a Unix socket for its engines, another one with gRPC for commands, and a listener for peers.

Peers call a port with TLS, or the socket of the commands when the whole service is on this machine.

The Ray actor, `kvservice up --no-ray` and the tests all run this class, on one event loop. It owns the order of the
start (memory, blocks, transport, listeners, registration, announcements) and of the stop. It leaves none of its files
behind, except the segment when it is told to keep that for the next boot.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvservice import discovery
from kvservice.aio import DaemonThreads, end_tasks, in_thread, is_set_within
from kvservice.auth.authenticator import Authenticator
from kvservice.auth.tenants import open_tenants
from kvservice.auth.tls import TlsFiles, check_listener, is_bound, is_loopback, listen, local_or_tcp, open_tls
from kvservice.client.peer import PeerClient
from kvservice.config import LEASE_SECONDS_MIN, POOL_BYTES_MIN
from kvservice.core.acquire.pulls import LEASE_MARGIN_SECONDS
from kvservice.core.attachments import BOOT_ATTACHMENTS_BITS
from kvservice.core.drain.sender import DrainPhase, DrainProgress
from kvservice.core.messages import Holder, PoolStats
from kvservice.core.segment.geometry import CONTROL_BYTES, SCRATCH_BYTES, SLAB_BYTES_MIN, plan_geometry
from kvservice.discovery import EPOCH_MAX
from kvservice.errors import ConfigError, KVServiceError, ServiceConflict, Unavailable, plaintext_refused
from kvservice.lookup.announce_pump import FAREWELL_SECONDS
from kvservice.lookup.mirror_file import mirror_path
from kvservice.lookup.mirror_writer import DirectoryMirror
from kvservice.lookup.shard_directory import ShardDirectory
from kvservice.memory.segment import Segment
from kvservice.observe.condition import Condition
from kvservice.observe.timings import Timings
from kvservice.pool.eviction import find_policy
from kvservice.pool.runtime import PoolRuntime
from kvservice.pool.runtime_ports import PoolConfig
from kvservice.pool.tier_factory import open_coders
from kvservice.pool.tier_specs import disk_bytes, disk_folder, find_tiers, marks_beside, names_beside
from kvservice.private_files import is_listening, make_directory
from kvservice.shard.engine_socket import EngineSocket
from kvservice.shard.missed_marks import MissedMarks
from kvservice.shard.node_files import NodeFiles
from kvservice.shard.operator import OperatorServicer
from kvservice.shard.readiness import LIVE, ReadinessServicer
from kvservice.shard.server_config import DEV_SHM, ShardServerConfig
from kvservice.shard.service import AdminServicer, PeerServicer
from kvservice.tier.block_files import remove_blocks
from kvservice.transfer import mapped
from kvservice.transfer.nixl import NixlTransport, nixl_available
from kvservice.transfer.puller import Puller
from kvservice.transfer.ways import joined
from kvservice.units import BlockKey, SpanRoute
from kvservice.wire.serving import CALLS_MAX, LISTS_BYTES_MAX, Gate, server_options, service_handler, stop_server
from kvservice.wire.v1 import shard_pb2

log = logging.getLogger("kvservice.shard")

STOP_GRACE_SECONDS = 1.0  # calls under way may finish within this; most take milliseconds. Then they are cancelled.
REPLACE_SECONDS_MAX = 5.0  # longest pause between two attempts to get memory for a new segment
PART_END_SECONDS = 1.0  # for each part of the server to end; one that does not is reported, see ShardServer.stop
DIRECTORY_END_SECONDS = 4.0  # it says farewell to all lookup partitions in parallel, for a second at most
REMOVE_SECONDS = 60.0  # for a million files on a disk of today; what is left then, the next `down` here removes
POOL_END_SECONDS = 8.0  # it waits for digests under way and closes the transport
TELL_SECONDS = 2.0  # after a drain the process waits this long for the operator's next question
# Its health is "not serving" while the shard drains.
PEER_SERVICE = shard_pb2.DESCRIPTOR.services_by_name["PeerService"].full_name
assert EPOCH_MAX << BOOT_ATTACHMENTS_BITS < 1 << 63, "an attachment id must fit into 64 bits on the wire"
assert FAREWELL_SECONDS < DIRECTORY_END_SECONDS
assert LEASE_SECONDS_MIN > LEASE_MARGIN_SECONDS, "a pull would have no time before its lease ends"
assert POOL_BYTES_MIN >= CONTROL_BYTES + SCRATCH_BYTES + SLAB_BYTES_MIN, "the smallest pool must hold a slab"


class ShardServer:
    """Call `start` and `stop` on one event loop."""

    def __init__(self, config: ShardServerConfig, wall_clock: Callable[[], float] = time.time) -> None:
        self._config = config
        self._files = NodeFiles(config)
        self._wall_clock = wall_clock
        self._tls: TlsFiles | None = None
        self._authenticator: Authenticator | None = None
        self._pool: PoolRuntime | None = None
        self._directory: ShardDirectory | None = None
        self._servers: list[grpc.aio.Server] = []
        self._engines: EngineSocket | None = None
        self._record: Path | None = None
        self._is_replacing = False  # the segment was removed, and there is no new one yet
        self._health = ReadinessServicer(lambda: self.condition() == Condition())
        self._peer_address = ""
        self._secret = b""
        self._lookup_addresses: tuple[str, ...] = ()
        self._peer_port = config.peer_port  # after the first start, the port that was bound then
        self._keeper: asyncio.Task[None] | None = None
        self._counters: Counter[str] = Counter()
        self._leaver: asyncio.Task[None] | None = None
        self._exits = False
        self._told_end = asyncio.Event()  # an operator has been told that the drain is over
        self.left = asyncio.Event()  # drained, and told to end: call `stop`

    async def start(self) -> Holder:
        """Start serving. Returns who this shard is now.

        Raises ConfigError, SegmentError, ServiceConflict or TransferError, and then leaves nothing behind.
        """
        before = self._files.there()
        try:
            await self._start()
        except BaseException:
            pool = self._pool
            await self.stop(leaving=False)
            if pool is not None and pool.is_new:
                pool.unlink()
            self._files.remove_new(before)
            raise
        self._keeper = asyncio.get_running_loop().create_task(self._keep_files())
        log.info("shard_started", extra={"node": self._config.node_id, "address": self._peer_address})
        return self.holder()

    async def _start(self) -> None:
        """Everything that can be checked is checked before memory is taken."""
        config, settings = self._config, self._config.settings
        self._tls = open_tls(settings.tls_dir)
        check_lookups(config.lookup_addresses, tls=self._tls is not None, allow_plaintext=settings.allow_plaintext)
        tenants = open_tenants(settings.tenants_file)
        geometry = plan_geometry(settings.pool_bytes, settings.slab_bytes or None)
        ways, reads = _choose_reader(config)
        coders = await asyncio.to_thread(partial(open_coders, settings, has_tenants=tenants is not None))
        coders.keys.set_tenants({} if tenants is None else tenants.current.secrets())
        eviction = await asyncio.to_thread(find_policy, settings.eviction)
        check_listener(self._peers_at(), self._tls, allow_plaintext=settings.allow_plaintext)
        directory = self._files.directory
        make_directory(directory)
        socket = self._files.socket
        if await asyncio.to_thread(is_listening, socket):
            raise ServiceConflict(
                f"a shard of service {settings.service!r} already serves node {config.node_id} at "
                f"{socket}: end it (`kvservice down` does, or says how), or choose another --node of `kvservice "
                "shard`, or another --service"
            )
        self._secret = secret = discovery.node_secret(directory)
        if config.lookup_addresses:
            mirror = DirectoryMirror.open(
                mirror_path(self._files.segment),
                directory / discovery.MIRROR_NAME,
                config.lookup_addresses,
                settings.mirror_bytes,
                time.time_ns(),
                self._tls,
            )
            self._directory = ShardDirectory(config.lookup_addresses, self._inventory, self._tls, secret, mirror)
        tiers = await find_tiers(settings, self._owner)
        self._pool = await PoolRuntime.open(
            PoolConfig(
                config.node_id,
                self._files.segment,
                geometry,
                settings.lease_seconds,
                # Above every earlier one, also of new memory after a reboot. The clock may have been set back. A shard
                # that has left keeps no record, and may be back within the second: hence milliseconds.
                epoch_floor=max(discovery.last_epoch(directory) + 1, int(self._wall_clock() * 1000)),
                tenants={} if tenants is None else tenants.current.limits(geometry.slabs_bytes, disk_bytes(tiers)),
                eviction=eviction,
                tiers=tiers,
                accept_spill=settings.accept_spill,
                spill=settings.spill == "evicted",
                max_age_seconds=settings.max_age_seconds,
                coders=coders,
                mark_files=(directory / discovery.MARKS_NAME, *marks_beside(tiers)),
                name_files=names_beside(tiers),
                wall_clock=self._wall_clock,
            ),
            reads=reads,
            directory=self._directory,
            peers=PeerClient(ways, config.node_id, tls=self._tls, secret=secret),
        )
        discovery.keep_epoch(directory, self._pool.epoch)
        missed = MissedMarks(config.node_id, self._pool.clears.take, self._tls)
        await missed.take(config.lookup_addresses)
        self._authenticator = Authenticator(tenants, self._pool)
        self._authenticator.start()
        await self._listen()
        self._register(config.lookup_addresses)
        (directory / discovery.KEPT_NAME).unlink(missing_ok=True)  # the record says where the memory is
        if self._directory is not None:
            on_return = partial(missed.ask_again, lambda: self._lookup_addresses)
            self._directory.start(self.holder, settings.heartbeat_seconds, self._superseded, on_return)

    def leave(self, timeout_seconds: float, handover: bool, exit: bool) -> DrainProgress:
        """Begin to leave the service, or continue. Returns at once with the progress; call it again for more.

        With `exit`, `left` is set in the end. Raises Unavailable when the shard does not run.
        """
        progress = self.pool.drain(timeout_seconds=timeout_seconds, handover=handover)
        if self._leaver is None:
            self._leaver = asyncio.get_running_loop().create_task(self._await_drained())
        self._exits = self._exits or exit
        if progress.phase is DrainPhase.GONE:
            self._told_end.set()
        return progress

    async def stay(self) -> DrainProgress:
        """Undo a drain, unless the directory has been told already. Returns the progress at once."""
        progress = self.pool.drain(undo=True)
        leaver = self._leaver
        if progress.phase is DrainPhase.SERVING and leaver is not None:
            self._leaver, self._exits = None, False
            await end_tasks([leaver])
            await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        return progress

    async def drain(self, timeout_seconds: float, handover: bool = True) -> DrainProgress:
        """Leave, and wait until that is done, for `timeout_seconds` and a moment at most."""
        if self._pool is None:
            return DrainProgress(DrainPhase.GONE, note="there is no pool: its memory is being replaced")
        progress = self.leave(timeout_seconds, handover, exit=False)
        await is_set_within(timeout_seconds + STOP_GRACE_SECONDS, self.pool.drained)
        progress = self.pool.drain_progress()
        log.info(
            "drained",
            extra={
                "node": self._config.node_id,
                "seconds": round(progress.seconds, 3),
                "handed": progress.blocks_handed,
                "elsewhere": progress.blocks_elsewhere,
                "lost": progress.blocks_lost if handover else 0,
                "note": progress.note,
            },
        )
        return progress

    async def _await_drained(self) -> None:
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self.pool.drained.wait()
        if self._exits:
            await is_set_within(TELL_SECONDS, self._told_end)
            self.left.set()

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        await self._health.set(PEER_SERVICE, status)  # but not "live": the process must not be restarted for leaving

    async def stop(self, leaving: bool = True, keep_segment: bool = False, forget_disk: bool = False) -> bool:
        """Stop in order: unregister, let calls finish for a moment, close. Idempotent.

        `forget_disk`: remove the blocks of the disk tier too, which otherwise stay for the next start.

        Always returns. False means that a part did not end within its `*_END_SECONDS`. The log names it, and only the
        end of the process ends it. The files are removed in any case, also when this is cancelled.
        """
        served = self._record is not None or self._is_replacing  # otherwise the files are another shard's
        record, self._record = self._record, None
        pool, directory = self._pool, self._directory
        all_ended = True
        try:
            keeper = self._keeper
            if keeper is not None and keeper is not asyncio.current_task():  # ends first, or it would make files again
                self._keeper = None
                all_ended &= await _end("files", end_tasks([keeper]), PART_END_SECONDS)
            if record is not None:
                record.unlink(missing_ok=True)
            if self._leaver is not None:
                all_ended &= await _end("drain", end_tasks([self._leaver]), PART_END_SECONDS)
            if directory is not None:
                all_ended &= await _end("directory", directory.stop(leaving), DIRECTORY_END_SECONDS)
            if self._authenticator is not None:
                all_ended &= await _end("authenticator", self._authenticator.stop(), PART_END_SECONDS)
            engines, self._engines = self._engines, None
            if engines is not None:
                ending = engines.stop(STOP_GRACE_SECONDS)
                all_ended &= await _end("engines", ending, STOP_GRACE_SECONDS + PART_END_SECONDS)
            servers, self._servers = self._servers, []
            for server in servers:
                ending = stop_server(server, STOP_GRACE_SECONDS)
                all_ended &= await _end("listener", ending, STOP_GRACE_SECONDS + PART_END_SECONDS)
            self._pool = None
            if pool is not None:
                all_ended &= await _end("pool", pool.close(), POOL_END_SECONDS)
                if forget_disk:
                    all_ended &= await _end("blocks on disk", self._remove_blocks(), REMOVE_SECONDS)
        finally:
            self._pool = self._directory = self._leaver = None
            if record is not None:
                record.unlink(missing_ok=True)
            if directory is not None:
                directory.unlink()
            if pool is not None and leaving and not keep_segment:
                pool.unlink()
            if leaving and served and not (self._is_replacing and self._is_taken()):
                self._files.remove(keep_memory=keep_segment)
        return all_ended

    async def _remove_blocks(self) -> None:
        folder = disk_folder(self._config.settings, self._owner)
        if folder is not None:
            count = await in_thread(partial(remove_blocks, folder), DaemonThreads("kvservice-remove-blocks"))
            log.info("disk_blocks_removed", extra={"path": str(folder), "blocks": count})

    def _is_taken(self) -> bool:
        """Whether another shard serves this node now. One can start while our memory is replaced, because we do not
        listen then. Blocks for a second at most."""
        try:
            return is_listening(self._files.socket)
        except ConfigError:  # another user's
            return True

    @property
    def _owner(self) -> str:
        """The path of this node below disk_path."""
        return f"{self._config.settings.service}/{self._config.node_id}"

    def holder(self) -> Holder:
        return Holder(self._config.node_id, self._peer_address, self.pool.epoch)

    @property
    def pool(self) -> PoolRuntime:
        if self._pool is None:
            raise Unavailable(f"shard {self._config.node_id} is not running")
        return self._pool

    def stats(self) -> PoolStats:
        stats = self.pool.stats()
        if self._directory is not None:
            stats.counters.update(self._directory.counters)
        stats.counters.update(self._counters)
        return stats

    def timings(self) -> Timings | None:
        """The latencies of the present boot. May be called from any thread."""
        pool = self._pool
        return None if pool is None else pool.timings

    def certificate_valid(self) -> tuple[float, float] | None:
        """As TlsFiles.valid; None without TLS. May be called from any thread."""
        return None if self._tls is None else self._tls.valid()

    def condition(self) -> Condition:
        """What probes are told. A fenced pool is dead: it refuses every call. The next start verifies all blocks."""
        pool = self._pool
        if pool is None:
            return Condition(unready="there is no pool: the shard starts, stops, or replaces its memory")
        return Condition(dead=pool.fenced or "", unready="draining" if pool.state.draining else "")

    def set_lookup_addresses(self, addresses: Sequence[str]) -> None:
        """Use new addresses of the lookup partitions. Their number must stay the same."""
        if self._directory is not None:
            self._directory.set_addresses(addresses)
            self._register(addresses)

    def _register(self, lookup_addresses: Sequence[str]) -> None:
        config = self._config
        self._lookup_addresses = tuple(lookup_addresses)
        record = discovery.ShardRecord(
            config.settings.service,
            config.node_id,
            self._files.socket,
            self._peer_address,
            os.getpid(),
            self.pool.epoch,
            self._lookup_addresses,
            config.settings.tls_dir,
            discovery.own_log(),
            "" if config.segment_dir == DEV_SHM else str(config.segment_dir),
        )
        self._record = discovery.write_record(record, config.settings.runtime_root)

    async def _listen(self) -> None:
        """Open the listeners. Peers and commands of this machine may share one."""
        assert self._authenticator is not None
        self._engines = EngineSocket(self.pool, self._authenticator)
        await self._engines.listen(self._files.socket)
        peers_at = self._peers_at()
        if peers_at != self._commands_at():
            await self._serve(self._commands_at())
        self._peer_address = await self._serve(peers_at)
        if not self._peer_address.startswith("unix:"):
            self._peer_port = int(self._peer_address.rpartition(":")[2])

    def _peers_at(self) -> str:
        """The address on which to listen for other shards."""
        config = self._config
        return local_or_tcp(
            config.peer_host,
            self._peer_port,
            self._commands_at().removeprefix("unix:"),
            tls=self._tls is not None,
            allow_plaintext=config.settings.allow_plaintext,
        )

    def _commands_at(self) -> str:
        return f"unix:{self._files.rpc_socket}"

    def _marks_asked(self) -> None:
        if self._directory is not None:
            self._directory.other_returned()

    async def _serve(self, address: str) -> str:
        """Start a gRPC listener. Returns the address to call."""
        server = grpc.aio.server(options=server_options(LISTS_BYTES_MAX), maximum_concurrent_rpcs=CALLS_MAX)
        self._servers.append(server)
        gate = Gate()
        assert self._authenticator is not None and self._engines is not None
        services = shard_pb2.DESCRIPTOR.services_by_name
        admin = AdminServicer(
            self.pool, self.holder, self.leave, self.stay, self._authenticator, self.stats, self._engines.pids
        )
        parts: dict[str, object] = {
            "PeerService": PeerServicer(self.pool, self.holder),
            "AdminService": admin,
            "OperatorService": OperatorServicer(self.pool, self._authenticator, self._marks_asked),
        }
        handlers = [service_handler(services[name], servicer, gate=gate) for name, servicer in parts.items()]
        server.add_generic_rpc_handlers(tuple(handlers))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [services[name].full_name for name in parts]
        reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        for name in ["", LIVE, *names]:
            leaves = self._leaver is not None and name == PEER_SERVICE
            status = health_pb2.HealthCheckResponse.NOT_SERVING if leaves else health_pb2.HealthCheckResponse.SERVING
            await self._health.set(name, status)
        called = listen(server, address, self._tls, allow_plaintext=self._config.settings.allow_plaintext)
        await server.start()
        return called

    async def _keep_files(self) -> None:
        """Make the runtime files and the segment again when something removes them, as systemd-logind does at a logout.

        So the service keeps running and the node keeps its name. A loss is noticed within a heartbeat.
        """
        complained = ""
        while True:
            await asyncio.sleep(self._config.settings.heartbeat_seconds)
            try:
                if self._leaver is None and not self.pool.is_linked():
                    await self._replace_segment()
                elif await asyncio.to_thread(self._lacks_files):
                    await self._remake_files()
                    complained = ""
            except (KVServiceError, OSError) as error:
                if str(error) != complained:
                    complained = str(error)
                    log.warning("runtime_files_not_remade", extra={"reason": complained})
            except Exception as error:  # task boundary: nothing else makes the files again
                if str(error) != complained:  # some causes last for hours, such as a machine without free threads
                    complained = str(error)
                    log.exception("runtime_files_failed")

    def _lacks_files(self) -> bool:
        addresses = (f"unix:{self._files.socket}", self._commands_at(), self._peer_address)
        return self._files.lacks_some() or not all(map(is_bound, addresses))

    async def _remake_files(self) -> None:
        """Make the files of the same boot, with the same secret. Open connections to removed sockets stay open."""
        directory = self._files.directory
        make_directory(directory)
        discovery.keep_secret(directory, self._secret)
        discovery.keep_epoch(directory, self.pool.epoch)
        if not is_bound(f"unix:{self._files.socket}") and self._engines is not None:
            await self._engines.listen(self._files.socket)
        for address in {self._commands_at(), self._peer_address}:
            if not is_bound(address):
                await self._serve(address)
        if self._directory is not None:
            self._directory.relink_mirror()
        self._register(self._lookup_addresses)
        self._counters["runtime_files_remade"] += 1
        log.warning("runtime_files_remade", extra={"directory": str(directory)})

    async def _replace_segment(self) -> None:
        """Start a new boot with new memory. Engines lose their attachments, unmap the old memory and attach again.

        Until there is room for the new memory, this node has no pool.
        """
        log.critical("segment_removed", extra={"node": self._config.node_id})
        self._counters["segments_replaced"] += 1
        self.pool.retire()
        self._is_replacing = True
        pause = self._config.settings.heartbeat_seconds
        while True:
            await self.stop(leaving=False)
            try:
                await self._start()
            except Exception as error:  # task boundary: nothing else starts it again
                unexpected = not isinstance(error, KVServiceError)
                log.error("segment_not_replaced", extra={"reason": str(error)}, exc_info=unexpected)
            else:
                self._is_replacing = False
                break
            await asyncio.sleep(pause)
            pause = min(2 * pause, REPLACE_SECONDS_MAX)
        log.warning("segment_replaced", extra={"node": self._config.node_id, "epoch": self.pool.epoch})

    def _inventory(self) -> list[tuple[BlockKey, SpanRoute]]:
        return [] if self._pool is None else self._pool.inventory()

    def _superseded(self) -> None:
        """The directory knows a newer epoch of this node: another process has taken its place."""
        log.critical("superseded", extra={"node": self._config.node_id})
        if self._pool is not None:
            self._pool.drain()


async def _end(what: str, work: Awaitable[None], seconds: float) -> bool:
    """Let a part end within `seconds`. When it does not, logs that and returns False; the part is left behind."""
    ending = asyncio.ensure_future(work)
    try:
        await asyncio.wait([ending], timeout=seconds)
    finally:
        ending.cancel()
    if not ending.done():
        log.error("part_did_not_end", extra={"part": what, "seconds": seconds})
    elif not ending.cancelled() and (error := ending.exception()) is not None:
        log.error("part_failed_to_end", extra={"part": what}, exc_info=error)
    return ending.done()


def check_lookups(addresses: Sequence[str], *, tls: bool, allow_plaintext: bool) -> None:
    """Raises ConfigError for a lookup partition at a plaintext port, where any user of its machine may listen."""
    for address in addresses:
        if not (tls or allow_plaintext or address.startswith("unix:")):
            raise plaintext_refused(f"the lookup partition at {address} would be called without TLS")


def _choose_reader(config: ShardServerConfig) -> tuple[str, Callable[[Segment], Puller]]:
    """The names of the ways in which peers are read, and what makes the reader. Raises ConfigError for an unknown
    transport, and for NIXL if it is not installed."""
    kind = config.settings.transport
    if kind not in ("auto", "nixl", "shm"):
        raise ConfigError(f"unknown transport {kind!r}: choose auto, nixl or shm")
    if kind == "nixl" and not nixl_available():
        raise ConfigError(
            "transport 'nixl' needs NIXL, which comes with the extra 'nixl' (pip install nixl-cu12); or take shm"
        )
    beyond = not is_loopback(config.peer_host)  # on loopback all peers are on this machine
    maps_peers = kind != "nixl"
    if kind == "nixl" or (kind == "auto" and beyond and nixl_available()):
        return (
            joined((mapped.NAME, "nixl") if maps_peers else ("nixl",)),
            lambda segment: Puller(
                segment, lambda: NixlTransport(segment, config.node_id, config.peer_host), maps_peers=maps_peers
            ),
        )
    if kind == "auto" and beyond:
        log.warning(
            "nixl_missing", extra={"means": "no blocks of other machines are read", "do": "pip install nixl-cu12"}
        )
    return mapped.NAME, lambda segment: Puller(segment, None)
