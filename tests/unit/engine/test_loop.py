"""The reference engine over an embedded pool says what `generate` says, whatever its blocks go through."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvservice.connector.options import ConnectorOptions
from kvservice.connector.plan import StepPlan
from kvservice.connector.scheduler.half import SchedulerHalf
from kvservice.connector.scheduler.ports import Wait
from kvservice.connector.worker.half import WorkerHalf
from kvservice.copying.message import Direction
from kvservice.engine import cache as engine_cache
from kvservice.engine.cache import BothHalves, engine_spec
from kvservice.engine.loop import ReferenceEngine, RequestOutput
from kvservice.engine.model import PagedModel
from kvservice.engine.options import EngineOptions
from kvservice.engine.sampling import Sampling
from kvservice.errors import ConfigError, InvalidRequest, UnnamedWeights
from tests.unit.engine.tiny_models import COMMON, VOCABULARY, generated, make, prompt

BLOCK = 4
# Short enough that no step tells the engine how fast it computes: a promise that arrives later than the tokens could be
# computed is not waited for, and these models compute within milliseconds.
BASE = prompt(32, seed=5)
PROMPTS = [[*BASE, *prompt(extra, seed=extra)] for extra in (3, 9, 6, 12)]
COUNT = 12
ALWAYS = 10**9
SETTINGS: dict[str, Any] = {
    "mode": "embedded",
    "memory": "8MiB",
    "weights_version": "random",
    "verify_load": "full",
    "block_tokens": BLOCK,
    "device_blocks": 64,
    "step_tokens": 60,
}
TIGHT = {"device_blocks": 16}  # one request fits, two do not once they have grown


@pytest.fixture(scope="module")
def model() -> Any:
    return make("grouped heads")


@pytest.fixture(scope="module")
def wanted(model: Any) -> list[list[int]]:
    return [generated(model, tokens, COUNT)[0] for tokens in PROMPTS]


@contextmanager
def running(model: Any, **options: Any) -> Iterator[ReferenceEngine]:
    """An engine that has lost no block when it ends."""
    with ReferenceEngine(PagedModel(model, block_tokens=BLOCK), EngineOptions(**{**SETTINGS, **options})) as engine:
        yield engine
        assert not engine.has_requests
        engine.scheduler.check_invariants()
        engine.blocks.check_invariants([])


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    assert not any(output.reason for output in outputs)
    return [output.token_ids[0] for output in outputs]


def test_text_goes_in_and_text_comes_out(model: Any, tmp_path: Path) -> None:
    """From a folder, whose bytes name the weights."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    options = EngineOptions(**{**SETTINGS, "weights_version": None, "cache_folder": str(tmp_path / "digests")})
    with ReferenceEngine.from_pretrained(tmp_path, options) as engine:
        text = " ".join(f"w{token}" for token in PROMPTS[0])
        (output,) = engine.generate([text], Sampling(max_tokens=COUNT))
    assert output.prompt == PROMPTS[0]
    assert output.texts == [" ".join(f"w{token}" for token in generated(model, PROMPTS[0], COUNT)[0])]


@pytest.mark.parametrize("layerwise", ["off", "both"])
@pytest.mark.parametrize("kind", ["grouped heads", "latent v2", "window", "window in some layers"])
def test_tokens_are_equal_cold_and_warm_from_memory(kind: str, layerwise: str) -> None:
    model = make(kind)
    wanted = [generated(model, tokens, COUNT)[0] for tokens in PROMPTS[:2]]
    with running(model, layerwise=layerwise) as engine:
        for turn in ("cold", "warm"):
            for tokens, answer in zip(PROMPTS[:2], wanted, strict=True):
                (output,) = engine.generate([tokens], Sampling(max_tokens=COUNT))
                assert output.token_ids == [answer], turn
                engine.forget()
            counters = engine.all_counters()
        assert output.loaded_tokens >= len(PROMPTS[1]) // BLOCK * BLOCK - BLOCK
        assert not counters["loads_failed"]
        assert bool(counters["loaded_blocks_layerwise"]) == (layerwise == "both")


