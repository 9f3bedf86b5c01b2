"""docs/reference/states.md, all state machines, from their tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

from kvservice.connector.layerwise import loads
from kvservice.connector.scheduler import request
from kvservice.core.acquire import acquisition, handoff, pulls, windowed
from kvservice.core.directory import meetings, membership
from kvservice.core.drain import receiver, sender
from kvservice.core.store import slots
from kvservice.engine import schedule
from kvservice.proxy import plan

HEAD = """# State machines

<!-- Made from the tables in the code by `make docs-reference`. Do not edit. -->

Everything here that has states moves by a literal table: a pair of state and event that is not in the table is a bug,
and raises an error that names both. "Stays" is an event that changes nothing, or not the state. Each machine begins in
the state of its first row; one that no row leads out of is the end.
"""


@dataclass(frozen=True, slots=True)
class Machine:
    title: str
    meaning: str
    module: ModuleType  # where the table stands
    first: Enum
    table: Mapping[Any, Any]


MACHINES = (
    Machine("Slot", "One place for a block in a shard's memory.", slots, slots.SlotState.FREE, slots.TRANSITIONS),
    Machine(
        "Acquisition",
        "One call that makes a prefix local and promises it.",
        acquisition,
        acquisition.AcquisitionState.STARTING,
        acquisition.TRANSITIONS,
    ),
    Machine(
        "Window hit",
        "The same call of a model with window groups. It is made of plain acquisitions, one after the other.",
        windowed,
        windowed.HitState.FULL,
        windowed.TRANSITIONS,
    ),
    Machine(
        "Pull",
        "Blocks of another node that are read into slots of this one, for fetches and for take-overs.",
        pulls,
        pulls.PullState.LOCATING,
        pulls.TRANSITIONS,
    ),
    Machine(
        "Hand-off",
        "A prompt that one engine computes for another, on the node where it is computed.",
        handoff,
        handoff.HandoffState.UNKNOWN,
        handoff.HANDOFF_TRANSITIONS,
    ),
    Machine(
        "Question about a hand-off",
        "What a reader on another node asks of the writer's node. It is answered with the blocks that are sealed.",
        handoff,
        handoff.FollowState.WAITING,
        handoff.FOLLOW_TRANSITIONS,
    ),
    Machine(
        "Drain", "A shard that leaves and hands its blocks over.", sender, sender.DrainPhase.SERVING, sender.TRANSITIONS
    ),
    Machine(
        "Take-over",
        "One offer of a leaving node, at the node that takes the blocks.",
        receiver,
        receiver.TakeOverState.LOCATING,
        receiver.TRANSITIONS,
    ),
    Machine(
        "Node in the directory",
        "What a lookup partition thinks of a node. A node that was never heard of counts as dead.",
        membership,
        membership.MemberState.DEAD,
        membership.TRANSITIONS,
    ),
    Machine(
        "Meeting",
        "A peer that a shard connects to before it needs it.",
        meetings,
        meetings.MeetingState.WAITING,
        meetings.TRANSITIONS,
    ),
    Machine(
        "Request in the connector",
        "One request of an engine, as the scheduler's half sees it.",
        request,
        request.RequestState.NEW,
        request.TRANSITIONS,
    ),
    Machine(
        "Layer-wise load",
        "A load that the same step computes on. The engine's blocks count only once every worker has confirmed it.",
        loads,
        loads.LayeredState.PLANNED,
        loads.TRANSITIONS,
    ),
    Machine(
        "Exchange of the proxy",
        "One request of a client, with its prefill and its decode. The middle column says what happened and, behind "
        "a slash, how it can go on.",
        plan,
        plan.State.NEW,
        plan.TRANSITIONS,
    ),
    Machine(
        "Request in the reference engine",
        "The sequences of one request, as one group, in the engine that is for reading and testing.",
        schedule,
        schedule.GroupState.WAITING,
        schedule.TRANSITIONS,
    ),
)


def words(value: Enum) -> str:
    return str(value.value).replace("_", " ")


def arrows(table: Mapping[Any, Any]) -> Iterable[tuple[Enum, Enum, str]]:
    """(from, to, label): one for each pair of states, in the order of the table."""
    labels: dict[tuple[Enum, Enum], list[str]] = {}
    for (state, *events), target in table.items():
        after = target[0] if isinstance(target, tuple) else target
        labels.setdefault((state, after), []).append(" / ".join(words(event) for event in events if event is not None))
    return ((source, target, ", ".join(found)) for (source, target), found in labels.items())


def states(machine: Machine) -> list[Enum]:
    """Those that the table leads to, in the order of their definition."""
    kind = type(machine.first)
    return [state for state in kind if any(state in arrow[:2] for arrow in arrows(machine.table))]


def drawn(machine: Machine) -> str:
    place = machine.module.__name__.replace(".", "/") + ".py"
    lines = [f"\n## {machine.title}\n", f"{machine.meaning} The table: `{place}`.\n"]
    lines += ["| in state | when | it is then |", "|---|---|---|"]
    found = sorted(
        arrows(machine.table), key=lambda arrow: (arrow[0] is not machine.first, states(machine).index(arrow[0]))
    )
    for source, target, label in found:
        then = "stays" if source is target else f"**{words(target)}**"
        lines.append(f"| **{words(source)}** | {label} | {then} |")
    leaving = {source for source, *_ in found}
    ends = [words(state) for state in states(machine) if state not in leaving]
    if ends:
        lines.append(f"\nIt ends in {' or '.join(f'**{state}**' for state in ends)}.")
    return "\n".join([*lines, ""])


def page() -> str:
    return HEAD + "".join(map(drawn, MACHINES))


PAGES = {"states.md": page}
