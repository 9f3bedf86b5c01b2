"""One contract: the fake tier, and the tier of objects over two stores. Disks and S3 have theirs elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import LocalStore, MemoryStore

from kvservice.testing.fake_tier import FakeTier, Files
from kvservice.testing.tier_contract import TierContract
from kvservice.tier import block_objects
from kvservice.tier.base import Tier
from kvservice.tier.objects import ObjectTier
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


class ObjectPlace:
    """A store that outlives the tiers on it. Other handles of obstore look behind their backs."""

    def __init__(self, url: str, store: Any) -> None:
        self._url = url
        self._store = store

    def make(self) -> Tier:
        return ObjectTier(self._url, "contract")

    def take(self, key: BlockKey) -> bytes | None:
        try:
            return bytes(obstore.get(self._store, self._name(key)).bytes())
        except FileNotFoundError:
            return None

    def put(self, key: BlockKey, data: bytes) -> None:
        obstore.put(self._store, self._name(key), data, use_multipart=False)

    def _name(self, key: BlockKey) -> str:
        return f"contract/v1/{key.hex()[:2]}/{key.hex()}.safetensors"


class ObjectsContract(TierContract):
    lists = False
    rewrites = False


class TestObjectsInMemory(ObjectsContract):
    @pytest.fixture
    def place(self, monkeypatch: pytest.MonkeyPatch) -> ObjectPlace:
        """Each memory:// is a store of its own; here all tiers of a test get one."""
        store = MemoryStore()
        monkeypatch.setattr(block_objects, "open_store", lambda url: store)
        return ObjectPlace("memory:///", store)


class TestObjectsInAFolder(ObjectsContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> ObjectPlace:
        return ObjectPlace(f"file://{tmp_path}", LocalStore(tmp_path))
