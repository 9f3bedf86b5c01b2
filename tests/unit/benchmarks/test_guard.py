"""A guard fails for a regression, and not for the noise of a busy machine."""

from __future__ import annotations

import random
import sys

import pytest

from benchmarks import guard


def test_the_interval_holds_the_median_where_it_is_known() -> None:
    """At 95 %: of a thousand draws some fifty may miss it."""
    draw, held = random.Random(1), 0
    for _ in range(1000):
        _, low, high = guard.interval([draw.lognormvariate(0.0, 0.5) for _ in range(25)])
        held += low <= 1.0 <= high
    assert held > 920


@pytest.mark.parametrize(
    ("ratios", "status"),
    [([0.9] * 25, 0), ([0.4] * 25, 1), ([0.4] * 12 + [0.9] * 13, 0)],
    ids=["faster than its goal", "slower than its goal", "too noisy to say"],
)
def test_the_status_says_whether_a_ratio_is_worse_than_its_goal(
    ratios: list[float], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guard, "GUARDS", {"it": (lambda: ratios, 0.5)})
    monkeypatch.setattr(sys, "argv", ["guard"])
    assert guard.main() == status
    assert ("slower than before, beyond the noise: it" in capsys.readouterr().err) == bool(status)
