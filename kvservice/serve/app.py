"""Builds apps of ray.serve.llm that use the cache, for `serve run`, `serve deploy` and Python.

Runs where the app is built: in the user's process, or in a task of Serve. Blocks until the service runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.llm import LLMConfig, LLMServingArgs
from ray.serve.llm import build_openai_app as build_plain_app
from ray.serve.llm import build_pd_openai_app as build_plain_pd_app

from kvservice.errors import ConfigError
from kvservice.serve import ray_llm
from kvservice.serve.section import KVServiceSection, parse_section
from kvservice.serve.service import RunningService, ensure_service
from kvservice.serve.wiring import MULTI_CONNECTOR, ROUTER, TRANSFER, connector_config, router_config, router_defaults

SECTION = "kvservice"
PREFILL, DECODE = "prefill_config", "decode_config"
RUNTIME_DIR = "KVSERVICE_RUNTIME_DIR"
INGRESS = "ingress_cls_config"


def build_openai_app(config: Mapping[str, Any]) -> Any:
    """An OpenAI-compatible Serve application: takes the arguments of ray.serve.llm.build_openai_app and a `kvservice`
    section (KVServiceSection). Finds or starts the service, so it blocks.

    Raises:
        ConfigError: the arguments cannot work.
        Unavailable, ServiceConflict: as `ensure_service` does.
    """
    section, arguments = wire_openai(config)
    _prepare(ensure_service(section), arguments["llm_configs"])
    return build_plain_app(arguments)


def build_pd_openai_app(config: Mapping[str, Any]) -> Any:
    """Prefill and decode on separate replicas: takes the arguments of ray.serve.llm.build_pd_openai_app and a
    `kvservice` section. Blocks and raises as build_openai_app does."""
    section, arguments = wire_pd(config)
    _prepare(ensure_service(section), [arguments[PREFILL], arguments[DECODE]])
    parallel = any(arguments[key].engine_kwargs.get("data_parallel_size", 1) > 1 for key in (PREFILL, DECODE))
    if parallel or ray_llm.DIRECT_STREAMING:
        return build_plain_pd_app(arguments)  # Ray's decode server: a request fails if its prefill is lost
    return ray_llm.pd_application(arguments)


def wire_openai(config: Mapping[str, Any]) -> tuple[KVServiceSection, dict[str, Any]]:
    """The section, and arguments for ray.serve.llm that include connector and router. Starts nothing. Raises
    ConfigError."""
    section, rest = _split(config)
    models = LLMServingArgs.model_validate(rest).llm_configs
    ids = [model.model_id for model in models]
    for name in section.models or ():
        if name not in ids:
            raise ConfigError(
                f"kvservice.models names {name!r}, but the app has {', '.join(map(repr, ids))}", key="models"
            )
    chosen = ids if section.models is None else section.models
    wired = [_wired(model, section, "kv_both") if model.model_id in chosen else model for model in models]
    for model in wired:
        if model.model_id in chosen and model.server_cls is None:
            model.server_cls = ray_llm.LLMServer
    return section, _with_ingress({**rest, "llm_configs": wired}, section)


def wire_pd(config: Mapping[str, Any]) -> tuple[KVServiceSection, dict[str, Any]]:
    """Like `wire_openai` for build_pd_openai_app. Prefill is routed by what nodes hold, decode by load."""
    section, rest = _split(config)
    if section.models is not None:
        raise ConfigError("a prefill/decode app has one model: remove kvservice.models", key="models")
    offload = section.connector.get("offload", "eager")
    if offload != "eager":
        raise ConfigError(
            f"offload {offload!r:.40} stores a prompt when its request ends, but a prefill/decode app needs 'eager'",
            key="offload",
        )
    for key in (PREFILL, DECODE):
        if rest.get(key) is None:
            raise ConfigError(f"a prefill/decode app needs {key}", key=key)
    prefill = _wired(_llm_config(rest[PREFILL]), section, "kv_producer")
    decode = _wired(_llm_config(rest[DECODE]), section, "kv_consumer", policy="load")
    for model in (prefill, decode):
        if model.engine_kwargs[TRANSFER]["kv_connector"] == MULTI_CONNECTOR:
            raise ConfigError(
                "a prefill/decode app uses KVServiceConnector alone, without MultiConnector", key=TRANSFER
            )
    if prefill.model_id != decode.model_id:
        raise ConfigError(
            f"prefill has model {prefill.model_id!r} and decode has {decode.model_id!r}; use the same model"
        )
    return section, _with_ingress({**rest, PREFILL: prefill, DECODE: decode}, section)


def _split(config: Mapping[str, Any]) -> tuple[KVServiceSection, dict[str, Any]]:
    if not isinstance(config, Mapping):
        raise ConfigError(f"the app's arguments must be a mapping, not a {type(config).__name__}")
    return parse_section(config.get(SECTION)), {key: value for key, value in config.items() if key != SECTION}


def _llm_config(value: Any) -> LLMConfig:
    return LLMConfig.from_file(value) if isinstance(value, str) else LLMConfig.model_validate(value)


def _wired(given: LLMConfig, section: KVServiceSection, role: str, policy: str | None = None) -> LLMConfig:
    """A copy of the config with connector and router filled in."""
    model = given.model_copy(deep=True)
    transfer = connector_config(given.engine_kwargs.get(TRANSFER), section, given.model_id, role)
    model.update_engine_kwargs(**{TRANSFER: transfer})
    defaults = router_defaults(given.engine_kwargs, _tokenizer(given), section, policy=policy)
    router = router_config(given.deployment_config.get(ROUTER), section, given.model_id, defaults)
    if router is not None:
        model.deployment_config = {**given.deployment_config, ROUTER: router}
    return model


def _tokenizer(model: LLMConfig) -> str | None:
    """The folder or hub name of the tokenizer. None if the weights come from a bucket, which the router cannot read."""
    loading = model.model_loading_config
    source = (
        loading.tokenizer_source or model.engine_kwargs.get("tokenizer") or loading.model_source or loading.model_id
    )
    return source if isinstance(source, str) and "://" not in source else None


def _with_ingress(arguments: dict[str, Any], section: KVServiceSection) -> dict[str, Any]:
    if section.retry and not ray_llm.DIRECT_STREAMING:
        given = arguments.get(INGRESS) or {}
        if isinstance(given, Mapping) and "ingress_cls" not in given:
            arguments[INGRESS] = {**given, "ingress_cls": "kvservice.serve.ray_llm.RetryingIngress"}
    return arguments


def _prepare(service: RunningService, models: list[LLMConfig]) -> None:
    """Give replicas what they need: the backend under its name, and the folder where the shards register."""
    ray_llm.register_backend()
    for model in models:
        if service.runtime_dir and TRANSFER in model.engine_kwargs:
            environment = dict(model.runtime_env or {})
            variables = {RUNTIME_DIR: service.runtime_dir, **environment.get("env_vars", {})}
            model.runtime_env = {**environment, "env_vars": variables}


__all__ = ["build_openai_app", "build_pd_openai_app", "wire_openai", "wire_pd"]
