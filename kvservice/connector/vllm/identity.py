"""vLLM's resolved configuration as named fields of a fingerprint: everything that may change the bytes of a block.

Only settings that differ from vLLM's default are named, because the version of vLLM is a field too. `identity_tables`
lists what is left out, by name and with the reason.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm.model_executor.models.registry import ModelRegistry

from kvservice.connector.config_text import PLAIN_ROPES, flat_fields, parts_of, text_of, without
from kvservice.connector.vllm.identity_tables import (
    ENVIRONMENT_HASHED,
    GENERATION_MODULES,
    LEFT_OUT,
    LENGTH_ENTRIES,
    LENGTH_MODULES,
    SAMPLING,
    SECTIONS_LEFT_OUT,
)

MODELS = "vllm.model_executor.models."


def config_fields(vllm_config: Any) -> dict[str, object]:
    """The fields by name: names of vLLM's settings, or `hf.` and the entry of the model's configuration."""
    model = vllm_config.model_config
    fields = _settings(vllm_config)
    fields |= hf_fields(model)
    fields |= length_fields(model)
    fields |= generation_fields(model)
    fields |= {f"env.{name}": os.environ[name] for name in os.environ if re.fullmatch(ENVIRONMENT_HASHED, name)}
    return fields


def _settings(vllm_config: Any) -> dict[str, object]:
    found: dict[str, object] = {}
    for name in _names(vllm_config):
        if name not in SECTIONS_LEFT_OUT:
            found |= _of_setting(name, getattr(vllm_config, name, None), _default(vllm_config, name))
    return found


def model_fields(model_config: Any, name: str) -> dict[str, object]:
    """The fields of a second model in the same engine, for example a draft."""
    found = _of_setting("model_config", model_config, None)
    found |= hf_fields(model_config) | length_fields(model_config) | generation_fields(model_config)
    return {f"{name}.{key}": value for key, value in found.items()}


def _of_setting(path: str, value: object, default: object) -> dict[str, object]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        left_out = LEFT_OUT.get(path, {})
        found: dict[str, object] = {}
        for name in _names(value):
            if name not in left_out:
                found |= _of_setting(f"{path}.{name}", getattr(value, name, None), _default(value, name))
        return found
    text = text_of(value)
    return {} if text == text_of(default) else {path: text}


def _names(config: Any) -> Iterator[str]:
    if dataclasses.is_dataclass(config):
        yield from (field.name for field in dataclasses.fields(config))


def _default(config: Any, name: str) -> object:
    """The default that vLLM declares; None if it declares none."""
    field = next(field for field in dataclasses.fields(config) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    default = None if field.default is dataclasses.MISSING else field.default
    declared = getattr(default, "default", default)  # pydantic's Field
    if declared is default or type(declared).__name__ != "PydanticUndefinedType":
        return declared
    factory = getattr(default, "default_factory", None)
    return factory() if factory is not None else None


# -- the model's own configuration ----


def hf_fields(model_config: Any) -> dict[str, object]:
    """The configuration that the engine uses, overrides included. Long lists are digests."""
    whole = without(model_config.hf_config.to_dict())
    fields = flat_fields("hf", whole)
    text = model_config.hf_text_config
    if text is not model_config.hf_config and (kept := without(text.to_dict())) not in parts_of(whole):
        fields |= flat_fields("text", kept)
    fields["architecture"] = str(getattr(model_config, "architecture", ""))
    return fields


# -- what depends on how long a prompt may become ----


def length_fields(model_config: Any) -> dict[str, object]:
    """`rope_context` if max_model_len chooses between two sets of angles. `max_model_len` if a model reads it in
    another way, or if nobody knows. Nothing if it changes no byte."""
    fields: dict[str, object] = {}
    length = getattr(model_config, "max_model_len", None)
    parts = [without(model_config.hf_config.to_dict()), without(model_config.hf_text_config.to_dict())]
    for part in (inner for outer in parts for inner in parts_of(outer)):
        kind = part.get("rope_type", part.get("type")) if _is_rope(part) else None
        if kind in ("longrope", "su"):
            trained = part.get("original_max_position_embeddings") or _first(parts, "original_max_position_embeddings")
            if isinstance(trained, int) and isinstance(length, int):
                fields["rope_context"] = f"{'over' if length > trained else 'within'} {trained} tokens"
            else:
                fields["max_model_len"] = str(length)
        elif kind is not None and kind not in PLAIN_ROPES:
            fields["max_model_len"] = str(length)
        if any(part.get(name) for name in LENGTH_ENTRIES):
            fields["max_model_len"] = str(length)
    module = module_of(model_config)
    if module is None or LENGTH_MODULES.get(module) == "":
        fields["max_model_len"] = str(length)
    return fields


def _is_rope(part: Mapping[str, object]) -> bool:
    return "rope_type" in part or ("type" in part and ("factor" in part or "long_factor" in part))


def _first(parts: Sequence[Mapping[str, object]], name: str) -> object:
    return next((part[name] for outer in parts for part in parts_of(outer) if part.get(name) is not None), None)


def module_of(model_config: Any) -> str | None:
    """The module of vLLM that computes the model. None for code from elsewhere, which may read anything."""
    registered = ModelRegistry.models.get(str(getattr(model_config, "architecture", "")))
    name = str(getattr(registered, "module_name", ""))
    return name.removeprefix(MODELS).split(".")[0] if name.startswith(MODELS) else None


def generation_fields(model_config: Any) -> dict[str, object]:
    """Fields of the generation config, for models that read it while they are built. What only sampling reads is left
    out."""
    module = module_of(model_config)
    if module is not None and module not in GENERATION_MODULES:
        return {}
    read = getattr(model_config, "try_get_generation_config", dict)
    config = {**read(), **getattr(model_config, "override_generation_config", {})}
    return {f"generation.{name}": text_of(value) for name, value in config.items() if name not in SAMPLING}
