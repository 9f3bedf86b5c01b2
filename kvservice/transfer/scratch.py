"""Which headers of the scratch area are being read into. Owned by the puller's thread."""

from __future__ import annotations

from kvservice.core.segment.geometry import HEADER_BYTES, SCRATCH_BYTES

SCRATCH_HEADERS = SCRATCH_BYTES // HEADER_BYTES


class Scratch:
    def __init__(self) -> None:
        self._free = [True] * SCRATCH_HEADERS

    @property
    def is_free(self) -> bool:
        """Whether nothing of it is taken."""
        return all(self._free)

    def take(self, count: int) -> int | None:
        """The first `count` consecutive free headers; None when there are none."""
        run = 0
        for index, free in enumerate(self._free):
            run = run + 1 if free else 0
            if run == count:
                first = index - count + 1
                self._free[first : index + 1] = [False] * count
                return first
        return None

    def give(self, first: int | None, count: int) -> None:
        """Give back what `take` returned."""
        if first is not None:
            self._free[first : first + count] = [True] * count
