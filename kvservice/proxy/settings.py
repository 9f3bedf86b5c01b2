"""The settings of the proxy, checked once at its start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvservice.config import REQUEST_TRIES
from kvservice.errors import ConfigError
from kvservice.units import MiB, parse_bytes


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """The settings of the proxy. Times are in seconds, sizes in bytes. Raises ConfigError for what cannot work."""

    prefill: tuple[str, ...]  # base addresses
    decode: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8080  # 0 means any free port
    # shorter prompts go straight to decode: a transfer would take longer than computing them
    min_prefill_chars: int = 512
    in_flight_max: int = 256  # per server; beyond it the server is not chosen, and clients get 503 if all are full
    tries: int = REQUEST_TRIES  # how many servers may get one request, not counting those that answered it
    body_bytes_max: int = 32 * MiB
    connect_seconds: float = 5.0
    prefill_seconds: float = 120.0
    request_seconds: float = 900.0  # for the whole exchange; then the client gets 504
    check_seconds: float = 5.0  # between two health checks of one server
    grace_seconds: float = 30.0  # for requests in flight when the proxy is told to end; then they get an error
    traces: str = "off"  # as the service's setting
    api_key: str | None = None  # for the proxy's own requests; clients' headers are forwarded unchanged

    def __post_init__(self) -> None:
        if not self.decode:
            raise ConfigError("give at least one decode server: --decode http://HOST:PORT")
        for name in ("connect_seconds", "prefill_seconds", "request_seconds", "check_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number greater than 0, not {getattr(self, name)}")
        for name in ("in_flight_max", "body_bytes_max"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.traces not in ("off", "otlp") and not self.traces.startswith("file:/"):
            raise ConfigError(f"traces is {self.traces!r}; give off, otlp, or file:/path")
        if self.tries < 1 + bool(self.prefill):
            raise ConfigError(
                f"tries must be at least 1, or at least 2 if there are prefill servers, because then two servers work "
                f"on a request at the same time; it is {self.tries}"
            )
        if self.min_prefill_chars < 0 or not 0 <= self.grace_seconds < math.inf:
            raise ConfigError("min_prefill_chars and grace_seconds must be numbers of at least 0")
        for role, urls in (("prefill", self.prefill), ("decode", self.decode)):
            if len(set(urls)) != len(urls):
                raise ConfigError(f"the same {role} server is given twice: {', '.join(urls)}")


def parse_settings(
    prefill: Sequence[str], decode: Sequence[str], *, max_body: str | int, **others: Any
) -> ProxySettings:
    """Build the settings from text: addresses and a size. `others` are passed on as fields. Raises ConfigError."""
    try:
        body_bytes = parse_bytes(max_body)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return ProxySettings(
        tuple(base_url(text) for text in prefill),
        tuple(base_url(text) for text in decode),
        body_bytes_max=body_bytes,
        **others,
    )


def base_url(text: str) -> str:
    """The address without a trailing slash. Raises ConfigError that says how to write an address."""
    url = text.rstrip("/")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"{text!r} is not the address of a server; write it like http://host:8000")
    if parts.path.endswith("/v1"):
        raise ConfigError(f"give the address without /v1: {url.removesuffix('/v1')}")
    return url
