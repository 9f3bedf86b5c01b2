"""Sends what core.directory.announce decides to the lookup partitions: one task per partition, one update at a time.

Everything runs on the event loop that calls `run`. Changes gather while an update is on its way, so batches grow with
the load. A lookup partition that does not answer is tried again with growing, jittered pauses, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence

import grpc

from kvservice.aio import end_tasks, is_set_within
from kvservice.auth.identity import lookup_audience, proofs_of
from kvservice.auth.tls import TlsFiles
from kvservice.client.channels import Channels
from kvservice.core.block.keys import pack_keys
from kvservice.core.directory.announce import Announcer, Update
from kvservice.core.directory.membership import HIDE_SECONDS, AnnounceOutcome, patience
from kvservice.core.directory.presence import KnownTimes
from kvservice.core.messages import Holder
from kvservice.errors import ConfigError, KVServiceError
from kvservice.lookup.service import OUTCOMES
from kvservice.wire.calls import call_in_time
from kvservice.wire.codec import encode_holder
from kvservice.wire.status import error_from_rpc
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc
from kvservice.wire.versions import PROTOCOL_VERSION

log = logging.getLogger("kvservice.client")

CALL_SECONDS = 5.0  # applying one update takes milliseconds; without an answer by then, it is sent again
FAREWELL_SECONDS = 1.0  # a stop waits no longer; a node without a farewell is hidden after its heartbeat timeout
BACKOFF_SECONDS_FIRST = 0.05  # the pause after a first failure: most last as long as a reconnect
BACKOFF_SECONDS_MAX = 2.0  # pauses double up to this, below the time after which the directory hides a silent node
assert BACKOFF_SECONDS_FIRST <= BACKOFF_SECONDS_MAX < HIDE_SECONDS

_OUTCOMES = {said: outcome for outcome, said in OUTCOMES.items()}


class AnnouncePump:
    """`node` returns who this shard is now. `on_fenced` is called once, on the loop, when a newer boot of this node is
    heard of. Without the node's `secret` no other process can announce the node meanwhile. `on_return` is called when
    the directory may not have known the node for a while and has heard of it again, also the first time: at
    once, and with True when others have had the time to announce themselves after it, or after `other_returned`.
    """

    def __init__(
        self,
        announcer: Announcer,
        addresses: Sequence[str],
        node: Callable[[], Holder],
        heartbeat_seconds: float,
        on_fenced: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        tls: TlsFiles | None = None,
        secret: bytes = b"",
        rng: random.Random | None = None,
        on_return: Callable[[bool], Awaitable[None]] | None = None,
    ) -> None:
        self._announcer = announcer
        self._addresses = _checked(addresses, announcer)
        self._node = node
        self._heartbeat_seconds = heartbeat_seconds
        self._on_fenced = on_fenced
        self._clock = clock
        self._rng = rng or random.Random()
        self._channels = Channels(tls)
        self._proofs = proofs_of(secret)
        self._kicks = [asyncio.Event() for _ in self._addresses]
        self._tasks: list[asyncio.Task[None]] = []
        self._told_fenced = False
        self._on_return = on_return
        self._presence = KnownTimes(len(self._addresses), patience(heartbeat_seconds)[0])
        self._returned = asyncio.Event()
        self._someone_returned = asyncio.Event()  # this node, or another one
        self._settle_seconds = heartbeat_seconds + 2 * BACKOFF_SECONDS_MAX

    async def run(self) -> None:
        """Announce until `stop`, cancellation, or a newer boot of this node."""
        loop = asyncio.get_running_loop()
        self._tasks = tasks = [loop.create_task(self._serve(partition)) for partition in range(len(self._addresses))]
        if not tasks:
            return
        returns = loop.create_task(self._tell_returns())
        try:
            await asyncio.wait(tasks)
        finally:
            await end_tasks([returns])
            await self._end_tasks()

    def kick(self) -> None:
        """Look for changes to send. Called after each change."""
        for kick in self._kicks:
            kick.set()

    def other_returned(self) -> None:
        """Another node returns, so `on_return` is called with True in some seconds."""
        self._someone_returned.set()

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Use new addresses; the number of partitions stays the same. Each partition's next update uses them."""
        self._addresses = _checked(addresses, self._announcer)
        self._channels.keep_only(self._addresses)
        self.kick()

    async def stop(self, leaving: bool) -> None:
        """End the tasks. With `leaving`, tell every lookup partition to forget this node, for a second at most.

        Idempotent.
        """
        await self._end_tasks()
        if leaving and not self._announcer.fenced:
            farewells = [self._farewell(partition) for partition in range(len(self._addresses))]
            await asyncio.gather(*farewells)
        await self._channels.close()

    async def _end_tasks(self) -> None:
        tasks, self._tasks = self._tasks, []
        await end_tasks(tasks)

    async def _serve(self, partition: int) -> None:
        complained = ""
        while not self._announcer.fenced:
            try:
                await self._announce_all(partition)
            except Exception as error:  # task boundary: nothing else announces this node, which stays hidden without it
                self._announcer.begin_again(partition)
                if str(error) != complained:
                    complained = str(error)
                    log.exception("announcements_failed", extra={"partition": partition})
                await asyncio.sleep(BACKOFF_SECONDS_MAX)
        self._fence()

    async def _announce_all(self, partition: int) -> None:
        """Announce until a newer boot of this node is heard of."""
        announcer, kick = self._announcer, self._kicks[partition]
        failures = 0
        heard_at = -self._heartbeat_seconds + self._clock()
        while not announcer.fenced:
            kick.clear()
            update = announcer.next_update(partition)
            if update is None:
                wait = heard_at + self._heartbeat_seconds - self._clock()
                if wait > 0:
                    await is_set_within(wait, kick)
                    continue
                update = announcer.heartbeat(partition)
            sent_at = self._clock()
            if await self._deliver(partition, update, failures, sent_at):
                failures, heard_at = 0, sent_at
            else:
                failures += 1
                pause = min(BACKOFF_SECONDS_FIRST * 2 ** min(failures - 1, 10), BACKOFF_SECONDS_MAX)
                await asyncio.sleep(pause * self._rng.uniform(0.5, 1.0))

    async def _tell_returns(self) -> None:
        while True:
            await self._someone_returned.wait()
            self._someone_returned.clear()
            if self._returned.is_set():
                self._returned.clear()
                await self._tell_return(False)
            if not await is_set_within(self._settle_seconds, self._returned):
                await self._tell_return(True)

    async def _tell_return(self, is_later: bool) -> None:
        try:
            if self._on_return is not None:
                await self._on_return(is_later)
        except Exception:  # task boundary: nothing else tells of the next return
            log.exception("return_failed")

    async def _deliver(self, partition: int, update: Update, failures: int, sent_at: float) -> bool:
        """Send one update, at `sent_at`. Returns whether the lookup partition answered."""
        try:
            reply = await self._announce(partition, update, CALL_SECONDS)
            outcome = _OUTCOMES[reply.outcome]
        except asyncio.CancelledError:
            self._announcer.on_failure(partition)  # it may have arrived
            raise
        except Exception as error:  # noqa: BLE001  RPC boundary: after any error this update is sent again
            self._announcer.on_failure(partition)
            if failures == 0:
                if isinstance(error, grpc.aio.AioRpcError):
                    reason = error_from_rpc(error, "announce").message
                else:
                    reason = repr(error)
                log.warning(
                    "announce_failed",
                    extra={"partition": partition, "address": self._addresses[partition], "reason": reason},
                )
            return False
        self._announcer.on_reply(partition, outcome, reply.lookup_epoch)
        # One that asks for everything does not know the node yet.
        is_known, stay = outcome is AnnounceOutcome.APPLIED, (reply.lookup_epoch, reply.shown_since)
        if is_known and self._presence.heard(partition, stay, sent_at, self._clock()):
            self._returned.set()
            self._someone_returned.set()
        return True

    async def _farewell(self, partition: int) -> None:
        update = self._announcer.farewell(partition)
        try:
            await self._announce(partition, update, FAREWELL_SECONDS)
        except (grpc.aio.AioRpcError, KVServiceError):
            log.info("farewell_failed", extra={"partition": partition})  # the heartbeat timeout hides the node later

    async def _announce(self, partition: int, update: Update, timeout: float) -> lookup_pb2.AnnounceReply:
        request = lookup_pb2.AnnounceRequest(
            node=encode_holder(self._node()),
            sequence=update.sequence,
            added=pack_keys(update.added),
            removed=pack_keys(update.removed),
            full_begin=update.full_begin,
            full_end=update.full_end,
            partition=partition,
            partition_count=len(self._addresses),
            leaving=update.leaving,
            protocol_version=PROTOCOL_VERSION,
        )
        stub = lookup_pb2_grpc.LookupServiceStub(self._channels.get(self._addresses[partition]))
        metadata = self._proofs(lookup_audience(partition))
        reply: lookup_pb2.AnnounceReply = await call_in_time(stub.Announce, request, timeout, metadata)
        return reply

    def _fence(self) -> None:
        if not self._told_fenced:
            self._told_fenced = True
            log.critical("announcer_fenced", extra={"node": self._node().node_id})
            self.kick()  # the tasks of the other partitions end as well
            self._on_fenced()


def _checked(addresses: Sequence[str], announcer: Announcer) -> tuple[str, ...]:
    if len(addresses) != announcer.partition_count:
        raise ConfigError(
            f"{len(addresses)} lookup addresses for {announcer.partition_count} partitions: the number of lookup "
            "partitions is fixed while a shard runs"
        )
    return tuple(addresses)
