"""What int8 loses, and the guard that switches it off."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.codec.base import Coded
from kvservice.codec.floats import ITEM_BYTES, from_floats, to_floats
from kvservice.codec.guard import DRIFT_MAX, FIRST_BLOCKS, MODELS_MAX, ONE_IN, Guard, drift
from kvservice.codec.int8 import Int8, pack_int8, unpack_int8
from kvservice.core.block.numbers import Numbers
from kvservice.core.segment.blockfile import BlockFileHeader
from kvservice.errors import CodecError
from kvservice.testing.codec_contract import block_of

ROUNDING = {"bfloat16": 2**-8, "float16": 2**-10, "float32": 2**-22}  # of the type, relative
SMALLEST_SCALE = 2.0**-24  # of float16


def payload_of(rows: np.ndarray, kind: str) -> bytes:
    target = bytearray(rows.size * ITEM_BYTES[kind])
    from_floats(rows.astype(np.float32), kind, memoryview(target))
    return bytes(target)


def numbers_of(kind: str, row: int, tokens: int = 0, accepts: str = "int8", limit: float = 0.0) -> Numbers:
    return Numbers(kind, ITEM_BYTES[kind], row, tokens, accepts, limit, "m")


def there_and_back(payload: bytes, numbers: Numbers) -> bytes | None:
    packed = pack_int8(payload, numbers)
    if packed is None:
        return None
    target = bytearray(len(payload))
    unpack_int8(memoryview(packed), numbers.type, numbers.row, memoryview(target))
    return bytes(target)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(ITEM_BYTES)),
    row=st.sampled_from([1, 2, 16, 64]),
    seed=st.integers(0, 1000),
    size=st.floats(-9, 5),
    spread=st.floats(0, 4),
)
def test_each_number_is_within_half_a_step_of_its_row(
    kind: str, row: int, seed: int, size: float, spread: float
) -> None:
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((12, row)) * 10.0**size * 10.0 ** draw.uniform(0, spread, (12, 1))
    payload = payload_of(np.clip(rows, -60000, 60000), kind)
    found = there_and_back(payload, numbers_of(kind, row))
    assert found is not None
    exact, lossy = (to_floats(each, kind).reshape(12, row).astype(np.float64) for each in (payload, found))
    step = np.maximum(np.abs(exact).max(axis=1, keepdims=True) / 127, SMALLEST_SCALE) * 1.002 + SMALLEST_SCALE
    assert (np.abs(lossy - exact) <= step / 2 * 1.001 + np.abs(lossy) * ROUNDING[kind]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_row_with_a_number_that_is_none_is_not_encoded(bad: float) -> None:
    rows = np.ones((4, 16), np.float32)
    rows[2, 3] = bad
    assert there_and_back(rows.tobytes(), numbers_of("float32", 16)) is None


def test_zeros_and_largest_numbers_come_back() -> None:
    for value in (0.0, 65504.0, -65504.0):
        rows = np.full((2, 16), value, np.float32)
        for kind in ITEM_BYTES:
            payload = payload_of(rows, kind)
            found = there_and_back(payload, numbers_of(kind, 16))
            assert found is not None
            np.testing.assert_allclose(to_floats(found, kind), to_floats(payload, kind), rtol=2e-3)
    assert there_and_back(np.full((2, 16), 1e9, np.float32).tobytes(), numbers_of("float32", 16)) is None


def test_rows_of_64_take_the_promised_share_of_their_bytes() -> None:
    payload = payload_of(np.random.default_rng(0).standard_normal((96, 64)), "bfloat16")
    packed = pack_int8(payload, numbers_of("bfloat16", 64))
    assert packed is not None and len(packed) / len(payload) == pytest.approx(66 / 128)


def encode(codec: Int8, payload: bytes, numbers: Numbers | None, before: str = "") -> Coded | None:
    return codec.encode(BlockFileHeader(block_of(payload), len(payload), before), memoryview(payload), numbers)


def test_only_blocks_whose_engine_accepts_it_are_encoded() -> None:
    payload = payload_of(np.random.default_rng(0).standard_normal((96, 64)), "bfloat16")
    codec = Int8()
    assert encode(codec, payload, numbers_of("bfloat16", 64)) is not None
    assert encode(codec, payload, None) is None
    assert encode(codec, payload, numbers_of("bfloat16", 64, accepts="")) is None
    assert encode(codec, payload, Numbers("float8_e4m3fn", 1, 64, 0, "int8")) is None
    assert encode(codec, payload, numbers_of("bfloat16", 0)) is None
    assert encode(codec, payload[:-2], numbers_of("bfloat16", 64)) is None
    assert encode(codec, payload, numbers_of("bfloat16", 64), before="planes:2=12288") is None


@pytest.mark.parametrize(("kind", "row"), [("bfloat16", 1), ("float16", 1), ("bfloat16", 2)])
def test_rows_that_would_grow_are_left_as_they_are(kind: str, row: int) -> None:
    """A tier without a codec reserves no more than the payload: the pool was fenced."""
    payload = payload_of(np.random.default_rng(0).standard_normal((2048 // row, row)), kind)
    assert encode(Int8(), payload, numbers_of(kind, row)) is None


@pytest.mark.parametrize(
    "parameters", ["", "float32", "float32:", "int4:64", "float32:-1", "float32:0", "float32:1234567"]
)
def test_header_with_other_parameters_is_refused(parameters: str) -> None:
    header = BlockFileHeader(block_of(bytes(64)), 64, f"int8:{parameters}=64")
    with pytest.raises(CodecError):
        Int8().decode(header, parameters, memoryview(bytes(66)), memoryview(bytearray(64)))


def kv(large: float) -> bytes:
    """A block of 8 cells of 16 tokens, K and V in turn; one channel of K is larger by `large` in every token."""
    rows = np.random.default_rng(3).standard_normal((8, 16, 2, 64))
    rows[:, :, 0, 5] += large
    return payload_of(rows, "bfloat16")


KNOWN = numbers_of("bfloat16", 64, tokens=16)


def measured(payload: bytes, numbers: Numbers) -> tuple[float, float]:
    found = there_and_back(payload, numbers)
    assert found is not None
    return drift(numbers, payload, found)


def test_large_channel_that_all_tokens_share_shows_as_drift() -> None:
    """Against the size of K it would not: the error stays below two percent of that."""
    (keys, values), (hurt, same) = measured(kv(0), KNOWN), measured(kv(100), KNOWN)
    assert keys < 0.01 and values < 0.01 and same == values
    assert hurt > 4 * DRIFT_MAX
    assert measured(kv(100), numbers_of("bfloat16", 64))[0] < 0.02


def test_drift_of_equal_and_of_constant_blocks() -> None:
    payload = kv(0)
    assert drift(KNOWN, payload, payload) == (0.0, 0.0)
    constant = payload_of(np.ones((8, 16, 2, 64)), "bfloat16")
    assert drift(KNOWN, constant, payload)[0] == float("inf")
    one_token = numbers_of("bfloat16", 64, tokens=1)
    assert 0 < measured(payload, one_token)[0] < 0.01


def test_guard_switches_a_model_off_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()
    codec = Int8(guard)
    other = Numbers("bfloat16", 2, 64, 16, "int8", model="other")
    with caplog.at_level(logging.WARNING, "kvservice.codec"):
        assert encode(codec, kv(0), KNOWN) is not None
        assert encode(codec, kv(100), KNOWN) is None
    assert [record.msg for record in caplog.records] == ["lossy_codec_switched_off"]
    assert encode(codec, kv(0), KNOWN) is None, "it stays off"
    assert encode(codec, kv(0), other) is not None
    mine, theirs = guard.figures()
    assert (mine.model, mine.is_off, mine.blocks, mine.checked) == ("m", True, 2, 2) and mine.keys > DRIFT_MAX
    assert (theirs.model, theirs.is_off) == ("other", False)


def test_limit_of_the_engine_wins() -> None:
    assert encode(Int8(), kv(100), numbers_of("bfloat16", 64, tokens=16, limit=0.9)) is not None
    assert encode(Int8(), kv(0), numbers_of("bfloat16", 64, tokens=16, limit=0.001)) is None


def test_guard_looks_at_all_first_blocks_and_then_at_some() -> None:
    guard, payload = Guard(), kv(0)
    count = FIRST_BLOCKS + 3 * ONE_IN
    assert all(guard.passes(KNOWN, payload, payload) for _ in range(count))
    (figures,) = guard.figures()
    assert (figures.blocks, figures.checked) == (count, FIRST_BLOCKS + 3)


def test_guard_watches_a_bounded_number_of_models() -> None:
    guard, payload = Guard(), kv(0)
    for number in range(MODELS_MAX):
        guard.passes(Numbers("bfloat16", 2, 64, 16, "int8", model=str(number)), payload, payload)
    assert not guard.allows(KNOWN)
