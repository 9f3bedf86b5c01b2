"""A lossless codec that is used only while measured speeds say that it pays."""

from __future__ import annotations

import threading
import time

from kvservice.codec.base import Codec, Coded
from kvservice.codec.worth import CodecWorth
from kvservice.core.block.numbers import Numbers
from kvservice.core.segment.blockfile import BlockFileHeader

ONE_IN = 64  # blocks that are encoded, decoded and timed while the codec is not used


class WherePays:
    """Encodes as `codec` does, or leaves a block as it is. It has the name of `codec`, which decodes. Any thread may
    call."""

    def __init__(self, codec: Codec) -> None:
        self.name = codec.name
        self._codec = codec
        self._worth = CodecWorth()
        self._seen = 0
        self._lock = threading.Lock()

    @property
    def pays(self) -> bool:
        return self._worth.pays

    def tier_read(self, byte_count: int, seconds: float) -> None:
        """The tier has read so many stored bytes in this time."""
        with self._lock:
            self._worth.read(byte_count, seconds)

    def encode(self, header: BlockFileHeader, data: memoryview, numbers: Numbers | None) -> Coded | None:
        with self._lock:
            self._seen += 1
            is_trial = self._seen % ONE_IN == 1
            pays = self._worth.pays
        if not pays and not is_trial:
            return None
        coded = self._codec.encode(header, data, numbers)
        if coded is not None and is_trial:
            target = memoryview(bytearray(len(data)))
            began = time.perf_counter()
            self._codec.decode(header, coded.parameters, memoryview(coded.data), target)
            with self._lock:
                self._worth.coded(len(data), len(coded.data), time.perf_counter() - began)
        return coded if pays else None

    def decode(self, header: BlockFileHeader, parameters: str, data: memoryview, target: memoryview) -> None:
        self._codec.decode(header, parameters, data, target)
