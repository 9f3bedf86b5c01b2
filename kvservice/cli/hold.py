"""`kvservice warm`, `pin`, `unpin` and `pins`: bring prompts to nodes and keep them there."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

from kvservice.cli.blocks import choose_nodes, silent_nodes
from kvservice.cli.drawing import plain, problem_line, span, table
from kvservice.cli.output import Format, write
from kvservice.cli.progress import Progress
from kvservice.errors import ConfigError, Forbidden, KVServiceError, NoService, Unauthenticated
from kvservice.units import format_bytes

if TYPE_CHECKING:
    from kvservice.client.operator import OperatorClient
    from kvservice.core.messages import EngineKind, WarmResult

T = TypeVar("T")
NAMES_PROMPTS = (
    "An attached engine says how the blocks of a prompt are named: start one, or keep the Python program running that "
    "stored them"
)


@dataclass(frozen=True, slots=True)
class HeldPrompts:
    """What the prompts of one command found at one node, counted in blocks."""

    node: str
    prompts: int
    asked: int
    local: int
    fetched: dict[str, int]  # by where they came from
    held: int
    missing: int
    misses: dict[str, int]  # prompts that were not found whole, by reason
    error: str = ""
    short: int = 0  # prompts without a whole block, left out


@dataclass(frozen=True, slots=True)
class HeldReport:
    nodes: tuple[HeldPrompts, ...]
    held_seconds: float  # 0 = until it is unpinned
    problems: tuple[str, ...] = ()  # nodes that did not answer

    @property
    def holds(self) -> bool:
        return any(row.held for row in self.nodes)


@dataclass(frozen=True, slots=True)
class PinRow:
    node: str
    name: str
    tenant: str
    model: str
    blocks: int
    bytes: int
    age_seconds: float


@dataclass(frozen=True, slots=True)
class PinList:
    pins: tuple[PinRow, ...]
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is warmed or pinned, and where."""

    file: Path
    model: str
    namespace: str | None = None
    tokenizer: str = ""
    nodes: tuple[str, ...] = ()  # beginnings of their ids; empty = all with an engine of the model
    hold: float = 0.0
    timeout: float = 60.0
    pin: str = ""


def warm(service: str | None, lookup: Sequence[str] | None, wanted: Wanted, form: Format) -> bool:
    """Warm or pin the prompts of a file, and print what came from where. Blocks. Returns False if a node failed, or no
    node pinned a block.

    Raises ConfigError for a file, model or node that does not fit, NoService, Forbidden, Unauthenticated."""
    from kvservice.serve.prompt_file import PromptNamer, read_prompts

    questions, namer = read_prompts(wanted.file), PromptNamer(wanted.tokenizer)
    if wanted.pin and len(questions) != 1:
        raise ConfigError(f"{wanted.file} has {len(questions)} prompts, and a pin holds one: use a name for each")

    async def hold(client: OperatorClient, shards: dict[str, str], silent: tuple[str, ...]) -> HeldReport:
        kinds, failed = await _engines(client, shards, wanted)
        with Progress("pinning" if wanted.pin else "warming") as progress:
            done, total = itertools.count(1), len(kinds) * len(questions)

            def one_more() -> None:
                number = next(done)
                progress.update(f"{number} of {total} prompts", number, total)

            rows = await asyncio.gather(
                *[_hold(client, node, shards[node], kinds[node], questions, namer, wanted, one_more) for node in kinds]
            )
        if all(row.short == len(questions) for row in rows):
            tokens = min(kind.layout.block_tokens for kind in kinds.values())
            raise ConfigError(f"no prompt of {wanted.file} is as long as one block of {tokens} tokens")
        return HeldReport(tuple(rows), 0.0 if wanted.pin else wanted.hold, (*silent, *failed))

    report = _with_shards(service, lookup, wanted.nodes, hold)
    write(report, lambda found, _: draw(found), form)
    failed = report.problems or any(row.error for row in report.nodes)
    return not failed and (report.holds or not wanted.pin)


