"""The model of the demo and the tests is the real one: names, shapes, tokenizer and, once, its answer."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy
import pytest

from kvservice.testing.eventually import eventually
from tests.interruptible import interruptible

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ROOT / "examples" / "documents"
ANSWER_TOKENS = 256


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_model_under_test", ROOT / "examples" / "prepare_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("heads", [1, 3, 9])
def test_rope_order_is_undone_exactly(script: ModuleType, heads: int) -> None:
    rows = numpy.arange(heads * 64 * 5, dtype=numpy.float32).reshape(heads * 64, 5)
    # llama.cpp's own permutation, from its Hugging Face converter.
    stored = rows.reshape(heads, 2, 32, 5).swapaxes(1, 2).reshape(rows.shape)
    assert not numpy.array_equal(stored, rows)
    assert numpy.array_equal(script.undo_rope_order(stored, heads), rows)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_preparation_that_is_stopped_leaves_no_folder(tmp_path: Path, number: signal.Signals) -> None:
    words = [sys.executable, str(ROOT / "examples" / "prepare_model.py"), "--out", str(tmp_path / "model")]
    with subprocess.Popen(interruptible(words), stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: list(tmp_path.iterdir()), "the unfinished folder")
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
    assert not list(tmp_path.iterdir())


def test_an_unknown_tensor_is_refused(script: ModuleType) -> None:
    with pytest.raises(script.ModelSourceError, match=r"rope_freqs\.weight"):
        script.tensor_name("rope_freqs.weight")


def test_a_folder_that_is_somebody_elses_is_not_replaced(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(script.ModelSourceError, match="not made by this script"):
        script.ensure_model(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_prepared_model_is_not_prepared_again(script: ModuleType, model_path: Path) -> None:
    before = (model_path / "model.safetensors").stat()
    assert script.ensure_model(model_path) == model_path
    assert (model_path / "model.safetensors").stat() == before


def test_the_weights_have_the_names_and_shapes_of_the_config(model_path: Path) -> None:
    from safetensors import safe_open

    config = json.loads((model_path / "config.json").read_text())
    with safe_open(model_path / "model.safetensors", framework="pt") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118  no iterator
        kinds = {weights.get_slice(name).get_dtype() for name in shapes}
    hidden, kv = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    assert kinds == {"BF16"}
    assert len(shapes) == config["num_hidden_layers"] * 9 + 2
    assert shapes["model.embed_tokens.weight"] == [config["vocab_size"], hidden]
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == [hidden, hidden]
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == [kv, hidden]
    assert shapes["model.layers.29.mlp.down_proj.weight"] == [hidden, config["intermediate_size"]]


def test_the_tokenizer_is_smollms(model_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    assert tokenizer.encode("The capital of France is").ids == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("2026").tokens == ["2", "0", "2", "6"]
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
    assert tokenizer.decode(tokenizer.encode("na\u00efve \u2192 \U0001f4a1\n\ttab").ids) == "na\u00efve → 💡\n\ttab"


def test_the_document_is_long_and_fits_with_each_question(model_path: Path) -> None:
    """Its tokens round-trip."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    context = json.loads((model_path / "config.json").read_text())["max_position_embeddings"]
    questions = json.loads((DOCUMENTS / "questions.json").read_text())
    document = (DOCUMENTS / questions["document"]).read_text()
    ids = tokenizer.encode(document).ids
    assert tokenizer.decode(ids) == document
    assert len(ids) >= 4000
    assert len(questions["questions"]) == 5
    for question in questions["questions"]:
        assert len(ids) + len(tokenizer.encode(question).ids) + ANSWER_TOKENS < context


@pytest.mark.vllm
def test_the_model_knows_the_capital_of_france(model_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(output[0]).startswith("The capital of France is Paris")
