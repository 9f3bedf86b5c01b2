"""Authenticator: names the tenant behind each call, and revokes attachments when their tenant's rights end.

A tenant is known by the token that its channel carries. Without a tenants file everybody is one tenant, and tokens are
not looked at. Runs on the shard's event loop; the tenants file is read on a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from kvservice.aio import end_tasks
from kvservice.auth.identity import Connection
from kvservice.auth.tenants import (
    METADATA_KEY,
    WHAT_TO_DO,
    Bearer,
    Public,
    Tenant,
    Tenants,
    TenantsFile,
    bearer_of,
    quota_bytes,
)
from kvservice.core.block.tenants import NOBODY, TenantLimits
from kvservice.core.messages import Attachment
from kvservice.core.segment.geometry import Geometry
from kvservice.errors import NotAttached, Unauthenticated
from kvservice.units import AttachmentId

log = logging.getLogger("kvservice.shard")

LOOK_SECONDS = 1.0  # a changed file, such as a revoked token, counts within this time. One look is one stat() call.


class TenantPool(Protocol):
    """The part of the pool that the authenticator needs. pool.runtime.PoolRuntime is one."""

    @property
    def geometry(self) -> Geometry: ...
    @property
    def disk_bytes(self) -> int: ...

    def set_tenants(self, limits: Mapping[str, TenantLimits], secrets: Mapping[str, bytes] | None = None) -> None: ...

    def count(self, name: str) -> None: ...


@dataclass(slots=True)
class _Bound:
    caller: Bearer
    revoke: Callable[[str], None]


class Authenticator:
    """Names callers by their tokens, and revokes attachments. `files` is None for a service without tenants."""

    def __init__(self, files: TenantsFile | None, pool: TenantPool) -> None:
        self._files = files
        self._pool = pool
        self._bound: dict[AttachmentId, _Bound] = {}
        self._watcher: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._files is not None and self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch(self._files))

    async def stop(self) -> None:
        if self._watcher is not None:
            await end_tasks([self._watcher])
            self._watcher = None

    def caller(self, connection: Connection) -> Bearer | None:
        """Who calls, or None when the service has no tenants. Raises Unauthenticated."""
        if self._files is None:
            return None
        try:
            return bearer_of(connection.invocation_metadata(), self._files.current)
        except Unauthenticated:
            self._pool.count("calls_unauthenticated")
            raise

    @property
    def has_tenants(self) -> bool:
        return self._files is not None

    def caller_if_any(self, connection: Connection) -> Bearer | None:
        """Like `caller`, but None also for a call without a token, which the node's own processes make.

        Raises Unauthenticated for a wrong token.
        """
        metadata = connection.invocation_metadata() or ()
        return self.caller(connection) if any(key == METADATA_KEY for key, _ in metadata) else None

    def account(self, connection: Connection) -> str | None:
        """The tenant whose requests the caller may see; None means every tenant's. Raises Unauthenticated."""
        caller = self.caller(connection)
        return None if caller is None or caller.tenant.admin else caller.tenant.name

    def bind(self, caller: Bearer | None, attachment: Attachment, revoke: Callable[[str], None]) -> Attachment:
        """The attachment as its engine receives it, with the keys of its tenant.

        `revoke(reason)` is called on the shard's loop, at most once, when the tenant's rights end before the caller
        calls `unbind`. Every bound attachment must be unbound in the end. Raises Unauthenticated when the token was
        revoked since `caller` was determined.
        """
        if caller is None or self._files is None:
            return attachment
        tenants = self._files.current
        if not tenants.is_valid(caller.tenant.name, caller.token):
            raise Unauthenticated(f"this tenant's token was revoked: {WHAT_TO_DO}")
        tenant = tenants.by_name[caller.tenant.name]
        self._bound[attachment.attachment_id] = _Bound(Bearer(tenant, caller.token), revoke)
        tenant_key, public_key = tenants.block_keys_of(tenant)
        return replace(
            attachment,
            tenant_key=tenant_key,
            public_key=public_key,
            may_publish=tenant.public is Public.PUBLISH,
            quota_bytes=quota_bytes(tenant.quota, attachment.geometry.slabs_bytes),
        )

    def unbind(self, attachment: AttachmentId) -> None:
        self._bound.pop(attachment, None)

    def renew(self, attachment: AttachmentId, caller: Bearer | None) -> None:
        """The engine has changed its token: the one that it attached with may be removed now.

        Raises NotAttached for the token of another tenant: the attachment stays what it was.
        """
        bound = self._bound.get(attachment)
        if caller is None or bound is None:
            return
        if bound.caller.tenant.name != caller.tenant.name:
            raise NotAttached(
                "this connection is attached for another tenant: attach again with a connection of its own"
            )
        # The tenant stays as it was when the engine attached, so that the next look sees a change of its rights.
        bound.caller = Bearer(bound.caller.tenant, caller.token)

    def keys_for(self, caller: Bearer) -> tuple[bytes, bytes]:
        assert self._files is not None
        return self._files.current.block_keys_of(caller.tenant)

    # -- the file ----

    async def _watch(self, files: TenantsFile) -> None:
        taken = files.current
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await asyncio.to_thread(files.look)
                found = files.current
                if found is not taken:  # also when it was read before and could not be taken: a revocation is in it
                    self._take(found)
                    taken = found
            except Exception:  # task boundary: an unexpected error with one file must not end the watching
                log.exception("tenants_file_failed")

    def _take(self, tenants: Tenants) -> None:
        for attachment, bound in list(self._bound.items()):
            old = bound.caller
            new = tenants.by_name.get(old.tenant.name)
            if new is None or not tenants.is_valid(old.tenant.name, old.token):
                self._revoke(attachment, f"this tenant's token was revoked: {WHAT_TO_DO}")
            elif _rights(new) != _rights(old.tenant):
                self._revoke(attachment, "this tenant's rights changed: attach again")
            else:
                bound.caller = Bearer(new, old.token)
        limits = tenants.limits(self._pool.geometry.slabs_bytes, self._pool.disk_bytes)
        self._pool.set_tenants(limits, tenants.secrets())

    def _revoke(self, attachment: AttachmentId, reason: str) -> None:
        bound = self._bound.pop(attachment, None)
        if bound is not None:
            self._pool.count("attachments_revoked")
            log.info("attachment_revoked", extra={"tenant": bound.caller.tenant.name, "attachment": int(attachment)})
            bound.revoke(reason)


def _rights(tenant: Tenant) -> tuple[object, ...]:
    """The rights that an engine was given when it attached. When they change, it must attach again."""
    return tenant.secret, tenant.public, tenant.quota


def is_private(connection: Connection) -> bool:
    """Whether nobody can listen to this channel: it has TLS, or it is the node's Unix socket."""
    encrypted = b"ssl" in connection.auth_context().get("transport_security_type", ())
    return encrypted or connection.peer().startswith("unix:")


def account_of(caller: Bearer | None) -> str:
    return NOBODY if caller is None else caller.tenant.name
