"""Arguments of a program, checked where they come in: a pool in this process has no wire that would refuse them."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from kvservice.errors import InvalidRequest
from kvservice.units import NAME_CHARS_MAX

_ADDRESS = re.compile(r"<.* at 0x[0-9a-f]+>")  # how Python prints an object that has no text of its own


def whole_number(name: str, value: object) -> int:
    """The value as an int, also of NumPy's types. Raises InvalidRequest."""
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidRequest(f"{name} is a whole number, not {value!r:.100}") from error


def seconds(name: str, value: object, most: float) -> float:
    """A time of at most `most`. Raises InvalidRequest."""
    if not isinstance(value, Real) or not 0 <= value <= most:  # type: ignore[operator]  # every Real compares
        raise InvalidRequest(f"{name} is 0 to {most:g} seconds, not {value!r:.100}")
    return float(value)


def each(name: str, value: object, what: str) -> list[Any]:
    """The items of a row of `what`. Raises InvalidRequest."""
    try:
        found: list[Any] = list(value)  # type: ignore[call-overload]
    except TypeError as error:
        raise InvalidRequest(f"{name} is a row of {what}, not {value!r:.100}") from error
    return found


def identity_fields(identity: object) -> dict[str, object]:
    """The fields of the fingerprint for what a program says of its blocks. Raises InvalidRequest, also for a value
    whose text is not its own: programs would share blocks that differ, or none at all, and nobody would notice."""
    if not isinstance(identity, Mapping):
        raise InvalidRequest(f'identity maps names to values, such as {{"weights": "step-1"}}, not {identity!r:.100}')
    for name, value in identity.items():
        _check_text_of(f"identity.{name}", value)
    return {f"identity.{name}": value for name, value in identity.items()}


def _check_text_of(name: str, value: object) -> None:
    """Raises InvalidRequest unless equal values, and no others, have the text of this one in all processes."""
    if isinstance(value, (set, frozenset)):
        raise InvalidRequest(f"{name} is a set, whose text has another order in each process; give it sorted")
    if hasattr(value, "__array__") and not isinstance(value, np.generic):
        raise InvalidRequest(
            f"{name} is an array, whose text leaves out numbers and digits; give a version, or a digest of its bytes"
        )
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        for part in value:
            _check_text_of(name, part)
    elif _ADDRESS.search(str(value)):
        raise InvalidRequest(f"{name} is another text in each process: {value!s:.100}; give a version, say")


def text(name: str, value: object) -> str:
    """Text that can be written as UTF-8. Raises InvalidRequest."""
    if isinstance(value, str):
        with contextlib.suppress(UnicodeEncodeError):
            value.encode()
            return value
    raise InvalidRequest(f"{name} is text, not {value!r:.100}")


def name_of(name: str, value: object) -> str:
    """Text that is short enough to travel. Raises InvalidRequest."""
    found = text(name, value)
    if len(found) > NAME_CHARS_MAX:
        raise InvalidRequest(f"{name} has at most {NAME_CHARS_MAX} characters, not {len(found)}")
    return found
