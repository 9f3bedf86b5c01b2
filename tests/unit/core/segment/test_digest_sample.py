"""How many of the blocks that are read are checked."""

from __future__ import annotations

import pytest

from kvservice.core.segment.digest_sample import SAMPLE_ONE_IN, DigestSample


@pytest.mark.parametrize(
    ("verify", "is_free", "checked"),
    [
        ("sampled", False, 2),
        ("sampled", True, 2 * SAMPLE_ONE_IN),
        ("full", False, 2 * SAMPLE_ONE_IN),
        ("off", True, 0),
    ],
)
def test_so_many_blocks_are_checked(verify: str, is_free: bool, checked: int) -> None:
    sample = DigestSample(verify)
    assert [sample.has_next(is_free=is_free) for _ in range(2 * SAMPLE_ONE_IN)].count(True) == checked
