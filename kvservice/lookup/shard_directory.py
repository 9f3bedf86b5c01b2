"""The lookup service as one shard uses it: sends announcements and asks for holders.

Satisfies pool.runtime.DirectoryPort. Runs on the shard's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from kvservice.aio import end_tasks
from kvservice.auth.tls import TlsFiles
from kvservice.core.actions import Announce, Retract
from kvservice.core.directory.announce import Announcer
from kvservice.core.messages import Holder
from kvservice.lookup.announce_pump import AnnouncePump
from kvservice.lookup.client import LookupClient
from kvservice.lookup.mirror_writer import DirectoryMirror
from kvservice.units import BlockKey, SpanRoute


class ShardDirectory:
    """Made before the pool, which needs it. `start` comes later, once the node's address is known."""

    def __init__(
        self,
        addresses: Sequence[str],
        inventory: Callable[[], Iterable[tuple[BlockKey, SpanRoute]]],
        tls: TlsFiles | None = None,
        secret: bytes = b"",
        mirror: DirectoryMirror | None = None,
    ) -> None:
        self._mirror = mirror
        self._tls = tls
        self._secret = secret
        self._addresses = tuple(addresses)
        self._announcer = Announcer(len(self._addresses), inventory)
        self.lookup = LookupClient(self._addresses, tls=tls, mirror=None if mirror is None else mirror.view)
        self._pump: AnnouncePump | None = None
        self._node: Callable[[], Holder] | None = None
        self._task: asyncio.Task[None] | None = None
        self._farewell = asyncio.Lock()
        self._has_left = False

    def start(
        self,
        node: Callable[[], Holder],
        heartbeat_seconds: float,
        on_fenced: Callable[[], None],
        on_return: Callable[[bool], Awaitable[None]] | None = None,
    ) -> None:
        self._node = node
        self._pump = AnnouncePump(
            self._announcer,
            self._addresses,
            node,
            heartbeat_seconds,
            on_fenced,
            tls=self._tls,
            secret=self._secret,
            on_return=on_return,
        )
        self._task = asyncio.get_running_loop().create_task(self._pump.run())
        if self._mirror is not None:
            self._mirror.start()

    async def stop(self, leaving: bool) -> None:
        """End everything. With `leaving`, the directory forgets this node at once, not after its heartbeat timeout."""
        if leaving:
            await self.leave()
        elif self._pump is not None:
            await self._pump.stop(leaving=False)
        if self._task is not None:
            await end_tasks([self._task])
        await self.lookup.close()
        if self._mirror is not None:
            await self._mirror.stop()

    def unlink(self) -> None:
        """Remove the files that `stop` removes, also if `stop` did not get so far. Idempotent."""
        if self._mirror is not None:
            self._mirror.unlink()

    async def leave(self) -> None:
        """Tell every lookup partition now that this node leaves, for a second at most. It is the last announcement."""
        async with self._farewell:  # a second caller waits until the first has finished
            if self._pump is not None and not self._has_left:
                self._has_left = True
                await self._pump.stop(leaving=True)

    def relink_mirror(self) -> None:
        """Link the mirror again after the runtime directory was removed. Raises OSError."""
        if self._mirror is not None:
            self._mirror.relink()

    def listen(self, heard: Callable[[Holder, bool], None]) -> None:
        """Nobody is told of without a mirror: only its streams name all nodes."""
        if self._mirror is not None:
            self._mirror.listen(heard)

    def self_holder(self) -> Holder | None:
        return None if self._node is None else self._node()

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Use new addresses of the lookup partitions; their number stays the same."""
        self.lookup.set_addresses(addresses)
        if self._mirror is not None:
            self._mirror.set_addresses(addresses)
        if self._pump is not None:
            self._pump.set_addresses(addresses)

    def other_returned(self) -> None:
        if self._pump is not None:
            self._pump.other_returned()

    def tell(self, changes: Sequence[Announce | Retract]) -> None:
        self._announcer.change(changes)
        if self._pump is not None:
            self._pump.kick()

    @property
    def counters(self) -> dict[str, int]:
        return {**self.lookup.counters, **({} if self._mirror is None else self._mirror.counters)}
