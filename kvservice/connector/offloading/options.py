"""The keys of the tier's entry in `secondary_tiers`, typed and checked once."""

from __future__ import annotations

from typing import ClassVar

from pydantic import model_validator

from kvservice.connector.options import EngineCacheOptions
from kvservice.errors import ConfigError


class TierOptions(EngineCacheOptions):
    """What the engine's operator can set, beside `type` and `module_path`."""

    what: ClassVar[str] = "key of KVServiceTier in secondary_tiers"

    namespace: str = "offloading"
    """Engines in different namespaces never share chunks, and never refuse each other."""

    weights_version_file: str | None = None
    """File with the version of weights that are changed in place. It is read at each reset of the prefix cache."""

    @model_validator(mode="after")
    def _names_the_weights(self) -> TierOptions:
        if self.weights_version is None:
            raise ConfigError(
                "KVServiceTier needs weights_version: name the weights, and with them what else changes what they "
                "compute or where it lies, such as adapters, quantization, overrides on the command line or "
                "cp_kv_cache_interleave_size, which vLLM tells no tier",
                key="weights_version",
            )
        if self.accept_codec or self.cache_folder:
            raise ConfigError("accept_codec and cache_folder are not for KVServiceTier: leave them out")
        return self
