"""Watches what a lossy codec loses, on blocks that are really stored, and switches it off for a model that it hurts.

The drift of K is the error's size relative to how much the K of a block's tokens differ. What all have in common does
not count: the same vector added to every K changes no attention. That is the part that hides errors in some models,
whose K have a few large channels. The drift of V is the error's size relative to that of V.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvservice.codec.base import Buffer
from kvservice.codec.floats import to_floats
from kvservice.core.block.numbers import Numbers
from kvservice.core.messages import CodecDrift

log = logging.getLogger("kvservice.codec")

DRIFT_MAX = 0.05  # unless the engine names another: three to five times what int8 loses of models that bear it well
FIRST_BLOCKS = 32  # of each model, all of which are looked at: a model that is hurt shows it at once
ONE_IN = 16  # blocks afterwards: looking costs about as much as encoding
MODELS_MAX = 256  # watched at once; blocks of more models are not encoded


class Guard:
    """Any thread may call."""

    def __init__(self) -> None:
        self._figures: dict[Numbers, CodecDrift] = {}
        self._lock = threading.Lock()

    def figures(self) -> list[CodecDrift]:
        with self._lock:
            return list(self._figures.values())

    def allows(self, numbers: Numbers) -> bool:
        """Whether blocks of this model may be encoded."""
        with self._lock:
            found = self._figures.get(numbers)
            return len(self._figures) < MODELS_MAX if found is None else not found.is_off

    def passes(self, numbers: Numbers, exact: Buffer, decoded: Buffer) -> bool:
        """Whether a block may be stored so. Looks at some blocks only, and switches the model off at the first one that
        drifts too far."""
        with self._lock:
            seen = self._figures.get(numbers) or CodecDrift(numbers.model, numbers.drift_max or DRIFT_MAX)
            seen = self._figures[numbers] = replace(seen, blocks=seen.blocks + 1)
            if seen.blocks > FIRST_BLOCKS and seen.blocks % ONE_IN:
                return not seen.is_off
        keys, values = drift(numbers, exact, decoded)
        with self._lock:
            seen = self._figures[numbers]
            is_fine = max(keys, values) <= seen.limit
            worst = (max(seen.keys, keys), max(seen.values, values))
            is_off = seen.is_off or not is_fine
            self._figures[numbers] = replace(
                seen, checked=seen.checked + 1, keys=worst[0], values=worst[1], is_off=is_off
            )
            if is_fine or seen.is_off:
                return not is_off
        log.warning(
            "lossy_codec_switched_off",
            extra={"model": numbers.model, "codec": numbers.accepts, "drift_keys": keys, "drift_values": values},
        )
        return False


def drift(numbers: Numbers, exact: Buffer, decoded: Buffer) -> tuple[float, float]:
    """(of K, of V). Where K and V cannot be told apart, the first is that of all rows against their own size."""
    x, y = to_floats(exact, numbers.type), to_floats(decoded, numbers.type)
    if not numbers.tokens or x.size % (numbers.tokens * 2 * numbers.row):
        return _ratio(y - x, x), 0.0
    shape = (-1, numbers.tokens, 2, numbers.row)
    x, error = x.reshape(shape), (y - x).reshape(shape)
    varying = x - x.mean(axis=1, keepdims=True) if numbers.tokens > 1 else x
    return _ratio(error[:, :, 0], varying[:, :, 0]), _ratio(error[:, :, 1], x[:, :, 1])


def _ratio(error: npt.NDArray[np.float32], of: npt.NDArray[np.float32]) -> float:
    lost, whole = (float(np.square(each, dtype=np.float64).sum()) for each in (error, of))
    return 0.0 if lost == 0 else float("inf") if whole == 0 else (lost / whole) ** 0.5
