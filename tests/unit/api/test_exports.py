"""`import kvservice`: it costs nothing, its names are exactly the public ones, and each has an example that runs."""

from __future__ import annotations

import doctest
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvservice

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "python.md"
PUBLIC = [name for name in kvservice.__all__ if not name.startswith("_")]
# What takes long to import, or need not be installed.
HEAVY = ("asyncio", "grpc", "numpy", "pydantic", "google.protobuf", "torch", "vllm", "ray", "xxhash")


def test_all_is_exactly_the_sorted_public_names() -> None:
    listed = [name for name in dir(kvservice) if not name.startswith("_") or name == "__version__"]
    modules = {name for name in listed if inspect.ismodule(getattr(kvservice, name))}
    assert kvservice.__all__ == sorted(kvservice.__all__)
    assert set(listed) - modules - {"annotations", "TYPE_CHECKING"} == set(kvservice.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"kvservice.*nothing"):
        kvservice.nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.processes
def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, time; begun = time.perf_counter(); import kvservice; took = time.perf_counter() - begun\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)), took < 0.5)"
    )
    said = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(kvservice.__file__).parents[1])},
    )
    assert said.stdout.strip() == "[] True"


def examples() -> Iterator[doctest.DocTest]:
    finder = doctest.DocTestFinder(recurse=True, exclude_empty=True)
    for name in PUBLIC:
        for found in finder.find(getattr(kvservice, name), name, globs={}):
            if found.examples:
                yield found
    blocks = re.findall(r"^```pycon\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    yield doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, str(PAGE), None)


@pytest.mark.parametrize("example", list(examples()), ids=lambda example: example.name)
def test_an_example_prints_what_it_shows(example: doctest.DocTest) -> None:
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert not said, "".join(said)


def test_every_public_name_has_an_example() -> None:
    """In its own docstring, or by name in somebody else's."""
    found = list(examples())
    run = "\n".join(part.source for example in found for part in example.examples)
    own = {example.name for example in found}
    assert [name for name in PUBLIC if name not in own and not re.search(rf"\b{name}\b", run)] == []
