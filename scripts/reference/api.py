"""docs/reference/python-api.md from the signatures and docstrings of the public names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import kvservice

HEAD = """# Python API: names

<!-- Made from kvservice/__init__.py and kvservice/api by `make docs-reference`. Do not edit. -->

What `import kvservice` gives. [Python API](python.md) says what it promises, and [errors](errors.md) describes the
errors. The examples are run by the tests.

"""
# In the order of their use.
FIRST = (
    *("connect", "Pool", "Cache", "Layout", "PutResult", "Hit", "RequestExplanation", "ExplainedBlocks"),
    *("connect_async", "AsyncPool", "AsyncCache"),
)
# Names of the types that annotations write in full.
_SHORT = (
    (re.compile(r"\bkvservice\.api\.\w+\.|\bcollections\.abc\.|\btyping\."), ""),
    (re.compile(r"NoneType"), "None"),
    (re.compile(r"""(?<=: |> )(['"])(.*?)\1(?=,| =|\)|$)"""), r"\2"),  # annotations are texts
    (re.compile(r"\(self(, )?"), "("),
)


def page() -> str:
    names = [name for name in kvservice.__all__ if not name.startswith("_")]
    errors = [name for name in names if name not in FIRST]
    assert set(FIRST) <= set(names)
    return HEAD + "".join(part for name in FIRST for part in described(name)) + of_errors(errors)


def described(name: str) -> Iterator[str]:
    """The section of one name."""
    found = getattr(kvservice, name)
    yield f"## {name}\n\n"
    if not inspect.isclass(found) or name == "Layout":
        yield signature(name, found)
    yield text(found)
    if inspect.isclass(found):
        for kind in reversed(found.__mro__[:-1]):  # what several share comes first
            for member, value in vars(kind).items():
                yield from of_member(name, member, value)


def of_member(owner: str, name: str, value: object) -> Iterator[str]:
    said = inspect.getdoc(value)
    if name.startswith("_") or said is None:
        return
    if isinstance(value, property):
        yield f"### {owner}.{name}\n\n{text(value)}"
    elif inspect.isfunction(value):
        yield f"### {owner}.{name}()\n\n{signature(name, value)}{text(value)}"


def signature(name: str, found: object) -> str:
    """In a block of code, one parameter a line where it is long."""
    said = f"{name}{inspect.signature(found)}"  # type: ignore[arg-type]
    for pattern, short in _SHORT:
        said = pattern.sub(short, said)
    if inspect.iscoroutinefunction(found):
        said = f"await {said}"
    if len(said) > 100:
        inside = said[said.index("(") + 1 : said.rindex(")")]
        parts = re.split(r", (?=\w+:|\*,|\*\w)", inside)
        said = said.replace(inside, "\n    " + ",\n    ".join(parts) + ",\n")
    return f"```python\n{said}\n```\n\n"


def text(found: object) -> str:
    """The docstring; examples in blocks of code."""
    parts = re.split(r"\n\n(?=>>> )", inspect.getdoc(found) or "", maxsplit=1)
    return "\n\n".join([parts[0], *(f"```pycon\n{part}\n```" for part in parts[1:])]) + "\n\n"


def of_errors(names: list[str]) -> str:
    rows = "".join(f"| `{name}` | {'yes' if getattr(kvservice, name).retryable else 'no'} |\n" for name in names)
    return f"## Errors\n\n| error | retryable |\n|---|---|\n{rows}"


PAGES = {"python-api.md": page}
