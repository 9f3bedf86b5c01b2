"""docs/reference/states.md shows every table of transitions in the code, as it is."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest

from kvservice.core.transitions import InvalidTransition, step
from scripts.reference.states import MACHINES, Machine, arrows
from tests.tidy.trees import parse, sources

ROOT = Path(__file__).resolve().parent.parent.parent
SIMPLE = [machine for machine in MACHINES if all(len(pair) == 2 for pair in machine.table)]


def named(machine: Machine) -> str:
    return machine.title.replace(" ", "_")


def test_every_table_in_the_code_is_on_the_page() -> None:
    tables = [
        (path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."), node.target.id)
        for path in sources(ROOT, "kvservice")
        for node in parse(path).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if node.target.id.endswith("TRANSITIONS")
    ]
    assert len(tables) == len(MACHINES)
    for module, name in tables:
        assert any(
            machine.module.__name__ == module and getattr(machine.module, name) is machine.table for machine in MACHINES
        ), f"{module}.{name} is not on the page"


@pytest.mark.parametrize("machine", MACHINES, ids=named)
def test_every_state_can_be_reached(machine: Machine) -> None:
    reached = {machine.first}
    for _ in type(machine.first):
        reached |= {target for source, target, _ in arrows(machine.table) if source in reached}
    assert reached == set(type(machine.first))


@pytest.mark.parametrize("machine", SIMPLE, ids=named)
def test_every_event_leads_somewhere(machine: Machine) -> None:
    known = {event for _, event in machine.table}
    assert known == set(type(next(iter(known))))


@pytest.mark.parametrize("machine", SIMPLE, ids=named)
def test_a_pair_that_is_not_in_the_table_raises(machine: Machine) -> None:
    events = type(next(iter(machine.table))[1])
    for state, event in itertools.product(type(machine.first), events):
        if (state, event) in machine.table:
            assert step(machine.table, state, event, "it") is machine.table[state, event]
        else:
            with pytest.raises(InvalidTransition, match=f"it is {state.value}, cannot {event.value}"):
                step(machine.table, state, event, "it")
