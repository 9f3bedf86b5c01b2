"""The bugs that the simulator must find are lines of the product as it is, so that a change that moves one is noticed
in seconds and not after the schedules were played."""

from __future__ import annotations

import pytest

from tests.sim import test_memory_nodes, test_rolling_restart, test_suspects
from tests.sim.mutants import MUTANTS
from tests.sim.mutation import Mutant, planted

ALL = (*MUTANTS, *test_memory_nodes.MUTANTS, *test_rolling_restart.MUTANTS, *test_suspects.PLANTS)


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_planted_bug_changes_the_product(mutant: Mutant) -> None:
    with planted(mutant):
        pass


def test_a_line_that_is_gone_is_said() -> None:
    with pytest.raises(LookupError, match="0 places"), planted(Mutant("a rule", MUTANTS[0].module, "no such line", "")):
        pass
