"""However tests are marked, a run in lanes runs each of them once."""

from __future__ import annotations

import itertools

from _pytest.mark.expression import Expression

from tests.lanes import LANES

MARKERS = ("ray", "vllm", "gpu", "nixl", "netns", "sim", "helm")


def test_every_combination_of_markers_is_in_exactly_one_lane() -> None:
    for flags in itertools.product((False, True), repeat=len(MARKERS)):
        marked = dict(zip(MARKERS, flags, strict=True))
        lanes = [lane for lane in LANES if Expression.compile(lane).evaluate(lambda n, m=marked: m[n])]
        assert len(lanes) == 1, f"{marked}: {lanes}"
