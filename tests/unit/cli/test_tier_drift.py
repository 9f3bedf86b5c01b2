"""`kvservice tier drift`: what it says of a model, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvservice.cli.main import app
from kvservice.engine.model import PagedModel
from tests.unit.engine.tiny_models import BLOCK_TOKENS, make


@pytest.fixture
def prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    model = PagedModel(make("grouped heads"), block_tokens=BLOCK_TOKENS)
    monkeypatch.setattr(PagedModel, "open", lambda *path, **settings: model)
    monkeypatch.setattr(PagedModel, "encode", lambda self, text: [ord(char) % 32 for char in text])
    path = tmp_path / "prompt.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, and over another one")
    return str(path)


def test_a_model_that_bears_it_ends_with_zero(prompt: str) -> None:
    done = CliRunner().invoke(app, ["tier", "drift", "m", prompt])
    assert done.exit_code == 0 and "Drift of the worst block: K 0.00" in done.stdout
    done = CliRunner().invoke(app, ["tier", "drift", "m", prompt, "--tokens", "48", "-o", "json"])
    found = json.loads(done.stdout)
    assert found["prefix_tokens"] + found["asked_tokens"] == 48 and 0 < found["drift_keys"] < 0.05


def test_a_drift_beyond_the_limit_ends_with_one(prompt: str) -> None:
    assert CliRunner().invoke(app, ["tier", "drift", "m", prompt, "--limit", "0.0001"]).exit_code == 1


def test_a_text_or_model_that_is_not_there_is_an_error_of_use(prompt: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["tier", "drift", "m", str(tmp_path / "none")])
    assert done.exit_code not in (0, 1) and "none" in done.stderr