@pytest.mark.parametrize("layerwise", ["off", "both"])
def test_tokens_are_equal_with_slots_of_four_blocks(model: Any, wanted: list[list[int]], layerwise: str) -> None:
    """Only whole slots are stored. A prompt that shares less than one loads nothing."""
    with running(model, slot_tokens=4 * BLOCK, layerwise=layerwise) as engine:
        for turn in ("cold", "warm"):
            for tokens, answer in zip(PROMPTS, wanted, strict=True):
                (output,) = engine.generate([tokens], Sampling(max_tokens=COUNT))
                assert output.token_ids == [answer], turn
                engine.forget()
        assert output.loaded_tokens == (len(PROMPTS[-1]) - 1) // (4 * BLOCK) * 4 * BLOCK
        counters = engine.all_counters()
        assert counters["load_blocks"] > 1 and counters["loaded_blocks"] == 4 * counters["load_blocks"]
        assert not counters["loads_failed"]
        (output,) = engine.generate([[*PROMPTS[0][: 4 * BLOCK - 1], VOCABULARY - 1, 1]], Sampling(max_tokens=1))
        assert output.loaded_tokens == 0


def test_swaps_fill_the_last_slot_up(model: Any, wanted: list[list[int]]) -> None:
    options = {**TIGHT, "host_blocks": 64, "preempt_by": "swap", "slot_tokens": 4 * BLOCK}
    with running(model, **options) as engine:
        assert tokens_of(engine.generate(PROMPTS, Sampling(max_tokens=COUNT))) == wanted
        assert engine.counters["swapped_in"] > 0 and not engine.all_counters()["swaps_lost"]


def test_engines_with_other_slots_share_nothing(model: Any) -> None:
    page = PagedModel(model, block_tokens=BLOCK)
    made = [EngineOptions(**SETTINGS, slot_tokens=tokens) for tokens in (None, BLOCK, 4 * BLOCK)]
    digests = [engine_spec(page, options).fingerprint.digest for options in made]
    assert digests[0] == digests[1] != digests[2]
    assert engine_spec(page, EngineOptions(**SETTINGS, namespace="a")).fingerprint.digest not in digests
    with pytest.raises(ConfigError, match=f"choose {BLOCK} or {2 * BLOCK}"):
        engine_spec(page, EngineOptions(**SETTINGS, slot_tokens=BLOCK + 1))


def test_bfloat16_is_equal_too() -> None:
    model = make("grouped heads", torch.bfloat16)
    with running(model) as engine:
        for _ in range(2):
            assert tokens_of(engine.generate(PROMPTS[:1], Sampling(max_tokens=4))) == generated(model, PROMPTS[0], 4)
            engine.forget()


def test_a_partial_hit_is_loaded_and_the_rest_computed(model: Any, wanted: list[list[int]]) -> None:
    with running(model) as engine:
        engine.generate([BASE], Sampling(max_tokens=1))
        engine.forget()
        (output,) = engine.generate([PROMPTS[3]], Sampling(max_tokens=COUNT))
        assert output.token_ids[0] == wanted[3]
        assert (output.local_tokens, output.loaded_tokens) == (0, len(BASE))
        (output,) = engine.generate([PROMPTS[0]], Sampling(max_tokens=COUNT))
        assert (output.local_tokens, output.loaded_tokens) == (len(BASE), 0), "the engine's own blocks come first"


@pytest.mark.parametrize("layerwise", ["off", "both"])
def test_tokens_are_equal_when_preempted_by_swap(model: Any, wanted: list[list[int]], layerwise: str) -> None:
    with running(model, **TIGHT, host_blocks=64, preempt_by="swap", layerwise=layerwise) as engine:
        assert tokens_of(engine.generate(PROMPTS, Sampling(max_tokens=COUNT))) == wanted
        counters = engine.all_counters()
        assert counters["swapped_out"] == counters["swapped_in"] > 0
        assert not counters["swaps_lost"] and not counters["swaps_refused"] and not counters["recomputed"]
        assert engine.blocks.host.free_count == engine.blocks.host.count


@pytest.mark.parametrize("cache", [True, False])
def test_tokens_are_equal_when_preempted_by_recompute(model: Any, wanted: list[list[int]], cache: bool) -> None:
    with running(model, **TIGHT, preempt_by="recompute", cache=cache) as engine:
        assert tokens_of(engine.generate(PROMPTS, Sampling(max_tokens=COUNT))) == wanted
        assert engine.counters["recomputed"] > 0 and not engine.counters["swapped_out"]


