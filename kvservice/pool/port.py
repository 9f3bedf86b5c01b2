"""The pool as an engine's connector sees it: a shard at the other end of a Unix socket, or embedded in the engine.

kvservice.client.shard.ShardClient and kvservice.pool.runtime.PoolRuntime both satisfy it. All calls are coroutines on
the caller's event loop. None blocks the loop, and each ends by its own deadline. Any KVServiceError may be raised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvservice.core.messages import (
    AcquireRequest,
    AcquireResult,
    Attachment,
    EngineSpec,
    Removed,
    RequestReport,
    SealItem,
    SealStatus,
    Statement,
    WarmRequest,
    WarmResult,
)
from kvservice.core.segment.refs import BlockRef
from kvservice.units import AttachmentId, HandoffId, LeaseId


class PoolPort(Protocol):
    """The calls of an engine. See the module for threads, blocking and errors."""

    async def attach(self, spec: EngineSpec, on_lost: Callable[[str], None]) -> Attachment:
        """Join the pool.

        When the connection ends without `detach`, `on_lost(reason)` is called on the loop, at most once for each
        attachment. The attachment, its leases and its reservations are then void, and the engine may attach again with
        the same engine id. Who cancels it is not attached. Raises FingerprintMismatch, UnsupportedLayout, Exhausted or
        Unavailable.
        """
        ...

    async def detach(self, attachment: AttachmentId) -> None:
        """Leave. Leases end. Unsealed reservations are quarantined until the engine's processes release their lock."""
        ...

    async def acquire(self, attachment: AttachmentId, request: AcquireRequest) -> AcquireResult:
        """Make a prefix local and lease it: see AcquireRequest. Answers within the request's timeout."""
        ...

    async def reserve(self, attachment: AttachmentId, count: int, group: int = 0, call: int = 0) -> list[BlockRef]:
        """Reserve up to `count` slots to write, each with its odd generation; fewer, or none, when the pool is full.

        `group` is the KV cache group whose blocks will be written. `call` is the caller's number of this call, for its
        statements (core.reconcile); 0 = it sends none.
        """
        ...

    async def seal(self, attachment: AttachmentId, items: Sequence[SealItem]) -> list[SealStatus]:
        """Publish written slots, whose bytes must be complete. Returns one status per item, after digesting them."""
        ...

    async def abort(self, attachment: AttachmentId, refs: Sequence[BlockRef]) -> None:
        """Give back reservations that nothing will write any more. Unknown ones are counted and ignored."""
        ...

    async def release(self, attachment: AttachmentId, lease_ids: Sequence[LeaseId]) -> None:
        """End read leases. Releasing one twice is counted and has no effect."""
        ...

    async def open_handoff(self, attachment: AttachmentId, handoff: HandoffId, call: int = 0) -> None:
        """Announce a prompt that is being computed for another engine, which may follow its blocks as they are sealed.

        `handoff` is 16 random bytes; `call` is as in `reserve`. Raises InvalidRequest when the id is in use, Exhausted
        when too many are open.
        """
        ...

    async def close_handoff(self, attachment: AttachmentId, handoff: HandoffId) -> None:
        """Say that everything which will be stored for the hand-off is sealed.

        It may arrive before the open_handoff. Hand-offs of a lost attachment are closed with it.
        """
        ...

    async def renew(
        self,
        attachment: AttachmentId,
        lease_ids: Sequence[LeaseId],
        reports: Sequence[RequestReport] = (),
        statement: Statement | None = None,
        suspects: Sequence[BlockRef] = (),
    ) -> Removed:
        """Heartbeat: extends these leases to `lease_seconds` from the moment when this was sent.

        If the reply that granted a lease is lost, the engine never names it here and it expires. `reports` are of
        requests that ended; the shard keeps them for a while. `statement` says what else the engine holds;
        core.reconcile says what happens to the rest. `suspects` are slots that it did not find as promised:
        core.acquire.suspects looks at them. Returns the blocks that left the pool since the last call, for an engine
        whose spec asks for them.
        """
        ...

    async def warm(self, request: WarmRequest) -> WarmResult:
        """Make a prefix local and hold it for a while: see WarmRequest. Answers within the request's timeout.

        Raises NotAttached when no engine with its fingerprint is attached, Exhausted when many wait to be warmed.
        """
        ...

    async def close(self) -> None:
        """Detach every attachment and stop. Idempotent."""
        ...
