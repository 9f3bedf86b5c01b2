"""`kvservice blocks`: lists the blocks of a service, with what is known of each. Never tokens, never bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from kvservice.cli.drawing import plain, problem_line, span, table
from kvservice.cli.output import PLAIN_WIDTH, Format, show
from kvservice.errors import ConfigError, NoService
from kvservice.units import format_bytes

if TYPE_CHECKING:
    from kvservice.client.block_list import BlockList, BlockRow
    from kvservice.client.members import Members

BLOCK_STATES = ("sealed", "leased")  # slots that hold a block, which is what people mean
# Blocks that are read before they are sorted: 10,000 take a second or two. With more, only those of the first nodes and
# slots are sorted, and the output says so.
SORTED_MAX = 10_000
KEY_DIGITS = 12  # of a key in a narrow table: enough to name a block of one service
# What blocks can be sorted by, the largest first.
SORTS: dict[str, Callable[[BlockRow], float]] = {
    "uses": lambda row: row.uses,
    "age": lambda row: row.age_seconds,
    "idle": lambda row: row.idle_seconds,
    "size": lambda row: row.bytes,
    "position": lambda row: row.position,
}


@dataclass(frozen=True, slots=True)
class Selection:
    """Which blocks a person asked for."""

    node: str | None = None  # the beginning of its id
    state: tuple[str, ...] = ()  # empty = BLOCK_STATES
    model: str = ""
    tenant: str | None = None
    key: str = ""  # the beginning of the key, in hex
    sort: str | None = None  # one of SORTS
    limit: int = 50


def run(
    service: str | None, lookup: Sequence[str] | None, selected: Selection, form: Format, watch: float | None = None
) -> BlockList:
    """Print the blocks, with `watch` again and again. Returns those of the last time. Blocks for RPCs.

    Raises NoService, ConfigError for a node that is not there, InvalidRequest for a filter that cannot match, and
    Unauthenticated if the service has tenants and the token is missing or wrong."""
    return show(
        lambda: collect(service, lookup, selected),
        lambda found, wide: draw(found, selected, wide),
        form,
        watch,
        width_min=PLAIN_WIDTH,
    )


def collect(service: str | None, lookup: Sequence[str] | None, selected: Selection) -> BlockList:
    """The blocks that were asked for. Blocks for RPCs."""
    import asyncio

    from kvservice.auth.token import Token
    from kvservice.client.block_list import BlockFilter, list_blocks
    from kvservice.client.channels import Channels
    from kvservice.client.members import find_members

    check(selected)
    members = find_members(service, lookup)
    chosen = choose_nodes(members, selected.node)
    wanted = BlockFilter(selected.state or BLOCK_STATES, selected.model, selected.tenant, selected.key)

    async def read() -> BlockList:
        async with Channels(members.tls, token=Token.of_command()) as channels:
            return await list_blocks(channels, chosen, wanted, selected.limit if selected.sort is None else SORTED_MAX)

    found = asyncio.run(read())
    silent = silent_nodes(members, selected.node)
    whole = replace(found, complete=found.complete and not silent, problems=(*found.problems, *silent))
    return arrange(whole, selected)


def check(selected: Selection) -> None:
    """Raises ConfigError for a choice that no block can match."""
    from kvservice.core.store.slots import SHOWN_STATES
    from kvservice.wire.figures import KEY_DIGITS_MAX

    for state in selected.state:
        if state not in SHOWN_STATES:
            raise ConfigError(f"--state is {state!r}; choose {', '.join(SHOWN_STATES)}", key="state")
    if not set(selected.key.lower()) <= set("0123456789abcdef") or len(selected.key) > KEY_DIGITS_MAX:
        raise ConfigError(f"--key is {selected.key!r}; give the first of its {KEY_DIGITS_MAX} hex digits", key="key")


def choose_nodes(members: Members, wanted: str | None) -> dict[str, str]:
    """The shards whose node's id begins with this. Raises ConfigError if there is none, NoService if none is left."""
    if not members.shards:
        silent = f": {', '.join(sorted(members.gone))} {'are' if len(members.gone) > 1 else 'is'} silent"
        raise NoService(f"no shard of service {members.service!r} answers{silent if members.gone else ''}")
    chosen = {node: address for node, address in members.shards.items() if node.startswith(wanted or "")}
    if not chosen:
        if unheard := [node for node in sorted(members.unheard) if node.startswith(wanted or "")]:
            raise NoService(f"node {', '.join(unheard)} is silent: `kvservice doctor`, on its machine, says what to do")
        raise ConfigError(f"no node's id begins with {wanted!r}; there is {', '.join(sorted(members.shards))}")
    return chosen


def silent_nodes(members: Members, wanted: str | None) -> tuple[str, ...]:
    """What to say about the shards that do not answer, of those whose node's id begins with this."""
    return tuple(f"node {node} is silent" for node in sorted(members.unheard) if node.startswith(wanted or ""))


def arrange(found: BlockList, selected: Selection) -> BlockList:
    """The blocks in the order that was asked for, and no more than were asked for."""
    from kvservice.client.block_list import BlockList

    rows = list(found.blocks)
    if selected.sort is not None:
        rows.sort(key=SORTS[selected.sort], reverse=True)
    complete = found.complete and len(rows) <= selected.limit
    return BlockList(tuple(rows[: selected.limit]), complete, found.problems)


def draw(found: BlockList, selected: Selection, wide: bool) -> RenderableType:
    numbers = ("*position", "*size", "*age", "*unused for", "*uses")
    more = ("*slot", "copy") if wide else ()
    made = table(
        *("key", "node", "model", "tenant", "state", "tier", *numbers, *more),
        fold=("node", "model", "tenant"),
        first_folds=False,
    )
    for row in found.blocks:
        known = bool(row.key)
        cells = [
            (row.key if wide else row.key[:KEY_DIGITS]) or "-",
            plain(row.node_id),
            plain(row.model) or "-",
            plain(row.tenant) or "-",
            plain(row.state),
            row.tier,
            f"{row.position:,}" if known else "-",
            format_bytes(row.bytes),
            span(row.age_seconds) if known else "-",
            span(row.idle_seconds) if known else "-",
            str(row.uses) if known else "-",
        ]
        made.add_row(*cells, *((str(row.slot), row.copy or "-") if wide else ()))
    lines: list[RenderableType] = [made] if found.blocks else []
    lines.append(Text(_summary(found, selected)))
    lines += map(problem_line, found.problems)
    return Group(*lines)


def _summary(found: BlockList, selected: Selection) -> str:
    count = len(found.blocks)
    if not count:
        return "No block matches."
    if found.complete:
        return f"{count:,} shown, all that match."
    if count < selected.limit:
        return f"{count:,} shown; nodes that did not answer may have more."
    return f"{count:,} shown; there are more. Narrow the choice, or raise --limit."
