"""The shard of this node as an engine sees it: PoolPort over gRPC on a Unix socket.

All coroutines run on the caller's loop. The attach stream shows that both ends live: when it ends, the shard and the
engine (`on_lost`) know at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from kvservice.aio import within
from kvservice.auth.token import Token
from kvservice.core.block.keys import pack_keys
from kvservice.core.explain.records import check_request_id
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
from kvservice.errors import KVServiceError, Unavailable
from kvservice.observe import tracing
from kvservice.units import AttachmentId, BootEpoch, HandoffId, LeaseId
from kvservice.wire.codec import (
    decode_acquired,
    decode_attachment,
    decode_refs,
    decode_removed,
    encode_hints,
    encode_refs,
    encode_seal_item,
    encode_spec,
    encode_statement,
)
from kvservice.wire.explain import encode_report
from kvservice.wire.holding import decode_warmed, encode_warm
from kvservice.wire.serving import CHANNEL_OPTIONS
from kvservice.wire.status import error_from_rpc
from kvservice.wire.v1 import shard_pb2, shard_pb2_grpc

log = logging.getLogger("kvservice.client")

END_OF_STREAM = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the stubs
CALL_SECONDS = 5.0  # calls that the shard answers from memory; without an answer by then the engine goes on without it
SEAL_SECONDS = 30.0  # the shard digests up to thousands of large blocks first
ACQUIRE_SLACK_SECONDS = 0.5  # the shard answers within the request's own timeout; this is for the network
ATTACH_SECONDS = 10.0  # a shard that starts may still be adopting blocks; then attaching fails and is tried again
STREAM_SILENCE_SECONDS = 15.0  # the shard sends a heartbeat every 2 s; after this silence it counts as stopped


class ShardClient:
    """Satisfies pool.port.PoolPort. One instance serves one engine; `attach` may be called again after a loss."""

    def __init__(self, socket_path: str, token: Token | None = None) -> None:
        """`token` is of the engine's tenant; by default the environment's. Raises ConfigError."""
        self._socket_path = socket_path
        self._token = token or Token.of_environment()
        self._channel: grpc.aio.Channel | None = None
        self._epochs: dict[AttachmentId, BootEpoch] = {}
        self._readers: dict[AttachmentId, asyncio.Task[None]] = {}

    async def attach(self, spec: EngineSpec, on_lost: Callable[[str], None]) -> Attachment:
        stream = self._stub().Attach(encode_spec(spec), metadata=self._token.metadata())
        try:
            event = await within(ATTACH_SECONDS, stream.read())
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"attach at {self._socket_path}") from error
        except asyncio.TimeoutError as error:
            stream.cancel()
            raise Unavailable(f"the shard at {self._socket_path} did not answer within {ATTACH_SECONDS} s") from error
        except asyncio.CancelledError:
            stream.cancel()  # the engine may be attached, and must not stay so
            raise
        if event is END_OF_STREAM or not event.HasField("attached"):
            raise Unavailable(f"the shard at {self._socket_path} closed the stream without attaching")
        attachment = decode_attachment(event.attached, str(Path(self._socket_path).parent))
        self._epochs[attachment.attachment_id] = attachment.epoch
        reader = asyncio.ensure_future(self._follow(attachment.attachment_id, stream, on_lost))
        self._readers[attachment.attachment_id] = reader
        return attachment

    async def detach(self, attachment: AttachmentId) -> None:
        reader = self._readers.pop(attachment, None)
        epoch = self._epochs.pop(attachment, BootEpoch(0))
        try:
            await self._unary("Detach", shard_pb2.DetachRequest(attachment_id=attachment, epoch=epoch), CALL_SECONDS)
        finally:
            if reader is not None:
                reader.cancel()

    async def acquire(self, attachment: AttachmentId, request: AcquireRequest) -> AcquireResult:
        message = shard_pb2.AcquireRequest(
            attachment_id=attachment,
            epoch=self._epoch(attachment),
            keys=pack_keys(request.keys),
            skip=request.skip,
            timeout_seconds=request.timeout_seconds,
            recompute_seconds_per_block=request.recompute_seconds_per_block,
            handoff=b"" if request.handoff is None else request.handoff.handoff_id,
            handoff_node="" if request.handoff is None else request.handoff.node_id,
            request_id=check_request_id(request.request_id),
            tail_at=0 if request.tail_at is None else request.tail_at + 1,
            hints=encode_hints(request.hints),
        )
        reply = await self._unary("Acquire", message, request.timeout_seconds + ACQUIRE_SLACK_SECONDS)
        return decode_acquired(reply)

    async def reserve(self, attachment: AttachmentId, count: int, group: int = 0, call: int = 0) -> list[BlockRef]:
        message = shard_pb2.ReserveRequest(
            attachment_id=attachment, epoch=self._epoch(attachment), count=count, group=group, call=call
        )
        reply = await self._unary("Reserve", message, CALL_SECONDS)
        return list(decode_refs(reply.blocks))

    async def seal(self, attachment: AttachmentId, items: Sequence[SealItem]) -> list[SealStatus]:
        message = shard_pb2.SealRequest(
            attachment_id=attachment, epoch=self._epoch(attachment), items=[encode_seal_item(item) for item in items]
        )
        reply = await self._unary("Seal", message, SEAL_SECONDS)
        return [SealStatus(status) for status in reply.statuses]

    async def abort(self, attachment: AttachmentId, refs: Sequence[BlockRef]) -> None:
        message = shard_pb2.AbortRequest(
            attachment_id=attachment, epoch=self._epoch(attachment), blocks=encode_refs(refs)
        )
        await self._unary("Abort", message, CALL_SECONDS)

    async def release(self, attachment: AttachmentId, lease_ids: Sequence[LeaseId]) -> None:
        message = shard_pb2.ReleaseRequest(
            attachment_id=attachment, epoch=self._epoch(attachment), lease_ids=list(lease_ids)
        )
        await self._unary("Release", message, CALL_SECONDS)

    async def renew(
        self,
        attachment: AttachmentId,
        lease_ids: Sequence[LeaseId],
        reports: Sequence[RequestReport] = (),
        statement: Statement | None = None,
    ) -> Removed:
        message = shard_pb2.RenewRequest(
            attachment_id=attachment,
            epoch=self._epoch(attachment),
            lease_ids=list(lease_ids),
            reports=[encode_report(report) for report in reports],
            statement=None if statement is None else encode_statement(statement),
        )
        return decode_removed(await self._unary("Renew", message, CALL_SECONDS))

    async def open_handoff(self, attachment: AttachmentId, handoff: HandoffId, call: int = 0) -> None:
        epoch = self._epoch(attachment)
        message = shard_pb2.OpenHandoffRequest(attachment_id=attachment, epoch=epoch, handoff=handoff, call=call)
        await self._unary("OpenHandoff", message, CALL_SECONDS)

    async def close_handoff(self, attachment: AttachmentId, handoff: HandoffId) -> None:
        epoch = self._epoch(attachment)
        message = shard_pb2.CloseHandoffRequest(attachment_id=attachment, epoch=epoch, handoff=handoff)
        await self._unary("CloseHandoff", message, CALL_SECONDS)

    async def warm(self, request: WarmRequest) -> WarmResult:
        stub, seconds = self._operator_stub(), request.timeout_seconds + ACQUIRE_SLACK_SECONDS
        try:
            metadata = (*self._token.metadata(), *tracing.metadata())
            return decode_warmed(await stub.Warm(encode_warm(request), timeout=seconds, metadata=metadata))
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"Warm at {self._socket_path}") from error

    async def close(self) -> None:
        for attachment in list(self._readers):
            try:
                await self.detach(attachment)
            except KVServiceError:  # the shard notices the end of the stream anyway
                log.debug("detach_failed", exc_info=True)
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close(None)

    async def _follow(self, attachment: AttachmentId, stream: Any, on_lost: Callable[[str], None]) -> None:
        """Read heartbeats until the stream ends, then report that once."""
        reason = "the shard closed the stream"
        try:
            while await within(STREAM_SILENCE_SECONDS, stream.read()) is not END_OF_STREAM:
                pass
        except asyncio.CancelledError:
            stream.cancel()
            raise
        except asyncio.TimeoutError:
            stream.cancel()
            reason = f"no heartbeat from the shard for {STREAM_SILENCE_SECONDS} s"
        except grpc.aio.AioRpcError as error:
            reason = error.details() or str(error.code())
        if self._readers.pop(attachment, None) is not None:
            self._epochs.pop(attachment, None)
            on_lost(reason)

    def _epoch(self, attachment: AttachmentId) -> BootEpoch:
        return self._epochs.get(attachment, BootEpoch(0))

    def _stub(self) -> shard_pb2_grpc.EngineServiceStub:
        return shard_pb2_grpc.EngineServiceStub(self._open_channel())

    def _operator_stub(self) -> shard_pb2_grpc.OperatorServiceStub:
        return shard_pb2_grpc.OperatorServiceStub(self._open_channel())

    def _open_channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"unix:{self._socket_path}", options=CHANNEL_OPTIONS)
        return self._channel

    async def _unary(self, method: str, request: Any, timeout: float) -> Any:
        try:
            metadata = (*self._token.metadata(), *tracing.metadata())
            return await getattr(self._stub(), method)(request, timeout=timeout, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, f"{method} at {self._socket_path}") from error
