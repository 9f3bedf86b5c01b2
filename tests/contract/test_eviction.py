"""One contract, every eviction policy: those of the product, and those that replay compares with."""

from __future__ import annotations

import pytest

from kvservice.core.store import eviction
from kvservice.core.store.eviction import EvictionPolicy
from kvservice.replay import policies
from kvservice.testing.eviction_contract import ChainEvictionContract, EvictionContract


class TestOfTheProduct(ChainEvictionContract):
    @pytest.fixture(params=sorted(eviction.POLICIES))
    def policy(self, request: pytest.FixtureRequest) -> EvictionPolicy:
        return eviction.POLICIES[request.param]()


class TestOfReplay(EvictionContract):
    @pytest.fixture(params=sorted(policies.POLICIES))
    def policy(self, request: pytest.FixtureRequest) -> EvictionPolicy:
        return policies.POLICIES[request.param]()
