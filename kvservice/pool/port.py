"""The pool as an engine's connector sees it, whether it is a shard across a Unix socket or embedded in the engine.

kvservice.client.shard.ShardClient and kvservice.pool.runtime.PoolRuntime both satisfy it. All calls are coroutines on
the caller's event loop; none blocks the loop; each ends by its own deadline. Any KVServiceError may be raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvservice.core.messages import (
    AcquireRequest,
    AcquireResult,
    Attachment,
    EngineSpec,
    RequestReport,
    SealItem,
    SealStatus,
    Statement,
)
from kvservice.core.segment.refs import BlockRef
from kvservice.units import AttachmentId, HandoffId, LeaseId


class PoolPort(Protocol):
    async def attach(self, spec: EngineSpec, on_lost: Callable[[str], None]) -> Attachment:
        """Join the pool. `on_lost(reason)` is called at most once per attachment, on the loop, when the stream ends
        without `detach`: the attachment, its leases and its reservations are then void, and the engine may attach
        again (with the same engine id). Raises FingerprintMismatch, UnsupportedLayout, Exhausted, Unavailable."""
        ...

    async def detach(self, attachment: AttachmentId) -> None:
        """Leave: leases end; unsealed reservations are quarantined until the engine's processes have let go."""
        ...

    async def acquire(self, attachment: AttachmentId, request: AcquireRequest) -> AcquireResult:
        """See AcquireRequest. Answers within the request's timeout with what is promised by then."""
        ...

    async def reserve(self, attachment: AttachmentId, count: int, group: int = 0, call: int = 0) -> list[BlockRef]:
        """Up to `count` slots to write, each with its odd generation; fewer (even none) when the pool is full.
        `group`: the KV cache group whose blocks they are for. `call`: the caller's number of this call, for its
        statements (core.reconcile); 0 = it makes none."""
        ...

    async def seal(self, attachment: AttachmentId, items: Sequence[SealItem]) -> list[SealStatus]:
        """Publish written slots, one status per item. The pool digests the bytes first: they must be complete."""
        ...

    async def abort(self, attachment: AttachmentId, refs: Sequence[BlockRef]) -> None:
        """Give back reservations that nothing will write any more. Unknown ones are counted, not an error."""
        ...

    async def release(self, attachment: AttachmentId, lease_ids: Sequence[LeaseId]) -> None:
        """End read leases. Releasing twice is a counted no-op."""
        ...

    async def open_handoff(self, attachment: AttachmentId, handoff: HandoffId, call: int = 0) -> None:
        """A prompt is being computed for another engine, which may follow its blocks as they are sealed. `handoff` is
        16 random bytes. `call` as in `reserve`. Raises InvalidRequest when the id is in use, Exhausted when too many
        are open."""
        ...

    async def close_handoff(self, attachment: AttachmentId, handoff: HandoffId) -> None:
        """Everything that will be stored for it is sealed, also when its Open has not been heard yet. Hand-offs of an
        attachment that is lost are closed with it."""
        ...

    async def renew(
        self,
        attachment: AttachmentId,
        lease_ids: Sequence[LeaseId],
        reports: Sequence[RequestReport] = (),
        statement: Statement | None = None,
    ) -> None:
        """Heartbeat: extends these leases to lease_seconds from the moment this was sent. One whose answer was lost on
        the way is never named here and ends by itself. `reports`: of requests that ended, kept for a while.
        `statement`: what else the engine holds; see core.reconcile for what becomes of the rest."""
        ...

    async def close(self) -> None:
        """Detach everything and stop. Idempotent."""
        ...
