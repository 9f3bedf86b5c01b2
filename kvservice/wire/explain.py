"""Records of requests, and the history of blocks <-> protobuf messages. Times travel as ages, because clocks differ.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvservice.core.explain.records import (
    KEEP_SECONDS,
    Explanation,
    HistoryEntry,
    RequestRecord,
    check_request_id,
    name_engine,
)
from kvservice.core.messages import EngineKind, RequestReport
from kvservice.wire.codec import encode_fingerprint
from kvservice.wire.figures import encode_refused
from kvservice.wire.v1 import shard_pb2

REPORTS_MAX = 4096  # reports taken from one heartbeat; an engine sends at most 1024, and the rest is left out


def encode_report(report: RequestReport) -> shard_pb2.RequestReport:
    return shard_pb2.RequestReport(
        request_id=check_request_id(report.request_id),
        prompt_blocks=report.prompt_blocks,
        engine_blocks=report.engine_blocks,
        loaded_blocks=report.loaded_blocks,
        computed_blocks=report.computed_blocks,
        load_failed=report.load_failed,
        gave_up=report.gave_up,
        asked=report.asked,
        salted=report.salted,
    )


def decode_report(message: shard_pb2.RequestReport) -> RequestReport:
    return RequestReport(
        check_request_id(message.request_id),
        message.prompt_blocks,
        message.engine_blocks,
        message.loaded_blocks,
        message.computed_blocks,
        message.load_failed,
        message.gave_up,
        message.asked,
        message.salted,
    )


def decode_reports(messages: Sequence[shard_pb2.RequestReport]) -> tuple[RequestReport, ...]:
    """The first REPORTS_MAX reports. The rest is left out, not refused: reports are for people, and no call may fail
    because of them.
    """
    return tuple(decode_report(message) for message in messages[:REPORTS_MAX])


def encode_explanation(
    found: Explanation,
    kinds: Iterable[EngineKind],
    node_id: str,
    host: str,
    now: float,
) -> shard_pb2.ExplainReply:
    """`kinds` are those of the attached engines."""
    return shard_pb2.ExplainReply(
        records=[_encode_record(record, now) for record in found.records],
        matching=found.matching,
        remembered=found.remembered,
        keep_seconds=KEEP_SECONDS,
        refused=[encode_refused(refused, now) for refused in found.refused],
        models=[
            shard_pb2.AttachedModel(
                model=kind.model,
                namespace=kind.namespace,
                fingerprint=encode_fingerprint(kind.fingerprint),
                engines=kind.attached,
            )
            for kind in kinds
        ],
        node_id=node_id,
        host=host,
    )


def _encode_record(record: RequestRecord, now: float) -> shard_pb2.RequestRecord:
    answered = record.answered_at
    return shard_pb2.RequestRecord(
        request_id=record.request_id,
        model=record.spec.model,
        namespace=record.spec.namespace,
        fingerprint=record.spec.fingerprint.digest.hex(),
        age_seconds=now - record.asked_at,
        took_seconds=0.0 if answered is None else answered - record.asked_at,
        answered=answered is not None,
        keys=record.keys,
        skip=record.skip,
        promised=record.promised,
        runs=[shard_pb2.SourceRun(start=run.start, count=run.count, source=run.source) for run in record.runs],
        miss=record.miss.value,
        miss_at=record.miss_at,
        miss_node=record.miss_node,
        found_until=record.found_until,
        report=None if record.report is None else encode_report(record.report),
        engine=name_engine(record.spec.engine_id),
        ended_age_seconds=None if record.reported_at is None else now - record.reported_at,
        handoff_node=record.handoff_node,
        handed_from=record.handed_from,
    )


def encode_history(entries: Iterable[HistoryEntry], now: float) -> shard_pb2.BlockHistoryReply:
    return shard_pb2.BlockHistoryReply(
        entries=[
            shard_pb2.HistoryEntry(
                index=entry.index,
                state=entry.state,
                age_seconds=now - entry.at,
                cause=entry.cause,
                caused_by=entry.caused_by,
                engine=entry.engine,
                held_seconds=entry.held_seconds,
                idle_seconds=entry.idle_seconds,
                reason=entry.reason,
            )
            for entry in entries
        ]
    )
