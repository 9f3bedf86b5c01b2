"""Rules of core.block.pages: engines of several kinds name a page alike, and only if its bytes are alike."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.block.pages import (
    PAGE_TOKENS,
    PageChain,
    SharedModel,
    config_digest,
    page_hashes,
    rope_text,
    salted,
)
from kvservice.errors import InvalidRequest, UnsupportedLayout

TOKENS = list(range(100, 140))  # two pages and a half
CONFIG: dict[str, object] = {"model_type": "llama", "num_hidden_layers": 3, "rope_theta": 10000, "dtype": "float32"}
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=80)


def model(**changed: Any) -> SharedModel:
    given_ = {"weights": "w", "dtype": "bfloat16", "layer_count": 3, "kv_head_count": 2, "head_size": 8}
    return SharedModel(**{**given_, "config": CONFIG, **changed})


def by_hand(tokens: list[int], before: bytes = b"") -> list[bytes]:
    """As SGLang names a page: SHA-256 of the digest before and the token ids, 4 bytes each, the lowest first."""
    names = []
    for start in range(0, len(tokens) // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
        hasher = hashlib.sha256(before)
        for token in tokens[start : start + PAGE_TOKENS]:
            hasher.update(token.to_bytes(4, "little"))
        before = hasher.digest()
        names.append(before)
    return names


def test_page_hash_is_a_published_function_of_its_tokens() -> None:
    """SGLang makes the same hash in another process, so a change here would end every hit between the two."""
    assert [name.hex() for name in page_hashes(TOKENS)] == GOLDEN_HASHES


GOLDEN_HASHES = [
    "34819f75ed7b029ce33517f976a03f67d74fac07003ef23ab361aaf7ef214b68",
    "b359ff706833ab50906de18766614b2b38838a7448199a16427ccddc9548eac2",
]


@given(token_lists)
def test_page_hashes_are_those_that_sglang_makes(tokens: list[int]) -> None:
    assert page_hashes(tokens) == by_hand(tokens)


@given(token_lists, st.integers(0, 5))
def test_chain_goes_on_behind_any_of_its_pages(tokens: list[int], pages: int) -> None:
    first = page_hashes(tokens[: pages * PAGE_TOKENS])
    rest = page_hashes(tokens[len(first) * PAGE_TOKENS :], first[-1] if first else None)
    assert first + rest == page_hashes(tokens)


@given(token_lists, st.lists(st.integers(0, 80)), st.binary(max_size=4))
def test_growing_request_has_the_hashes_of_its_tokens(tokens: list[int], ends: list[int], salt: bytes) -> None:
    chain = PageChain(salt)
    hashes = chain.hashes
    for end in sorted(ends):
        assert chain.follow(tokens[:end]) is hashes
    assert chain.follow(tokens) == page_hashes(tokens, salted(salt) if salt else None)


def test_prompts_of_different_salts_share_no_page() -> None:
    names = [tuple(PageChain(salt).follow(TOKENS)) for salt in (b"", b"a", b"b")]
    assert len({name for chain in names for name in chain}) == 6


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_has_no_page_hash(token: int) -> None:
    with pytest.raises(InvalidRequest, match="token ids are whole numbers"):
        page_hashes([*TOKENS, token])


def test_fingerprint_of_shared_pages_is_published() -> None:
    """Every kind of engine makes it for itself, and other versions of the project too."""
    assert model().fingerprint.digest.hex() == GOLDEN_FINGERPRINT
    assert dict(model().fingerprint.fields)["page_layout"] == "layer, K or V, token, kv head, element: 1"


GOLDEN_FINGERPRINT = "1191bdacbfd13a57afdc4526dcdd34cc898ee0d2a563e7915a26c5031db4ac15"


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": "others"},
        {"dtype": "float16"},
        {"layer_count": 2, "config": {**CONFIG, "num_hidden_layers": 2}},
        {"kv_head_count": 1},
        {"head_size": 16},
        {"config": {**CONFIG, "rope_theta": 20000}},
        {"config": {**CONFIG, "rms_norm_eps": 1e-6}},
        {"accepts": "int8"},
    ],
)
def test_whatever_changes_the_bytes_changes_the_names(changed: dict[str, object]) -> None:
    assert model(**changed).fingerprint.digest != model().fingerprint.digest


def test_words_of_a_configuration_change_no_name() -> None:
    other = {"num_hidden_layers": 3, "model_type": "llama", "rope_theta": 10000, "transformers_version": "5"}
    assert config_digest(other) == config_digest(CONFIG)


def test_slot_of_a_page_holds_k_and_v_of_sixteen_tokens() -> None:
    layout = model().layout
    assert layout.payload_bytes == 3 * 2 * PAGE_TOKENS * 2 * 8 * 2  # layers, K and V, tokens, heads, elements, bytes
    assert (layout.block_tokens, layout.parts) == (PAGE_TOKENS, 1)


def test_rotation_reads_alike_in_all_its_spellings() -> None:
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2}}
    old = {"rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert rope_text(new) == rope_text(old) == "linear, factor 2.0, rope_theta 10000.0"
    assert rope_text({"rope_scaling": None, "partial_rotary_factor": 0.5}) == "default, partial_rotary_factor 0.5"
    assert rope_text({"rope_parameters": {"rope_type": "llama3", "mode": "x"}}) == "llama3, mode x"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": "fp8"}, "a KV cache of fp8"),
        ({"layer_count": 4}, "the KV cache has 4 layers and the model 3"),
        ({"config": {**CONFIG, "vision_config": {"a": 1}}}, "several parts .vision_config"),
        ({"config": {**CONFIG, "quantization_config": {"bits": 4}}}, "quantised weights"),
        ({"config": {**CONFIG, "kv_lora_rank": 512}}, "latent attention"),
        ({"config": {**CONFIG, "layer_types": ["full_attention", "linear_attention"]}}, "not linear_attention"),
        ({"config": {**CONFIG, "sliding_window": 4096}}, "not sliding_window"),
        ({"config": {**CONFIG, "attention_chunk_size": 8192}}, "not chunks"),
        ({"config": {**CONFIG, "rope_scaling": {"rope_type": "yarn", "factor": 4}}}, "rotation 'yarn'"),
        ({"config": {**CONFIG, "rope_parameters": {"full": {"rope_type": "default"}}}}, "in different ways"),
    ],
)
def test_model_that_was_not_compared_is_refused_by_name(changed: dict[str, object], reason: str) -> None:
    with pytest.raises(UnsupportedLayout, match=reason):
        model(**changed)


@pytest.mark.parametrize(
    "entry", [{"sliding_window": 4096, "use_sliding_window": False}, {"layer_types": ["full_attention"] * 3}]
)
def test_window_that_is_switched_off_is_shared(entry: dict[str, object]) -> None:
    assert model(config={**CONFIG, **entry}).fingerprint.digest
