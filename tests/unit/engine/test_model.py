"""A model over blocks says what transformers' `generate` says, however its tokens are cut into steps."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from kvservice.engine.model import PagedModel
from kvservice.engine.paged import TokenSpan
from kvservice.engine.sampling import Generation, Sampling
from kvservice.errors import UnsupportedLayout
from tests.unit.engine.tiny_models import (
    BLOCK_TOKENS,
    COMMON,
    FURTHER,
    KINDS,
    VOCABULARY,
    WINDOW,
    Driver,
    generated,
    make,
    make_further,
    prompt,
)

COUNT = 8  # tokens of an output
# How far the likeliest token must lead before two ways to compute it are asked for the same one. Sums in another order
# differ by 1e-5 in float32; bfloat16 has 8 bits, so logits near 8 differ by 0.03.
MARGINS = {torch.float32: 1e-3, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Case:
    """A model, a prompt, and what `generate` says after it."""

    model: Any
    tokens: list[int]
    expected: list[int]


def sure(kind: str, dtype: torch.dtype, length: int = 23) -> Case:
    """The first seed whose model is sure of each of its tokens: no rounding closes the lead."""
    for seed in range(40):
        model = make(kind, dtype, seed)
        tokens = prompt(length, seed)
        expected = generated(model, tokens, COUNT)[0]
        if lead(model, tokens + expected, len(tokens)) > MARGINS[dtype]:
            return Case(model, tokens, expected)
    raise AssertionError("no seed gives a model that is sure of its tokens")


def lead(model: Any, tokens: list[int], begin: int) -> float:
    """By how much the token chosen at each position from `begin` on led at least, computed without a cache."""
    best = without_cache(model, tokens)[begin - 1 : -1].topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


def without_cache(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


@pytest.fixture(scope="module", params=[(kind, dtype) for kind in KINDS for dtype in MARGINS], ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    return sure(*request.param)


def greedy(driver: Driver, rows: list[tuple[list[int], list[int]]], logits: torch.Tensor) -> list[list[int]]:
    """COUNT tokens of each (prompt, table), computed together, of which the first follow from these logits."""
    known = [list(tokens) for tokens, _ in rows]
    for _ in range(COUNT):
        for row, token in zip(known, logits.argmax(dim=-1).tolist(), strict=True):
            row.append(token)
        spans = [driver.span(row, len(row) - 1, table) for row, (_, table) in zip(known, rows, strict=True)]
        logits = driver.model.forward(spans)
    return [row[-COUNT:] for row in known]


def test_cold(case: Case) -> None:
    driver, table = Driver(case.model), []
    assert greedy(driver, [(case.tokens, table)], driver.prefill(case.tokens, table)) == [case.expected]


def test_prefill_in_chunks(case: Case) -> None:
    """Chunks of 5 tokens cross the edges of blocks of 4."""
    driver, table = Driver(case.model), []
    assert greedy(driver, [(case.tokens, table)], driver.prefill(case.tokens, table, 5)) == [case.expected]


@pytest.mark.parametrize("chunk", [1, BLOCK_TOKENS, 22])
def test_prefill_in_chunks_of_other_sizes(chunk: int) -> None:
    case = sure("grouped heads", torch.float32)
    driver, table = Driver(case.model), []
    assert greedy(driver, [(case.tokens, table)], driver.prefill(case.tokens, table, chunk)) == [case.expected]


def test_prefix_that_lies_in_blocks_is_not_computed(case: Case) -> None:
    """The second sequence shares the full blocks of the first, whose computing it would otherwise repeat."""
    driver = Driver(case.model)
    other = [*case.tokens[:16], *prompt(9, 77)]
    first: list[int] = []
    driver.prefill(other, first)
    table = first[: 16 // BLOCK_TOKENS]
    logits = driver.prefill(case.tokens, table, begin=16)
    assert greedy(driver, [(case.tokens, table)], logits) == [case.expected]


def test_sequences_of_one_batch_do_not_see_each_other(case: Case) -> None:
    """Other lengths, so rows are padded; and two of one length, whose prompts are one batch."""
    driver = Driver(case.model)
    prompts = [case.tokens, prompt(23, 5), prompt(7, 6), prompt(40, 7)]
    tables: list[list[int]] = [[] for _ in prompts]
    logits = driver.model.forward(
        [driver.span(tokens, 0, table) for tokens, table in zip(prompts, tables, strict=True)]
    )
    assert greedy(driver, list(zip(prompts, tables, strict=True)), logits)[0] == case.expected


@pytest.mark.parametrize("name", [*KINDS, *FURTHER])
def test_logits_are_those_without_a_cache(name: str) -> None:
    """Chunks, decodes of unequal length and padding, all logits compared, not only the likeliest token."""
    model = make(name) if name in KINDS else make_further(name)
    driver = Driver(model)
    texts = [prompt(30, 1), prompt(18, 2), prompt(3, 3)]
    tables: list[list[int]] = [[], [], []]
    for text, table in zip(texts, tables, strict=True):
        driver.prefill(text[:-1], table, 6)
    found = driver.model.forward(
        [driver.span(text, len(text) - 1, table) for text, table in zip(texts, tables, strict=True)]
    )
    expected = torch.stack([without_cache(model, text)[-1] for text in texts])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_step_mixes_prefill_and_decode() -> None:
    case = sure("grouped heads", torch.float32)
    driver, table, late = Driver(case.model), [], prompt(11, 4)
    driver.prefill(case.tokens, table)
    known, late_table = [*case.tokens, case.expected[0]], []
    logits = driver.model.forward([driver.span(late, 0, late_table), driver.span(known, len(case.tokens), table)])
    assert int(logits[1].argmax()) == case.expected[1]
    torch.testing.assert_close(logits[0], without_cache(case.model, late)[-1], atol=1e-4, rtol=1e-4)


BEAMS = {"num_beams": 4, "num_return_sequences": 4}


@pytest.mark.parametrize("kind", ["grouped heads", "latent v3", "window", "window in some layers"])
def test_four_beams_are_those_of_generate(kind: str) -> None:
    """Beams fork, share full blocks, copy the open one and drop."""
    model, tokens = make(kind, seed=3), prompt(18, 3)
    found = Driver(model).run(tokens, Sampling(max_tokens=10, beams=4, n=4))
    assert found == generated(model, tokens, 10, **BEAMS)


def test_four_beams_are_those_of_generate_in_bfloat16() -> None:
    """With weights whose beams are the same in float32: then no rounding of bfloat16 decides between two of them."""
    for seed in range(40):
        model, tokens = make("grouped heads", torch.bfloat16, seed), prompt(18, seed)
        exact = generated(copy.deepcopy(model).float(), tokens, 6, **BEAMS)
        expected = generated(model, tokens, 6, **BEAMS)
        if expected == exact:
            break
    assert expected == exact, "no seed gives a model that is sure of its beams"
    assert Driver(model).run(tokens, Sampling(max_tokens=6, beams=4, n=4)) == expected


def test_outputs_of_one_prompt_are_those_computed_alone() -> None:
    """Four sampled outputs share the blocks of their prompt: the same as four that share nothing."""
    model, tokens = make("grouped heads"), prompt(18)
    sampling = Sampling(max_tokens=COUNT, temperature=0.8, top_p=0.9, seed=11, n=4)
    together = Driver(model).run(tokens, sampling)
    assert len({tuple(output) for output in together}) == 4
    alone = []
    for number in range(4):
        generation, known = Generation(sampling), list(tokens)
        while len(known) < len(tokens) + COUNT:
            row = without_cache(model, known)[-1]
            position = len(known) - len(tokens)
            known.append(generation.pick(row, number, position))
        alone.append(known[len(tokens) :])
    assert together == alone


def test_tokens_behind_the_window_need_no_block() -> None:
    """Where all layers slide, attention may be told to begin later, and table entries before are never used."""
    case = sure("window", torch.float32)
    driver, table = Driver(case.model), []
    logits = driver.prefill(case.tokens, table)
    assert driver.model.window == WINDOW
    known = list(case.tokens)
    for _ in range(COUNT):
        known.append(int(logits[0].argmax()))
        first = max(0, len(known) - WINDOW) // BLOCK_TOKENS * BLOCK_TOKENS
        for place in range(first // BLOCK_TOKENS):
            table[place] = -1
        span = driver.span(known, len(known) - 1, table)
        logits = driver.model.forward([TokenSpan(span.tokens, span.begin, span.table, first)])
    assert known[-COUNT:] == case.expected
    assert [Driver(make(kind)).model.window for kind in ("grouped heads", "window in some layers")] == [0, 0]


def test_padding_never_reads_what_others_left_behind() -> None:
    """NaN in every slot that no sequence owns: masked weights times NaN would be NaN."""
    driver = Driver(make("grouped heads"))
    driver.kv.storage.fill_(float("nan"))
    texts, tables = [prompt(20), prompt(5)], [[], []]
    for text, table in zip(texts, tables, strict=True):
        driver.prefill(text[:-1], table)
    logits = driver.model.forward(
        [driver.span(text, len(text) - 1, table) for text, table in zip(texts, tables, strict=True)]
    )
    assert logits.isfinite().all()


class Recorder:
    """Notes when a layer is about to be used, and what it holds once it is written."""

    def __init__(self, driver: Driver, block: int) -> None:
        self.driver = driver
        self.block = block
        self.calls: list[tuple[str, int]] = []
        self.held: list[torch.Tensor] = []

    def before(self, layer: int) -> None:
        self.calls.append(("before", layer))

    def written(self, layer: int) -> None:
        self.calls.append(("written", layer))
        self.held.append(self.driver.kv.layers[layer][self.block].clone())


def test_layer_hook_runs_once_a_layer_and_step() -> None:
    """Three forwards of one step, and yet each layer is awaited before the first and written after the last."""
    driver = Driver(make("grouped heads"))
    tables: list[list[int]] = [[], [], []]
    spans = [driver.span(prompt(length), 0, table) for length, table in zip((4, 9, 6), tables, strict=True)]
    hook = Recorder(driver, tables[0][0])
    driver.model.forward(spans, hook)
    assert sorted(hook.calls) == [("before", 0), ("before", 1), ("written", 0), ("written", 1)]
    assert [call for call in hook.calls if call[0] == "before"] == [("before", 0), ("before", 1)]
    assert all(hook.calls.index(("before", layer)) < hook.calls.index(("written", layer)) for layer in (0, 1))
    for layer, held in enumerate(hook.held):
        assert held.ne(0).any()
        assert torch.equal(held, driver.kv.layers[layer][tables[0][0]]), "nothing is written to it any more"


def test_latent_attention_keeps_the_latent_only() -> None:
    shape = PagedModel(make("latent v3"), block_tokens=4).shape
    assert (shape.head_count, shape.key_width, shape.value_width) == (1, 24, 8)
    assert shape.block_bytes == 2 * 4 * (24 + 8) * 4


def test_blocks_that_fit_into_memory() -> None:
    model = PagedModel(make("grouped heads"), block_tokens=4)
    block = 2 * 2 * 4 * (16 + 16) * 4  # layers, kv heads, tokens, K and V, bytes
    assert model.shape.block_bytes == block
    assert model.count_blocks(memory_bytes=10 * block + block - 1) == 10
    with pytest.raises(ValueError, match="hold no block"):
        model.count_blocks(memory_bytes=block - 1)
    with pytest.raises(ValueError, match="memory_bytes"):
        model.count_blocks()


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("mamba", {"state_size": 4}, "MambaForCausalLM keeps no cache"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "Lfm2ForCausalLM keeps LinearAttentionLayer"),
        ("minimax", {"num_local_experts": 2}, "MiniMaxForCausalLM keeps MiniMaxCache"),
    ],
)
def test_models_that_keep_something_else_are_refused(name: str, settings: dict[str, Any], said: str) -> None:
    config = AutoConfig.for_model(name, **{**COMMON, "num_key_value_heads": 2, **settings})
    with pytest.raises(UnsupportedLayout, match=said):
        PagedModel(AutoModelForCausalLM.from_config(config))


def test_encoders_are_refused() -> None:
    config = T5Config(vocab_size=99, d_model=32, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedLayout, match="has an encoder"):
        PagedModel(T5ForConditionalGeneration(config))


def test_adapters_are_refused() -> None:
    model = make("grouped heads")
    model.peft_config = {"default": "a LoRA"}
    with pytest.raises(UnsupportedLayout, match="has an adapter: merge it"):
        PagedModel(model)


def test_text_goes_in_and_comes_out(tmp_path: Path) -> None:
    """Opened from a folder with its tokenizer. The end-of-sequence token ends the output and is not in its text."""
    words = {word: number for number, word in enumerate(["<end>", *(f"w{number}" for number in range(VOCABULARY - 1))])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<end>")), eos_token="<end>"
    )
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save_pretrained(tmp_path)
    model = make("grouped heads")
    model.generation_config.eos_token_id = 0
    model.save_pretrained(tmp_path)
    opened = PagedModel.open(tmp_path, block_tokens=4)
    assert opened.encode("w0 w5 w3") == [1, 6, 4]
    assert opened.decode([1, 6, 0]).split() == ["w0", "w5"]
    assert (opened.eos, opened.shape.dtype, opened.name) == (frozenset([0]), torch.float32, str(tmp_path))
    with pytest.raises(ValueError, match="tokenizer"):
        PagedModel(model).encode("w0")
