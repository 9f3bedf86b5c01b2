"""Runs cut into pieces for a kernel: together they are the same bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvservice.core.segment.copy_runs import cut_runs

RUN = st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(1, 300))


@given(st.lists(RUN, max_size=12), st.integers(1, 100))
def test_pieces_are_the_bytes_of_the_runs_in_order(runs: list[tuple[int, int, int]], piece: int) -> None:
    to, of, length = np.array(runs, np.int64).reshape(-1, 3).T
    targets, sources, lengths = cut_runs(to, of, length, piece)
    assert all(0 < length <= piece for length in lengths.tolist())

    def pairs(*columns: np.ndarray) -> list[tuple[int, int]]:
        return [(to + i, come_from + i) for to, come_from, size in zip(*columns, strict=True) for i in range(size)]

    assert pairs(targets, sources, lengths) == pairs(to, of, length)
