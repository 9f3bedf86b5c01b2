"""Chunks that were computed alone, in another order: exact at ratio 1, plain reuse at 0, never named as a prefix."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

import kvservice
from kvservice.engine.blend import ROOT, Blender, BlendSettings
from kvservice.errors import InvalidRequest, UnsupportedLayout

BLOCK, LAYERS, VOCABULARY = 16, 4, 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_model(dtype: torch.dtype = torch.float32, **more: Any) -> LlamaForCausalLM:
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, **more)).to(dtype).eval()


def some_tokens(count: int, seed: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(VOCABULARY) for _ in range(count)]


# 70 and 40 tokens are 4 and 2 whole blocks; the rest of each is computed, as the system prompt and the question are.
SYSTEM, FIRST, SECOND, QUESTION = (some_tokens(count, seed) for seed, count in enumerate((21, 70, 40, 9)))
PIECES = [SYSTEM, SECOND, FIRST, QUESTION]
PROMPT = [token for piece in PIECES for token in piece]
CACHED = [*range(21, 21 + 32), *range(61, 61 + 64)]  # positions of the tokens in whole blocks


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More only wait for each other: the matrices are tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def pool() -> Iterator[kvservice.Pool]:
    with kvservice.connect(mode="embedded", memory="8MiB") as found:
        yield found


def make_blender(model: Any, pool: kvservice.Pool, **settings: Any) -> Blender:
    blender = Blender(model, pool, "model", BlendSettings(**settings), block_tokens=BLOCK)
    for chunk in (FIRST, SECOND):
        assert blender.store(chunk).is_complete
    return blender


def computed_whole(model: Any, tokens: list[int] = PROMPT) -> tuple[torch.Tensor, DynamicCache]:
    cache = DynamicCache()
    with torch.no_grad():
        found = model(torch.tensor([tokens]), past_key_values=cache, logits_to_keep=len(QUESTION))
    return found.logits, cache


def append_computed(model: Any, cache: DynamicCache, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens]), past_key_values=cache).logits
    return logits


def append_alone(model: Any, cache: DynamicCache, chunk: list[int]) -> None:
    """A chunk that sees nothing but itself, computed by the model at the place where it goes. Nothing is rotated."""
    begin, alone = cache.get_seq_length(), DynamicCache()
    with torch.no_grad():
        places = torch.arange(begin, begin + len(chunk))[None]
        model(torch.tensor([chunk]), past_key_values=alone, position_ids=places)
    for number, layer in enumerate(alone.layers):
        cache.update(layer.keys, layer.values, number)


def reused_plainly(model: Any) -> tuple[torch.Tensor, DynamicCache]:
    cache = DynamicCache()
    append_computed(model, cache, SYSTEM)
    for chunk in (SECOND, FIRST):
        whole = len(chunk) // BLOCK * BLOCK
        append_alone(model, cache, chunk[:whole])
        append_computed(model, cache, chunk[whole:])
    return append_computed(model, cache, QUESTION), cache


def next_tokens(model: Any, logits: torch.Tensor, cache: Any, count: int = 8) -> list[int]:
    said = [int(logits[0, -1].argmax())]
    while len(said) < count:
        said.append(int(append_computed(model, cache, said[-1:])[0, -1].argmax()))
    return said


# -- exact ----


@pytest.mark.parametrize(
    ("attention", "dtype", "checks"),
    [
        ("sdpa", torch.float32, (1,)),
        ("sdpa", torch.bfloat16, (1, 2)),
        ("eager", torch.float32, (1, 2)),
        ("eager", torch.bfloat16, (1,)),
    ],
)
def test_ratio_one_is_full_prefill_bit_for_bit(
    pool: kvservice.Pool, attention: str, dtype: torch.dtype, checks: tuple[int, ...]
) -> None:
    model = make_model(dtype, attn_implementation=attention)
    found = make_blender(model, pool, ratio=1.0, check_layers=checks).prefill(PIECES)
    logits, cache = computed_whole(model)
    assert torch.equal(found.logits, logits)
    for mixed, layer in zip(found.cache.layers, cache.layers, strict=True):
        assert torch.equal(mixed.keys, layer.keys)
        assert torch.equal(mixed.values, layer.values)
    assert (found.tokens, found.cached, found.computed) == (len(PROMPT), len(CACHED), len(PROMPT))
    assert next_tokens(model, found.logits, found.cache) == next_tokens(model, logits, cache)


@pytest.mark.parametrize(
    ("attention", "scaling"),
    [("eager", "default"), ("sdpa", "default"), ("sdpa", "linear"), ("sdpa", "llama3"), ("sdpa", "yarn")],
)
def test_ratio_zero_is_plain_reuse(pool: kvservice.Pool, attention: str, scaling: str) -> None:
    """Equal to chunks that the model computed alone where they stand, so keys are rotated as the model rotates them."""
    rope = {"rope_type": scaling, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if scaling == "llama3" else {}
    more: dict[str, Any] = {} if scaling == "default" else {"rope_parameters": rope}
    model = make_model(torch.float64, attn_implementation=attention, max_position_embeddings=256, **more)
    found = make_blender(model, pool, ratio=0).prefill(PIECES)
    logits, cache = reused_plainly(model)
    for mixed, layer in zip(found.cache.layers, cache.layers, strict=True):
        assert torch.allclose(mixed.keys, layer.keys, atol=1e-4)  # angles are of 32 bits in every model
        assert torch.allclose(mixed.values, layer.values, atol=1e-4)
    assert torch.allclose(found.logits, logits, atol=1e-4)
    assert not torch.allclose(found.logits, computed_whole(model)[0], atol=1e-2), "the test could not tell"
    assert found.computed == len(PROMPT) - len(CACHED)
    assert next_tokens(model, found.logits, found.cache) == next_tokens(model, logits, cache)


def test_chunk_at_the_beginning_is_an_exact_prefix(pool: kvservice.Pool) -> None:
    model = make_model(torch.float64)
    found = make_blender(model, pool, ratio=0).prefill([FIRST, QUESTION])
    assert torch.allclose(found.logits, computed_whole(model, FIRST + QUESTION)[0], atol=1e-10)
    assert found.computed == len(FIRST + QUESTION) - 64


def test_disabled_looks_nothing_up(pool: kvservice.Pool) -> None:
    model = make_model()
    found = make_blender(model, pool, enabled=False, ratio=0).prefill(PIECES)
    assert torch.equal(found.logits, computed_whole(model)[0])
    assert (found.cached, found.computed, found.misses) == (0, len(PROMPT), ())


# -- the choice ----


@pytest.mark.parametrize(("checks", "ratio"), [((1,), 0.15), ((2,), 0.5), ((1, 2), 0.25)])
def test_tokens_that_deviate_most_are_computed(pool: kvservice.Pool, checks: tuple[int, ...], ratio: float) -> None:
    model = make_model(torch.float64)
    found = make_blender(model, pool, ratio=ratio, check_layers=checks).prefill(PIECES)
    alone, whole = reused_plainly(model)[1], computed_whole(model)[1]
    kept = list(CACHED)
    for number, layer in enumerate(checks, 1):
        # What the next check compares was computed from the tokens that the one before kept.
        new = whole.layers[layer].keys if number == 1 else found.cache.layers[layer].keys
        distance = (new - alone.layers[layer].keys).square().sum((0, 1, 3))
        count = -(-len(CACHED) * ratio ** (number / len(checks)) // 1)
        kept = sorted(sorted(kept, key=lambda token: -float(distance[token]))[: int(count)])
        mixed, reused = found.cache.layers[layer + 1].keys, alone.layers[layer + 1].keys
        same = torch.isclose(mixed, reused, atol=1e-4).all(3).all(1)[0]
        assert [token for token in CACHED if not same[token]] == kept
    assert found.computed == len(PROMPT) - len(CACHED) + len(kept)


def test_more_computed_is_closer_to_full_prefill(pool: kvservice.Pool) -> None:
    model = make_model(torch.float64)
    exact = computed_whole(model)[0].log_softmax(-1)
    off = []
    for ratio in (0, 0.25, 0.5, 0.75, 1):
        mixed = make_blender(model, pool, ratio=ratio).prefill(PIECES).logits.log_softmax(-1)
        off.append(float((exact.exp() * (exact - mixed)).sum(-1).mean()))
    assert off == sorted(off, reverse=True)
    assert off[0] > 0.0
    assert off[-1] == 0.0


# -- names, leases, misses ----


def test_chunks_and_blends_never_have_prefix_names(pool: kvservice.Pool) -> None:
    """A program that caches prefixes of the same tokens with the same layout finds none of it, whatever its salt."""
    model = make_model()
    blender = make_blender(model, pool, ratio=0.3)
    blender.prefill(PIECES)
    assert not blender._chunks.get(FIRST), "nor would an adapter's or a tenant's prefix under the same fingerprint"
    layout = kvservice.Layout(BLOCK, (LAYERS, 2, 2, BLOCK, 8), "float32")
    prefixes = pool.attach("model", layout)
    for tokens in (FIRST, SECOND, PROMPT):
        for salt in ("", ROOT):
            with prefixes.get(tokens, salt=salt) as hit:
                assert (len(hit), hit.miss) == (0, "never_stored")
    whole = len(PROMPT) // BLOCK
    assert prefixes.put(PROMPT, torch.zeros(whole, *layout.shape)) == kvservice.PutResult(whole, 0, 0)
    assert blender.prefill([PROMPT, QUESTION]).cached == 0, "and a prompt's prefix is never a chunk"


def test_stored_chunk_is_not_computed_again(pool: kvservice.Pool) -> None:
    model = make_model()
    blender = make_blender(model, pool)
    model.register_forward_pre_hook(lambda *given: pytest.fail("computed"))
    assert blender.store(FIRST) == kvservice.PutResult(0, 4, 0)


def fill(pool: kvservice.Pool) -> None:
    """With more than it has room for: what nobody leases is evicted."""
    others = pool.attach("fill", kvservice.Layout(BLOCK, (64, 1024), "float32"))
    for number in range(40):
        others.put(some_tokens(BLOCK, number), torch.zeros(1, 64, 1024))


def test_what_the_pool_lost_is_computed(pool: kvservice.Pool) -> None:
    """The leases of a blend have ended with it, so its chunks can be evicted; then they are misses with a reason."""
    model = make_model()
    blender = make_blender(model, pool, ratio=0)
    assert blender.prefill(PIECES).cached == len(CACHED)
    fill(pool)
    found = blender.prefill(PIECES)
    assert torch.equal(found.logits, computed_whole(model)[0])
    assert (found.cached, found.computed) == (0, len(PROMPT))
    assert len(found.misses) == 3 and all(found.misses)


def test_chunk_whose_lease_was_lost_is_computed(pool: kvservice.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other blocks lie where it lay, while it is read: as if it had never been stored."""
    model = make_model()
    without = Blender(model, pool, "another", BlendSettings(ratio=0), block_tokens=BLOCK)
    assert without.store(SECOND).is_complete
    wanted = without.prefill(PIECES)
    blender = make_blender(model, pool, ratio=0)
    get = blender._chunks.get

    def lose(chunk: list[int], **more: Any) -> kvservice.Hit:
        hit = get(chunk, **more)
        if chunk is FIRST:
            assert hit._held is not None
            hit._held.release()
            fill(pool)
        return hit

    monkeypatch.setattr(blender._chunks, "get", lose)
    found = blender.prefill(PIECES)
    assert torch.equal(found.logits, wanted.logits)
    assert (found.cached, found.misses) == (32, ("never_stored", "lease_lost"))
    assert wanted.cached == 32


