"""What became of a request: every shard is asked for its record, and every node what became of the missing blocks.

Needs no Ray. Requests that run are not slowed: shards record by themselves, and keep records for some minutes. A pool
in this process is asked in the same way, without a call.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from kvservice.auth.token import Token
from kvservice.client.members import Members, note_hint
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.keys import KEY_BYTES, KEYS_PER_REQUEST_MAX, unpack_keys
from kvservice.core.explain.diagnosis import BlockHistory, Evidence, RecordedRequest, count_outcomes, diagnose
from kvservice.core.explain.records import Explanation, HistoryEntry, SourceRun
from kvservice.core.messages import EngineKind, MissReason
from kvservice.errors import InvalidRequest, Unauthenticated
from kvservice.units import BlockKey
from kvservice.wire.explain import decode_report, encode_explanation, encode_history
from kvservice.wire.status import error_from_rpc
from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc, shard_pb2, shard_pb2_grpc

CALL_SECONDS = 3.0  # For one RPC. A shard that takes longer is listed as silent, and what it knows is missing.
ASKED_AT_ONCE = 16  # RPCs at once, so that a large service is asked in seconds.
CANDIDATES_MAX = 16  # ids that an answer lists when several fit; more do not help a reader
_ENGINES_PART = re.compile(r"-[0-9a-f]{8}$")

Answers = dict[str, tuple[Any, float]]  # by node or address: its reply, or None, and when it came on time.monotonic()


class Witnesses(Protocol):
    """Who can be asked about a request and its blocks. Every call blocks."""

    def requests(self, request_id: str) -> Answers:
        """An ExplainReply of each node."""

    def histories(self, keys: bytes, age_seconds: float) -> Answers:
        """A BlockHistoryReply of each node."""

    def lost(self, keys: bytes, age_seconds: float) -> Answers:
        """A LostBlocksReply of each lookup partition."""


class ServiceWitnesses:
    """The shards and lookup partitions of a service."""

    def __init__(self, members: Members, token: Token | None = None) -> None:
        """`token` is a tenant's; by default the environment's."""
        self.members = members
        self._token = token or Token.of_environment()

    def requests(self, request_id: str) -> Answers:
        question = shard_pb2.ExplainRequest(request_id=request_id)
        return self._of_shards(lambda stub, token: stub.Explain(question, timeout=CALL_SECONDS, metadata=token))

    def histories(self, keys: bytes, age_seconds: float) -> Answers:
        question = shard_pb2.BlockHistoryRequest(keys=keys, age_seconds=age_seconds)
        return self._of_shards(lambda stub, token: stub.BlockHistory(question, timeout=CALL_SECONDS, metadata=token))

    def lost(self, keys: bytes, age_seconds: float) -> Answers:
        question = lookup_pb2.LostBlocksRequest(keys=keys, age_seconds=age_seconds)
        return self._ask(
            {address: address for address in self.members.lookups},
            lambda channel, _: lookup_pb2_grpc.LookupServiceStub(channel).LostBlocks(question, timeout=CALL_SECONDS),
        )

    def _of_shards(self, call: Callable[[Any, Any], Any]) -> Answers:
        shards = {**self.members.unheard, **self.members.shards}  # a silent one is to be told of
        return self._ask(shards, lambda channel, token: call(shard_pb2_grpc.AdminServiceStub(channel), token))

    def _ask(self, addresses: dict[str, str], call: Callable[[grpc.Channel, Any], Any]) -> Answers:
        """Call every address. Raises Unauthenticated if nobody answers because of the token."""
        refusals: list[str] = []

        def ask(address: str) -> tuple[Any, float]:
            try:
                with self.members.channel(address) as channel:
                    shown = self._token.metadata_for(address, encrypted=self.members.tls is not None)
                    return call(channel, shown), time.monotonic()
            except grpc.RpcError as error:
                refusal = error_from_rpc(error, f"explain at {address}")
                if isinstance(refusal, Unauthenticated):
                    refusals.append(refusal.message)
                note_hint(self.members.hints, address, error)
                return None, time.monotonic()

        names = sorted(addresses)
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            found = dict(zip(names, pool.map(ask, [addresses[name] for name in names]), strict=True))
        if refusals and len(refusals) == len(names):
            raise Unauthenticated(refusals[0])
        return found


class RememberingPool(Protocol):
    """A pool in this process, as PoolRuntime is one. Called on its own event loop only."""

    def explain(
        self, request_id: str, account: str | None = None
    ) -> tuple[Explanation, tuple[EngineKind, ...], float]: ...

    def block_history(
        self, keys: tuple[BlockKey, ...], age_seconds: float
    ) -> tuple[tuple[HistoryEntry, ...], float]: ...


class PoolWitness:
    """A pool in this process, and nobody else."""

    def __init__(self, pool: RememberingPool, node: str) -> None:
        self._pool = pool
        self._node = node

    def requests(self, request_id: str) -> Answers:
        found, kinds, now = self._pool.explain(request_id)
        host = socket.gethostname()
        return self._said(encode_explanation(found, kinds, self._node, host, now))

    def histories(self, keys: bytes, age_seconds: float) -> Answers:
        entries, now = self._pool.block_history(unpack_keys(keys), age_seconds)
        return self._said(encode_history(entries, now))

    def lost(self, keys: bytes, age_seconds: float) -> Answers:
        return {}

    def _said(self, reply: Any) -> Answers:
        return {self._node: (reply, time.monotonic())}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Engines of a node that share blocks."""

    node: str
    model: str
    fingerprint: Fingerprint