def unpin(
    service: str | None, lookup: Sequence[str] | None, name: str, nodes: Sequence[str], form: Format = Format.TABLE
) -> bool:
    """End a pin at every node, or at these. Returns False if no node had it or one did not answer."""

    async def end(client: OperatorClient, shards: dict[str, str], silent: tuple[str, ...]) -> PinList:
        return await _rows(shards, silent, lambda address: _unpinned(client, address, name))

    found = _with_shards(service, lookup, nodes, end)
    write(found, lambda found, _: draw_pins(found, f"No node has a pin {name!r}.", "let go"), form)
    return bool(found.pins) and not found.problems


def pins(service: str | None, lookup: Sequence[str] | None, form: Format) -> bool:
    """Print the pins of every node. Returns False if one did not answer."""

    async def ask(client: OperatorClient, shards: dict[str, str], silent: tuple[str, ...]) -> PinList:
        return await _rows(shards, silent, client.pins)

    found = _with_shards(service, lookup, (), ask)
    write(found, lambda found, _: draw_pins(found, "Nothing is pinned.", "pinned"), form)
    return not found.problems


# -- asking --


def _with_shards(
    service: str | None,
    lookup: Sequence[str] | None,
    nodes: Sequence[str],
    work: Callable[[OperatorClient, dict[str, str], tuple[str, ...]], Awaitable[T]],
) -> T:
    """What `work` returns for these nodes, given the addresses of their shards and what to say of the silent ones."""
    from kvservice.auth.token import Token
    from kvservice.client.members import find_members
    from kvservice.client.operator import OperatorClient

    members = find_members(service, lookup)
    shards = {node: address for name in nodes or [""] for node, address in choose_nodes(members, name).items()}
    silent = tuple(dict.fromkeys(line for name in nodes or [""] for line in silent_nodes(members, name)))

    async def run() -> T:
        client = OperatorClient(members.tls, Token.of_command())
        try:
            return await work(client, shards, silent)
        finally:
            await client.close()

    return asyncio.run(run())


async def answers(
    shards: dict[str, str], ask: Callable[[str], Awaitable[tuple[Any, ...]]]
) -> dict[str, tuple[Any, ...] | KVServiceError]:
    """What each node answers, or why it does not. Raises Forbidden and Unauthenticated, which hold for all."""

    async def one(address: str) -> tuple[Any, ...] | KVServiceError:
        try:
            return await ask(address)
        except (Forbidden, Unauthenticated):
            raise
        except KVServiceError as error:
            return error

    return dict(zip(shards, await asyncio.gather(*map(one, shards.values())), strict=True))


async def _engines(
    client: OperatorClient, shards: dict[str, str], wanted: Wanted
) -> tuple[dict[str, EngineKind], list[str]]:
    """The engines that the prompts are for, by node, and what to say of the nodes that did not tell. Raises ConfigError
    for none, or several kinds at one, and NoService if no node told."""
    found: dict[str, EngineKind] = {}
    seen: set[str] = set()
    failed: list[str] = []
    for node, answer in (await answers(shards, client.engines)).items():
        if isinstance(answer, KVServiceError):
            failed.append(f"node {node}: {answer.message}")
            continue
        seen |= {kind.model for kind in answer}
        kinds = [kind for kind in answer if kind.model == wanted.model]
        kinds = [kind for kind in kinds if wanted.namespace in (None, kind.namespace)]
        if len(kinds) > 1:
            names = " or ".join(repr(kind.namespace) for kind in kinds)
            raise ConfigError(f"node {node} has several engines of {wanted.model}: choose --namespace {names}")
        if kinds:
            found[node] = kinds[0]
    if len(failed) == len(shards):
        raise NoService("; ".join(failed))
    if not found:
        known = ", ".join(sorted(seen)) or "none"
        raise ConfigError(
            f"no engine of model {wanted.model!r} is attached there; models: {known}. {NAMES_PROMPTS}", key="model"
        )
    return found, failed


