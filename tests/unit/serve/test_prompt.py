"""What a request asks, read without touching what belongs to the engine; options are checked with names and values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvservice.errors import ConfigError
from kvservice.serve.options import RouterOptions
from kvservice.serve.prompt import CHARS_PER_TOKEN, CUT_TOKENS, PromptTokenizer, Tokens, Unknown, question_of

HELLO = {"role": "user", "content": "Hello"}


def chat(*messages: dict[str, Any], **more: Any) -> SimpleNamespace:
    return SimpleNamespace(model="org/name", messages=list(messages), **more)


def test_text_parts_and_plain_text_are_the_same_message() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "Hello"}]}
    assert question_of([chat(HELLO)], {}) == question_of([chat(parts)], {})


def test_the_request_is_found_among_arguments_and_keywords() -> None:
    assert question_of([None, chat(HELLO)], {}).messages is not None
    assert question_of([], {"request": {"prompt": "Hello", "model": "m"}}).text == "Hello"
    assert question_of([SimpleNamespace(prompt=[1, 2, 3])], {}).token_ids == (1, 2, 3)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (SimpleNamespace(input="Hello"), "no_prompt"),
        (chat({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}), "multimodal"),
        (chat(HELLO, chat_template="{{ messages }}"), "chat_template"),
        (chat(HELLO, chat_template_kwargs=["thinking"]), "chat_template"),
        (chat(HELLO, chat_template_kwargs={"chat_template": "{{ messages }}"}), "chat_template"),
        (chat({"role": "developer", "content": "Be kind"}), "message_shape"),
        (chat({"role": "user", "content": "x", "audio": {"id": "1"}}), "message_shape"),
        (SimpleNamespace(prompt=["a", "b"]), "batch"),
        (SimpleNamespace(prompt="a", truncate_prompt_tokens=5), "truncated"),
    ],
)
def test_a_prompt_that_cannot_be_known_says_why(request_: object, reason: str) -> None:
    with pytest.raises(Unknown) as caught:
        question_of([request_], {})
    assert caught.value.reason == reason


def test_a_request_for_an_adapter_is_not_known() -> None:
    with pytest.raises(Unknown, match="lora"):
        question_of([chat(HELLO)], {}, multiplexed_model_id="org/name:adapter")


def test_an_iterator_is_left_to_the_engine() -> None:
    calls = iter([{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}])
    with pytest.raises(Unknown, match="message_shape"):
        question_of([chat({"role": "assistant", "content": None, "tool_calls": calls})], {})
    assert len(list(calls)) == 1


def test_arguments_of_tool_calls_become_objects_in_a_copy() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    question = question_of([chat(HELLO, {"role": "assistant", "tool_calls": [call]})], {})
    assert question.messages is not None
    assert question.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert call["function"]["arguments"] == '{"x": 1}'


class _Words:
    """Stands for a tokenizer: one token a word."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [len(word) for word in text.split()]


def reading(tokens_max: int) -> PromptTokenizer:
    tokenizer = PromptTokenizer("words", tokens_max=tokens_max)
    tokenizer._tokenizer = _Words()
    return tokenizer


def test_only_as_much_of_a_long_text_is_looked_at_as_may_matter() -> None:
    text = "word " * 10_000
    found = reading(100).tokens(question_of([SimpleNamespace(prompt=text)], {}))
    assert len(found.ids) <= 100
    assert found.count == pytest.approx(10_000, rel=0.05)
    whole = reading(100).tokens(question_of([SimpleNamespace(prompt="word " * 50)], {}))
    assert whole == Tokens([4] * 50, 50)


def test_the_end_of_a_text_that_was_cut_is_not_believed() -> None:
    text = "abcdefgh" * 1000  # one word: cut, its token would be another
    found = reading(100).tokens(question_of([SimpleNamespace(prompt=text)], {}))
    assert found.ids == []
    assert len(text) > 100 * CHARS_PER_TOKEN
    assert CUT_TOKENS >= 1


def test_before_the_tokenizer_is_loaded_only_tokens_are_known() -> None:
    tokenizer = PromptTokenizer("words", tokens_max=100)
    assert tokenizer.tokens(question_of([SimpleNamespace(prompt=[7, 8])], {})) == Tokens((7, 8), 2)
    with pytest.raises(Unknown, match="tokenizer_loading"):
        tokenizer.tokens(question_of([SimpleNamespace(prompt="Hello")], {}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"budget": 5}, "did you mean 'budget_ms'"),
        ({"budget_ms": "fast"}, "budget_ms is 'fast'"),
        ({"budget_ms": 0}, "give 1 to 10000"),
        ({"policy": "best"}, "choose cost or load"),
        ({"tokens_max": True}, "type int"),
        ({"prefill_tokens_per_second": 0}, "a number above 0"),
        ({"lookup_addresses": "host:1"}, "type tuple"),
    ],
)
def test_a_wrong_option_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RouterOptions.parse(values)


def test_options_are_json() -> None:
    options = RouterOptions.parse({"lookup_addresses": ["h:1"], "budget_ms": 5, "chat_template_kwargs": {"a": 1}})
    assert (options.lookup_addresses, options.budget_ms) == (("h:1",), 5.0)
