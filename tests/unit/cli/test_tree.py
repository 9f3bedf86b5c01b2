"""The tree of commands: every one has a group and examples that work, and the pages show no command that does not."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import kvservice
from kvservice.cli.exits import MEANINGS, ExitCode, code_of
from kvservice.cli.extras import EXTRAS, missing_extra, requirements
from kvservice.cli.main import app
from kvservice.cli.tree import GROUPS, with_watch_seconds
from kvservice.errors import error_types

ROOT = Path(__file__).parents[3]
TREE: Any = typer.main.get_command(app)
SUMMARY_CHARS_MAX = 62  # what 80 columns leave beside the longest name, so that the list of commands is not cut
FENCE = re.compile(r"```(?:console|bash|sh)\n(.*?)```", re.DOTALL)
PROMPT = re.compile(r"^(?:\$ )?(?:(?:[A-Z_]+=\S* )*)(kvservice .*)$")


def leaves(group: Any = TREE, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(words of the command, the command)."""
    for name, each in group.commands.items():
        if hasattr(each, "commands"):
            yield from leaves(each, (*before, name))
        else:
            yield (*before, name), each


LEAVES = list(leaves())
each_leaf = pytest.mark.parametrize("words", [words for words, _ in LEAVES], ids=" ".join)


def leaf(words: tuple[str, ...]) -> Any:
    return dict(LEAVES)[words]


def parse(line: str) -> None:
    """Raises what the command line would end with for a wrong option, and runs nothing."""
    _, *words = shlex.split(line)
    command = TREE
    while hasattr(command, "commands") and not words[0].startswith("-"):
        command = command.commands[words.pop(0)]
    try:
        command.make_context(command.name, words)
    except typer.Exit as end:  # of --version
        assert not end.exit_code


def commands_of(page: Path) -> list[str]:
    """The calls of `kvservice` in a page's blocks, lines joined, comments and what follows the command left out."""
    found = []
    for block in FENCE.findall(page.read_text()):
        shows_output = "$ " in block
        for line in block.replace("\\\n", " ").splitlines():
            match = PROMPT.match(line.strip())
            if match and (line.startswith("$ ") or not shows_output):
                found.append(re.split(r"\s+(?:#|\||&|>|2>)", match[1])[0])
    return found


@each_leaf
def test_each_command_has_a_summary_and_examples(words: tuple[str, ...]) -> None:
    command = leaf(words)
    summary = command.help.partition("\n")[0]
    assert len(summary) <= SUMMARY_CHARS_MAX and summary.endswith(".")
    examples = command.epilog.splitlines()
    assert examples
    for example in examples:
        assert example.startswith(" ".join(("kvservice", *words)))
        parse(example)


def test_each_command_is_in_a_group_of_the_help() -> None:
    assert {each.rich_help_panel for each in TREE.commands.values()} == set(GROUPS)


@pytest.mark.parametrize(
    "page",
    [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if commands_of(path)],
    ids=lambda path: path.name,
)
def test_commands_that_a_page_shows_are_understood(page: Path) -> None:
    for line in commands_of(page):
        parse(line)


@each_leaf
def test_help_ends_with_the_examples(words: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(app, [*words, "-h"])
    assert shown.exit_code == 0
    assert shown.output.rstrip().endswith(leaf(words).epilog.splitlines()[-1])
    assert "Traceback" not in shown.output


@pytest.mark.processes
def test_python_m_and_version_are_the_command() -> None:
    for arguments, said in ((["--version"], f"kvservice {kvservice.__version__}\n"), (["-h"], "Usage: kvservice ")):
        done = subprocess.run(
            [sys.executable, "-m", "kvservice", *arguments], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.startswith(said)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("kvservice dr", {"drain"}),
        ("kvservice up --pool", {"--pool-bytes"}),
        ("kvservice tenants u", {"usage"}),
        ("kvservice certs x --role ", {"node", "client"}),
        ("kvservice config show pool", {"pool_bytes"}),
    ],
)
@pytest.mark.processes
def test_completion_offers_commands_options_and_values(typed: str, offered: set[str]) -> None:
    words = typed.split(" ")
    variables = {
        "_KVSERVICE_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "kvservice"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert offered <= set(done.stdout.split())


def test_every_kind_of_end_has_one_meaning() -> None:
    assert set(MEANINGS) == set(ExitCode)
    codes = {kind.__name__: code_of(kind("x")) for kind in error_types().values()}
    special = {name: code for name, code in codes.items() if code is not ExitCode.PROBLEM}
    assert special == {
        "ConfigError": ExitCode.USAGE,
        "NoService": ExitCode.NO_SERVICE,
        "Unauthenticated": ExitCode.DENIED,
        "Forbidden": ExitCode.DENIED,
    }


def test_watch_alone_means_every_two_seconds() -> None:
    assert with_watch_seconds(["--watch"]) == ["--watch", "2"]
    assert with_watch_seconds(["--watch", "-o", "json"]) == ["--watch", "2", "-o", "json"]
    assert with_watch_seconds(["--watch", "0.5"]) == ["--watch", "0.5"]


@pytest.mark.parametrize(("module", "extras"), EXTRAS.items())
def test_a_missing_extra_is_named_with_what_is_in_it(module: str, extras: tuple[str, ...]) -> None:
    found = missing_extra(ModuleNotFoundError(f"No module named {module!r}", name=f"{module}.part"))
    assert (
        found is not None and all(repr(extra) in found.message for extra in extras) and code_of(found) is ExitCode.USAGE
    )
    for each in requirements(extras[0]):
        assert repr(each) in found.message


def test_a_missing_module_of_no_extra_stays_an_error() -> None:
    assert missing_extra(ModuleNotFoundError("No module named 'kvservice.nothing'", name="kvservice.nothing")) is None
