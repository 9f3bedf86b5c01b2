"""The fake tier keeps the rules of every tier. Those of disk and object store have tests of their own beside theirs."""

from __future__ import annotations

import pytest

from kvservice.testing.fake_tier import FakeTier, Files
from kvservice.testing.tier_contract import TierContract
from kvservice.tier.base import Tier
from kvservice.units import BlockKey


class FakePlace:
    def __init__(self) -> None:
        self._files: Files = {}

    def make(self) -> Tier:
        return FakeTier(files=self._files)

    def take(self, key: BlockKey) -> bytes | None:
        return self._files.get(key)

    def put(self, key: BlockKey, data: bytes) -> None:
        self._files[key] = data


class TestFakeTier(TierContract):
    @pytest.fixture
    def place(self) -> FakePlace:
        return FakePlace()
