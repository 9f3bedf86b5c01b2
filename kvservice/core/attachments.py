"""Attachments: which engines use this shard, and under which number each of them is known. Pure; a part of ShardState.

An engine has one attachment at a time. It ends when the engine detaches, attaches again, or is lost; everything that it
was promised ends with it, except slots that one of its processes may still write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvservice.core import events as ev
from kvservice.core.acquire.attached import EngineAttachment, check_layouts
from kvservice.core.actions import Reply
from kvservice.core.block.keys import KEY_BYTES
from kvservice.core.bounded_table import BoundedTable
from kvservice.core.context import ShardContext
from kvservice.core.messages import EngineSpec
from kvservice.core.writes import Writes
from kvservice.errors import Exhausted, FingerprintMismatch, InvalidRequest, NotAttached, Unavailable
from kvservice.units import AttachmentId, BootEpoch

ENGINE_ID_BYTES = 16  # as long as a key, because the header of a slot being written has the engine's id in its place
ATTACHMENTS_MAX = 256  # engines of one node: far more than it has GPUs. Another one is refused with Exhausted.
ENGINES_REMEMBERED = 4 * ATTACHMENTS_MAX  # includes some that left, because late messages of theirs may still come
assert ENGINES_REMEMBERED > ATTACHMENTS_MAX
BOOT_ATTACHMENTS_BITS = 20  # of an attachment id, after the epoch: a million attachments in one boot
ATTACHMENTS_OF_TENANT_MAX = 128  # so that no tenant uses up all attachments; more are refused with Exhausted
assert ENGINE_ID_BYTES == KEY_BYTES
assert ATTACHMENTS_OF_TENANT_MAX < ATTACHMENTS_MAX < 1 << BOOT_ATTACHMENTS_BITS


@dataclass(frozen=True, slots=True)
class AttachReply:
    """The answer of `Attach`. The performer adds the addresses, which the core does not know."""

    attachment: AttachmentId
    epoch: BootEpoch
    lease_seconds: float
    replaced: tuple[AttachmentId, ...] = ()  # earlier attachments of the same engine, which have ended now


class Attachments:
    """Every attached engine. `on_end` ends what a shard's parts hold for an attachment."""

    def __init__(self, shard: ShardContext, writes: Writes, on_end: Callable[[AttachmentId, float], None]) -> None:
        self._shard = shard
        self._writes = writes
        self._on_end = on_end
        self._open: dict[AttachmentId, EngineAttachment] = {}
        # The last attempt of each engine that was answered.
        self._attempts: BoundedTable[bytes, int] = BoundedTable(ENGINES_REMEMBERED)
        self._next_attachment = (shard.epoch << BOOT_ATTACHMENTS_BITS) + 1  # no id of an earlier boot is valid

    def handlers(self) -> dict[type, Callable[[Any, float], None]]:
        return {
            ev.Attach: self._attach,
            ev.Detach: self._detach,
            ev.AttachmentLost: self._attachment_lost,
            ev.EngineGone: self._engine_gone,
        }

    def __len__(self) -> int:
        return len(self._open)

    def get(self, attachment: AttachmentId) -> EngineAttachment | None:
        return self._open.get(attachment)

    def of(self, account: str | None = None) -> list[EngineAttachment]:
        """All attached engines, the first attached first; with an account, only its own."""
        return [attached for attached in self._open.values() if account is None or attached.account == account]

    def require(self, attachment: AttachmentId) -> EngineAttachment:
        attached = self._open.get(attachment)
        if attached is None:
            raise NotAttached(f"attachment {attachment} is not known to shard {self._shard.node_id}: attach again")
        return attached

    # -- what happens ----

    def _attach(self, event: ev.Attach, now: float) -> None:
        spec = event.spec
        if len(spec.engine_id) != ENGINE_ID_BYTES or spec.engine_id == bytes(ENGINE_ID_BYTES):
            raise InvalidRequest(f"an engine id is {ENGINE_ID_BYTES} bytes and not zero", length=len(spec.engine_id))
        if self._shard.is_draining():
            raise Unavailable(
                f"shard {self._shard.node_id} is draining: attach to another node, or wait until it is back"
            )
        replaced = [a for a in self._open.values() if a.spec.engine_id == spec.engine_id]
        others = [a for a in self._open.values() if a.spec.engine_id != spec.engine_id]
        of_tenant = sum(a.account == event.account for a in others)
        if len(others) >= ATTACHMENTS_MAX or (event.account and of_tenant >= ATTACHMENTS_OF_TENANT_MAX):
            raise Exhausted(
                f"{len(others)} engines are attached to shard {self._shard.node_id} already, {of_tenant} of this tenant"
            )
        check_layouts(spec, self._shard.geometry)
        if any(a.account != event.account for a in replaced):
            raise InvalidRequest("this engine id belongs to another engine: make a random one")
        if 0 < spec.attempt <= (self._attempts.get(spec.engine_id) or 0):
            # A later attach of this engine has been answered, and its workers may write slots reserved since then.
            self._shard.counters["attach_overtaken"] += 1
            raise NotAttached("a later attach of this engine has overtaken this one")
        self._refuse_other_fingerprint(spec, event.account, now)
        self._attempts.put(spec.engine_id, spec.attempt)
        for attached in replaced:
            self._end(attached, now)
        # An engine attaches again only when none of its processes can write an old reservation (PoolPort.attach).
        self._writes.free(spec.engine_id)
        attachment = AttachmentId(self._next_attachment)
        self._next_attachment += 1
        attached = self._open[attachment] = EngineAttachment(attachment, spec, event.account, now)
        self._shard.freshness.learn(spec.names)
        if spec.hears_removals:
            self._shard.store.removals.listen(attachment, event.account)
        self._shard.counters["attaches"] += 1
        ended = tuple(a.attachment for a in replaced)
        self._shard.emit(Reply(event.op, AttachReply(attachment, self._shard.epoch, self._shard.lease_seconds, ended)))

    def _refuse_other_fingerprint(self, spec: EngineSpec, account: str, now: float) -> None:
        """Only within a tenant: engines of other tenants share no blocks with it and stay unknown to it. And only among
        engines of one kind: nobody expects a vLLM and an SGLang to find each other's exact blocks."""
        sharing = (spec.model, spec.namespace, spec.fingerprint.engine)
        for attached in self.of(account):
            other = attached.spec
            same_place = (other.model, other.namespace, other.fingerprint.engine) == sharing
            if same_place and other.engine_id != spec.engine_id and other.fingerprint != spec.fingerprint:
                self._shard.counters["attach_fingerprint_refused"] += 1
                refusal = FingerprintMismatch(
                    f"model {spec.model!r} is attached to shard {self._shard.node_id} with another fingerprint, so the "
                    f"two would never share a block: {spec.fingerprint.difference(other.fingerprint)}. Start both "
                    "engines alike, or give one of them a namespace of its own (in kv_connector_extra_config, or "
                    "`attach` of a program)",
                    ours=other.fingerprint.digest.hex(),
                    theirs=spec.fingerprint.digest.hex(),
                )
                differences = spec.fingerprint.differences(other.fingerprint)
                self._shard.records.refused(spec, refusal.message, now, account, differences)
                raise refusal

    def _detach(self, event: ev.Detach, now: float) -> None:
        attached = self._open.get(event.attachment)
        if attached is not None:
            self._end(attached, now)
            self._writes.quarantine(attached.spec.engine_id)

    def _attachment_lost(self, event: ev.AttachmentLost, now: float) -> None:
        attached = self._open.get(event.attachment)
        if attached is None:
            return
        self._end(attached, now)
        self._shard.counters["attachments_lost"] += 1
        self._writes.quarantine(attached.spec.engine_id)

    def _engine_gone(self, event: ev.EngineGone, now: float) -> None:
        if all(attached.spec.engine_id != event.engine_id for attached in self._open.values()):
            self._writes.free(event.engine_id)

    def _end(self, attached: EngineAttachment, now: float) -> None:
        del self._open[attached.attachment]
        self._on_end(attached.attachment, now)
