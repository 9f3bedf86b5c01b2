"""`kvservice explain REQUEST_ID`: asks every shard for the request, and every node what became of its missing blocks.

Needs no Ray. Requests that run are not slowed: shards record by themselves, and keep records for some minutes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvservice.cli.output import Format, show
from kvservice.cli.status import plain
from kvservice.errors import Unauthenticated

CALL_SECONDS = 3.0  # For one RPC. A shard that takes longer is listed as silent, and what it knows is missing.
ASKED_AT_ONCE = 16  # RPCs at once, so that a large service is asked in seconds.
KEY_BYTES = 16  # of a block's key, as kvservice.core.block.keys has it
LISTED_MAX = 16  # Items that one line lists; then it ends with the number of the others. More do not help a reader.
_ENGINES_PART = re.compile(r"-[0-9a-f]{8}$")
COLOURS = {"engine": "green", "local": "green", "fetched": "cyan", "missed": "yellow"}


@dataclass(slots=True)
class ShardAnswers:
    """What the shards answered about an id."""

    replies: dict[str, Any]  # ExplainReply by node
    heard_at: dict[str, float]  # when each answer came, on this machine's monotonic clock
    silent: list[str]

    def records(self) -> list[tuple[str, Any]]:
        return [(node, record) for node, reply in sorted(self.replies.items()) for record in reply.records]

    @property
    def keep_seconds(self) -> float:
        return max((reply.keep_seconds for reply in self.replies.values()), default=0.0)


def run(service: str | None, lookup: Sequence[str] | None, request_id: str, form: Format) -> bool:
    """Print the diagnosis; blocks for RPCs. Returns False if the request is unknown, or if several begin with the id.
    Raises NoService."""
    state = show(lambda: explain(service, request_id, lookup), lambda state, _: draw(state), form)
    return bool(state["requests"])


def explain(service: str | None, request_id: str, lookup: Sequence[str] | None = None) -> dict[str, Any]:
    """Everything that `draw` shows, with stable keys. Blocks for RPCs. Raises NoService."""
    from kvservice.cli.members import find_members

    members = find_members(service, lookup)
    answers = _ask_shards(members, request_id)
    records = answers.records()
    ids, chosen = choose([record.request_id for _, record in records], request_id)
    records = [(node, record) for node, record in records if record.request_id in chosen]
    requests: list[dict[str, Any]] = []
    if len(ids) == 1:
        requests = [_explain_record(members, answers, node, record) for node, record in records]
        requests.sort(key=lambda row: -row["age_seconds"])
    return {
        "asked_for": request_id,
        "request_id": ids[0] if len(ids) == 1 else None,
        "candidates": ids[:LISTED_MAX] if len(ids) > 1 else [],
        "requests": requests,
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
        "silent_nodes": sorted(answers.silent),
        "silent_lookups": list(members.silent),
        "hints": sorted(set(members.hints.values())),
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


def _ask_shards(members: Any, request_id: str) -> ShardAnswers:
    from kvservice.wire.v1 import shard_pb2, shard_pb2_grpc

    request = shard_pb2.ExplainRequest(request_id=request_id)
    found = _ask_all(
        members,
        members.shards,
        lambda channel, token: shard_pb2_grpc.AdminServiceStub(channel).Explain(
            request, timeout=CALL_SECONDS, metadata=token
        ),
    )
    answered = {node: reply for node, (reply, _) in found.items() if reply is not None}
    silent = [node for node in found if node not in answered]
    return ShardAnswers(answered, {node: at for node, (_, at) in found.items()}, silent)


def _ask_all(
    members: Any, addresses: dict[str, str], call: Callable[[grpc.Channel, Any], Any]
) -> dict[str, tuple[Any, float]]:
    """Call every address. Returns each answer, or None, and when it came. `call` gets the tenant's token as metadata.
    Raises Unauthenticated if nobody answers because of the token."""
    from kvservice.auth.token import Token
    from kvservice.cli.members import note_hint
    from kvservice.wire.status import error_from_rpc

    token = Token.of_environment()
    refusals: list[str] = []

    def ask(address: str) -> tuple[Any, float]:
        try:
            with members.channel(address) as channel:
                shown = token.metadata_for(address, encrypted=members.tls is not None)
                return call(channel, shown), time.monotonic()
        except grpc.RpcError as error:
            refusal = error_from_rpc(error, f"explain at {address}")
            if isinstance(refusal, Unauthenticated):
                refusals.append(refusal.message)
            note_hint(members.hints, address, error)
            return None, time.monotonic()

    names = sorted(addresses)
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        found = dict(zip(names, pool.map(ask, [addresses[name] for name in names]), strict=True))
    if refusals and len(refusals) == len(names):
        raise Unauthenticated(refusals[0])
    return found


def _explain_record(members: Any, answers: ShardAnswers, node: str, record: Any) -> dict[str, Any]:
    from kvservice.core.explain.diagnosis import count_outcomes, diagnose

    request = _recorded_request(node, record)
    missing = list(range(min(request.skip + request.promised, request.block_count), request.block_count))
    evidence = _gather_evidence(members, answers, node, record, missing)
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


def _recorded_request(node: str, record: Any) -> Any:
    from kvservice.core.explain.diagnosis import RecordedRequest
    from kvservice.core.explain.records import SourceRun
    from kvservice.core.messages import MissReason
    from kvservice.wire.explain import decode_report

    report = decode_report(record.report) if record.HasField("report") else None
    blocks = len(record.keys) // KEY_BYTES
    if not blocks and report is not None:
        blocks = report.prompt_blocks  # the request never asked the shard
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


def _gather_evidence(members: Any, answers: ShardAnswers, node: str, record: Any, missing: Sequence[int]) -> Any:
    """Ask every shard, and the directory, about the blocks that were missed. Blocks."""
    from kvservice.core.explain.diagnosis import BlockHistory, Evidence
    from kvservice.wire.v1 import lookup_pb2, lookup_pb2_grpc, shard_pb2, shard_pb2_grpc

    packed = record.keys[missing[0] * KEY_BYTES :] if missing else b""
    asked_at = answers.heard_at[node]  # ages in later answers are counted from when the record's age was told
    entries: dict[int, list[BlockHistory]] = {}
    lost: dict[int, BlockHistory] = {}
    if packed:
        age = record.age_seconds + time.monotonic() - asked_at  # the record's age when this question is asked
        question = shard_pb2.BlockHistoryRequest(keys=packed, age_seconds=age)
        found = _ask_all(
            members,
            members.shards,
            lambda channel, shown: shard_pb2_grpc.AdminServiceStub(channel).BlockHistory(
                question, timeout=CALL_SECONDS, metadata=shown
            ),
        )
        for name, (reply, at) in found.items():
            for row in reply.entries if reply is not None else ():
                entry = BlockHistory(
                    name,
                    row.state,
                    row.age_seconds - (at - asked_at),
                    row.cause,
                    row.caused_by,
                    row.engine,
                    row.held_seconds,
                    row.idle_seconds,
                )
                entries.setdefault(missing[0] + row.index, []).append(entry)
        ask_lost = lookup_pb2.LostBlocksRequest(keys=packed, age_seconds=age)
        directories = {address: address for address in members.lookups}
        found = _ask_all(
            members,
            directories,
            lambda channel, _: lookup_pb2_grpc.LookupServiceStub(channel).LostBlocks(ask_lost, timeout=CALL_SECONDS),
        )
        for reply, at in found.values():
            for row in reply.lost if reply is not None else ():
                age = row.age_seconds - (at - asked_at)
                lost[missing[0] + row.index] = BlockHistory(row.node_id, "gone", age, row.cause)
    return Evidence(entries, lost, _other_fingerprints(answers, node, record))


def _other_fingerprints(answers: ShardAnswers, node: str, record: Any) -> tuple[str, ...]:
    """Nodes that serve the same model under another fingerprint, each with the difference."""
    from kvservice.core.block.fingerprint import Fingerprint

    def of(row: Any) -> Fingerprint:
        return Fingerprint.of({field.name: field.value for field in row.fingerprint.fields})

    models = [(name, row, of(row)) for name, reply in sorted(answers.replies.items()) for row in reply.models]
    mine = next((print_ for _, _, print_ in models if print_.digest.hex() == record.fingerprint), None)
    found = [
        f"node {name} serves {row.model} with another one: {print_.difference(mine)}"
        for name, row, print_ in models
        if row.model == record.model and mine is not None and print_ != mine
    ]
    return tuple(found)


def draw(state: dict[str, Any]) -> RenderableType:
    parts: list[RenderableType] = []
    for row in state["requests"]:
        parts += _draw_record(state["request_id"], row)
    lines: list[str] = []
    if state["candidates"]:
        lines.append(f"several requests begin with {plain(repr(state['asked_for']))}; give more of the id:")
        lines += [f"  {plain(candidate)}" for candidate in state["candidates"]]
    elif not state["requests"]:
        minutes = state["keep_seconds"] / 60
        lines.append(
            f"no shard remembers a request {plain(repr(state['asked_for']))}. A node keeps records for "
            f"{minutes:.0f} minutes, and at most the latest 4096. A request is recorded when it asks for its prefix. "
            "Give the engine's id: the one that the API returned, or its beginning."
        )
        lines += [
            f"[yellow]an engine of {plain(refused['model'])} was refused at node {plain(refused['node'])} "
            f"{refused['age_seconds']:.0f} s ago, and serves without the cache:[/] {plain(refused['message'])}"
            for refused in state["refused_engines"]
        ]
    for node in state["silent_nodes"]:
        lines.append(f"[red]node {plain(node)} did not answer, so what it knows is missing here[/]")
    lines += [f"[red]lookup partition {plain(address)} did not answer[/]" for address in state["silent_lookups"]]
    lines += [f"→ {plain(hint)}" for hint in state["hints"]]
    return Group(*parts, *(Text.from_markup(line) for line in lines))


def _draw_record(request_id: str, row: dict[str, Any]) -> list[RenderableType]:
    blocks = row["blocks"]
    waited = f" (it waited for a hand-off from node {plain(row['handoff_node'])})" if row["handoff_node"] else ""
    took = f", answered after {row['took_seconds'] * 1000:.1f} ms{waited}" if row["answered"] else ", never answered"
    table = Table()
    for column in ("blocks", "", "from", "why"):
        table.add_column(column, overflow="fold")
    for one in row["diagnosis"]:
        last = one["start"] + one["count"] - 1
        span = f"{one['start']}" if last == one["start"] else f"{one['start']}-{last}"
        outcome = f"[{COLOURS[one['outcome']]}]{one['outcome']}[/]"
        why = one["text"] if one["miss_cause"] is None else f"{one['miss_cause'].replace('_', ' ')}: {one['text']}"
        table.add_row(f"{span} ({one['count']})", outcome, plain(one["node"]), plain(why))
    head = (
        f"{plain(request_id)}\non node {plain(row['node'])}, model {plain(row['model'])}, "
        f"{row['age_seconds']:.1f} s ago{took}"
    )
    end = "" if row["finished"] else "; it has not ended yet, or its engine has not reported the end"
    foot = (
        f"{row['blocks_asked']} blocks asked: {blocks['engine']} in the engine, {blocks['local']} local, "
        f"{blocks['fetched']} fetched, {blocks['missed']} recomputed{end}"
    )
    return [Text.from_markup(head), table, Text.from_markup(foot)]