@pytest.mark.parametrize("way", ["swap", "recompute"])
def test_forks_and_beams_are_equal_when_preempted(model: Any, way: str) -> None:
    sampled = Sampling(max_tokens=COUNT, temperature=0.8, top_p=0.9, seed=3, n=4)
    beams = Sampling(max_tokens=COUNT, beams=4)
    with running(model) as engine:
        alone = engine.generate([PROMPTS[1]], sampled)[0].token_ids
        assert engine.counters["copied"] > 0 and len({tuple(tokens) for tokens in alone}) > 1
    with running(model, device_blocks=26, preempt_by=way) as engine:
        ids = [engine.add(PROMPTS[0], beams), engine.add(PROMPTS[1], sampled), engine.add(PROMPTS[2], beams)]
        found: dict[str, list[list[int]]] = {}
        while engine.has_work:
            found.update({output.request_id: output.token_ids for output in engine.step()})
        assert found[ids[0]] == generated(model, PROMPTS[0], COUNT, num_beams=4)
        assert found[ids[1]] == alone
        assert found[ids[2]] == generated(model, PROMPTS[2], COUNT, num_beams=4)
        assert engine.counters["swapped_out" if way == "swap" else "recomputed"] > 0


@pytest.mark.parametrize("layerwise", ["off", "both"])
def test_a_step_is_done_in_its_order(model: Any, monkeypatch: pytest.MonkeyPatch, layerwise: str) -> None:
    """Loads and swaps in, swaps out, copies on write, the forward, stores, and then the report and the tokens."""
    seen: list[str] = []

    def record(owner: Any, name: str, label: str, *, when: Any = lambda *given: True) -> None:
        inner = getattr(owner, name)

        def call(*given: Any, **named: Any) -> Any:
            if when(*given):
                seen.append(label)
            return inner(*given, **named)

        monkeypatch.setattr(owner, name, call)

    sampled = Sampling(max_tokens=COUNT, temperature=0.8, seed=3, n=2)
    with running(model, **{**TIGHT, "device_blocks": 20}, preempt_by="swap", layerwise=layerwise) as engine:
        engine.generate([BASE], Sampling(max_tokens=1))
        engine.forget()
        record(engine.scheduler, "schedule", "schedule")
        assert engine._cache is not None
        record(engine._cache, "start", "swap in", when=lambda swaps: False)
        record(engine._cache._worker, "start_loads", "load", when=lambda plan: bool(plan.loads))
        record(engine._cache, "swap_out", "swap out")
        record(engine.model.kv, "copy_blocks", "copy")
        record(engine.model, "forward", "forward")
        record(engine._cache, "before", "layer")
        record(engine._cache, "store", "store")
        record(engine.scheduler, "commit", "tokens")
        ids = [engine.add(tokens, sampled) for tokens in PROMPTS]
        while engine.has_work:
            engine.step()
    assert len(ids) == len(PROMPTS)
    order = ["schedule", "load", "swap out", "copy", "forward", *["layer"] * 2, "store", "tokens"]
    steps = "|".join(seen).split("schedule")[1:]
    for each in steps:
        places = [order.index(label) for label in each.split("|") if label]
        assert places == sorted(places), f"out of order: {each}"
    assert {"load", "swap out", "copy"} <= set(seen), "the test shows nothing"


@pytest.mark.parametrize("defer", ["on", "off"])
def test_stores_go_into_the_pool_with_this_step_or_the_next(
    model: Any, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch, defer: str
) -> None:
    seen: list[str] = []
    with running(model, defer_stores=defer) as engine:
        cache = engine._cache
        assert cache is not None
        copier, scheduler = cache._worker._copier, engine.scheduler
        copy, commit, forward = copier.run, scheduler.commit, engine.model.forward

        def copies(direction: Direction, *given: Any, **named: Any) -> Any:
            seen.append(direction.name)
            return copy(direction, *given, **named)

        monkeypatch.setattr(copier, "run", copies)
        monkeypatch.setattr(scheduler, "commit", lambda *given: (seen.append("tokens"), commit(*given)))
        monkeypatch.setattr(engine.model, "forward", lambda *given: (seen.append("forward"), forward(*given))[1])
        assert engine.generate(PROMPTS[:1], Sampling(max_tokens=COUNT))[0].token_ids == wanted[:1]
    before = {seen[place - 1] for place, label in enumerate(seen) if label == "STORE"}
    assert before == {"tokens" if defer == "on" else "forward"}, seen


def test_every_option_is_on_its_page() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference-engine.md").read_text()
    own = [name for name in EngineOptions.model_fields if name not in ConnectorOptions.model_fields]
    assert len(own) > 5
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == own


