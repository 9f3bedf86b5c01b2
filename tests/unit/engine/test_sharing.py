"""Pages that engines of several kinds share, on the reference engine: named for all of them, compared with the model's
files before the first one is shared, and the same tokens as without a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvservice.connector.plan import ProbePlan
from kvservice.connector.shared.gate import AGREES, DIFFERS, GateState, ShareGate
from kvservice.connector.shared.judge import Difference, Judge, Probation
from kvservice.connector.worker.page_copier import PageCopier, PageViews, row_views
from kvservice.core.block.pages import KNOWN_PROMPT, page_hashes, salted
from kvservice.engine.cache import engine_spec
from kvservice.engine.loop import ReferenceEngine
from kvservice.engine.model import PagedModel
from kvservice.engine.options import EngineOptions
from kvservice.engine.paged import TokenSpan
from kvservice.engine.sampling import Sampling
from kvservice.engine.sharing import check_pages, name_pages, page_copier, shared_spec
from kvservice.errors import ConfigError, UnsupportedLayout
from tests.unit.engine.tiny_models import generated, make, prompt

COUNT = 8
SETTINGS: dict[str, Any] = {"mode": "embedded", "memory": "8MiB", "share": "engines", "device_blocks": 32}
PROMPT = prompt(40, seed=3)  # so short that no step tells how fast the engine computes, and it waits for the pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make("grouped heads").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def judge(folder: Path) -> Judge:
    return Judge(str(folder), "float32")


def paged(folder: Path) -> PagedModel:
    from transformers import AutoModelForCausalLM

    return PagedModel(AutoModelForCausalLM.from_pretrained(folder), block_tokens=16, name=str(folder))


@pytest.fixture(scope="module")
def computed(folder: Path) -> PagedModel:
    """Its first four blocks hold the known prompt."""
    model = paged(folder)
    model.allocate(8)
    model.forward([TokenSpan(KNOWN_PROMPT, 0, [0, 1, 2, 3])], None)
    return model


def options(folder: Path, **more: Any) -> EngineOptions:
    return EngineOptions(**{**SETTINGS, "cache_folder": str(folder / "digests"), **more})


def test_engine_hits_the_pages_that_it_stored(folder: Path) -> None:
    with ReferenceEngine(paged(folder), options(folder, verify_load="full")) as engine:
        wanted = generated(make("grouped heads"), PROMPT, COUNT)
        for loaded in (0, len(PROMPT) // 16 * 16):
            (output,) = engine.generate([PROMPT], Sampling(max_tokens=COUNT))
            assert output.token_ids == wanted
            assert output.loaded_tokens == loaded
            engine.forget()
        counters = engine.all_counters()
        assert not counters["loads_failed"] and counters["load_verified_blocks"]


def test_exact_and_shared_blocks_have_no_name_in_common(folder: Path) -> None:
    model = paged(folder)
    exact = engine_spec(model, options(folder, share="off"))
    shared = shared_spec(model, options(folder), exact)
    assert exact.fingerprint.digest != shared.fingerprint.digest
    assert dict(shared.fingerprint.fields)["engine"] == "shared between engines"
    assert dict(exact.fingerprint.fields)["engine"] == "kvservice-reference"
    assert shared.layout.payload_bytes == model.shape.block_bytes
    apart = shared_spec(model, options(folder), replace(exact, namespace="a"))
    assert apart.fingerprint.difference(shared.fingerprint) == "namespace: a here, (absent) there"


def test_pages_are_named_by_tokens_and_salt_alone() -> None:
    names = name_pages(PROMPT, 16, b"", None)
    assert names == page_hashes(PROMPT)
    assert name_pages(PROMPT[16:], 16, b"salt", names[0]) == names[1:]
    assert name_pages(PROMPT, 16, b"salt", None) == page_hashes(PROMPT, salted(b"salt"))


def test_pages_of_the_same_model_differ_by_nothing(computed: PagedModel, judge: Judge) -> None:
    found = page_copier(computed).pages([(block, 0) for block in range(4)], 2)
    difference = judge.difference(KNOWN_PROMPT, found, range(2))
    assert max(difference.keys, difference.values) < 1e-6 and difference.kl < 1e-9
    assert not difference.refusal("float32")


def interleaved(k: torch.Tensor) -> torch.Tensor:
    return k.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


WRONG: dict[str, Callable[[PageViews], PageViews]] = {
    "K and V exchanged": lambda views: PageViews(views.values, views.keys),
    "heads exchanged": lambda views: PageViews([k.flip(2) for k in views.keys], views.values),
    "halves of the rotation interleaved": lambda views: PageViews([interleaved(k) for k in views.keys], views.values),
    "layers exchanged": lambda views: PageViews(views.keys[::-1], views.values[::-1]),
    "tokens one late": lambda views: PageViews([k.roll(1, 1) for k in views.keys], views.values),
    "V of eight bits": lambda views: PageViews(
        views.keys, [v.to(torch.float8_e4m3fn).to(v.dtype) for v in views.values]
    ),
    "the second layer not finished": lambda views: PageViews(
        views.keys, [views.values[0], views.values[1] + 0.1 * torch.randn_like(views.values[1])]
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_pages_in_another_order_are_refused(computed: PagedModel, judge: Judge, fault: str) -> None:
    layers = computed.kv.layers
    copier = PageCopier(layers, WRONG[fault](row_views(layers)), range(2))
    difference = judge.difference(KNOWN_PROMPT, copier.pages([(block, 0) for block in range(4)], 2), range(2))
    assert " differs by " in difference.refusal("float32")


def test_engine_whose_pages_do_not_fit_runs_without_a_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvservice.connector.shared.judge.LAYER_0_MAX", -1.0)
    with ReferenceEngine(paged(folder), options(folder)) as engine:
        (output,) = engine.generate([PROMPT], Sampling(max_tokens=COUNT))
        assert output.token_ids == generated(make("grouped heads"), PROMPT, COUNT)
    assert "running without the cache: this engine shares no pages: K of layer 0 differs" in caplog.text


def test_nan_is_no_agreement() -> None:
    nan = float("nan")
    assert not Difference(0.0, 0.0, 0.0).refusal("bfloat16")
    assert Difference(nan, 0.0, 0.0).refusal("bfloat16") and Difference(0.0, 0.0, nan).refusal("bfloat16")


def test_a_rank_is_judged_by_its_own_heads(computed: PagedModel, judge: Judge) -> None:
    found = page_copier(computed).pages([(block, 0) for block in range(4)], 2)
    assert not judge.difference(KNOWN_PROMPT, found[:, :, :, 1:], range(1, 2)).refusal("float32")
    assert judge.difference(KNOWN_PROMPT, found[:, :, :, :1], range(1, 2)).refusal("float32")
    with pytest.raises(UnsupportedLayout, match="the engine keeps"):
        judge.difference(KNOWN_PROMPT, found, range(1, 2))


def test_what_cannot_be_shared_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    memory = PagedModel(make("grouped heads"), block_tokens=16)
    given_ = options(folder, weights_version="a")
    with pytest.raises(UnsupportedLayout, match="save it to a folder first"):
        shared_spec(memory, given_, engine_spec(memory, given_))
    with pytest.raises(UnsupportedLayout, match="transformers cannot read"):
        Judge(str(tmp_path), "float32")
    with pytest.raises(ConfigError, match="needs block_tokens 16"):
        options(folder, block_tokens=32)


def test_worker_looks_once_and_counts_what_it_found(computed: PagedModel, judge: Judge) -> None:
    later: list[Callable[[], None]] = []
    probation = Probation(judge, page_copier(computed), later.append)
    plan = ProbePlan(KNOWN_PROMPT, (0, 1, 2, 3))
    probation.look(plan)
    probation.look(plan)
    assert not probation.take_counters()
    (run,) = later
    run()
    assert probation.take_counters() == {AGREES: 1} and not probation.take_counters()


@pytest.mark.parametrize("blocks", [(3, 2, 1, 0), (0, 1, 2)])
def test_worker_that_cannot_compare_does_not_agree(computed: PagedModel, judge: Judge, blocks: tuple[int, ...]) -> None:
    """Blocks in a wrong order, and too few of them."""
    probation = Probation(judge, page_copier(computed), lambda run: run())
    try:
        probation.look(ProbePlan(KNOWN_PROMPT, blocks))
    except IndexError:
        assert len(blocks) < 4
    assert probation.take_counters() == {DIFFERS: 1}


def test_gate_opens_when_every_worker_agrees() -> None:
    gate = ShareGate(worker_count=2)
    assert gate.probe(KNOWN_PROMPT, 31, [7]) is None and gate.is_waiting
    gate.reported({AGREES: 2})  # of nothing that was asked
    gate = ShareGate(worker_count=2)
    plan = gate.probe(KNOWN_PROMPT, 40, [7, 8, 9])
    assert plan == ProbePlan(KNOWN_PROMPT[:32], (7, 8, 9))
    assert gate.probe(KNOWN_PROMPT, 64, [7, 8, 9, 10]) is None
    gate.reported({AGREES: 1})
    assert not gate.is_open
    gate.reported({"other": 1})
    gate.reported({AGREES: 1})
    assert gate.is_open


def test_gate_is_shut_by_one_worker_for_good() -> None:
    gate = ShareGate(worker_count=2)
    gate.probe(KNOWN_PROMPT, 64, [1, 2, 3, 4])
    gate.reported({AGREES: 1, DIFFERS: 1})
    gate.reported({AGREES: 2})
    assert gate.state is GateState.SHUT


def test_probe_has_at_most_sixteen_pages() -> None:
    plan = ShareGate(1).probe(list(range(400)), 400, list(range(25)))
    assert plan is not None and len(plan.token_ids) == 256


def test_check_at_attach_computes_what_fits(folder: Path) -> None:
    model = paged(folder)
    model.allocate(2)
    check_pages(model, page_copier(model))
    assert not torch.equal(model.kv.storage[1], torch.zeros_like(model.kv.storage[1]))