async def _hold(
    client: OperatorClient,
    node: str,
    address: str,
    kind: EngineKind,
    questions: Sequence[Any],
    namer: Any,
    wanted: Wanted,
    one_more: Callable[[], None],
) -> HeldPrompts:
    """Prompt after prompt; the first error ends the node's part."""
    from kvservice.core.messages import WarmRequest

    done: list[WarmResult] = []
    short, error = 0, ""
    for question in questions:
        keys = namer.keys(question, kind)
        if not keys:
            short += 1
            one_more()
            continue
        request = WarmRequest(kind.fingerprint.digest, tuple(keys), wanted.timeout, wanted.hold, wanted.pin)
        try:
            done.append(await client.warm(address, request))
        except (Forbidden, Unauthenticated):
            raise
        except KVServiceError as refused:
            error = refused.message
            break
        one_more()
    return _sum(node, done, error, short)


def _sum(node: str, results: Sequence[WarmResult], error: str, short: int) -> HeldPrompts:
    fetched: dict[str, int] = {}
    misses: dict[str, int] = {}
    here = 0
    for result in results:
        here += result.local
        for source, count in result.fetched:
            fetched[source] = fetched.get(source, 0) + count
            here += count
        if result.miss.value != "none":
            misses[result.miss.value] = misses.get(result.miss.value, 0) + 1
    asked = sum(result.asked for result in results)
    local, held = sum(result.local for result in results), sum(result.held for result in results)
    return HeldPrompts(node, len(results), asked, local, fetched, held, asked - here, misses, error, short)


async def _unpinned(client: OperatorClient, address: str, name: str) -> tuple[Any, ...]:
    ended = await client.unpin(address, name)
    return () if ended is None else (ended,)


async def _rows(
    shards: dict[str, str], silent: tuple[str, ...], ask: Callable[[str], Awaitable[tuple[Any, ...]]]
) -> PinList:
    rows: list[PinRow] = []
    problems = list(silent)
    for node, answer in (await answers(shards, ask)).items():
        if isinstance(answer, KVServiceError):
            problems.append(f"node {node}: {answer.message}")
            continue
        rows += [
            PinRow(node, pin.name, pin.account, pin.model, pin.blocks, pin.bytes, pin.age_seconds) for pin in answer
        ]
    return PinList(tuple(rows), tuple(problems))


# -- showing --


def draw(report: HeldReport) -> RenderableType:
    from kvservice.core.explain.records import place_name

    made = table("node", "*prompts", "*blocks", "here", "fetched", "*held", "*missing")
    lines: list[RenderableType] = [made]
    for row in report.nodes:
        came = ", ".join(f"{count} from {plain(place_name(node))}" for node, count in row.fetched.items()) or "-"
        counts = (row.prompts, row.asked, row.local)
        made.add_row(plain(row.node), *map(str, counts), came, str(row.held), str(row.missing))
        if row.misses:
            reasons = ", ".join(f"{reason}: {count}" for reason, count in row.misses.items())
            lines.append(Text(f"{row.node}: prompts that are not whole, by reason: {reasons}"))
        if row.short:
            lines.append(Text(f"{row.node}: prompts shorter than one block, left out: {row.short}"))
        if row.error:
            lines.append(problem_line(f"node {row.node}: {row.error}"))
    until = "until `kvservice unpin`" if not report.held_seconds else f"for {span(report.held_seconds)}"
    lines.append(Text(f"Held {until}, or until the shard ends." if report.holds else "Nothing is held."))
    lines += map(problem_line, report.problems)
    return Group(*lines)


def draw_pins(found: PinList, none: str, since: str) -> RenderableType:
    made = table("name", "node", "tenant", "model", "*blocks", "*size", f"*{since}")
    for row in found.pins:
        made.add_row(
            plain(row.name),
            plain(row.node),
            plain(row.tenant) or "-",
            plain(row.model),
            str(row.blocks),
            format_bytes(row.bytes),
            span(row.age_seconds),
        )
    lines: list[RenderableType] = [made] if found.pins else [Text(none)]
    lines += map(problem_line, found.problems)
    return Group(*lines)