def test_a_swap_that_is_lost_is_computed_again(
    model: Any, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes change while they are in the pool: the check of the load finds it."""
    with running(model, **TIGHT, preempt_by="swap") as engine:
        cache = engine._cache
        assert cache is not None
        start_loads = cache._worker.start_loads

        def spoil(plan: StepPlan) -> Any:
            if plan.loads:  # the pool has promised these blocks, so they are sealed
                segment = cache._worker._segment
                assert segment is not None
                for slot, length, header in segment.scan():
                    if header.is_stable:  # what is still written has no digest yet, and would be stored like this
                        segment.payload(slot, length)[:16] = b"\xee" * 16
            return start_loads(plan)

        monkeypatch.setattr(cache._worker, "start_loads", spoil)
        assert tokens_of(engine.generate(PROMPTS, Sampling(max_tokens=COUNT))) == wanted
        counters = engine.all_counters()
        assert counters["load_corrupt"] > 0 and counters["recomputed"] > 0 and not counters["swapped_in"]


def test_a_pool_that_is_silent_about_a_swap_is_not_waited_for(
    model: Any, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests of the engine wait with it."""
    monkeypatch.setattr(engine_cache, "SWAP_SECONDS_MAX", 0.05)
    with running(model, **TIGHT, preempt_by="swap") as engine:
        assert engine._cache is not None
        half, asked = engine._cache._half, list[str]()
        matched = half.matched

        def silent(request_id: str, *rest: Any) -> Any:
            if "/swap" not in request_id:
                return matched(request_id, *rest)
            asked.append(request_id)
            assert len(asked) < 200_000, "it waits for ever"  # a fast machine asks 10,000 times in 0.05 s
            return Wait()

        monkeypatch.setattr(half, "matched", silent)
        assert tokens_of(engine.generate(PROMPTS, Sampling(max_tokens=COUNT))) == wanted
        counters = engine.all_counters()
    assert counters["swaps_lost"] > 0 and not [name for name in counters if name.startswith("failed_swap_in")]


def test_no_request_can_name_what_was_swapped(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines swap the same prompts under different keys, and none is a key of a prompt."""
    seen: list[dict[str, set[bytes]]] = []
    inner = SchedulerHalf.plan_stores

    def watch(half: Any, plan: Any, scheduled: Any) -> None:
        scheduled = list(scheduled)
        inner(half, plan, scheduled)
        for request_id, hashes, *_ in scheduled:
            seen[-1]["swaps" if "/swap" in request_id else "prompts"] |= set(hashes)

    monkeypatch.setattr(SchedulerHalf, "plan_stores", watch)
    for _ in range(2):
        seen.append({"swaps": set(), "prompts": set()})
        with running(model, **TIGHT, preempt_by="swap") as engine:
            engine.generate(PROMPTS, Sampling(max_tokens=COUNT))
    assert seen[0]["prompts"] == seen[1]["prompts"] and seen[0]["swaps"] and seen[1]["swaps"]
    assert seen[0]["swaps"].isdisjoint(seen[1]["swaps"] | seen[0]["prompts"])


def test_a_request_may_be_called_as_a_swap_once_was(model: Any) -> None:
    """What was swapped was stored under the names of that request's prompt, and its next reader got it."""
    prompts = {"old": prompt(33, seed=1), "new": prompt(17, seed=2), "new/swap1": prompt(17, seed=3)}
    with running(model, **TIGHT, preempt_by="swap") as engine:
        for request_id, tokens in prompts.items():
            engine.add(tokens, Sampling(max_tokens=COUNT), request_id=request_id)
        while engine.has_work:
            engine.step()
        assert engine.all_counters()["swaps_out"] > 0
        engine.forget()
        (output,) = engine.generate([prompts["new/swap1"]], Sampling(max_tokens=COUNT))
    assert output.loaded_tokens and output.token_ids == generated(model, prompts["new/swap1"], COUNT)


@pytest.mark.parametrize(
    ("owner", "name", "times"),
    [
        (SchedulerHalf, "on_new_request", ALWAYS),
        (SchedulerHalf, "matched", ALWAYS),
        (SchedulerHalf, "allocated", ALWAYS),
        (SchedulerHalf, "begin_step", 3),
        (SchedulerHalf, "plan_stores", ALWAYS),
        (SchedulerHalf, "finished", ALWAYS),
        (WorkerHalf, "start_loads", ALWAYS),
        (WorkerHalf, "store", ALWAYS),
        (WorkerHalf, "take_loaded", 3),
        (WorkerHalf, "take_report", 3),
    ],
)
def test_an_exception_in_the_cache_costs_time_only(
    model: Any, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, times: int
) -> None:
    inner, calls = getattr(owner, name), []

    def fail(*given: Any, **named: Any) -> Any:
        calls.append(name)
        if len(calls) <= times:
            raise RuntimeError("planted")
        return inner(*given, **named)

    with running(model, **TIGHT, preempt_by="swap") as engine:
        engine.generate([BASE], Sampling(max_tokens=1))
        engine.forget()
        monkeypatch.setattr(owner, name, fail)
        ids = [engine.add(tokens, Sampling(max_tokens=COUNT)) for tokens in PROMPTS]
        found: dict[str, list[int]] = {}
        while engine.has_requests:
            found.update({output.request_id: output.token_ids[0] for output in engine.step()})
        monkeypatch.undo()
        while engine.has_work:
            engine.step()
        assert [found[each] for each in ids] == wanted
        assert calls and any(key.startswith("failed_") for key in engine.all_counters())


def test_an_aborted_request_ends_and_keeps_no_block(model: Any, wanted: list[list[int]]) -> None:
    with running(model, **TIGHT, preempt_by="swap") as engine:
        ids = [engine.add(tokens, Sampling(max_tokens=COUNT)) for tokens in PROMPTS]
        ended: dict[str, RequestOutput] = {}
        while not engine.counters["swapped_out"]:
            ended.update({output.request_id: output for output in engine.step()})
        for each in ids[1:]:
            engine.abort(each)
        while engine.has_work:
            ended.update({output.request_id: output for output in engine.step()})
        assert ended[ids[0]].token_ids[0] == wanted[0] and not ended[ids[0]].reason
        assert {ended[each].reason for each in ids[1:]} == {"aborted"}
        assert engine.blocks.device.free_count == engine.blocks.device.count


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("enable_lora", "merge the adapter into the weights"),
        ("pipeline_parallel_size", "load it on one device"),
        ("num_scheduler_steps", "each step is one forward"),
        ("device_blokcs", "did you mean 'device_blocks'"),
    ],
)
def test_what_it_lacks_is_refused_by_name(option: str, words: str) -> None:
    with pytest.raises(ConfigError, match=option) as refused:
        EngineOptions(**{option: 2})
    assert words in refused.value.message


