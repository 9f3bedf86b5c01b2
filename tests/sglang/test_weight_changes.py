"""Weights of SGLang that are changed in place, or files that are replaced below it: a real engine hits nothing of what
other weights computed, and its pages are named by the weights that it has loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.demo.sglang_engine import HICACHE, PAGE_TOKENS, SETTINGS, SITE
from examples.demo.sglang_process import SGLangProcess
from kvservice.testing.cluster import LocalCluster
from kvservice.testing.eventually import eventually
from kvservice.units import MiB, NodeId
from tests.sglang.test_engines import ANSWER_TOKENS, attempt, pages_of, prompt
from tests.sglang.test_interface import said
from tests.vllm.tiny_model import make_llama

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # as in test_engines
    pytest.mark.skipif(not (SITE / "sglang").is_dir(), reason="no SGLang: make .venv-sglang/.installed"),
]

NODE = NodeId("n0")
REPLACED = """
import json, os, shutil, sys
from sglang.srt import runtime_context
from sglang.srt.server_args import ServerArgs
from kvservice.connector.sglang import identity
from kvservice.connector.sglang.options import SGLangOptions
from kvservice.errors import UnnamedWeights
settings, weights, replacement, are_named_before = json.loads(sys.argv[1])
runtime_context.publish(ServerArgs(**settings), role="scheduler")
def named():
    try:
        return identity.engine_fields(SGLangOptions.parse({"interface_v1": 1}))["weights"]
    except UnnamedWeights as error:
        return error.message
found = [named()] if are_named_before else []
shutil.copyfile(replacement, weights + ".new")
os.replace(weights + ".new", weights)
print(json.dumps([*found, named()]))
"""


@pytest.fixture
def models(tmp_path: Path, model_path: Path) -> tuple[Path, Path]:
    """Of one shape, with other weights."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    return (
        make_llama(first, model_path, attention_heads=4, kv_heads=2),
        make_llama(second, model_path, attention_heads=4, kv_heads=2, seed=8),
    )


def test_pages_of_earlier_weights_are_never_hit(models: tuple[Path, Path]) -> None:
    """Neither at once nor by a storage that is attached behind the change."""
    before, after = models
    text = prompt("Lou")
    with LocalCluster(nodes=1, pool_bytes=64 * MiB, transport="shm") as cluster:
        storage = {"mode": "service", "socket": cluster.socket(NODE), "verify_load": "full"}
        settings = {"model_path": str(before), "storage": storage, "log_level": "warning", "context_length": 4096}
        with SGLangProcess(settings) as engine:
            engine.ready()

            def asked() -> dict[str, int]:
                engine.forget()
                return engine.ask(text, ANSWER_TOKENS)

            first = asked()
            pages = pages_of(first)
            eventually(lambda: attempt(engine, text) == pages * PAGE_TOKENS, "its own pages")
            engine.attach(attached=False)
            engine.change_weights(after)
            wanted = asked()
            assert wanted["token_ids"] != first["token_ids"]
            engine.attach(attached=True)
            check(asked, wanted, pages)
            engine.change_weights(before)
            check(asked, first, pages)


def check(asked: Callable[[], dict[str, int]], wanted: dict[str, int], pages: int) -> None:
    """The first answer hits nothing, and a later one what the weights of now computed."""
    answer = asked()
    assert answer["token_ids"] == wanted["token_ids"]
    assert answer["storage_tokens"] == 0
    eventually(lambda: asked()["storage_tokens"] == pages * PAGE_TOKENS, "pages of the weights of now")
    assert asked()["token_ids"] == wanted["token_ids"]


def names(model: Path, replacement: Path, *, settings: dict[str, object], are_named_before: bool) -> list[str]:
    """What a process of SGLang calls its weights before the file is replaced, if it does, and afterwards."""
    files = [str(folder / "model.safetensors") for folder in (model, replacement)]
    given = {**SETTINGS, "model_path": str(model), "context_length": 4096, **settings}
    found = said(REPLACED, json.dumps([given, *files, are_named_before]))
    assert isinstance(found, list)
    return found


def test_an_attached_again_storage_names_what_was_loaded(models: tuple[Path, Path]) -> None:
    first, again = names(*models, settings=HICACHE, are_named_before=True)
    assert first == again and first.startswith("xxh3:")


def test_files_replaced_below_a_running_engine_name_nothing(models: tuple[Path, Path]) -> None:
    """A storage that is attached then would take the new files for the weights that the engine has."""
    (found,) = names(*models, settings={}, are_named_before=False)
    assert "model.safetensors was changed after this engine started" in found
