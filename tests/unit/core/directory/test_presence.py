"""Whether at each moment some lookup partition has known the node. tests/integration/test_operator.py has processes."""

from __future__ import annotations

import pytest

from kvservice.core.directory.presence import KnownTimes

HIDE = 3.0


Answer = tuple[int, int, float] | tuple[int, int, float, int]


def told(*answers: Answer, partition_count: int = 2) -> list[bool]:
    """What is said after each of these (partition, its epoch, when the announcement left, since when it shows it)."""
    presence = KnownTimes(partition_count, HIDE)
    said = []
    for partition, epoch, at, *since in answers:
        said.append(presence.heard(partition, (epoch, since[0] if since else 1), at, at + 0.1))
    return said


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        pytest.param(
            [(0, 1, 0.0), (1, 1, 0.5), (0, 1, 1.0), (1, 1, 1.5)], [True, False, False, False], id="all is well"
        ),
        pytest.param([(0, 1, 0.0), (0, 1, 4.0)], [True, True], id="silent for as long as a node is hidden after"),
        pytest.param([(0, 1, 0.0), (0, 2, 1.0)], [True, True], id="the only one that knew it began anew"),
        pytest.param(
            [(0, 1, 0.0), (1, 1, 0.5), (0, 1, 1.0), (1, 1, 1.5), (0, 2, 2.0), (1, 1, 2.5)],
            [True, False, False, False, False, False],
            id="the other one knew it all the time",
        ),
        pytest.param(
            [(0, 1, 0.0), (1, 1, 0.5), (0, 1, 1.0), (1, 1, 1.5), (0, 2, 2.0), (1, 2, 2.5)],
            [True, False, False, False, False, True],
            id="both began anew, one before it heard of the other",
        ),
        pytest.param(
            [(0, 1, 0.0), (1, 1, 0.5), (0, 1, 1.0), (0, 2, 2.0), (1, 1, 3.0), (1, 2, 3.5)],
            [True, False, False, False, False, False],
            id="one after the other, and each was known meanwhile",
        ),
        pytest.param(
            [(0, 1, 0.0), (1, 1, 0.5), (0, 2, 4.0), (1, 1, 4.5)],
            [True, False, True, False],
            id="the other one was silent",
        ),
        pytest.param(
            [(0, 1, 0.0), (1, 1, 0.5), (0, 1, 1.0), (1, 1, 1.5), (0, 1, 2.0, 2), (1, 1, 2.5, 2)],
            [True, False, False, False, False, True],
            id="both say that they hid it, and its clock stood still",
        ),
        pytest.param(
            [(0, 1, 0.0), (1, 1, 0.5), (0, 1, 1.0), (1, 1, 1.5), (0, 1, 2.0, 2), (1, 1, 2.5)],
            [True, False, False, False, False, False],
            id="one hid it, and the other one did not",
        ),
    ],
)
def test_a_moment_at_which_nobody_knew_the_node_is_noticed(answers: list[Answer], says: list[bool]) -> None:
    assert told(*answers) == says
