"""A router names the blocks of a prompt exactly as vLLM's scheduler and the connector do, without an engine."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvservice.connector.vllm.block_hashes import block_namer
from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.keys import block_keys
from kvservice.errors import UnsupportedLayout
from kvservice.serve.prompt import PromptTokenizer, question_of

pytestmark = pytest.mark.vllm
BLOCK = 16

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city", "parameters": {"type": "object", "properties": {}}},
}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Why is the sky blue?"}]},
    {
        "messages": [
            {"role": "system", "content": "You are kind."},
            {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]},
            {"role": "assistant", "content": "Three"},
            {"role": "user", "content": "Four? " * 200},
        ]
    },
    {"messages": [{"role": "user", "content": "Go on"}], "add_generation_prompt": False, "add_special_tokens": True},
    {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "Rain"},
        ],
        "tools": [TOOL],
    },
    {
        "messages": [{"role": "user", "content": "Hm"}, {"role": "assistant", "content": "Well,"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
]


@pytest.fixture(scope="module")
def renderer(model_path: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.renderers import renderer_from_config
    from vllm.renderers.online_renderer import OnlineRenderer

    config = EngineArgs(model=str(model_path), dtype="bfloat16", max_model_len=4096).create_engine_config()
    return OnlineRenderer(
        config.model_config,
        renderer_from_config(config),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        tool_parser="hermes",
    )


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> PromptTokenizer:
    loaded = PromptTokenizer(str(model_path), tokens_max=8192)
    loaded.load()
    return loaded


@pytest.mark.parametrize("body", CHATS, ids=["plain", "parts", "bare", "tools", "continued"])
def test_a_chat_has_the_tokens_that_vllm_gives_it(
    body: dict[str, Any], renderer: Any, tokenizer: PromptTokenizer
) -> None:
    from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest
    from vllm.renderers.inputs.preprocess import extract_prompt_components

    mine = tokenizer.tokens(question_of([ChatCompletionRequest(model="m", **body)], {}))
    _, rendered = asyncio.run(renderer.render_chat(ChatCompletionRequest(model="m", **body), skip_mm_cache=True))
    theirs = extract_prompt_components(renderer.model_config, rendered[0]).token_ids
    assert list(mine.ids) == list(theirs)


def test_a_completion_has_the_tokens_that_vllm_gives_it(renderer: Any, tokenizer: PromptTokenizer) -> None:
    from ray.llm._internal.serve.core.configs.openai_api_models import CompletionRequest
    from vllm.renderers.inputs.preprocess import extract_prompt_components

    request = CompletionRequest(model="m", prompt="It was a dark and stormy night. " * 30)
    mine = tokenizer.tokens(question_of([request], {}))
    rendered = asyncio.run(
        renderer.preprocess_completion(request, prompt_input=request.prompt, prompt_embeds=None, skip_mm_cache=True)
    )
    assert list(mine.ids) == list(extract_prompt_components(renderer.model_config, rendered[0]).token_ids)


@pytest.mark.parametrize("as_file", [False, True])
def test_a_template_is_text_or_a_file_as_for_vllm(model_path: Path, tmp_path: Path, as_file: bool) -> None:
    from vllm.renderers.chat_utils import load_chat_template

    template = "{% for message in messages %}<{{ message.role }}> {{ message.content }}\n{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    given = str(tmp_path / "chat.jinja") if as_file else template
    assert load_chat_template(given) == template
    tokenizer = PromptTokenizer(str(model_path), tokens_max=256, chat_template=given)
    tokenizer.load()
    asked = question_of([{"messages": [{"role": "user", "content": "Hello there"}]}], {})
    plain = tokenizer.tokens(question_of([{"prompt": "<user> Hello there\n", "add_special_tokens": False}], {}))
    assert tokenizer.tokens(asked) == plain


def test_a_cut_text_begins_with_the_tokens_of_the_whole_one(model_path: Path, tokenizer: PromptTokenizer) -> None:
    short = PromptTokenizer(str(model_path), tokens_max=256)
    short.load()
    question = question_of([{"prompt": "Sphinx of black quartz, judge my vow; 1234567890 naïve café. " * 200}], {})
    whole, cut = tokenizer.tokens(question), short.tokens(question)
    assert len(cut.ids) >= 200
    assert list(cut.ids) == list(whole.ids)[: len(cut.ids)]
    assert cut.count == pytest.approx(whole.count, rel=0.1)


@pytest.mark.parametrize("salt", ["", "tenant-7"])
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash_cbor"])
def test_block_keys_are_the_connectors(algorithm: str, salt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import functools
    from types import SimpleNamespace

    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from kvservice.connector.vllm import compat

    monkeypatch.setenv("PYTHONHASHSEED", "7") if algorithm.startswith("xx") else None
    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    config = SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    fingerprint = Fingerprint.of({"model": "m", "block_tokens": BLOCK, **compat.hash_fields(config)})
    tokens = [(index * 7919) % 49_000 for index in range(5 * BLOCK + 3)]
    request = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(),
        pooling_params=None,
        cache_salt=salt or None,
        block_hasher=get_request_block_hasher(BLOCK, function),
    )
    connector_keys = functools.partial(block_keys, fingerprint.digest)(request.block_hashes)
    name = partial(block_namer, cache_salt=salt)
    mine = block_keys(fingerprint.digest, name(dict(fingerprint.fields))(tokens))
    assert len(mine) == 5
    assert mine == connector_keys
    slots = {**dict(fingerprint.fields), "slot_tokens": str(2 * BLOCK)}
    assert block_keys(fingerprint.digest, name(slots)(tokens)) == [mine[1], mine[3]], "the last block names a slot"
    with pytest.raises(UnsupportedLayout):
        name({**slots, "slot_tokens": str(BLOCK + 1)})


def test_whatever_makes_a_prompt_another_one_is_in_its_keys() -> None:
    """Adapters, images, embeddings and salts: other names from the first block that they change."""
    import torch
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    function = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(function)

    def image(identifier: str) -> list[MultiModalFeatureSpec]:
        return [MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=2 * BLOCK, length=BLOCK))]

    def embeds(value: float) -> dict[str, Any]:
        return {"prompt_token_ids": None, "prompt_embeds": torch.full((4 * BLOCK, 8), value)}

    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "salt a": {"cache_salt": "a"},
        "salt b": {"cache_salt": "b"},
        "adapter": {"lora_request": LoRARequest("poet", 1, "/adapters/poet")},
        "adapter of that name elsewhere": {"lora_request": LoRARequest("poet", 1, "/adapters/poet-2")},
        "image": {"mm_features": image("cat")},
        "another image": {"mm_features": image("dog")},
        "embeddings": embeds(0.5),
        "other embeddings": embeds(0.25),
    }
    names: dict[str, list[bytes]] = {}
    for name, more in variants.items():
        given = {"prompt_token_ids": list(range(4 * BLOCK)), **more}
        hasher = get_request_block_hasher(BLOCK, function)
        request = Request("r", sampling_params=SamplingParams(), pooling_params=None, block_hasher=hasher, **given)
        names[name] = list(block_keys(bytes(32), request.block_hashes))
        assert len(names[name]) == 4
    assert names["image"][:2] == names["another image"][:2] == names["plain"][:2], "an image changes what follows it"
    for name, keys in names.items():
        for other, theirs in names.items():
            if other != name:
                alike = 2 if {name, other} <= {"plain", "image", "another image"} else 0
                assert sum(a == b for a, b in zip(keys, theirs, strict=True)) == alike, (name, other)
