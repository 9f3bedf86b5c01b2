"""Puts connector and router into the dictionaries of an LLMConfig. What a user wrote is kept, completed or refused, but
never changed.

Pure: dictionaries in, new dictionaries out.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from kvservice.errors import ConfigError
from kvservice.serve.options import RouterOptions
from kvservice.serve.section import KVServiceSection

CONNECTOR = "KVServiceConnector"
CONNECTOR_MODULE = "kvservice.connector.vllm"
MULTI_CONNECTOR = "MultiConnector"
POLICY = "kv_load_failure_policy"
ROUTER_CLASS = "kvservice.serve.router.KvAwareRouter"
TRANSFER, ROUTER = "kv_transfer_config", "request_router_config"
EXTRA = "kv_connector_extra_config"
# Arguments of the engine that decide which tokens a prompt has, and the router options that say the same.
ROUTER_OPTION_OF = {
    "chat_template": "chat_template",
    "chat_template_content_format": "content_format",
    "default_chat_template_kwargs": "chat_template_kwargs",
    "trust_remote_code": "trust_remote_code",
}


def connector_config(
    given: Mapping[str, Any] | None, section: KVServiceSection, model: str, role: str
) -> dict[str, Any]:
    """The kv_transfer_config of one model: the user's, completed with ours. Raises ConfigError if the two contradict
    each other, or if the user's names another connector."""
    copied = _mapping(given, TRANSFER, model)
    kind = copied.get("kv_connector", CONNECTOR)
    if kind == MULTI_CONNECTOR:
        return _in_multi(copied, section, model, role)
    if kind != CONNECTOR:
        raise ConfigError(
            f"model {model!r} has {TRANSFER} with {kind}, but an engine has only one connector; remove it, or leave "
            f"the model out of kvservice.models, or list both under {MULTI_CONNECTOR}, {CONNECTOR} with "
            f'kv_connector_module_path "{CONNECTOR_MODULE}"',
            model=model,
        )
    found = _filled(copied, section, model)
    if found.setdefault("kv_role", role) not in (role, "kv_both"):
        raise ConfigError(
            f"model {model!r}: kv_role is {found['kv_role']!r}; use {role!r} or 'kv_both' here", model=model
        )
    return found


def _mapping(given: object, name: str, model: str) -> dict[str, Any]:
    """A copy of what the user wrote there; {} if it is left empty. Raises ConfigError if it is no mapping."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"model {model!r}: {name} must be a mapping, not a {type(given).__name__}", model=model)
    return copy.deepcopy(dict(given))


def _filled(found: dict[str, Any], section: KVServiceSection, model: str) -> dict[str, Any]:
    found.setdefault("kv_connector", CONNECTOR)
    found.setdefault("kv_connector_module_path", CONNECTOR_MODULE)
    found.setdefault(POLICY, "recompute")
    options = found[EXTRA] = _mapping(found.get(EXTRA), EXTRA, model)
    for key, value in section.connector_options().items():
        said_here = key in section.connector or key == "service"
        if options.setdefault(key, value) != value and said_here:
            raise ConfigError(
                f"model {model!r}: {EXTRA} has {key} = {options[key]!r}, but the kvservice section "
                f"has {value!r}; remove one of them",
                model=model,
            )
    return found


def _in_multi(found: dict[str, Any], section: KVServiceSection, model: str, role: str) -> dict[str, Any]:
    extra = found[EXTRA] = _mapping(found.get(EXTRA), EXTRA, model)
    children = extra.get("connectors")
    if not isinstance(children, list) or not all(isinstance(child, Mapping) for child in children):
        raise ConfigError(
            f"model {model!r}: {EXTRA} of its {MULTI_CONNECTOR} must have connectors, a list of mappings", model=model
        )
    ours = [index for index, child in enumerate(children) if child.get("kv_connector") == CONNECTOR]
    if len(ours) != 1:
        raise ConfigError(
            f"model {model!r}: its {MULTI_CONNECTOR} lists {CONNECTOR} {len(ours)} times; list it once, or leave the "
            "model out of kvservice.models",
            model=model,
        )
    children[ours[0]] = _filled(children[ours[0]], section, model)
    children[ours[0]].setdefault("kv_role", role)
    found.setdefault("kv_role", role)
    found.setdefault(POLICY, "recompute")  # vLLM reads this one, and not that of a child
    return found


def router_config(
    given: Mapping[str, Any] | None, section: KVServiceSection, model: str, defaults: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The request_router_config of one model; None if nothing is to be set. `defaults` are router options that follow
    from the model. Raises ConfigError if both the user and the section chose a router, or for options that cannot
    work."""
    if section.router == "default":
        return None if given is None else dict(given)
    found = dict(given or {})
    chosen = found.get("request_router_class")
    if chosen not in (None, ROUTER_CLASS):
        if "router" in section.model_fields_set or section.router_options:
            raise ConfigError(
                f"model {model!r} has a {ROUTER} with another class; remove it, or write `router: default` in the "
                "kvservice section",
                model=model,
            )
        return found
    options = dict(found.get("request_router_kwargs") or {})
    for key, value in section.router_options.items():
        if options.setdefault(key, value) != value:
            raise ConfigError(
                f"model {model!r}: request_router_kwargs has {key} = {options[key]!r}, but the kvservice section "
                f"has {value!r}; remove one of them",
                model=model,
            )
    found["request_router_class"] = ROUTER_CLASS
    found["request_router_kwargs"] = {**defaults, **options}
    RouterOptions.parse(found["request_router_kwargs"])
    return found


def router_defaults(
    engine_kwargs: Mapping[str, Any], tokenizer: str | None, section: KVServiceSection, *, policy: str | None = None
) -> dict[str, Any]:
    """Router options that follow from the model, as far as they are known."""
    options: dict[str, Any] = {"service": section.service}
    if tokenizer:
        options["tokenizer"] = tokenizer
    if section.connector.get("namespace"):
        options["namespace"] = section.connector["namespace"]
    for argument, option in ROUTER_OPTION_OF.items():
        if value := engine_kwargs.get(argument):
            options[option] = str(value) if isinstance(value, PurePath) else value
    if policy is not None:
        options["policy"] = policy
    return options
