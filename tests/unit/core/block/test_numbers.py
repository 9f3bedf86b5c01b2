"""What a fingerprint says of the bytes of a block."""

from __future__ import annotations

import pytest

from kvservice.core.block.fingerprint import Fingerprint
from kvservice.core.block.numbers import Numbers, number_fields, numbers_of


def test_fields_say_what_they_were_made_of() -> None:
    plain = Fingerprint.of(number_fields("torch.bfloat16", 64, 16))
    assert numbers_of(dict(plain.fields), "m") == Numbers("bfloat16", 2, 64, 16, "", 0.0, "m")
    lossy = Fingerprint.of(number_fields("float32", 128, 0, "int8:0.1"))
    assert numbers_of(dict(lossy.fields)) == Numbers("float32", 4, 128, 0, "int8", 0.1)


def test_engine_that_accepts_a_codec_has_another_fingerprint() -> None:
    fields = [number_fields("float16", 64, 16, accepts) for accepts in ("", "int8", "int8:0.1")]
    assert len({Fingerprint.of(each).digest for each in fields}) == 3


@pytest.mark.parametrize(
    "fields",
    [{}, {"numbers": ""}, {"numbers": "float128 row 64 tokens 16"}, {"numbers": "float32 row x tokens 16"}],
)
def test_fields_that_say_nothing_known(fields: dict[str, str]) -> None:
    assert numbers_of(fields) is None


@pytest.mark.parametrize("accepts", ["", "Int8", "int8:", "int8:1.0", "int8:0.12345", "int8 "])
def test_codec_that_no_option_can_name_is_none(accepts: str) -> None:
    found = numbers_of({"numbers": "float32 row 64 tokens 16", "accept_codec": accepts})
    assert found is not None and (found.accepts, found.drift_max) == ("", 0.0)
