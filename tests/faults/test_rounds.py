from __future__ import annotations

import pytest

from tests.faults import rounds as fault_rounds


@pytest.mark.parametrize(("failed_before", "wanted"), [(1.0, 1), (0.5, 7), (2 / 60, 136)])
def test_rounds_are_enough_to_be_certain(failed_before: float, wanted: int) -> None:
    assert fault_rounds.certain_rounds(failed_before) == wanted
    assert (1 - failed_before) ** wanted <= 0.01


def test_a_campaign_plays_more_rounds_than_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fault_rounds.VARIABLE, raising=False)
    assert fault_rounds.rounds(20, failed_before=0.5, campaign=1000) == 20
    monkeypatch.setenv(fault_rounds.VARIABLE, "3")
    assert fault_rounds.rounds(20, failed_before=0.5, campaign=1000) == 3
    monkeypatch.setenv(fault_rounds.VARIABLE, fault_rounds.CERTAIN)
    assert fault_rounds.rounds(20, failed_before=0.5, campaign=1000) == 1000
    assert fault_rounds.rounds(2, failed_before=0.5) == 7
