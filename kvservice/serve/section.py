"""The `kvservice` section of an app's arguments. It is checked in full before anything is started."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvservice.config import ServiceConfig, load_config
from kvservice.connector.options import ConnectorOptions
from kvservice.errors import ConfigError, KVServiceError
from kvservice.serve.options import RouterOptions

RouterKind = Literal["kv_aware", "default"]


class KVServiceSection(BaseModel):
    """The section. All of it may be left out: then a service named "default" is found or started, and every model uses
    it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # Name of the service. One Ray cluster may have several.
    service: str = Field(default_factory=lambda: ServiceConfig().service)
    # Ray cluster to join when this process has not joined one. None: RAY_ADDRESS, else the cluster of this machine.
    address: str | None = None
    # False: somebody else starts the service. The app waits for it, and without it fails to deploy.
    start: bool = True
    # How long the app waits: for the shards of a service that it starts, or for a service that somebody else starts.
    wait_seconds: float = Field(default=180.0, gt=0, le=3600)
    # Settings of the service, named as in its TOML file: pool_bytes, lookup_partitions, transport, ... A running
    # service with other settings is refused. If none are given here, a running service is used as it is.
    settings: dict[str, Any] = Field(default_factory=dict)
    # Options of the connector, as in kv_connector_extra_config: offload, verify_load, namespace, ...
    connector: dict[str, Any] = Field(default_factory=dict)
    # kv_aware: route to the replica where a prompt costs least. default: route as Serve does by itself.
    router: RouterKind = "kv_aware"
    # Options of the KV-aware router.
    router_options: dict[str, Any] = Field(default_factory=dict)
    # The model ids that use the cache. None: all of the app.
    models: list[str] | None = None
    # Send a request again when its replica died before it answered anything.
    retry: bool = True

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        for key in value if isinstance(value, Mapping) else ():
            if key not in cls.model_fields:
                close = difflib.get_close_matches(str(key), cls.model_fields, n=1)
                known = ", ".join(cls.model_fields)
                raise ValueError(f"unknown key {key!r}" + (f"; did you mean {close[0]!r}?" if close else f": {known}"))
        return value

    @model_validator(mode="after")
    def _usable(self) -> KVServiceSection:
        try:
            self.service_config()
            self.connector_options()
            RouterOptions.parse(self.router_options)
        except KVServiceError as error:
            raise ValueError(error.message) from error
        if self.router == "default" and self.router_options:
            raise ValueError("router_options are for router kv_aware; remove them, or write `router: kv_aware`")
        return self

    def service_config(self) -> ServiceConfig:
        """The settings of a service that is started for this section, including KVSERVICE_* of the environment.
        Raises ConfigError."""
        if "service" in self.settings:
            raise ConfigError("the service's name belongs in kvservice.service, not in its settings", key="service")
        return load_config(**{"service": self.service, **self.settings})

    def connector_options(self) -> dict[str, Any]:
        """The options for kv_connector_extra_config. Raises ConfigError."""
        for key in ("service", "socket", "node"):
            if key in self.connector:
                raise ConfigError(
                    f"connector.{key} is filled in for each replica; remove it, and name the service in "
                    "kvservice.service",
                    key=key,
                )
        if self.connector.get("mode") == "embedded":
            raise ConfigError("connector.mode 'embedded' uses no service; build the app with ray.serve.llm instead")
        options = {"mode": "service", **self.connector, "service": self.service}
        ConnectorOptions.parse(options)
        return options


def parse_section(value: Any) -> KVServiceSection:
    """Check the section. Raises ConfigError with one line per fault, each naming its place."""
    if isinstance(value, KVServiceSection):
        return value
    try:
        return KVServiceSection.model_validate({} if value is None else value)
    except ValidationError as error:
        faults = []
        for fault in error.errors():
            place = ".".join(["kvservice", *(str(part) for part in fault["loc"])])
            faults.append(f"{place}: {fault['msg'].removeprefix('Value error, ')}")
        raise ConfigError("; ".join(faults)) from error
