"""--hicache-storage-backend-extra-config, typed and checked once, without the keys that are SGLang's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from kvservice.config import Count, Seconds, Shown
from kvservice.connector.options import Share, SharingOptions
from kvservice.errors import ConfigError

# What SGLang reads itself and hands on. It takes further ones of its own out before.
OF_SGLANG = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"})
# A flush of SGLang waits 10 s for each thread that is in a call of its storage; then its scheduler raises, and the
# engine ends. So no call may take as long, also with half a second for the way to a shard that does not answer.
CALL_SECONDS_MAX = 8.0
INTERFACE = (
    'add "interface_v1": 1 to --hicache-storage-backend-extra-config: kvservice copies straight between the pages of '
    "SGLang's host memory and the pool"
)


class SGLangOptions(SharingOptions):
    """What the engine's operator can set."""

    what: ClassVar[str] = "key of --hicache-storage-backend-extra-config"

    fetch_timeout_seconds: Annotated[Seconds, Field(ge=0, le=CALL_SECONDS_MAX), Shown(unit="seconds")] = 5.0
    """Service: longest that a request waits for blocks of another node. SGLang ends itself when it is flushed while a
    call of its storage takes 10 seconds."""

    head_group: Annotated[
        Annotated[Count, Field(ge=1)] | None,
        Shown(allowed="a divisor of a rank's KV heads", default="a rank's KV heads"),
    ] = None
    """KV heads of one block of the pool. Engines of different tensor-parallel sizes share blocks when it divides the KV
    heads of a rank in all of them: set it to that of the largest size."""

    @model_validator(mode="after")
    def _shares_whole_pages(self) -> SGLangOptions:
        if self.share is Share.ENGINES and self.head_group is not None:
            raise ConfigError("share 'engines' and head_group exclude each other: a shared page holds all heads")
        return self

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> SGLangOptions:
        """Raises ConfigError naming the key, the value and what is allowed."""
        if not given.get("interface_v1"):
            raise ConfigError(INTERFACE)
        return cls(**{name: value for name, value in given.items() if name not in OF_SGLANG})  # type: ignore[arg-type]
