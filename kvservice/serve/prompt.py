"""Turns an OpenAI request into the token ids that the engine will see. Pure, except `PromptTokenizer.load`.

It repeats only what vLLM does with plain text: string contents or text parts, tools, template arguments. For anything
else (images, a template in the request, LoRA, …) it raises Unknown with the reason, and the router falls back. If it
computes other tokens than the engine, hits are lost, but no answer is wrong.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Of a long text this many characters are tokenised for each token that may matter. Text has about four, so this is
# enough for tokens_max.
CHARS_PER_TOKEN = 6
CUT_TOKENS = 16  # Tokens dropped at the end of a text that was cut: in the whole text they may be others.
CHECKS = 4  # Prompts that are tokenised both whole and in parts. Only if all agree are the parts trusted.
# Characters of parts whose tokens are kept, about 2 million tokens in 8 MB. Beyond it the least recently used part
# goes.
PARTS_CHARS_MAX = 8 << 20
TEXT_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"})
# The keyword with a Future for the replica's id, for a sender that dispatches the request itself, as DecodeServer does.
SENT_TO = "kvservice_sent_to"
ROLES = frozenset({"system", "user", "assistant", "tool"})


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as it was asked. Exactly one of `messages`, `text` and `token_ids` is set."""

    model: str
    messages: tuple[dict[str, Any], ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    add_special_tokens: bool = False
    cache_salt: str = ""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a prompt. `ids` may be only the first ones; then `count`, the number of all, is an estimate."""

    ids: Sequence[int]
    count: int


class Unknown(Exception):
    """The tokens of this prompt cannot be known here. `reason` is a counter's label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def question_of(arguments: Sequence[Any], keywords: Mapping[str, Any], multiplexed_model_id: str = "") -> Question:
    """The prompt in the arguments of a deployment's method. Only reads, and consumes no iterator. Raises Unknown."""
    if multiplexed_model_id:
        raise Unknown("lora")  # the adapter's path on the engine's disk is part of the hash
    for body in (*arguments, *keywords.values()):
        if _get(body, "messages") is not None:
            return _chat(body)
        if _get(body, "prompt") is not None:
            return _completion(body)
    raise Unknown("no_prompt")


def transfer_parameters(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> list[Any]:
    """`kv_transfer_params` of the bodies in these arguments, as they came."""
    return [_get(body, "kv_transfer_params") for body in (*arguments, *keywords.values())]


def _get(body: Any, name: str) -> Any:
    return body.get(name) if isinstance(body, Mapping) else getattr(body, name, None)


def _refuse_special(body: Any) -> None:
    reasons = {
        "mm_processor_kwargs": "multimodal",
        "prompt_embeds": "prompt_embeds",
        "truncate_prompt_tokens": "truncated",
        "chat_template": "chat_template",
    }
    for name, reason in reasons.items():
        if _get(body, name) is not None:
            raise Unknown(reason)


def _chat(body: Any) -> Question:
    _refuse_special(body)
    messages = _get(body, "messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise Unknown("messages")
    arguments: dict[str, Any] = {
        "add_generation_prompt": _get(body, "add_generation_prompt") is not False,
        "continue_final_message": bool(_get(body, "continue_final_message")),
    }
    for name in ("documents", "reasoning_effort"):
        if _get(body, name) is not None:
            arguments[name] = _get(body, name)
    own = _get(body, "chat_template_kwargs") or {}
    # A client's template could keep the thread of all prompts for hours; engines refuse it here too, by default.
    if not isinstance(own, Mapping) or own.get("chat_template") is not None:
        raise Unknown("chat_template")
    if "reasoning_effort" in arguments and "enable_thinking" not in own:
        arguments["enable_thinking"] = arguments["reasoning_effort"] != "none"
    tools = _get(body, "tools")
    return Question(
        model=str(_get(body, "model") or ""),
        messages=tuple(_message(message) for message in messages),
        tools=None if not tools else tuple(_plain(tool) for tool in tools),
        add_special_tokens=bool(_get(body, "add_special_tokens")),
        cache_salt=str(_get(body, "cache_salt") or ""),
        template_arguments={**arguments, **own},
    )


def _completion(body: Any) -> Question:
    _refuse_special(body)
    prompt = _get(body, "prompt")
    model, salt = str(_get(body, "model") or ""), str(_get(body, "cache_salt") or "")
    if isinstance(prompt, str):
        special = _get(body, "add_special_tokens") is not False
        return Question(model, text=prompt, add_special_tokens=special, cache_salt=salt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return Question(model, token_ids=tuple(prompt), cache_salt=salt)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        special = _get(body, "add_special_tokens") is not False
        return Question(model, text=prompt[0], add_special_tokens=special, cache_salt=salt)
    raise Unknown("batch")


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        dump = getattr(message, "model_dump", None)
        if dump is None:
            raise Unknown("message_shape")
        message = dump(exclude_none=True)
    known = {key: value for key, value in message.items() if value is not None}
    role = known.get("role")
    if role not in ROLES or not known.keys() <= TEXT_KEYS:
        raise Unknown("message_shape")
    parts = [known["content"]] if isinstance(known.get("content"), str) else known.get("content", [])
    found: dict[str, Any] = {"role": role, "content": tuple(_text(part) for part in _listed(parts))}
    if role == "system" and any(text.startswith("x-anthropic-") for text in found["content"]):
        raise Unknown("message_shape")  # vLLM removes such a header
    if isinstance(known.get("name"), str):
        found["name"] = known["name"]
    if role == "tool" and "tool_call_id" in known:
        found["tool_call_id"] = known["tool_call_id"]
    if role == "assistant":
        calls = [_tool_call(call) for call in _listed(known.get("tool_calls", []))]
        if calls:
            found["tool_calls"] = calls
        if "reasoning" in known:
            found["reasoning"] = found["reasoning_content"] = known["reasoning"]
    return found


def _listed(value: Any) -> Sequence[Any]:
    """A list of the request. Pydantic leaves some lists as iterators that can be read only once; they are left to the
    engine."""
    if not isinstance(value, list | tuple):
        raise Unknown("message_shape")
    return value


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise Unknown("multimodal")


def _tool_call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, as templates expect them."""
    plain = _plain(call)
    function = plain.get("function")
    if not isinstance(function, dict) or plain.get("type", "function") != "function":
        raise Unknown("message_shape")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    return {**plain, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _plain(value: Any) -> dict[str, Any]:
    dump = getattr(value, "model_dump", None)
    plain = dump() if dump is not None else value
    if not isinstance(plain, dict):
        raise Unknown("message_shape")
    return plain


class PromptTokenizer:
    """A Hugging Face tokenizer with its chat template. Use it from one thread at a time. `load` and `tokens` block."""

    def __init__(
        self,
        name: str,
        *,
        tokens_max: int,
        chat_template: str = "",
        template_arguments: Mapping[str, Any] | None = None,
        content_format: str = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        """Only assigns; `load` reads the files.

        Args:
            name: folder or model of the hub.
            chat_template: the template or its file, if the engine was started with one.
            template_arguments: those that the engine was started with.
            content_format: auto, string or openai, like vLLM's option.
        """
        self._name = name
        self._tokens_max = tokens_max
        self._template = chat_template
        self._arguments = dict(template_arguments or {})
        self._format = content_format
        self._trust = trust_remote_code
        self._tokenizer: Any = None
        self._wants_parts = False
        self._marks: dict[str, int] = {}  # special tokens; the tokenizer splits a text at them first
        self._checks = CHECKS
        self._parts: OrderedDict[str, array[int]] = OrderedDict()
        self._parts_chars = 0

    def load(self) -> None:
        """Load the tokenizer; takes seconds. Raises OSError or ValueError if it is missing or needs code of its own."""
        from transformers import AutoTokenizer

        self._template = _template_text(self._template)
        tokenizer = AutoTokenizer.from_pretrained(self._name, trust_remote_code=self._trust)
        template = self._template or tokenizer.chat_template
        if isinstance(template, str):
            self._wants_parts = self._format == "openai" or (self._format == "auto" and _wants_parts(template))
        tokenizer.encode("warm", add_special_tokens=False)
        self._marks = _marks_of(tokenizer)
        self._tokenizer = tokenizer

    def tokens(self, question: Question) -> Tokens:
        """Raises Unknown."""
        if question.token_ids is not None:
            return Tokens(question.token_ids[: self._tokens_max], len(question.token_ids))
        if self._tokenizer is None:
            raise Unknown("tokenizer_loading")
        text = question.text if question.text is not None else self._render(question)
        kept = _cut(text, self._tokens_max * CHARS_PER_TOKEN)
        ids = self._encode(kept, question.add_special_tokens)
        count = len(ids)
        if len(kept) < len(text):
            count = int(count * len(text) / max(len(kept), 1))
            ids = ids[: max(len(ids) - CUT_TOKENS, 0)]
        return Tokens(ids[: self._tokens_max], count)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Encode in parts, if that gives the same tokens. For the next turn of a conversation only the new messages are
        work."""
        if add_special_tokens or not self._marks:
            return self._whole(text, add_special_tokens)
        ids = self._by_parts(text)
        if self._checks:
            self._checks -= 1
            whole = self._whole(text, add_special_tokens)
            if whole != ids:
                self._marks = {}
                return whole
        return ids

    def _whole(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def _by_parts(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, self._marks)) + ")", text):
            mark = self._marks.get(part)
            if mark is not None:
                ids.append(mark)
            elif part:
                ids.extend(self._part(part))
        return ids

    def _part(self, part: str) -> array[int]:
        found = self._parts.get(part)
        if found is not None:
            self._parts.move_to_end(part)
            return found
        found = self._parts[part] = array("I", self._whole(part, False))
        self._parts_chars += len(part)
        while self._parts_chars > PARTS_CHARS_MAX:
            oldest, _ = self._parts.popitem(last=False)
            self._parts_chars -= len(oldest)
        return found

    def _render(self, question: Question) -> str:
        assert question.messages is not None
        try:
            text = self._tokenizer.apply_chat_template(
                [self._content(message) for message in question.messages],
                tools=None if question.tools is None else list(question.tools),
                tokenize=False,
                **{
                    **self._arguments,
                    **question.template_arguments,
                    **({"chat_template": self._template} if self._template else {}),
                },
            )
        except Exception as error:
            raise Unknown("template_failed") from error
        if not isinstance(text, str):
            raise Unknown("template_failed")
        return text

    def _content(self, message: dict[str, Any]) -> dict[str, Any]:
        texts = message["content"]
        if self._wants_parts and message["role"] != "tool":
            return {**message, "content": [{"type": "text", "text": text} for text in texts]}
        return {**message, "content": "\n".join(text for text in texts if text)}


def _template_text(given: str) -> str:
    """The template that this option of vLLM means. Without a brace or a line break it names a file. Raises OSError."""
    return given if not given or any(char in given for char in "{}\n") else Path(given).read_text()


def _marks_of(tokenizer: Any) -> dict[str, int]:
    """Special tokens that take no text around them, longest first. {} for a tokenizer of another kind."""
    backend = getattr(tokenizer, "_tokenizer", None)
    added: dict[int, Any] = getattr(backend, "get_added_tokens_decoder", dict)()
    marks = {
        token.content: number
        for number, token in added.items()
        if token.special and not (token.lstrip or token.rstrip or token.single_word)
    }
    return dict(sorted(marks.items(), key=lambda item: -len(item[0])))


def _cut(text: str, chars_max: int) -> str:
    """At most `chars_max` characters of the text, cut at a space if there is one near."""
    if len(text) <= chars_max:
        return text
    space = text.rfind(" ", max(chars_max - 200, 0), chars_max)
    return text[: space if space > 0 else chars_max]


def _wants_parts(template: str) -> bool:
    try:
        from kvservice.connector.vllm.block_hashes import template_wants_parts

        return template_wants_parts(template)
    except ImportError:  # this process has no vLLM; nearly all templates take text
        return False