@dataclass(slots=True)
class ShardAnswers:
    """What the shards answered about an id."""

    replies: dict[str, Any]  # ExplainReply by node
    heard_at: dict[str, float]  # when each answer came, on this machine's monotonic clock
    silent: list[str]
    models: list[ServedModel]  # of all nodes
    unreadable: list[str]  # what is left out of `models`, and why

    @classmethod
    def of(cls, found: Answers) -> ShardAnswers:
        answered = {node: reply for node, (reply, _) in found.items() if reply is not None}
        silent = sorted(node for node in found if node not in answered)
        models: list[ServedModel] = []
        unreadable: list[str] = []
        for node, row in ((node, row) for node, reply in sorted(answered.items()) for row in reply.models):
            try:
                fingerprint = Fingerprint.of({field.name: field.value for field in row.fingerprint.fields})
            except InvalidRequest as error:
                unreadable.append(f"engines of {row.model} at node {node}: {error.message}")
            else:
                models.append(ServedModel(node, row.model, fingerprint))
        return cls(answered, {node: at for node, (_, at) in found.items()}, silent, models, unreadable)

    def records(self) -> list[tuple[str, Any]]:
        return [(node, record) for node, reply in sorted(self.replies.items()) for record in reply.records]

    @property
    def keep_seconds(self) -> float:
        return max((reply.keep_seconds for reply in self.replies.values()), default=0.0)


def explain(witnesses: Witnesses, request_id: str) -> dict[str, Any]:
    """What became of a request and of each of its blocks, with stable keys. Blocks for the witnesses' calls. Raises
    Unauthenticated."""
    answers = ShardAnswers.of(witnesses.requests(request_id))
    records = answers.records()
    ids, chosen = choose([record.request_id for _, record in records], request_id)
    records = [(node, record) for node, record in records if record.request_id in chosen]
    requests: list[dict[str, Any]] = []
    if len(ids) == 1:
        requests = [_explain_record(witnesses, answers, node, record) for node, record in records]
        requests.sort(key=lambda row: -row["age_seconds"])
    return {
        "asked_for": request_id,
        "request_id": ids[0] if len(ids) == 1 else None,
        "candidates": ids[:CANDIDATES_MAX] if len(ids) > 1 else [],
        "requests": requests,
        "hosts": {node: reply.host for node, reply in sorted(answers.replies.items())},
        "keep_seconds": answers.keep_seconds,
        "refused_engines": [
            {
                "node": node,
                "model": row.model,
                "namespace": row.namespace,
                "age_seconds": round(row.age_seconds, 1),
                "message": row.message,
            }
            for node, reply in sorted(answers.replies.items())
            for row in reply.refused
        ],
        "silent_nodes": answers.silent,
        "unreadable": answers.unreadable,
    }


def choose(found: Sequence[str], wanted: str) -> tuple[list[str], set[str]]:
    """The requests that are meant, and the engines' ids of them. vLLM adds a random part to the id of a request in each
    engine that works on it, so ids that differ only in that part are one request."""
    if wanted in found:
        return [wanted], {wanted}
    requests: dict[str, set[str]] = {}
    for one in found:
        requests.setdefault(_ENGINES_PART.sub("", one), set()).add(one)
    if wanted in requests:
        requests = {wanted: requests[wanted]}
    names = sorted(next(iter(ids)) if len(ids) == 1 else name for name, ids in requests.items())
    return names, {one for ids in requests.values() for one in ids}


