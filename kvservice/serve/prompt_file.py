"""Prompts in a file, and the keys under which engines know their blocks. For commands; everything blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX, block_keys, chain_hashes
from kvservice.core.messages import EngineKind
from kvservice.errors import ConfigError
from kvservice.serve.prompt import PromptTokenizer, Question, Unknown, question_of
from kvservice.units import BlockHash, BlockKey

PROMPTS_MAX = 10_000  # of one file; more are an export and no choice of prompts, and refused
TOKENS_MAX = 1 << 20  # of one prompt that are named: more than the longest chain of keys covers
_SHAPE = 'a list of token ids, or a request as the API takes it: {"prompt": ...} or {"messages": [...]}'


def read_prompts(path: Path) -> list[Question]:
    """The prompts of a file: one JSON value a line, or one for the whole file. Raises ConfigError, with the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8; a line is {_SHAPE}") from error
    # Not splitlines(): it also splits at U+2028 and others, which JSON allows within a string.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    try:
        values = [(1, json.loads(text))]
    except (ValueError, RecursionError):  # RecursionError: it is nested a thousand levels deep
        values = [(number, _value(path, number, line)) for number, line in lines]
    if not 0 < len(values) <= PROMPTS_MAX:
        raise ConfigError(f"{path} has {len(values)} prompts; give 1 to {PROMPTS_MAX}; a line is {_SHAPE}")
    return [_question(path, number, value) for number, value in values]


def _value(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number}: {error}; a line is {_SHAPE}") from error


def _question(path: Path, number: int, value: Any) -> Question:
    body = {"prompt": value} if isinstance(value, list) else value
    try:
        question = question_of([body], {})
    except Unknown as unknown:
        raise ConfigError(f"{path}, line {number}: its blocks cannot be named ({unknown.reason}); give {_SHAPE}") from (
            unknown
        )
    if not all(0 <= token < 1 << 32 for token in question.token_ids or ()):
        raise ConfigError(f"{path}, line {number}: a token id is 0 to 2^32 - 1; give {_SHAPE}")
    return question


def refuse_missing_folder(model: str) -> None:
    """Raise ConfigError for what can only be a folder, and is none. Another name may be one at Hugging Face."""
    if (model.startswith(("/", ".", "~")) or model.count("/") > 1) and not Path(model).is_dir():
        raise ConfigError(f"there is no folder {model}")


class PromptNamer:
    """Turns prompts into block keys. `tokenizer` is a folder or a model of the hub; "" for prompts of token ids."""

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = PromptTokenizer(tokenizer, tokens_max=TOKENS_MAX)
        self._name = tokenizer
        self._loaded = False

    def keys(self, question: Question, kind: EngineKind) -> list[BlockKey]:
        """The keys of the prompt's whole blocks for these engines, at most as many as a request takes.

        Raises ConfigError for text without a tokenizer, UnsupportedLayout if the engines' names cannot be made here.
        """
        if question.token_ids is None and not self._loaded:
            self._load()
        try:
            ids = self._tokenizer.tokens(question).ids
        except Unknown as unknown:
            raise ConfigError(f"the prompt has no tokens here: {unknown.reason}") from unknown
        hashes = _hashes(dict(kind.fingerprint.fields), ids, question.cache_salt)[:KEYS_PER_REQUEST_MAX]
        return block_keys(kind.fingerprint.digest, hashes, kind.tenant_key)

    def _load(self) -> None:
        if not self._name:
            raise ConfigError("the prompt is text: name the engine's tokenizer with --tokenizer, or give token ids")
        refuse_missing_folder(self._name)
        try:
            self._tokenizer.load()
        except (OSError, ValueError) as error:
            raise ConfigError(f"the tokenizer cannot be loaded: {error}") from error
        self._loaded = True


def _hashes(fields: Mapping[str, str], ids: Sequence[int], salt: str) -> list[BlockHash]:
    if "api" in fields:  # a program's pool (kvservice.api), which names blocks without an engine
        return chain_hashes(ids, int(fields["block_tokens"]), salt.encode())
    from kvservice.connector.vllm.block_hashes import block_namer

    return block_namer(fields, salt)(ids)
