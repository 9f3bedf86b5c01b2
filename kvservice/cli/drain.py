"""`kvservice drain`: makes shards leave the service, hands over their hottest blocks first, and shows the progress.
Needs no Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import typer

from kvservice.cli.exits import say_wrong
from kvservice.cli.output import Format, write
from kvservice.cli.progress import Progress
from kvservice.errors import ConfigError, Forbidden, NoService, Unauthenticated
from kvservice.units import counted, format_bytes, printable

POLL_SECONDS = 0.2  # Between two questions for the progress that is shown.
# For one RPC. A drain answers at once; without an answer the shard is asked again until its time is over.
CALL_SECONDS = 3.0
SLACK_SECONDS = 10.0  # A drain that still answers this long after its time counts as failed.
ENDING = ("settling", "gone")
GONE = (
    "nobody listens at its address. Its process has ended, and nothing is left to drain; or this machine does not "
    "reach it. `kvservice doctor`, on its machine, says which"
)
HANGS = (
    f"its shard did not answer within {CALL_SECONDS:g} s: it hangs, or this machine does not reach it. Try again; on "
    "its machine, `kvservice logs` may say why"
)


@dataclass(slots=True)
class Drained:
    """One shard that leaves."""

    node: str
    channel: Callable[[], grpc.Channel]  # makes a new channel to its shard
    phase: str = ""
    progress: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    done: bool = False


def run(
    service: str | None,
    lookup: Sequence[str] | None,
    node: str | None,
    local: bool,
    timeout: float,
    handover: bool,
    undo: bool,
    form: Format = Format.TABLE,
) -> bool:
    """Drain the shards, or with `undo` keep them. Blocks. Returns whether every named shard left (or stays). Raises
    ConfigError if `node` names no node or several, NoService if there is no service, Forbidden or Unauthenticated if a
    shard refuses the certificate or token."""
    chosen = _choose(service, lookup, node, local)
    if undo:
        return _undo(chosen, form)
    with Progress("draining") as progress:
        deadline = time.monotonic() + timeout + SLACK_SECONDS
        while not all(one.done for one in chosen):
            for one in [one for one in chosen if not one.done]:
                _ask(one, timeout, handover)
                if time.monotonic() > deadline and not one.done:
                    one.done, one.error = True, f"it is still {one.phase} after {timeout + SLACK_SECONDS:.0f} s"
            progress.update("; ".join(_progress_line(one) for one in chosen), *_blocks_safe(chosen))
            if not all(one.done for one in chosen):
                time.sleep(POLL_SECONDS)
    _write(chosen, form)
    for one in chosen:
        _say(_result_line(one, handover), is_wrong=bool(one.error))
    return not any(one.error for one in chosen)


def _write(chosen: list[Drained], form: Format) -> None:
    """For programs; people are told on stderr."""
    if not form.is_for_people:
        write(
            chosen, lambda *_: "", form, lambda all_: [{"node": o.node, "error": o.error, **o.progress} for o in all_]
        )


def _blocks_safe(chosen: list[Drained]) -> tuple[float, float | None]:
    """How many blocks have another node by now, and of how many; None while that is not known."""
    known = [one.progress for one in chosen if one.progress]
    safe = sum(each["blocks_handed"] + each["blocks_elsewhere"] for each in known)
    return safe, sum(each["blocks_total"] for each in known) or None


def _choose(service: str | None, lookup: Sequence[str] | None, node: str | None, local: bool) -> list[Drained]:
    from kvservice.client.members import find_members

    if (node is None) == (not local):
        raise ConfigError("name the shards that leave: either --node NODE, or --local for those of this machine")
    members = find_members(service, lookup)
    if local:
        if not members.local:
            raise NoService(f"no shard of service {members.service!r} runs on this machine")
        return [Drained(name, partial(members.channel, members.shards[name])) for name in members.local]
    matching = [name for name in sorted(members.shards) if name == node] or [
        name for name in sorted(members.shards) if name.startswith(node or "")
    ]
    if len(matching) != 1:
        known = ", ".join(sorted(members.shards)) or "none"
        what = "is no live node" if not matching else "could be several nodes"
        raise ConfigError(f"{node!r} {what} of service {members.service!r}; there are: {known}")
    return [Drained(matching[0], partial(members.channel, members.shards[matching[0]]))]


def _ask(one: Drained, timeout: float, handover: bool) -> None:
    from kvservice.core.drain.sender import DrainPhase
    from kvservice.wire.leaving import decode_progress
    from kvservice.wire.v1 import shard_pb2, shard_pb2_grpc

    request = shard_pb2.DrainRequest(timeout_seconds=timeout, handover=handover, exit=True)
    try:
        with one.channel() as channel:
            reply = shard_pb2_grpc.AdminServiceStub(channel).Drain(request, timeout=CALL_SECONDS)
    except grpc.RpcError as error:
        _failed(one, error)
        return
    progress = decode_progress(reply)
    one.phase = progress.phase.value
    one.progress = {
        "phase": one.phase,
        "seconds": round(progress.seconds, 3),
        "blocks_total": progress.blocks_total,
        "blocks_handed": progress.blocks_handed,
        "blocks_elsewhere": progress.blocks_elsewhere,
        "blocks_lost": max(progress.blocks_lost, 0),
        "bytes_handed": progress.bytes_handed,
        "receivers": dict(progress.receivers),
        "leases": progress.leases,
        "note": progress.note,
    }
    one.done = progress.phase is DrainPhase.GONE


def _failed(one: Drained, error: grpc.RpcError) -> None:
    from kvservice.wire.status import connect_hint, error_from_rpc

    refused = error_from_rpc(error, f"node {one.node}")
    if isinstance(refused, Forbidden | Unauthenticated):  # by one shard as by all
        raise refused
    code = getattr(error, "code", lambda: None)()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and one.phase:
        return  # the shard is busy, and is asked again until the time is over
    one.done = True
    if one.phase in ENDING:  # it ended between two questions, as it should
        one.progress["phase"] = "gone"
        return
    details = getattr(error, "details", lambda: None)() or "no answer"
    silent: dict[Any, str] = {grpc.StatusCode.UNAVAILABLE: GONE, grpc.StatusCode.DEADLINE_EXCEEDED: HANGS}
    details = connect_hint(details) or silent.get(code) or str(details)
    one.error = f"its shard ended during the drain ({one.phase})" if one.phase else details


def _undo(chosen: list[Drained], form: Format) -> bool:
    from kvservice.wire.v1 import shard_pb2, shard_pb2_grpc

    for one in chosen:
        try:
            with one.channel() as channel:
                stub = shard_pb2_grpc.AdminServiceStub(channel)
                reply = stub.Drain(shard_pb2.DrainRequest(undo=True), timeout=CALL_SECONDS)
            one.phase = reply.phase
            one.progress = {"phase": one.phase}
        except grpc.RpcError as error:
            _failed(one, error)
        stays = one.phase == "serving"
        what = "serves again" if stays else f"cannot stay: {one.error or one.phase}"
        _say(f"node {one.node} {what}", is_wrong=not stays)
    _write(chosen, form)
    return all(one.phase == "serving" for one in chosen)


def _say(line: str, *, is_wrong: bool) -> None:
    """Print it to stderr. It has words of other processes, which are no markup."""
    line = printable(line)
    if is_wrong:
        say_wrong(line)
    else:
        typer.echo(line, err=True)


def _progress_line(one: Drained) -> str:
    if not one.progress:
        return f"{one.node}: {one.error or 'asking'}"
    done = one.progress["blocks_handed"] + one.progress["blocks_elsewhere"]
    total = counted(one.progress["blocks_total"], "block")
    return f"{one.node}: {one.phase.replace('_', ' ')}, {done:,} of {total} safe"


def _result_line(one: Drained, handover: bool) -> str:
    if one.error:
        return f"node {one.node} did not leave: {one.error}"
    progress = one.progress
    if not progress["blocks_total"]:
        return f"node {one.node} left; it held no blocks"
    left = f"node {one.node} left after {progress['seconds']:.1f} s."
    note = f" ({progress['note']})" if progress["note"] else ""
    if not handover:  # nobody was asked who else has them
        return f"{left} Not handed over: {counted(progress['blocks_total'], 'block')}{note}"
    receivers = ", ".join(f"{node}: {count:,}" for node, count in progress["receivers"].items())
    parts = [
        f"{progress['blocks_handed']:,} handed over ({format_bytes(progress['bytes_handed'])}"
        + (f"; {receivers})" if receivers else ")")
    ]
    parts.append(f"{progress['blocks_elsewhere']:,} were on other nodes already")
    parts.append(f"{progress['blocks_lost']:,} on no other node")
    return f"{left} Of {counted(progress['blocks_total'], 'block')}: " + ", ".join(parts) + note


def check_timeout(seconds: float) -> float:
    """The same number. Raises ConfigError if it is out of range for a drain."""
    from kvservice.core.drain.sender import DRAIN_SECONDS_MAX

    if not 0 < seconds <= DRAIN_SECONDS_MAX:
        raise ConfigError(f"give a drain more than 0 and at most {DRAIN_SECONDS_MAX:.0f} seconds, not {seconds}")
    return seconds