def test_options_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="offload 'eager'"):
        EngineOptions(preempt_by="swap", offload="lazy")
    with pytest.raises(ConfigError, match="name them with weights_version"):
        EngineOptions(weights_version_file="/version")
    with pytest.raises(ConfigError, match="copies whole blocks"):
        EngineOptions(layerwise="load", copier="worker")


def test_requests_that_can_never_run_are_refused(model: Any) -> None:
    with running(model, device_blocks=8) as engine:
        for tokens, count, words in ((prompt(40), 4, "larger device pool"), (prompt(8), 600, "positions of the model")):
            with pytest.raises(InvalidRequest, match=words):
                engine.add(tokens, Sampling(max_tokens=count))
        for token in (VOCABULARY, -1, 1.5, "a", None):  # a step that fails would end every request of the engine
            with pytest.raises(InvalidRequest, match="token"):
                engine.add([1, token])  # type: ignore[list-item]
        with pytest.raises(InvalidRequest, match="version"):
            engine.add(prompt(8), transfer_params={"kvservice": {"version": 9, "role": "decode"}})
    with pytest.raises(InvalidRequest, match="closed"):
        engine.add(prompt(8))


def test_a_text_with_the_keys_of_another_length_is_refused() -> None:
    """LongRoPE: beyond `original_max_position_embeddings` the keys of the whole text are others."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 8.0}
    turned = {"rope_theta": 10_000.0, "original_max_position_embeddings": 64, **rope}
    config = LlamaConfig(**COMMON, num_key_value_heads=2, rope_parameters=turned)
    with running(LlamaForCausalLM(config).eval()) as engine:
        assert len(engine.generate([prompt(60)], Sampling(max_tokens=4))[0].token_ids[0]) == 4
        with pytest.raises(InvalidRequest, match="64 positions of the model"):
            engine.add(prompt(60), Sampling(max_tokens=5))


@pytest.mark.parametrize(
    ("ours", "counter"), [({"hints": {"pin_seconds": "x"}}, "hints_refused"), ({"store": "no"}, "switches_refused")]
)
def test_hints_and_switches_without_sense_refuse_nobody(model: Any, ours: dict[str, object], counter: str) -> None:
    with running(model) as engine:
        asked(engine, {"version": 1, **ours})
        counters = engine.all_counters()
    assert counters[counter] == 1
    assert bool(counters["store_blocks_planned"]) == (counter == "hints_refused"), "unclear switches keep a prompt out"


@pytest.mark.parametrize(
    ("ours", "is_stored"),
    [
        ({"hints": {"no_store": True}}, False),
        ({"hints": {"no_store": True}, "store": True}, True),
        ({"hints": {"no_store": True}, "role": "prefill", "handoff": "0" * 32}, True),
        ({"store": False}, False),
    ],
)
def test_a_request_says_whether_it_is_stored(model: Any, ours: dict[str, object], is_stored: bool) -> None:
    with running(model) as engine:
        asked(engine, {"version": 1, **ours})
        assert bool(engine.all_counters()["store_blocks_planned"]) == is_stored


def asked(engine: ReferenceEngine, ours: dict[str, object], tokens: Sequence[int] = PROMPTS[0]) -> RequestOutput:
    """The answer to a request with these parameters, when all copies have ended."""
    request_id = engine.add(tokens, Sampling(max_tokens=2), transfer_params={"kvservice": ours})
    found: dict[str, RequestOutput] = {}
    while engine.has_work:
        found.update({output.request_id: output for output in engine.step()})
    return found[request_id]


def test_a_request_is_not_loaded_if_it_says_so(model: Any) -> None:
    with running(model) as engine:
        for load, is_loaded in ((True, False), (False, False), (True, True)):
            assert bool(asked(engine, {"version": 1, "load": load}).loaded_tokens) == is_loaded
            engine.forget()


def test_weights_without_a_name_are_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="weights_version"):
        ReferenceEngine(PagedModel(model, block_tokens=BLOCK), EngineOptions(mode="embedded", device_blocks=8))


def test_weights_changed_in_memory_are_not_named_by_files(model: Any, tmp_path: Path) -> None:
    """An adapter that was merged into them leaves the model's folder in its `name_or_path`."""
    model.save_pretrained(tmp_path)
    merged = type(model).from_pretrained(tmp_path)
    merged.model.layers[0].self_attn.k_proj.weight.data += 0.5
    with pytest.raises(ConfigError, match="weights_version"):
        ReferenceEngine(PagedModel(merged, block_tokens=BLOCK), EngineOptions(mode="embedded", device_blocks=8))


