"""One contract, every codec of ours."""

from __future__ import annotations

import pytest

from kvservice.codec.aesgcm import AesGcm
from kvservice.codec.base import Codec
from kvservice.codec.int8 import Int8
from kvservice.codec.keys import KeyRing
from kvservice.codec.planes import Planes
from kvservice.codec.where_it_pays import WherePays
from kvservice.core.block.numbers import Numbers
from kvservice.testing.codec_contract import CodecContract

BFLOAT16 = Numbers("bfloat16", 2, 64, 16, "int8", model="m")
FLOAT32 = Numbers("float32", 4, 64, 16, "int8", model="m")


@pytest.fixture(scope="module")
def planes() -> Planes:
    return Planes()  # imports Blosc2, which takes a second


class TestPlanes(CodecContract):
    @pytest.fixture
    def codec(self, planes: Planes) -> Codec:
        return planes

    @pytest.fixture(params=[BFLOAT16, FLOAT32], ids=lambda each: each.type)
    def numbers(self, request: pytest.FixtureRequest) -> Numbers:
        found: Numbers = request.param
        return found


class TestPlanesWhereItPays(CodecContract):
    @pytest.fixture
    def codec(self, planes: Planes) -> Codec:
        codec = WherePays(planes)
        for _ in range(8):
            codec.tier_read(1 << 20, 10.0)
            codec._worth.coded(1 << 20, 1 << 19, 0.001)
        assert codec.pays
        return codec

    @pytest.fixture
    def numbers(self) -> Numbers:
        return BFLOAT16


class TestInt8(CodecContract):
    @pytest.fixture
    def codec(self) -> Codec:
        return Int8()

    @pytest.fixture(params=[BFLOAT16, FLOAT32, Numbers("float16", 2, 64, 16, "int8")], ids=lambda each: each.type)
    def numbers(self, request: pytest.FixtureRequest) -> Numbers:
        found: Numbers = request.param
        return found


class TestAesGcm(CodecContract):
    @pytest.fixture
    def codec(self) -> Codec:
        return AesGcm(KeyRing(nobody=b"s" * 32))

    @pytest.fixture
    def numbers(self) -> Numbers:
        return BFLOAT16
