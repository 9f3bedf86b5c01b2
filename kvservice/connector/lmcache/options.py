"""What the operator of an LMCache server can set, the keys of adapter_params, typed and checked once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from kvservice.config import Shown
from kvservice.connector.options import VERSION, Timeout, Verify, checked_version
from kvservice.errors import ConfigError
from kvservice.session.options import Mode, PoolOptions

WEIGHTS = (
    "adapter_params need weights_version: LMCache names weights by the model's name alone. Say what you call those of "
    'the server\'s engines, such as {"weights_version": "2026-11-01"}, and give a new one with new weights'
)


class AdapterOptions(PoolOptions):
    """The keys of adapter_params."""

    what: ClassVar[str] = "key of adapter_params"

    weights_version: Annotated[Annotated[str, AfterValidator(checked_version)], Shown(allowed=VERSION)]
    """What you call the weights of the server's engines. Servers with another version share nothing with it. LMCache
    itself knows the model's name only."""

    packing: Annotated[
        Annotated[str, Field(max_length=256)] | None, Shown(default="the processor's, without a GPU")
    ] = None
    """How the engines order K and V in their memory, as far as LMCache copies it as it is: on a CPU by the processor's
    instruction set, which the server takes from its own. Give it where the engines run on another kind of processor."""

    mode: Mode = Mode.SERVICE
    """Where objects are kept. service uses the shard of this node, embedded a pool in the server's process. auto
    chooses once, at start: the service when one is registered on this machine, else embedded."""

    namespace: Annotated[str, Field(max_length=128)] = "lmcache"
    """Servers in different namespaces never share objects, and never refuse each other."""

    verify_load: Verify = Verify.SAMPLED
    """Which loaded objects are checked against their digest. sampled: all where the copy itself makes the digest, as a
    compiled installation does at no cost, else one in sixteen; full: all; off: none. Objects that came from another
    node are always checked."""

    fetch_timeout_seconds: Timeout = 5.0
    """Longest that a lookup waits for objects of another node. What has not come by then is a miss."""

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> AdapterOptions:
        """Raises ConfigError naming the key, the value and what is allowed."""
        if "weights_version" not in given:
            raise ConfigError(WEIGHTS, key="weights_version")
        return cls(**given)  # type: ignore[arg-type]  # checked here, whatever it is
