"""`kvservice clear`: forgets blocks in every tier on every node, and says whom it could not reach."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from kvservice.cli.drawing import plain, problem_line, table
from kvservice.cli.hold import NAMES_PROMPTS, answers
from kvservice.cli.output import Format, write
from kvservice.cli.progress import Progress
from kvservice.cli.status import collect
from kvservice.errors import ConfigError, Forbidden, InvalidRequest, KVServiceError, NoService, Unauthenticated
from kvservice.units import counted, format_bytes, printable

if TYPE_CHECKING:
    from kvservice.client.members import Members
    from kvservice.client.operator import OperatorClient
    from kvservice.client.overview import Overview
    from kvservice.core.block.marks import Mark
    from kvservice.core.messages import EngineKind
    from kvservice.serve.prompt import Question
    from kvservice.units import BlockKey

POLL_SECONDS = 1.0  # between two rounds of --wait
OTHER_NAMES = (
    "Blocks of these prompts that were computed with an adapter or images, or behind a change of weights in place, "
    "have other names and stay: --model clears them, too."
)


@dataclass(frozen=True, slots=True)
class Scope:
    """What is cleared: exactly one of these, but for a prompt, which also has a model."""

    everything: bool = False
    namespace: str | None = None
    tenant: str = ""
    model: str = ""
    prompt: Path | None = None
    tokenizer: str = ""


@dataclass(frozen=True, slots=True)
class ClearedNode:
    node: str
    blocks: int = 0
    bytes: int = 0
    reading: int = 0  # cleared blocks that somebody still reads
    tier_blocks: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class ClearReport:
    nodes: tuple[ClearedNode, ...]
    problems: tuple[str, ...]
    complete: bool
    note: str = ""  # what it may have missed


def run(
    service: str | None, lookup: Sequence[str] | None, wanted: Scope, wait: float, form: Format = Format.TABLE
) -> bool:
    """Clear, and print what went. Blocks, with `wait` until all is done or the time is over. Returns whether it is.

    Raises ConfigError for a scope that says nothing or too much, NoService, Forbidden, Unauthenticated."""
    kinds = (wanted.everything, wanted.namespace is not None, bool(wanted.tenant), wanted.prompt is not None)
    if sum(kinds) + (bool(wanted.model) and wanted.prompt is None) != 1:
        raise ConfigError("say what to clear: one of --everything, --namespace, --tenant, --model and --prompt")
    if wanted.prompt is not None and not wanted.model:
        raise ConfigError("name the --model that the prompts are for", key="model")
    if wanted.tenant:
        _check_tenants(wanted.tenant, service, lookup)
    report, found_blocks = asyncio.run(_clear(service, lookup, wanted, wait))
    if wanted.prompt is not None:
        report = replace(report, note=OTHER_NAMES)
    elif report.complete and not found_blocks and not wanted.everything:
        report = replace(report, note=doubt(wanted, collect(service, lookup)))
    write(report, lambda found, _: draw(found), form)
    return report.complete


def _check_tenants(name: str, service: str | None, lookup: Sequence[str] | None) -> None:
    """Raises ConfigError in a service without tenants, where each block would count as one of unknown tenant and go."""
    from kvservice.cli import tenant_usage

    usage = tenant_usage.collect(service, lookup)
    if not usage.held and not usage.problems:
        raise ConfigError(
            f"this service has no tenants, so there is none of the name {name!r}; nothing was cleared. To clear all "
            "blocks give --everything",
            key="tenant",
        )


def doubt(wanted: Scope, seen: Overview) -> str:
    """What to say when a clear found no block: a wrong name looks like one whose blocks are gone."""
    if wanted.model:
        kind, name = "model", wanted.model
        known = {engine.model for engine in seen.engines} | {row.model for row in seen.hits}
    elif wanted.tenant:
        kind, name = "tenant", wanted.tenant
        known = {engine.tenant for engine in seen.engines} | {row.name for row in seen.tenants}
    else:
        kind, name = "namespace", wanted.namespace or ""
        known = {engine.namespace for engine in seen.engines}
        if any(namespace.startswith(f"{name}/") for namespace in known):
            return ""
    if name in known:
        return ""
    names = ", ".join(sorted(known - {""}))
    return f"No block was found, and no node knows a {kind} {name!r}; known: {names or 'none'}"


async def _clear(
    service: str | None, lookup: Sequence[str] | None, wanted: Scope, wait: float
) -> tuple[ClearReport, bool]:
    """Returns what the last round found, and whether any found a block."""
    from kvservice.auth.token import Token
    from kvservice.client.members import find_members
    from kvservice.client.operator import OperatorClient
    from kvservice.core.messages import EngineKind
    from kvservice.serve.prompt_file import read_prompts

    questions = read_prompts(wanted.prompt) if wanted.prompt is not None else []  # once: it may be a pipe
    members = await asyncio.to_thread(find_members, service, lookup)
    client = OperatorClient(members.tls, Token.of_command())
    deadline = time.monotonic() + wait
    at, kinds, silent = time.time(), dict[bytes, EngineKind](), dict[str, str]()
    marks: list[Mark] = []
    found_blocks = False
    try:
        with Progress("clearing") as progress:
            while True:
                known = len(kinds)
                if wanted.prompt is not None:
                    silent = await _learn_kinds(client, members, wanted.model, kinds)
                if not marks or len(kinds) > known:
                    marks = _marks(wanted, questions, at, kinds.values())
                report = await _round(client, members, marks, silent)
                found_blocks |= any(node.blocks or node.tier_blocks for node in report.nodes)
                if report.complete or time.monotonic() >= deadline:
                    if not marks:
                        raise ConfigError(_no_engine(wanted.model, silent), key="model")
                    return report, found_blocks
                left = sum(bool(node.error or node.reading) for node in report.nodes) + len(report.problems)
                progress.update(f"not done: {counted(left, 'part')}")
                await asyncio.sleep(POLL_SECONDS)
                try:
                    members = await asyncio.to_thread(find_members, service, lookup)
                except NoService:  # the directory may come back, and until then the same nodes are asked
                    members = replace(members, silent=members.lookups)
    finally:
        await client.close()


async def _learn_kinds(
    client: OperatorClient, members: Members, model: str, kinds: dict[bytes, EngineKind]
) -> dict[str, str]:
    """Add the engines of the model, by fingerprint. Returns the nodes that do not say which they have, and why."""
    silent: dict[str, str] = {}
    for node, found in (await answers({**members.hidden, **members.shards}, client.engines)).items():
        if isinstance(found, KVServiceError):
            silent[node] = found.message
        else:
            kinds.update({kind.fingerprint.digest: kind for kind in found if kind.model == model})
    return silent


def _no_engine(model: str, silent: Collection[str]) -> str:
    there = f" at the nodes that answer; silent: {', '.join(sorted(silent))}" if silent else ""
    return f"no engine of model {model!r} is attached{there}. {NAMES_PROMPTS}; or clear --model instead"


def _marks(wanted: Scope, questions: Sequence[Question], at: float, kinds: Collection[EngineKind]) -> list[Mark]:
    from kvservice.core.block.marks import Mark, MarkKind

    if wanted.everything:
        return [Mark(MarkKind.EVERYTHING, at)]
    if wanted.namespace is not None:
        return [Mark(MarkKind.NAMESPACE, at, wanted.namespace)]
    if wanted.tenant:
        return [Mark(MarkKind.TENANT, at, wanted.tenant)]
    if wanted.prompt is None:
        return [Mark(MarkKind.MODEL, at, wanted.model)]
    return [Mark(MarkKind.PROMPT, at, keys=tuple(part)) for part in _keys(wanted, questions, kinds)]


def _keys(wanted: Scope, questions: Sequence[Question], kinds: Collection[EngineKind]) -> list[list[BlockKey]]:
    """The blocks of the prompts under every name that these engines give them, for each mark; no mark without any."""
    from kvservice.core.acquire.clearing import CLEAR_MARKS_MAX
    from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX
    from kvservice.core.block.window_groups import WINDOW_GROUPS_MAX, group_key
    from kvservice.serve.prompt_file import PromptNamer

    namer = PromptNamer(wanted.tokenizer)
    if not kinds:
        return []
    plain_keys = {key for kind in kinds for question in questions for key in namer.keys(question, kind)}
    found = {group_key(key, group) for key in plain_keys for group in range(1, WINDOW_GROUPS_MAX + 1)} | plain_keys
    ordered = sorted(found)
    parts = [ordered[start : start + KEYS_PER_REQUEST_MAX] for start in range(0, len(ordered), KEYS_PER_REQUEST_MAX)]
    if not 0 < len(parts) <= CLEAR_MARKS_MAX:
        raise ConfigError(f"{wanted.prompt} has {len(plain_keys)} blocks, too many or too few: clear --model instead")
    return [list(part) for part in parts]


async def _round(
    client: OperatorClient, members: Members, marks: Sequence[Mark], silent: Mapping[str, str]
) -> ClearReport:
    """`silent` are nodes that may have engines which give the blocks further names. Without marks nothing is asked."""
    from kvservice.client.operator import CALL_SECONDS, CLEAR_SECONDS

    async def one(node: str, address: str) -> ClearedNode:
        # The directory has not heard of a hidden node for seconds, so it hardly works on the clear, but hangs.
        patience = CALL_SECONDS if node in members.hidden else CLEAR_SECONDS
        reading = blocks = size = tier_blocks = 0
        try:
            for mark in marks:  # one prompt's keys fill a request
                result = await client.clear(address, [mark], patience)
                blocks, size = blocks + result.blocks, size + result.bytes
                tier_blocks += result.tier_blocks
                reading = result.reading
        except (Forbidden, Unauthenticated, InvalidRequest):
            raise
        except KVServiceError as error:
            return ClearedNode(node, error=error.message)
        return ClearedNode(node, blocks, size, reading, tier_blocks)

    asked = {**members.hidden, **members.shards}
    nodes = await asyncio.gather(*[one(node, address) for node, address in sorted(asked.items())])
    problems = [f"lookup partition {address} does not answer: it may know more nodes" for address in members.silent]
    problems += [f"node {node} is registered on this machine, and nobody listens" for node in sorted(members.gone)]
    problems += [
        f"node {row.node} does not say which engines it has: {silent[row.node]}"
        for row in nodes
        if row.node in silent and not row.error
    ]
    complete = not problems and not any(node.error or node.reading for node in nodes)
    return ClearReport(tuple(nodes), tuple(problems), complete)


def draw(report: ClearReport) -> RenderableType:
    made = table("node", "*blocks", "*size", "*still read", "*in tiers")
    lines: list[RenderableType] = [made]
    for node in report.nodes:
        if node.error:
            lines.append(problem_line(f"node {node.node} was not reached: {node.error}"))
        else:
            counts = (str(node.blocks), format_bytes(node.bytes), str(node.reading), str(node.tier_blocks))
            made.add_row(plain(node.node), *counts)
    lines += map(problem_line, report.problems)
    if report.complete:
        lines.append(Text("Complete: every node has forgotten them. Engines keep what is in their own GPU cache."))
    elif any(node.reading for node in report.nodes):
        lines.append(Text("Requests still read cleared blocks; no new one gets them. --wait waits for these."))
    else:
        lines.append(Text("Not complete. A node that was not reached asks the others when it is back."))
    if report.note:
        lines.append(Text(printable(report.note)))
    return Group(*lines)
