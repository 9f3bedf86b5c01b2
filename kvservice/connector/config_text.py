"""Settings and configurations of an engine as texts for a fingerprint: equal in every process for equal values."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path

import torch

TEXT_CHARS_MAX = 160  # Longer values are replaced by a digest, so that the fingerprint's text stays readable.
HF_FIELDS_MAX = 300  # Fields of one configuration. If there are more, each part of it is one digest.

# Entries of a model's configuration that change no byte.
HF_LEFT_OUT = frozenset(
    {"_name_or_path", "transformers_version", "_commit_hash", "id2label", "label2id", "problem_type"}
)

# Rotary embeddings whose angles follow from position and configuration alone.
PLAIN_ROPES = frozenset(
    {"default", "linear", "llama3", "yarn", "mrope", "deepseek_yarn", "deepseek_llama_scaling", "proportional"}
)


# -- a model's own configuration ----


def without(config: Mapping[str, object]) -> dict[str, object]:
    """The configuration without what changes no byte, at any depth."""
    return {
        str(name): without(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in HF_LEFT_OUT
    }


def parts_of(config: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """The configuration itself, and the configurations inside it at any depth."""
    yield config
    for value in config.values():
        if isinstance(value, Mapping):
            yield from parts_of(value)


def flat_fields(prefix: str, config: Mapping[str, object]) -> dict[str, object]:
    """The entries at any depth by their paths. Of a very large configuration: each part as a digest."""
    found: dict[str, object] = dict(_entries(prefix, config))
    if len(found) > HF_FIELDS_MAX:
        return {f"{prefix}.{name}": text_of(value) for name, value in config.items() if value is not None}
    return found


def _entries(prefix: str, config: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _entries(f"{prefix}.{name}", value)
        elif value is not None:
            yield f"{prefix}.{name}", text_of(value)


# -- values ----


def text_of(value: object) -> str:
    """A text that every process makes for the same value. A long text becomes a digest."""
    text = json.dumps(_plain(value), sort_keys=True)
    if len(text) <= TEXT_CHARS_MAX:
        return text
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype | Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(inner) for inner in value), key=str)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(inner) for inner in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name, None)) for field in dataclasses.fields(value)}
    if isinstance(value, type) or callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    compute_hash = getattr(value, "compute_hash", None)
    return f"{type(value).__qualname__} {compute_hash() if compute_hash is not None else value!r}"
