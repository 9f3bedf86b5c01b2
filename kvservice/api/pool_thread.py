"""The pool of a program: one thread with an event loop, and the models that are attached. Both faces share it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, cast

from kvservice.aio import in_thread, to_its_end
from kvservice.api.arguments import text
from kvservice.api.attached import AttachedModel, Verify
from kvservice.api.explanation import RequestExplanation, explanation_of
from kvservice.api.layout import Layout
from kvservice.api.loop import LoopThread
from kvservice.api.program import AttachedProgram
from kvservice.auth.token import Token
from kvservice.client.explanation import PoolWitness, ServiceWitnesses, explain
from kvservice.client.members import find_members
from kvservice.core.segment.geometry import plan_geometry
from kvservice.errors import InvalidRequest
from kvservice.session.options import Mode, PoolOptions
from kvservice.session.pool_choice import choose_mode, embedded, open_service, service_of
from kvservice.units import NodeId

if TYPE_CHECKING:
    from kvservice.pool.port import PoolPort
    from kvservice.pool.runtime import PoolRuntime

_open: weakref.WeakSet[PoolThread] = weakref.WeakSet()  # those that the end of the program, or a fork, finds open


class PoolThread:
    """Made by `connect`. The coroutines run on the loop of `loop`."""

    def __init__(self, options: PoolOptions) -> None:
        self._options = options
        self.mode = choose_mode(options)
        self._node = NodeId(os.urandom(6).hex())  # of a pool in this process
        self._open_embedded: Callable[[], Awaitable[PoolRuntime]] | None = None
        if self.mode is Mode.EMBEDDED:
            self._open_embedded = embedded(options, plan_geometry(options.embedded_bytes()), self._node)
        self.loop = LoopThread()
        self._runtime: PoolRuntime | None = None
        self._opening = asyncio.Lock()  # two programs that attach at once share one pool
        self._closing = asyncio.Lock()  # who closes it as well waits for the first
        self._leaving: set[asyncio.Task[None]] = set()
        self.attached: list[AttachedModel | AttachedProgram] = []
        _open.add(self)

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("a pool and its caches belong to one process: connect() in the other one")

    async def open(self) -> None:
        """Open the embedded pool, or see that the shard listens. Raises Unavailable, SegmentError or ConfigError."""
        if not await self._open_here():
            await (await open_service(self._options)).close()

    async def attach(
        self,
        model: str,
        layout: Layout,
        identity: Mapping[str, object],
        namespace: str,
        verify: Verify,
        made_for: list[AttachedModel] | None = None,
    ) -> AttachedModel:
        """Also appends it to `made_for`, for a caller that may be interrupted as it comes: then `drop` it. Raises what
        the pool refuses with, and InvalidRequest for what is no Layout."""
        if not isinstance(layout, Layout):
            raise InvalidRequest(f"layout is {layout!r:.100}; give a kvservice.Layout: what one block looks like")
        made = AttachedModel(self._open_pool, model, layout, identity, namespace, verify)
        await made.open()
        self.attached.append(made)
        if made_for is not None:
            made_for.append(made)
        return made

    async def attach_program(
        self, model: str, layout: Layout, fields: Mapping[str, object], namespace: str
    ) -> AttachedProgram:
        """Attach a program that goes on without its pool, and is attached when the pool comes. Opens the embedded pool
        if there is to be one. Raises SegmentError or ConfigError for that, InvalidRequest."""
        made = AttachedProgram(self._open_pool, model, layout, fields, namespace)
        await self._open_here()
        self.attached.append(made)
        await made.begin()
        return made

    async def _open_here(self) -> bool:
        """Open the embedded pool once. False if there is to be none."""
        if self._open_embedded is None:
            return False
        async with self._opening:
            if self._runtime is None:
                self._runtime = await self._open_embedded()
        return True

    async def detach(self, attached: AttachedModel | AttachedProgram) -> None:
        """Goes on when its caller is cancelled, who would not come again."""
        await to_its_end(self._detach(attached), self._leaving)

    async def _detach(self, attached: AttachedModel | AttachedProgram) -> None:
        await attached.close()
        with contextlib.suppress(ValueError):
            self.attached.remove(attached)

    def drop(self, made: Sequence[AttachedModel]) -> None:
        """Detach what nobody was given. Returns at once. What is still under way sees its cancellation first."""

        async def detach() -> None:
            for each in made:
                await self.detach(each)

        with contextlib.suppress(InvalidRequest):  # closed meanwhile, and this with it
            self.loop.submit(detach())

    async def explain(self, request_id: str) -> RequestExplanation:
        """See Pool.explain."""
        request_id = text("request_id", request_id)
        if self._runtime is not None:
            return explanation_of(explain(PoolWitness(self._runtime, self._node), request_id))
        token = Token.of_environment(self._options.token_file)
        return await in_thread(lambda: self._ask_service(request_id, token))

    def _ask_service(self, request_id: str, token: Token) -> RequestExplanation:
        members = find_members(service_of(self._options))
        return explanation_of(explain(ServiceWitnesses(members, token), request_id), members.silent)

    async def close(self) -> None:
        """Detach everything, close the embedded pool and let the thread end. Goes on when its caller is cancelled, who
        would not come again. Idempotent."""
        await to_its_end(self._close(), self._leaving)

    async def _close(self) -> None:
        async with self._closing:
            try:
                # At once: a shard that hangs keeps each of them for seconds.
                await asyncio.gather(*(self.detach(each) for each in self.attached))
                runtime, self._runtime = self._runtime, None
                if runtime is not None:
                    await runtime.close()
            finally:
                self.loop.stop()

    def end(self) -> None:
        """Close, and wait for the end of the thread, but on that thread. Idempotent; does nothing after a fork."""
        self.loop.wait_for_end(self.close())
        self.loop.stop()

    async def _open_pool(self) -> PoolPort:
        if self._runtime is None:
            return await open_service(self._options)
        return cast("PoolPort", _Shared(self._runtime))


class _Shared:
    """The embedded pool as one of its sessions sees it, which must not close it."""

    def __init__(self, runtime: PoolRuntime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> object:
        return getattr(self._runtime, name)

    async def close(self) -> None:
        return


def _close_all() -> None:
    """At the end of the program, for pools that nobody closed."""
    for pool in list(_open):
        pool.end()


def _forked() -> None:
    """In a child: its parent's locks say that the parent writes."""
    for pool in list(_open):
        for each in pool.attached:
            each.drop_lock()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forked)
