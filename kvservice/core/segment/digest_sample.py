"""Which of the blocks that are read are checked against their digest. Pure."""

from __future__ import annotations

SAMPLE_ONE_IN = 16  # blocks a check: it costs little, and memory that goes bad shows within seconds of load


class DigestSample:
    """The choice of one reader, which counts its blocks."""

    def __init__(self, verify: str) -> None:
        """`verify` is sampled, full or off."""
        self._verify = verify
        self._count = 0

    def has_next(self, *, is_free: bool = False) -> bool:
        """Whether the next block is checked. `is_free`: its digest comes with the copy, so all are but with off."""
        self._count += 1
        if self._verify == "sampled":
            return is_free or self._count % SAMPLE_ONE_IN == 0
        return self._verify == "full"
