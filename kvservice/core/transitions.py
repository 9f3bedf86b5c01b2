"""Follows a literal table of transitions. Each table is beside the states that it is about. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class InvalidTransition(AssertionError):
    """A bug: the state does not allow the change that was asked for."""


def step(table: Mapping[tuple[S, E], S], state: S, event: E, what: object) -> S:
    """The state after the event. Raises InvalidTransition, which names `what`, for a pair that is not in the table."""
    target = table.get((state, event))
    if target is None:
        raise InvalidTransition(f"{what} is {state.value}, cannot {event.value}")
    return target
