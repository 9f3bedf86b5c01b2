"""How `kvservice top` starts: what it needs, and what it says when that is not there."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from kvservice.cli.main import app
from kvservice.cli.top import run as starting


class Terminal:
    def isatty(self) -> bool:
        return True


def test_without_textual_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "sys", type("Streams", (), {"stdout": Terminal(), "stdin": Terminal()}))
    for name in [name for name in sys.modules if name.startswith(("textual", "kvservice.cli.top.app"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual", None)
    shown = CliRunner().invoke(app, ["top"])
    assert shown.exit_code == 2 and "extra 'top' of kvservice" in shown.output
