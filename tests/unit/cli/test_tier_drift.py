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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "cuda:99"], "device cuda:99 cannot be used here"),
        (["--device", "nonsense"], "device nonsense cannot be used here"),
        (["--dtype", "nonsense"], "torch has no type of numbers 'nonsense'"),
    ],
)
def test_a_device_or_type_that_torch_lacks_is_said_in_a_line(tmp_path: Path, words: list[str], says: str) -> None:
    text = tmp_path / "text"
    text.write_text("a text")
    done = CliRunner().invoke(app, ["tier", "drift", str(tmp_path), str(text), *words])
    assert done.exit_code == 2 and says in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("model", ["/nowhere/model", "./nowhere"])
def test_a_folder_that_is_not_there_is_no_name_of_a_hub(tmp_path: Path, model: str) -> None:
    text = tmp_path / "text"
    text.write_text("a text")
    done = CliRunner().invoke(app, ["tier", "drift", model, str(text)])
    assert done.exit_code == 2 and f"there is no folder {model}" in done.stderr
