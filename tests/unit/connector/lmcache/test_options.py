"""adapter_params: what must be given, and what a typo gets."""

from __future__ import annotations

import pytest

import kvservice.connector.lmcache as package
from kvservice.connector.lmcache.options import AdapterOptions
from kvservice.errors import ConfigError
from kvservice.session.options import Mode


def test_the_weights_must_be_named() -> None:
    with pytest.raises(ConfigError, match=r"weights_version.*model's name alone"):
        AdapterOptions.parse({})
    with pytest.raises(ConfigError, match="weights_version"):
        AdapterOptions.parse({"weights_version": ""})
    assert AdapterOptions.parse({"weights_version": "v1"}).mode is Mode.SERVICE


def test_a_typo_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"key of adapter_params 'pakcing'.*'packing'"):
        AdapterOptions.parse({"weights_version": "v1", "pakcing": "x"})


def test_the_package_loads_lmcache_only_when_its_adapter_is_used() -> None:
    with pytest.raises(AttributeError, match="Adapter2"):
        package.Adapter2  # noqa: B018
