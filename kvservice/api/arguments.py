"""Arguments of a program, checked where they come in: a pool in this process has no wire that would refuse them."""

from __future__ import annotations

import contextlib
import operator
from numbers import Real

from kvservice.errors import InvalidRequest
from kvservice.units import NAME_CHARS_MAX


def whole_number(name: str, value: object) -> int:
    """The value as an int, also of NumPy's types. Raises InvalidRequest."""
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError as error:
        raise InvalidRequest(f"{name} is a whole number, not {value!r:.100}") from error


def seconds(name: str, value: object, most: float) -> float:
    """A time of at most `most`. Raises InvalidRequest."""
    found = float(value) if isinstance(value, Real) else -1.0
    if not 0 <= found <= most:
        raise InvalidRequest(f"{name} is 0 to {most:g} seconds, not {value!r:.100}")
    return found


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
