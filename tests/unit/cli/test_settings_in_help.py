"""The help of a command explains the settings that it reads, and what 0 does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvservice.cli import processes
from kvservice.cli.main import app
from kvservice.cli.settings import summary
from kvservice.config import ServiceConfig, allowed, load_config, shown
from kvservice.lookup import process as lookup_process

ROOT = Path(__file__).parents[3]
TREE: Any = typer.main.get_command(app)
# Of what runs for a command, the modules that have the settings of the service.
READERS = {
    "shard": (ROOT / "kvservice/cli/processes.py", *(ROOT / "kvservice/shard").glob("*.py")),
    "up": (ROOT / "kvservice/cli/lifecycle.py", *(ROOT / "actors").glob("*.py")),
}


class Recorder(ServiceConfig):
    """Settings that know which of them were read."""

    def __getattribute__(self, name: str) -> Any:
        if name in ServiceConfig.model_fields:
            read.add(name)
        return super().__getattribute__(name)


read: set[str] = set()


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder(**load_config(None, {}).model_dump())
    read.clear()
    yield made
    read.clear()


def explained(command: str) -> set[str]:
    return {each.name for each in TREE.commands[command].settings() if not each.hidden}


def test_the_help_of_lookup_has_exactly_what_it_reads(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    async def serve(*_: object, **__: object) -> None: ...

    monkeypatch.setattr(lookup_process, "serve", serve)
    processes.run_lookup(recorder, 0, "127.0.0.1", None)
    assert read == explained("lookup")


@pytest.mark.parametrize("command", READERS)
def test_what_the_help_leaves_out_is_not_read(command: str) -> None:
    others = ServiceConfig.model_fields.keys() - explained(command)
    assert others
    source = "".join(path.read_text().split("def run_lookup")[0] for path in READERS[command])
    assert not re.findall(rf"(?:config|settings)\.(?:{'|'.join(others)})\b", source)


def test_a_setting_that_changes_nothing_is_taken_and_named_only() -> None:
    answer = CliRunner().invoke(app, ["lookup", "-h"])
    head, _, tail = answer.output.partition("Other settings:")
    assert "--pool-bytes" not in head and "--pool-bytes," in tail.split()
    TREE.commands["lookup"].make_context("lookup", ["--pool-bytes", "8GiB"])


def settings_without_a_value(field: Any) -> bool:
    """Whether a setting takes 0, or nothing."""
    if field.annotation is bool:
        return False
    return field.default in ("", ()) or bool(re.search(r"\b(?:or 0|0, or|(?:least|from) 0)(?![.\d])", allowed(field)))


@pytest.mark.parametrize(
    "name", [name for name, field in ServiceConfig.model_fields.items() if settings_without_a_value(field)]
)
def test_the_help_says_what_0_or_no_value_does(name: str) -> None:
    field = ServiceConfig.model_fields[name]
    assert shown(field).default or re.search(r"[.] (?:0\b|Empty:|Without )", summary(field))


def test_config_show_says_yes_and_no_as_the_help_does() -> None:
    shown = CliRunner().invoke(app, ["config", "show", "head_shard", "accept_spill"]).stdout.splitlines()
    assert [line.split()[:2] for line in shown[1:3]] == [["accept_spill", "no"], ["head_shard", "yes"]]
