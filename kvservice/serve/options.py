"""The options of the router (`request_router_kwargs`), checked when the router is made. Values are JSON."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvservice.core.acquire.holds import HOLD_SECONDS_MAX
from kvservice.core.block.keys import KEYS_PER_REQUEST_MAX
from kvservice.errors import ConfigError

POLICIES = ("cost", "load")
FORMATS = ("auto", "string", "openai")


@dataclass(frozen=True, slots=True)
class RouterOptions:
    tokenizer: str = ""  # folder or hub name; "" means that only prompts sent as token ids can be looked up
    chat_template: str = ""  # the template or its file, if the engine was started with another than the tokenizer's
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # the engine's default_chat_template_kwargs
    content_format: str = "auto"  # like vLLM's --chat-template-content-format
    trust_remote_code: bool = False
    policy: str = "cost"  # "load" means the shortest queue only, for decode replicas
    service: str = ""  # name of the service; "" means the only one there is
    namespace: str = ""  # the connectors' namespace, if several fingerprints of a model are attached
    # in partition order; () means found through the machine's shards or through Ray
    lookup_addresses: tuple[str, ...] = ()
    token_file: str = ""  # token of the tenant whose engines these are; "" means as the environment says
    budget_ms: float = 20.0  # for tokenising and lookup together; a request that takes longer is routed by load
    tokens_max: int = 8192  # of a prompt that are looked at; the rest counts as not held
    answer_seconds: float = 0.5  # how long an answer of the lookup service is used again
    refresh_seconds: float = 5.0  # between readings of the nodes' engine stats, while there are requests
    engine_blocks: int = 2048  # blocks that an engine is assumed to remember
    engine_seconds: float = 300.0  # how long it is assumed to remember them
    prefill_tokens_per_second: float = 5000.0  # used until an engine has measured its own
    load_bytes_per_second: float = 5e9  # from the node's pool into the engine
    fetch_bytes_per_second: float = 1e9  # from another node; used until a shard has measured it
    fetch_overhead_ms: float = 5.0  # for each other node; used until a shard has measured it
    warm_seconds: float = 30.0  # how long blocks are held that were fetched ahead; 0 = none are fetched ahead
    traces: str = "off"  # where spans of decisions go: off, otlp, or file:/path
    decoding_share: float = 0.02  # share of an average prefill by which a decoding request delays a new one

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> RouterOptions:
        """Build the options. Raises ConfigError that names key and value."""
        known = {item.name: item for item in fields(cls)}
        checked: dict[str, Any] = {}
        for key, value in values.items():
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
                raise ConfigError(f"request_router_kwargs has unknown key {key!r}{hint}", key=key)
            checked[key] = _converted(key, known[key].type, value)
        options = cls(**checked)
        options._check()
        return options

    def _check(self) -> None:
        for key, known in (("policy", POLICIES), ("content_format", FORMATS)):
            if getattr(self, key) not in known:
                raise ConfigError(f"{key} is {getattr(self, key)!r}; choose {' or '.join(known)}", key=key)
        for key in ("prefill_tokens_per_second", "load_bytes_per_second", "fetch_bytes_per_second"):
            if not 0 < getattr(self, key) < float("inf"):
                raise ConfigError(f"{key} is {getattr(self, key)}; give a number above 0", key=key)
        for key in ("fetch_overhead_ms", "decoding_share", "answer_seconds", "engine_seconds", "engine_blocks"):
            if not 0 <= getattr(self, key) < float("inf"):
                raise ConfigError(f"{key} is {getattr(self, key)}; give a number of at least 0", key=key)
        if self.traces not in ("off", "otlp") and not self.traces.startswith("file:/"):
            raise ConfigError(f"traces is {self.traces!r}; choose off, otlp or file:/path", key="traces")
        if not 1 <= self.budget_ms <= 10_000:
            raise ConfigError(f"budget_ms is {self.budget_ms}; give 1 to 10000", key="budget_ms")
        if not 0 <= self.warm_seconds <= HOLD_SECONDS_MAX:
            raise ConfigError(
                f"warm_seconds is {self.warm_seconds}; give 0 to {HOLD_SECONDS_MAX:.0f}", key="warm_seconds"
            )
        if not 0.1 <= self.refresh_seconds <= 3600:
            raise ConfigError(f"refresh_seconds is {self.refresh_seconds}; give 0.1 to 3600", key="refresh_seconds")
        if not 16 <= self.tokens_max <= KEYS_PER_REQUEST_MAX * 16:
            limit = KEYS_PER_REQUEST_MAX * 16
            raise ConfigError(f"tokens_max is {self.tokens_max}; give 16 to {limit}", key="tokens_max")


def _converted(key: str, kind: Any, value: Any) -> Any:
    wanted = str(kind)
    if wanted == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if wanted == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if wanted == "bool" and isinstance(value, bool):
        return value
    if wanted == "str" and isinstance(value, str):
        return value
    if wanted.startswith("dict") and isinstance(value, Mapping):
        return dict(value)
    if wanted.startswith("tuple") and isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
        return tuple(value)
    raise ConfigError(f"{key} is {value!r}; give a value of type {wanted.split('[')[0]}", key=key)
