"""Reads blocks of peers into slots of this pool. The puller's threads report the ends, as events of the core."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from functools import partial

from kvservice.core import actions as act
from kvservice.core import events as ev
from kvservice.observe import tracing
from kvservice.observe.failpoints import failpoint
from kvservice.observe.timings import Timings
from kvservice.pool.remote import RemoteShards
from kvservice.pool.runtime_ports import PullerPort
from kvservice.transfer.puller import PullItem, PullJob

# Gives an event to the core, from any thread, in the context of the request that it is about. Without one it is about
# nobody's.
Report = Callable[[ev.Event, contextvars.Context | None], None]


class PeerReads:
    """`puller` is None in a pool that reads from nobody. Call `begin` on the pool's loop."""

    def __init__(
        self,
        puller: PullerPort | None,
        remote: RemoteShards,
        clock: Callable[[], float],
        timings: Timings,
        report: Report,
    ) -> None:
        self._puller = puller
        self._remote = remote
        self._clock = clock
        self._timings = timings
        self._report = report

    def begin(self, action: act.Pull) -> None:
        info = self._remote.peer_info(action.holder.node_id, action.epoch)
        if self._puller is None or info is None:
            failed = (ev.PullResult.FAILED,) * len(action.items)
            self._report(ev.Pulled(action.job, failed), contextvars.copy_context())
            return
        items = tuple(PullItem(handle, destination) for handle, destination in action.items)
        job = PullJob(
            action.job,
            action.holder.node_id,
            action.epoch,
            info.description,
            info.geometry,
            action.payload_bytes,
            items,
            action.deadline,
        )
        size = len(items) * job.payload_bytes
        span = tracing.begin("fetch", node=action.holder.node_id, blocks=len(items), bytes=size)
        came = partial(self._on_pulled, self._clock(), span, contextvars.copy_context())
        self._puller.submit(job, came, self._on_writes_ended)

    def _on_pulled(
        self,
        began: float,
        span: tracing.Span,
        context: contextvars.Context,
        job: int,
        results: tuple[ev.PullResult, ...],
    ) -> None:
        failpoint("shard.pulled")
        span.end(verified=results.count(ev.PullResult.OK))
        context.run(self._timings.add, "fetch_seconds", self._clock() - began, "peer")
        self._report(ev.Pulled(job, results), context)

    def _on_writes_ended(self, job: int) -> None:
        self._report(ev.WritesEnded(job), None)