def _explain_record(witnesses: Witnesses, answers: ShardAnswers, node: str, record: Any) -> dict[str, Any]:
    request = _recorded_request(node, record)
    missing = list(range(min(request.skip + request.promised, request.block_count), request.block_count))
    evidence = _gather_evidence(witnesses, answers, node, record, missing)
    diagnoses = diagnose(request, evidence)
    report = request.report
    return {
        "node": node,
        "model": record.model,
        "namespace": record.namespace,
        "age_seconds": round(record.age_seconds, 3),
        "took_seconds": round(record.took_seconds, 6),
        "answered": record.answered,
        "handoff_node": request.handoff_node or None,
        "blocks": count_outcomes(diagnoses),
        "blocks_asked": request.block_count,
        "finished": report is not None,
        "report": None
        if report is None
        else {
            "prompt_blocks": report.prompt_blocks,
            "engine_blocks": report.engine_blocks,
            "loaded_blocks": report.loaded_blocks,
            "computed_blocks": report.computed_blocks,
            "load_failed": report.load_failed,
            "gave_up": report.gave_up,
            "asked": report.asked,
        },
        "diagnosis": [
            {
                "start": one.start,
                "count": one.count,
                "outcome": one.outcome.value,
                "node": one.node,
                "miss_cause": None if one.miss_cause is None else one.miss_cause.value,
                "text": one.text,
                "eviction_cause": one.eviction_cause or None,
            }
            for one in diagnoses
        ],
    }


def _recorded_request(node: str, record: Any) -> RecordedRequest:
    report = decode_report(record.report) if record.HasField("report") else None
    blocks = len(record.keys) // KEY_BYTES
    if not blocks and report is not None:
        blocks = min(report.prompt_blocks, KEYS_PER_REQUEST_MAX)  # the request never asked the shard
    try:
        miss = MissReason(record.miss)
    except ValueError:
        miss = MissReason.NEVER_STORED  # a reason of a newer shard
    runs = tuple(SourceRun(run.start, run.count, run.source) for run in record.runs)
    return RecordedRequest(
        node,
        record.age_seconds,
        blocks,
        record.skip,
        record.promised,
        runs,
        miss,
        record.miss_node,
        record.answered,
        report,
        record.found_until,
        record.engine,
        record.ended_age_seconds if record.HasField("ended_age_seconds") else None,
        record.took_seconds,
        record.handoff_node,
        record.handed_from,
    )


def _gather_evidence(
    witnesses: Witnesses, answers: ShardAnswers, node: str, record: Any, missing: Sequence[int]
) -> Evidence:
    """Ask every shard, and the directory, about the blocks that were missed. Blocks."""
    packed = record.keys[missing[0] * KEY_BYTES :] if missing else b""
    asked_at = answers.heard_at[node]  # ages in later answers are counted from when the record's age was told
    entries: dict[int, list[BlockHistory]] = {}
    lost: dict[int, BlockHistory] = {}
    if packed:
        age = record.age_seconds + time.monotonic() - asked_at  # the record's age when this question is asked
        for name, row, at in _rows(witnesses.histories(packed, age), "entries"):
            entry = BlockHistory(
                name,
                row.state,
                row.age_seconds - (at - asked_at),
                row.cause,
                row.caused_by,
                row.engine,
                row.held_seconds,
                row.idle_seconds,
                row.reason,
            )
            entries.setdefault(missing[0] + row.index, []).append(entry)
        for _, row, at in _rows(witnesses.lost(packed, age), "lost"):
            age_then = row.age_seconds - (at - asked_at)
            lost[missing[0] + row.index] = BlockHistory(row.node_id, "gone", age_then, row.cause)
    return Evidence(entries, lost, _other_fingerprints(answers, record))


def _rows(found: Answers, field: str) -> Iterable[tuple[str, Any, float]]:
    for name, (reply, at) in found.items():
        for row in getattr(reply, field) if reply is not None else ():
            yield name, row, at


def _other_fingerprints(answers: ShardAnswers, record: Any) -> tuple[str, ...]:
    """Nodes that serve the same model under another fingerprint, each with the difference."""
    mine = next((one.fingerprint for one in answers.models if one.fingerprint.digest.hex() == record.fingerprint), None)
    if mine is None:
        return ()
    return tuple(
        f"node {one.node} serves {one.model} with another one: {one.fingerprint.difference(mine)}"
        for one in answers.models
        if one.model == record.model and one.fingerprint != mine
    )
