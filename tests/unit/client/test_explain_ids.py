"""Which requests an id means, when engines have added to it."""

from __future__ import annotations

import pytest

from kvservice.client.explanation import choose

PREFILL, DECODE, SECOND = "cmpl-7-0-0a1b2c3d", "cmpl-7-0-ffffffff", "cmpl-7-1-0a1b2c3e"


@pytest.mark.parametrize(
    ("wanted", "found", "names", "ids"),
    [
        ("cmpl-7-0", [PREFILL, DECODE], ["cmpl-7-0"], {PREFILL, DECODE}),  # prefill and decode of one request
        ("cmpl-7", [PREFILL], [PREFILL], {PREFILL}),
        ("cmpl-7", [PREFILL, DECODE, SECOND], ["cmpl-7-0", SECOND], {PREFILL, DECODE, SECOND}),
        (PREFILL, [PREFILL], [PREFILL], {PREFILL}),
        ("r1", ["r1-00000001", "r12-00000002"], ["r1-00000001"], {"r1-00000001"}),
        ("r1", [], [], set()),
    ],
)
def test_ids_that_differ_in_the_engines_part_are_one_request(
    wanted: str, found: list[str], names: list[str], ids: set[str]
) -> None:
    assert choose(found, wanted) == (names, ids)
