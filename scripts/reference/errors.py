"""docs/reference/errors.md from the tree of errors and the exit codes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from kvservice import errors
from kvservice.cli.exits import MEANINGS
from kvservice.errors import KVServiceError

HEAD = """# Errors and exit codes

<!-- Made from kvservice/errors.py and kvservice/cli/exits.py by `make docs-reference`. Do not edit. -->

Every error that kvservice raises on purpose belongs to one tree. Its text is for people and says what to do. Programs
use its `reason` and its `attributes`, which travel over gRPC with it. A retryable error may succeed later without a
change by the caller.

| error | reason | gRPC code | retryable | when |
|---|---|---|---|---|
"""

TAIL = """
Indented errors are kinds of the one above. Over gRPC an error is its code, with reason and attributes in the trailing
metadata, and becomes the same error on the other end. What to do about the reasons of a refused engine is in
[an engine was refused](../howto/engine-refused.md).

## Exit codes

| code | name | what it says of a command |
|---|---|---|
"""

# Of the tree in the module's docstring: name and what stands behind it.
_DRAWN = re.compile(r"^ {4}(?:[│ ]   )?[├└]── (\w+)(.*)$", re.MULTILINE)
_COLUMNS = re.compile(r"\s{2,}")


def meanings() -> dict[str, str]:
    """What the tree in the docstring of kvservice.errors says of each error, by its name; it may be empty."""
    found = {}
    for name, rest in _DRAWN.findall(inspect.getdoc(errors) or errors.__doc__ or ""):
        last = _COLUMNS.split(rest.strip())[-1]
        found[name] = "" if re.fullmatch(r"[A-Z_]+|no|yes|\(.*\) [A-Z_]+|", last) else last
    return found


def tree(kind: type[KVServiceError], depth: int = 0) -> Iterator[tuple[int, type[KVServiceError]]]:
    yield depth, kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child, depth + 1)


def page() -> str:
    said = meanings()
    rows = "".join(
        f"| {'&nbsp;&nbsp;' * max(0, depth - 1)}`{kind.__name__}` | `{kind.reason}` | {kind.grpc_code} | "
        f"{'yes' if kind.retryable else 'no'} | {said.get(kind.__name__) or first_line(kind)} |\n"
        for depth, kind in tree(KVServiceError)
    )
    codes = "".join(f"| {int(code)} | `{code.name}` | {meaning} |\n" for code, meaning in MEANINGS.items())
    return HEAD + rows + TAIL + codes


def first_line(kind: type[KVServiceError]) -> str:
    return (kind.__doc__ or "").strip().split("\n")[0].rstrip(".") or "–"


PAGES = {"errors.md": page}
