"""How often an attack is played: a few times in CI, as often as it takes to be certain in `make faults`."""

from __future__ import annotations

import math
import os

VARIABLE = "KVSERVICE_TEST_FAULT_ROUNDS"
CERTAIN = "certain"
CONFIDENCE = 0.99


def rounds(ci: int, *, failed_before: float, campaign: int = 0) -> int:
    """The number of rounds to play.

    Args:
        ci: rounds when nothing else is asked for.
        failed_before: share of the rounds that failed before the fault was mended, in (0, 1]; measured.
        campaign: least number of rounds of `make faults`.

    `KVSERVICE_TEST_FAULT_ROUNDS` is a number of rounds, or `certain`: as many as would have failed at least once with a
    probability of 99 % before the mend.
    """
    asked = os.environ.get(VARIABLE, "")
    if not asked:
        return ci
    if asked != CERTAIN:
        return int(asked)
    return max(ci, campaign, certain_rounds(failed_before))


def certain_rounds(failed_before: float) -> int:
    """Rounds of which at least one would have failed, with a probability of 99 %."""
    if failed_before >= 1:
        return 1
    return math.ceil(math.log(1 - CONFIDENCE) / math.log(1 - failed_before))
