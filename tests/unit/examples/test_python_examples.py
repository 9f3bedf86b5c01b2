"""The examples of the Python API do what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
LINES_MAX = {"quickstart.py": 45, "two_nodes.py": 60, "transformers_cache.py": 100, "reference_engine.py": 45}

pytestmark = pytest.mark.processes


def run(name: str, folder: Path, *arguments: str, seconds: float = 120) -> str:
    environment = {**os.environ, "KVSERVICE_RUNTIME_DIR": str(folder), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(("name", "count"), LINES_MAX.items())
def test_an_example_stays_short(name: str, count: int) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= count


def test_quickstart_shows_a_hit_and_a_miss(tmp_path: Path) -> None:
    said = run("quickstart.py", tmp_path)
    assert "mode:  embedded" in said and "equal: True" in said
    assert "get:   Hit(512 tokens in 32 blocks, 0 from other nodes)" in said and "never_stored" in said


def test_two_nodes_shows_a_remote_hit(tmp_path: Path) -> None:
    """A get that was early brings a part of the blocks, and the first whole hit only the others."""
    said = run("two_nodes.py", tmp_path)
    first = re.search(r"n1 first: Hit\(1,024 tokens in 64 blocks, (\d+) from other nodes\)", said)
    assert first is not None and 0 < int(first[1]) <= 64, said
    assert "n1 again: Hit(1,024 tokens in 64 blocks, 0 from other nodes)" in said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hugging_face_model_says_the_same(tmp_path: Path, model_path: Path) -> None:
    said = run("transformers_cache.py", tmp_path, str(model_path), seconds=800)
    assert said.count("answers equal") == 3, said
    assert [int(cached) for cached in re.findall(r"(\d+) cached", said)] == [0, 640, 640], said


def test_the_transformers_cache_tells_weights_and_models_apart() -> None:
    """By their numbers: a merged adapter leaves folder and configuration. A model without a head_dim has a layout."""
    pytest.importorskip("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    from examples.transformers_cache import identity_of, layout_of
    from tests.unit.engine.tiny_models import COMMON, make

    model, before = make("window in some layers"), identity_of(make("window in some layers"))
    assert layout_of(model).shape == (2, 2, 2, 16, 16)
    assert identity_of(model) == before
    model.model.layers[0].self_attn.k_proj.weight.data += 0.5
    assert identity_of(model) != before
    config = AutoConfig.for_model("lfm2", **COMMON, num_key_value_heads=2, layer_types=["conv", "full_attention"])
    with pytest.raises(SystemExit, match="one shape"):
        layout_of(AutoModelForCausalLM.from_config(config))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_reference_engine_loads_what_it_stored(tmp_path: Path, model_path: Path) -> None:
    said = run("reference_engine.py", tmp_path, str(model_path), seconds=800)
    found = re.findall(r"(cold|warm): .* (\d+) in the engine, (\d+) from the pool: (.*)", said)
    assert [(turn, int(local), int(loaded)) for turn, local, loaded, _ in found] == [
        ("cold", 0, 0),
        ("cold", 160, 0),
        ("warm", 0, 160),
        ("warm", 160, 16),
    ], said
    assert [text for *_, text in found[:2]] == [text for *_, text in found[2:]]


@pytest.mark.parametrize("name", ["reference_engine", "transformers_cache"])
def test_an_example_without_its_model_asks_for_it(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{name}"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and "give the folder of a model" in done.stderr and "Traceback" not in done.stderr