def test_files_changed_after_the_load_name_no_weights(model: Any, tmp_path: Path) -> None:
    """A training run that writes its next checkpoint into the same folder."""
    model.save_pretrained(tmp_path)
    loaded = PagedModel(model, block_tokens=BLOCK, name=str(tmp_path))
    options = EngineOptions(cache_folder=str(tmp_path / "digests"))
    before = engine_spec(loaded, options).fingerprint
    make("grouped heads", seed=1).save_pretrained(tmp_path)
    with pytest.raises(UnnamedWeights, match="changed after this model was loaded"):
        engine_spec(loaded, options)
    opened = PagedModel(model, block_tokens=BLOCK, name=str(tmp_path))
    assert engine_spec(opened, options).fingerprint != before


def test_an_engine_whose_step_did_not_end_says_so() -> None:
    """Ctrl-C amid the layers. Another engine of the same model goes on, and finds nothing that is half computed."""
    model = make("grouped heads")
    paged, options = PagedModel(model, block_tokens=BLOCK), EngineOptions(**SETTINGS)
    with ReferenceEngine(paged, options) as engine:
        with model.model.layers[1].register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[:2], Sampling(max_tokens=COUNT))
        for go_on in (engine.step, lambda: engine.add(PROMPTS[0])):
            with pytest.raises(InvalidRequest, match="was interrupted"):
                go_on()
    with ReferenceEngine(paged, options) as engine:
        outputs = engine.generate(PROMPTS[:2], Sampling(max_tokens=COUNT))
    assert [output.token_ids for output in outputs] == [generated(model, tokens, COUNT) for tokens in PROMPTS[:2]]


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_closed_engine_leaves_no_thread_and_no_memory(model: Any) -> None:
    before = set(threading.enumerate())
    engine = ReferenceEngine(PagedModel(model, block_tokens=BLOCK), EngineOptions(**SETTINGS, layerwise="both"))
    engine.generate(PROMPTS[:2], Sampling(max_tokens=2))
    engine.add(PROMPTS[2])
    engine.close()
    engine.close()
    assert set(threading.enumerate()) == before
    assert isinstance(engine._cache, BothHalves) and engine._cache._worker._segment is None