# -- what is refused ----


@pytest.mark.parametrize(
    ("named", "more"),
    [
        ("rope scaling 'dynamic'", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        ("attention 'flex_attention'", {"attn_implementation": "flex_attention"}),
    ],
)
def test_llama_that_cannot_be_blended_is_refused(pool: kvservice.Pool, named: str, more: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedLayout, match=named):
        Blender(make_model(**more), pool, "model")


def test_other_attention_is_refused_by_name(pool: kvservice.Pool) -> None:
    heads = {"num_attention_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    ranks = {"kv_lora_rank": 16, "q_lora_rank": 16, "n_routed_experts": 2, "n_group": 1, "topk_group": 1}
    small = {**SHAPE, "pad_token_id": 0}
    latent = DeepseekV3Config(**{**small, **heads, **ranks, "num_experts_per_tok": 1, "first_k_dense_replace": LAYERS})
    for named, model in {
        r"\(MLA\)": DeepseekV3ForCausalLM(latent),
        "sliding window": MistralForCausalLM(MistralConfig(**small, sliding_window=32)),
        "positions that are not rotary": GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2)
        ),
        "keys of layer 3 are not rotated": SmolLM3ForCausalLM(SmolLM3Config(**small)),
        "a part of its keys": PhiForCausalLM(PhiConfig(**small)),
    }.items():
        with pytest.raises(UnsupportedLayout, match=named):
            Blender(model.eval(), pool, "model")


@pytest.mark.parametrize(
    ("named", "settings"),
    [
        ("ratio is 0 to 1", {"ratio": 1.5}),
        ("in order", {"check_layers": (2, 1)}),
        ("one or more", {"check_layers": ()}),
        ("layer 0", {"check_layers": (0, 2)}),
        ("end at 2", {"check_layers": (3,)}),
    ],
)
def test_settings_that_make_no_sense_are_refused(pool: kvservice.Pool, named: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=named):
        Blender(make_model(), pool, "model", BlendSettings(**settings))


def test_prompt_without_a_last_piece_is_refused(pool: kvservice.Pool) -> None:
    blender = make_blender(make_model(), pool)
    for pieces in ([], [FIRST, []]):
        with pytest.raises(InvalidRequest, match="last piece"):
            blender.prefill(pieces)
