"""Calls from one simulated process to the pool of a node, with everything that gRPC can do to real ones.

A request and its answer are messages: they are lost, late, doubled and overtaken. The caller's deadline travels with
the call. After it the callee is told that nobody waits, on its own clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvservice.errors import KVServiceError, Unavailable
from kvservice.pool.runtime import PoolRuntime
from kvservice.testing.sim.parts import NodeParts
from kvservice.testing.sim.world import Process

T = TypeVar("T")
REFUSED_SECONDS = 0.05  # Until a caller notices a refused connection: one round trip.


@dataclass(slots=True, eq=False)
class _Call:
    work: Callable[[PoolRuntime], Awaitable[Any]]
    answer: asyncio.Future[Any]
    until: float  # world's time: nobody waits any more
    is_given_up: bool = False
    tasks: list[asyncio.Task[None]] = field(default_factory=list)  # of the callee


class SimCaller:
    """Makes calls for one process. `address` names the caller's end of the links."""

    def __init__(self, process: Process, address: str) -> None:
        self._process = process
        self._world = process.world
        self._address = address
        self._open: dict[_Call, NodeParts] = {}

    async def call(self, node: NodeParts, seconds: float, work: Callable[[PoolRuntime], Awaitable[T]]) -> T:
        """Run `work` on the node's pool. Returns and raises what it does, or raises Unavailable if no answer comes in
        time."""
        loop = asyncio.get_running_loop()
        if node.runtime is None:
            await asyncio.sleep(REFUSED_SECONDS * self._world.random.random())
            raise Unavailable(f"nobody listens at {node.name}")
        call = _Call(work, loop.create_future(), self._world.now + seconds)
        self._open[call] = node
        timer = loop.call_later(seconds, self._fail, call, f"{node.name} did not answer within {seconds:.1f} s")
        life = node.life
        self._world.send(self._address, node.name, node.receive, self._arrive, node, life, call)
        try:
            result: T = await call.answer
            return result
        finally:
            timer.cancel()
            self._open.pop(call, None)
            if not call.answer.done() or call.answer.cancelled() or call.is_given_up:
                self._world.send(self._address, node.name, node.receive, self._end, call)

    def cut(self, node: NodeParts) -> None:
        """The connection broke: fail every call that waits for an answer over it."""
        for call in [call for call, callee in self._open.items() if callee is node]:
            self._fail(call, f"the connection to {node.name} broke")

    def _fail(self, call: _Call, reason: str) -> None:
        if not call.answer.done():
            call.is_given_up = True
            call.answer.set_exception(Unavailable(reason))

    # -- on the callee ----

    def _arrive(self, node: NodeParts, life: int, call: _Call) -> None:
        runtime = node.runtime
        if runtime is not None and node.life == life:
            call.tasks.append(node.loop.start(self._serve(node, runtime, call)))
            node.after(max(call.until - self._world.now, 0.0), self._end, call)

    def _end(self, call: _Call) -> None:
        for task in call.tasks:
            task.cancel()

    async def _serve(self, node: NodeParts, runtime: PoolRuntime, call: _Call) -> None:
        answer: object
        try:
            answer = await call.work(runtime)
        except KVServiceError as error:
            answer = error
        life = self._process.life
        self._world.send(node.name, self._address, self._deliver, life, call, answer)

    def _deliver(self, life: int, call: _Call, answer: object) -> None:
        if self._process.life == life:
            self._process.receive(self._answered, call, answer)

    def _answered(self, call: _Call, answer: object) -> None:
        if call.answer.done():
            return
        if isinstance(answer, KVServiceError):
            call.answer.set_exception(answer)
        else:
            call.answer.set_result(answer)
