"""The shard of this node as an engine sees it: PoolPort over frames on a Unix socket.

All coroutines run on the caller's loop. Each attachment has a connection of its own, whose end is the attachment's: the
shard and the engine (`on_lost`) both notice it at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from google.protobuf.message import Message

from kvservice.auth.token import Token
from kvservice.client.engine_link import EngineLink
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
from kvservice.errors import DeadlineExceeded, KVServiceError, NotAttached, Unavailable
from kvservice.units import AttachmentId, HandoffId, LeaseId
from kvservice.wire.codec import (
    decode_acquired,
    decode_attachment,
    decode_refs,
    decode_removed,
    decode_sealed,
    encode_acquire,
    encode_refs,
    encode_seal_item,
    encode_spec,
    encode_statement,
)
from kvservice.wire.explain import encode_report
from kvservice.wire.frames import FrameKind
from kvservice.wire.holding import decode_warmed, encode_warm
from kvservice.wire.parsing import parse
from kvservice.wire.v1 import shard_pb2
from kvservice.wire.versions import PROTOCOL_VERSION

log = logging.getLogger("kvservice.client")

CALL_SECONDS = 5.0  # calls that the shard answers from memory; without an answer by then the engine goes on without it
SEAL_SECONDS = 30.0  # the shard digests up to thousands of large blocks first
ACQUIRE_SLACK_SECONDS = 0.5  # the shard answers within the request's own timeout; this is for the way
ATTACH_SECONDS = 10.0  # for each answer to an engine that comes: a shard that starts may still be adopting blocks


class ShardClient:
    """Satisfies pool.port.PoolPort. One instance serves one engine; `attach` may be called again after a loss."""

    def __init__(self, socket_path: str, token: Token | None = None) -> None:
        """`token` is of the engine's tenant; by default the environment's. Raises ConfigError."""
        self._socket_path = socket_path
        self._token = token or Token.of_environment()
        self._links: dict[AttachmentId, EngineLink] = {}

    async def attach(self, spec: EngineSpec, on_lost: Callable[[str], None]) -> Attachment:
        attached: list[AttachmentId] = []

        def end(reason: str) -> None:
            for attachment in attached:
                if self._links.pop(attachment, None) is not None:
                    on_lost(reason)

        link = await self._connected(end, ATTACH_SECONDS)
        try:
            body = await link.ask(FrameKind.ATTACH, encode_spec(spec).SerializeToString(), ATTACH_SECONDS)
            attachment = decode_attachment(parse(shard_pb2.Attached, body), str(Path(self._socket_path).parent))
            link.check_open()  # the end may have come together with the answer
        except DeadlineExceeded as error:
            link.close()
            raise Unavailable(f"the shard at {self._socket_path} did not answer within {ATTACH_SECONDS} s") from error
        except BaseException:
            link.close()  # the engine may be attached, and must not stay so
            raise
        self._links[attachment.attachment_id] = link
        attached.append(attachment.attachment_id)
        return attachment

    async def detach(self, attachment: AttachmentId) -> None:
        link = self._links.pop(attachment, None)
        if link is not None:
            try:
                await link.ask(FrameKind.DETACH, b"", CALL_SECONDS)
            finally:
                link.close()

    async def acquire(self, attachment: AttachmentId, request: AcquireRequest) -> AcquireResult:
        seconds = request.timeout_seconds + ACQUIRE_SLACK_SECONDS
        body = await self._ask(attachment, FrameKind.ACQUIRE, encode_acquire(request), seconds)
        return decode_acquired(parse(shard_pb2.AcquireReply, body))

    async def reserve(self, attachment: AttachmentId, count: int, group: int = 0, call: int = 0) -> list[BlockRef]:
        question = shard_pb2.ReserveRequest(count=count, group=group, call=call)
        body = await self._ask(attachment, FrameKind.RESERVE, question, CALL_SECONDS)
        return list(decode_refs(parse(shard_pb2.ReserveReply, body).blocks))

    async def seal(self, attachment: AttachmentId, items: Sequence[SealItem]) -> list[SealStatus]:
        question = shard_pb2.SealRequest(items=[encode_seal_item(item) for item in items])
        body = await self._ask(attachment, FrameKind.SEAL, question, SEAL_SECONDS)
        return decode_sealed(parse(shard_pb2.SealReply, body), len(items))

    async def abort(self, attachment: AttachmentId, refs: Sequence[BlockRef]) -> None:
        await self._ask(attachment, FrameKind.ABORT, shard_pb2.AbortRequest(blocks=encode_refs(refs)), CALL_SECONDS)

    async def release(self, attachment: AttachmentId, lease_ids: Sequence[LeaseId]) -> None:
        await self._ask(attachment, FrameKind.RELEASE, shard_pb2.ReleaseRequest(lease_ids=lease_ids), CALL_SECONDS)

    async def renew(
        self,
        attachment: AttachmentId,
        lease_ids: Sequence[LeaseId],
        reports: Sequence[RequestReport] = (),
        statement: Statement | None = None,
        suspects: Sequence[BlockRef] = (),
    ) -> Removed:
        question = shard_pb2.RenewRequest(
            lease_ids=lease_ids,
            reports=[encode_report(report) for report in reports],
            statement=None if statement is None else encode_statement(statement),
            suspects=encode_refs(suspects),
        )
        body = await self._ask(attachment, FrameKind.RENEW, question, CALL_SECONDS)
        return decode_removed(parse(shard_pb2.RenewReply, body))

    async def open_handoff(self, attachment: AttachmentId, handoff: HandoffId, call: int = 0) -> None:
        question = shard_pb2.OpenHandoffRequest(handoff=handoff, call=call)
        await self._ask(attachment, FrameKind.OPEN_HANDOFF, question, CALL_SECONDS)

    async def close_handoff(self, attachment: AttachmentId, handoff: HandoffId) -> None:
        question = shard_pb2.CloseHandoffRequest(handoff=handoff)
        await self._ask(attachment, FrameKind.CLOSE_HANDOFF, question, CALL_SECONDS)

    async def warm(self, request: WarmRequest) -> WarmResult:
        seconds = request.timeout_seconds + ACQUIRE_SLACK_SECONDS
        link = await self._connected(lambda reason: None, min(seconds, ATTACH_SECONDS))
        try:
            body = await link.ask(FrameKind.WARM, encode_warm(request).SerializeToString(), seconds)
        finally:
            link.close()
        return decode_warmed(parse(shard_pb2.WarmReply, body))

    async def close(self) -> None:
        for attachment in list(self._links):
            try:
                await self.detach(attachment)
            except KVServiceError:  # the shard notices the end of the connection anyway
                log.debug("detach_failed", exc_info=True)

    async def _ask(self, attachment: AttachmentId, kind: FrameKind, question: Message, seconds: float) -> bytes:
        link = self._links.get(attachment)
        if link is None:
            raise NotAttached(f"attachment {attachment} has ended: attach again")
        if link.greeted_as != self._token.metadata():  # its file has another one now
            await self._greet(link, CALL_SECONDS)
        return await link.ask(kind, question.SerializeToString(), seconds)

    async def _connected(self, on_end: Callable[[str], None], seconds: float) -> EngineLink:
        """A new connection, greeted. Raises Unavailable, also when the shard accepts it and says nothing."""
        link = await EngineLink.connect(self._socket_path, on_end)
        try:
            await self._greet(link, seconds)
        except DeadlineExceeded as error:
            link.close()
            raise Unavailable(f"the shard at {self._socket_path} did not answer within {seconds} s") from error
        except BaseException:
            link.close()
            raise
        return link

    async def _greet(self, link: EngineLink, seconds: float) -> None:
        """Say which version this is, and whose engine. Raises what the shard refuses with, such as VersionMismatch."""
        metadata = self._token.metadata()
        authorization = metadata[0][1] if metadata else ""
        hello = shard_pb2.Hello(protocol_version=PROTOCOL_VERSION, authorization=authorization)
        await link.ask(FrameKind.HELLO, hello.SerializeToString(), seconds)
        link.greeted_as = metadata
