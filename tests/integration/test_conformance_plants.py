"""Each example of tests/conformance fails under the change of the product that is planted for it."""

from __future__ import annotations

import pytest

from tests.conformance.plants import main


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_plant_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0, capsys.readouterr().out
