"""Whether a lossless codec pays on a tier: whether a block is in memory sooner when fewer bytes are read and then
decoded. Pure; speeds come from outside.

Writing is not weighed: nobody waits for it. Room is not either, though a smaller block leaves more of it.
"""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.1  # of a new measurement: one slow block does not turn the decision, twenty do
MEASURED_MIN = 4  # measurements of each kind before anything is decided
GAIN = 1.1  # how much faster reading must become before the codec is switched on; at 1.0 it is switched off again


@dataclass(slots=True)
class Mean:
    """A mean that forgets."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(WEIGHT, 1 / self.count)


class CodecWorth:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._reading = Mean()  # seconds a byte that the tier reads
        self._decoding = Mean()  # seconds a byte of payload
        self._share = Mean()  # stored bytes for each byte of payload
        self._pays = False

    @property
    def pays(self) -> bool:
        """Whether blocks should be encoded now. False until enough was measured."""
        return self._pays

    def read(self, byte_count: int, seconds: float) -> None:
        """The tier has read so many bytes in this time."""
        if byte_count > 0:
            self._reading.add(seconds / byte_count)
            self._decide()

    def coded(self, payload_bytes: int, stored_bytes: int, decode_seconds: float) -> None:
        """A block of this size was stored in so many bytes, and decoded in this time."""
        if payload_bytes > 0:
            self._share.add(stored_bytes / payload_bytes)
            self._decoding.add(decode_seconds / payload_bytes)
            self._decide()

    def _decide(self) -> None:
        if min(self._reading.count, self._decoding.count) < MEASURED_MIN:
            return
        plain = self._reading.value
        encoded = self._share.value * plain + self._decoding.value
        self._pays = plain > encoded * (1.0 if self._pays else GAIN)
